"""Draws four masks with their slices, one figure, as in the README.

python examples/plot_masks.py [docs/images/masks.png]
"""

import argparse
from pathlib import Path

from magi_compile.masks.library import (
    NamedMask,
    document_causal,
    prefix_lm_document,
    share_question,
    sliding_window_full,
)
from magi_compile.masks.plot import plot

DOCUMENTS = [1100, 500, 900, 300, 1296]


def masks() -> dict[str, NamedMask]:
    return {
        "document causal": document_causal(DOCUMENTS),
        "sliding window": sliding_window_full([4096], window=700),
        "prefix LM, by document": prefix_lm_document(DOCUMENTS, prefix=400),
        "share question": share_question(DOCUMENTS),
    }


def main(path: str = "docs/images/masks.png") -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(16, 4.6), layout="constrained")
    for ax, (name, mask) in zip(axes, masks().items(), strict=True):
        plot(mask.slices, ax, title=name)
        ax.set_xticks(range(0, 4097, 1024))
        ax.set_yticks(range(0, 4097, 1024))
    for ax in axes[1:]:
        ax.set_ylabel("")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, facecolor="white", bbox_inches="tight", pad_inches=0.15)
    print(f"wrote {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="?", default="docs/images/masks.png", help="of the picture")
    main(parser.parse_args().path)
