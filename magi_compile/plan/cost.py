"""The cost of a tile, and the order in which tiles are handed out."""

from __future__ import annotations

import torch
from torch import Tensor

# Hundredths of an unmasked block: integers, whose sums have the same order on every device.
BLOCK_COST = 100
MASK_COST = 15  # what the mask adds to a block
TILE_COST = 150  # loading the rows of the tile, storing its result
# Of a split of a tile, whose result is written twice as wide; of its merge, and of any merge at all. Measured.
SPLIT_COST, MERGE_COST, MERGE_LAUNCH_COST = 150, 300, 500


def blocks_of(columns: Tensor, block_cols: int) -> Tensor:
    """The number of blocks of so many columns."""
    return (columns + block_cols - 1) // block_cols


def run_costs(num_blocks: Tensor, num_masked: Tensor) -> Tensor:
    """The cost of the blocks of each run: a block is worth 100, a masked one 115."""
    return BLOCK_COST * num_blocks + MASK_COST * num_masked


def tile_costs(run_cost: Tensor, run_begin: Tensor, run_end: Tensor, is_padding: Tensor) -> Tensor:
    """The cost of each tile: its runs `[run_begin, run_end)` and a constant; nothing for padding."""
    cost = sums(run_cost, run_begin, run_end) + TILE_COST
    return torch.where(is_padding, 0, cost)


def sums(values: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """The sum of `values[begin[i] : end[i]]` for each i, int64."""
    total = torch.cat([values.new_zeros(1, dtype=torch.int64), values.cumsum(0)])
    return total[end] - total[begin]


def longest_first(cost: Tensor) -> Tensor:
    """The order that hands out expensive tiles first, equal ones by row.

    Greedy scheduling, longest job first, ends within 4/3 of the best makespan (Graham, 1969).
    """
    return torch.argsort(cost, descending=True, stable=True)


def document_costs(cost: Tensor, first_end: Tensor) -> Tensor:
    """For each tile, by row, the cost of the most expensive one of its document.

    Documents are neighbouring tiles whose first runs end in the same column, or that have none. Longest first by these
    costs, the tiles of a document stay together: tiles of keys that are worked on at a time then read the same queries.
    """
    starts = torch.ones_like(first_end)
    starts[1:] = first_end[1:] != first_end[:-1]
    document = starts.cumsum(0) - 1
    return torch.zeros_like(cost).scatter_reduce(0, document, cost, "amax")[document]
