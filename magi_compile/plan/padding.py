"""The room of a tile plan whose sizes follow from shapes alone, so that nothing waits for a device."""

from __future__ import annotations

from typing import NamedTuple

import torch

MAX_OVERLAP = 64
MAX_CROSSINGS = 8


class PaddedSizes(NamedTuple):
    """The room of a walk whose sizes follow from shapes alone.

    Attributes:
        num_regions: a region starts at row 0 and where a slice begins or ends, if a tile of rows
            without another such place follows.
        num_tiles: a region of n rows has at most `(n + tile_rows - 1) / tile_rows` tiles.
        num_runs: a slice touches one tile more than it crosses borders between tiles. There is
            room for `max_overlap` slices across every border (few slices, however long) or for
            `MAX_CROSSINGS` borders in every slice (many slices, if they are short: block-sparse
            masks with a mask for each head), both on average, whichever is more.
        max_overlap: as in `build_tile_plan`.
    """

    num_regions: int
    num_tiles: int
    num_runs: int
    max_overlap: int

    @property
    def message(self) -> str:
        """The requirement for all pairs to fit, in words."""
        return (
            f"the plan has room for {self.max_overlap} slices across the average border between tiles, or for "
            f"{MAX_CROSSINGS} borders in the average slice, and the mask needs more; a larger "
            "`slice_capacity` gives room"
        )


def padded_sizes(
    num_slices: int, total_rows: int, tile_rows: int, max_overlap: int = MAX_OVERLAP
) -> PaddedSizes:
    """The room of a padded walk of at least one slice; ints or SymInts, as in `build_tile_plan`."""
    num_regions = 1 + torch.sym_min(2 * num_slices + 1, total_rows // tile_rows)
    num_tiles = (total_rows + num_regions * (tile_rows - 1)) // tile_rows
    if num_tiles == 0:
        return PaddedSizes(num_regions, 0, 0, max_overlap)
    crossings = torch.sym_max(
        torch.sym_min(max_overlap, num_slices) * (num_tiles - 1),
        torch.sym_min(MAX_CROSSINGS, num_tiles - 1) * num_slices,
    )
    num_runs = num_slices + crossings
    return PaddedSizes(num_regions, num_tiles, num_runs, max_overlap)


def size_to_sort(count: int) -> int:
    """The power of two from `count` up: as many keys does a kernel sort."""
    return 1 << max(count - 1, 0).bit_length()
