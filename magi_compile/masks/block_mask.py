"""BlockMask to slices: through its mask_mod, or from its block lists where it has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from magi_compile.masks import bands
from magi_compile.masks.convert import slices_from_intervals
from magi_compile.masks.intervals import RowIntervals, row_intervals
from magi_compile.masks.slices import AttnSlices
from magi_compile.masks.solve import UnsupportedMaskError
from magi_compile.masks.trace import trace_mask_mod

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def slices_from_block_mask(block_mask: BlockMask, batch: int | None = None) -> AttnSlices:
    """The slices of a BlockMask over packed rows: row q of batch entry b is row `b * seqlen_q + q`.

    Waits for the device if the mask is on a GPU.

    Args:
        block_mask: made by `create_block_mask`, or by `BlockMask.from_kv_blocks` with or without a mask_mod.
        batch: number of batch entries; by default the mask's own. A mask made for one entry serves any number.

    Raises:
        UnsupportedMaskError: intervals can not express the mask.
        ValueError: the mask_mod's captured tensors are not as it needs them, or the block lists contradict it.
    """
    own_batch = block_mask.shape[0]
    if batch is None:
        batch = own_batch
    if own_batch not in (1, batch):
        raise ValueError(
            f"`batch` must be {own_batch}, the batch size of `block_mask`, got {batch}"
        )
    program, tables = trace_mask_mod(block_mask.mask_mod)
    if program.is_always_true:
        return _from_lists(block_mask, batch)
    seqlen_q, seqlen_k = block_mask.seq_lengths
    device = block_mask.kv_num_blocks.device
    intervals = row_intervals(
        program, tables, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, device=device
    )
    intervals.check()
    _check_lists(block_mask, intervals)
    return slices_from_intervals(intervals)


def _from_lists(block_mask: BlockMask, batch: int) -> AttnSlices:
    """All keys of all listed blocks."""
    partial, full = _grids(block_mask)
    listed = partial | full
    if not bool((listed == listed[:, :1]).all()):
        raise UnsupportedMaskError(["the block lists of `block_mask` differ between heads"])
    listed = listed[:, 0].expand(batch, -1, -1).cpu()
    (seqlen_q, seqlen_k), (rows, keys) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    change = torch.nn.functional.pad(listed.to(torch.int8), (1, 1)).diff(dim=-1)
    entry, q_block, first = (change > 0).nonzero().unbind(1)
    last = (change < 0).nonzero()[:, 2]
    still = torch.zeros_like(first)
    blocks = bands.Bands(
        entry * seqlen_q + q_block * rows,
        entry * seqlen_q + ((q_block + 1) * rows).clamp(max=seqlen_q),
        entry * seqlen_k + first * keys,
        entry * seqlen_k + (last * keys).clamp(max=seqlen_k),
        still,
        still,
    )
    normal = bands.to_ranges(bands.normal_form(blocks))
    slices = AttnSlices(*normal, batch * seqlen_q, batch * seqlen_k)
    return slices.to(block_mask.kv_num_blocks.device)


def _check_lists(block_mask: BlockMask, intervals: RowIntervals) -> None:
    """Raises where FlexAttention, which reads the lists first, would not compute what the mask_mod says."""
    partial, full = (grid.cpu() for grid in _grids(block_mask))
    rows, keys = block_mask.BLOCK_SIZE
    num_q, num_k = partial.shape[2:]
    lo, hi = intervals.lo.cpu(), intervals.hi.cpu()
    count, batch, seqlen_q = lo.shape
    q_block = torch.arange(seqlen_q) // rows
    line = (torch.arange(batch)[:, None] * num_q + q_block).expand(count, -1, -1)

    def rows_per_block(first: Tensor, last: Tensor) -> Tensor:
        """In how many rows of its q block each kv block is in `[first, last)`."""
        change = torch.zeros(batch * num_q * (num_k + 1), dtype=torch.int32)
        for block, step in ((first, 1), (last, -1)):
            where = (line * (num_k + 1) + block)[first < last]
            change.index_add_(0, where, torch.full_like(where, step, dtype=torch.int32))
        return change.view(batch, num_q, num_k + 1).cumsum(-1)[..., :num_k]

    is_seen = rows_per_block(lo // keys, torch.where(lo < hi, (hi + keys - 1) // keys, 0)) > 0
    end = torch.where(hi == intervals.seqlen_k, num_k, hi // keys)
    is_full = (
        rows_per_block((lo + keys - 1) // keys, end) == q_block.bincount(minlength=num_q)[:, None]
    )
    left_out = is_seen & ~(partial | full).all(1)
    wrongly_full = full.any(1) & ~is_full
    for found, what in (
        (left_out, "leave out a block in which its mask_mod shows keys"),
        (wrongly_full, "call a block full in which its mask_mod hides keys"),
    ):
        if bool(found.any()):
            entry, q_index, kv_index = found.nonzero()[0].tolist()
            raise ValueError(
                f"the block lists of `block_mask` {what}: batch entry {entry}, q block {q_index}, "
                f"kv block {kv_index}"
            )


def _grids(block_mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Which blocks are listed as partial and as full: bool `[batch, nheads, q blocks, kv blocks]`."""
    seqlen_q, seqlen_k = block_mask.seq_lengths
    rows, keys = block_mask.BLOCK_SIZE
    num_q, num_k = -(-seqlen_q // rows), -(-seqlen_k // keys)
    if block_mask.kv_num_blocks.shape[-1] < num_q:
        raise ValueError(
            f"`block_mask.kv_num_blocks` must cover {num_q} q blocks, "
            f"got {block_mask.kv_num_blocks.shape[-1]}"
        )

    def grid(name: str) -> Tensor:
        num_blocks = getattr(block_mask, f"{name}kv_num_blocks")
        if num_blocks is None:
            return torch.zeros_like(partial)
        num_blocks = num_blocks[..., :num_q]
        indices = getattr(block_mask, f"{name}kv_indices")[..., :num_q, :].long()
        is_listed = torch.arange(indices.shape[-1], device=indices.device) < num_blocks[..., None]
        is_bad = is_listed & ((indices < 0) | (indices >= num_k))
        if bool(is_bad.any()):
            raise ValueError(
                f"`block_mask.{name}kv_indices` must be in [0, {num_k}), got {int(indices[is_bad][0])}"
            )
        empty = torch.zeros(*indices.shape[:-1], num_k + 1, dtype=torch.bool, device=indices.device)
        return empty.scatter(-1, torch.where(is_listed, indices, num_k), True)[..., :num_k]

    partial = grid("")
    return partial, grid("full_")
