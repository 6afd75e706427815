"""A mask in a terminal."""

from __future__ import annotations

from magi_bench.workloads.derive import block_areas
from magi_compile.masks.slices import AttnSlices

SHADES = " .:-=+*#%@"
CELLS = 48


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
