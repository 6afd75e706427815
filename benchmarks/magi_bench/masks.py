"""`magi-bench masks`: lists the masks, or draws one, in a terminal or as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from magi_bench import arguments
from magi_bench.cases import Case, format_length
from magi_bench.workloads.derive import block_areas
from magi_bench.workloads.lengths import SAMPLERS
from magi_bench.workloads.workload import MASKS, SPARSE_MASKS, build
from magi_compile.masks.library import MASKS as NAMED_MASKS
from magi_compile.masks.slices import AttnSlices

SHADES = " .:-=+*#%@"
CELLS = 48


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option of the command."""
    option = parser.add_argument
    option("--show", metavar="NAME", help="draw this mask")
    option("--seqlen", type=arguments.length, default=4096)
    option("--lengths", choices=SAMPLERS, default="seeds")
    option("--block", type=arguments.count, default=128, help="tokens of a block of a sparse mask")
    option("--density", type=arguments.share, default=0.2, help="of a sparse mask")
    option("--seed", type=int, default=42)
    option("--output", type=Path, help="a .png or .svg; by default text")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Lists, or draws."""
    if args.show is None:
        for name in MASKS:
            documented = (NAMED_MASKS[name].__doc__ or "") if name in NAMED_MASKS else ""
            arguments.say(f"{name:24}{documented or 'Blocks drawn for each key-value head.'}")
        return 0
    is_sparse = args.show in SPARSE_MASKS
    level, sizes = "sparse" if is_sparse else "kernel", (args.seqlen, 1, 1, 128)
    case = Case(
        *(level, args.show, *sizes),
        lengths=args.lengths,
        block=args.block if is_sparse else 0,
        density=args.density if is_sparse else 1.0,
        seed=args.seed,
    )
    slices = build(case).head_slices(0)
    if args.output is None:
        arguments.say(to_text(slices))
        return 0
    from matplotlib import pyplot

    from magi_compile.masks import plot

    figure = pyplot.figure(figsize=(5, 5.4), layout="constrained")
    title = f"{case.mask_label}, {format_length(case.seqlen)} tokens"
    plot(slices, figure.add_subplot(), title=title)
    figure.savefig(args.output, dpi=150)
    return 0


def to_text(slices: AttnSlices) -> str:
    """Queries downwards, keys to the right; the darker, the more of the pairs of a square are visible."""
    block = max(-(-max(slices.seqlen_q, slices.seqlen_k) // CELLS), 1)
    shares = block_areas(slices, block).double() / block**2
    lines = []
    for row in shares.tolist():
        # Two characters a cell: terminals are twice as high as wide. Only a full cell gets the darkest shade.
        lines.append("".join(2 * SHADES[_shade(share)] for share in row).rstrip())
    area = slices.area()
    density = area / (slices.seqlen_q * slices.seqlen_k)
    lines.append(f"{len(slices)} slices, area {area:,}, density {density:.1%}")
    return "\n".join(lines)


def _shade(share: float) -> int:
    if share == 0:
        return 0
    return min(1 + int(share * (len(SHADES) - 1)), len(SHADES) - 1)
