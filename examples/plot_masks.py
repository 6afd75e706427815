"""Draws masks with their slices: four in a row, as in the README, or every named mask of the library.

python examples/plot_masks.py [--all] [docs/images/masks.png]
"""

import argparse
from pathlib import Path

from magi_compile.masks import plot
from magi_compile.masks.library import (
    MASKS,
    NamedMask,
    document_causal,
    prefix_lm_document,
    share_question,
    sliding_window_full,
    tree,
)

DOCUMENTS = [1100, 500, 900, 300, 1296]
# Sizes that show at 4096 tokens, where the defaults are for longer sequences.
SIZES: dict[str, dict[str, int]] = {
    "sliding_window_full": {"window": 500},
    "sliding_window_causal": {"window": 500},
    "global_sliding_window": {"window": 500},
    "block_causal_document": {"block": 256},
    "block_diffusion": {"block": 128},
    "sliding_tiles": {"tile": 64, "width": 4, "height": 4},
}


def four_masks() -> dict[str, NamedMask]:
    return {
        "document causal": document_causal(DOCUMENTS),
        "sliding window": sliding_window_full([4096], window=700),
        "prefix LM, by document": prefix_lm_document(DOCUMENTS, prefix=400),
        "share question": share_question(DOCUMENTS),
    }


def all_masks() -> dict[str, NamedMask]:
    lengths = {"sliding_tiles": [4096]}
    masks = {
        name: build(lengths.get(name, DOCUMENTS), **SIZES.get(name, {}))
        for name, build in MASKS.items()
    }
    # Two prompts, each with answers below it, one of which goes on in two ways.
    return masks | {
        "tree": tree([700, 500, 400, 300, 396, 600, 600, 600], [-1, 0, 0, 2, 2, -1, 5, 5])
    }


def main(path: str, masks: dict[str, NamedMask], columns: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = -(-len(masks) // columns)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(4 * columns, 4.6 * rows), layout="constrained", squeeze=False
    )
    for ax, (name, mask) in zip(grid.flat, masks.items(), strict=False):
        plot(mask.slices, ax, title=name)
        ax.set_xticks(range(0, 4097, 1024))
        ax.set_yticks(range(0, 4097, 1024))
        if ax is not grid[0, 0]:
            ax.set_ylabel("")
    for ax in list(grid.flat)[len(masks) :]:
        ax.axis("off")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(
        path, dpi=110 if rows == 1 else 70, facecolor="white", bbox_inches="tight", pad_inches=0.15
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every named mask of the library")
    parser.add_argument("path", nargs="?", help="of the picture; by default in docs/images")
    args = parser.parse_args()
    if args.all:
        main(args.path or "docs/images/named_masks.png", all_masks(), columns=5)
    else:
        main(args.path or "docs/images/masks.png", four_masks(), columns=4)
