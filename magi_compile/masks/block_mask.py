"""BlockMask and slices: one from the other through its mask_mod, or from its block lists where it has none."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from magi_compile._compat import LARGE_SPARSE_BLOCK_SIZE
from magi_compile.masks import bands
from magi_compile.masks.block_lists import BlockLists, visible_blocks
from magi_compile.masks.evaluation.row_intervals import RowIntervals, row_intervals
from magi_compile.masks.evaluation.to_slices import slices_from_intervals
from magi_compile.masks.evaluation.verify import check_intervals, is_verified, remember
from magi_compile.masks.program.record import MaskMod
from magi_compile.masks.program.trace import TracedMask, trace_mask_mod
from magi_compile.masks.slices import AttnSlices
from magi_compile.masks.solver.solve import UnsupportedMaskError, refuse_broken

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
) -> BlockMask:
    """`torch.nn.attention.flex_attention.create_block_mask`, in memory for rows instead of for the score matrix.

    The same BlockMask, list by list: FlexAttention takes it as it is. Only the block lists themselves grow with the
    square of the length, one entry for each block. Inside torch.compile it is PyTorch's own function, whose lists
    the lowering does not need. Waits for the device if that is a GPU.

    Args:
        mask_mod: the same for all heads, and of a form that slices can express.
        B: number of batch entries; None for one that serves any number.
        H: number of heads; None for one that serves any number.
        Q_LEN: rows of a batch entry.
        KV_LEN: keys of a batch entry.
        device: of the lists and of the captured tensors; by default PyTorch's current accelerator, or "cpu".
        BLOCK_SIZE: rows and keys of a block, one number or two.

    Raises:
        UnsupportedMaskError: intervals can not express the mask; PyTorch's `create_block_mask` takes any mask.
        TypeError: `mask_mod` is not a function.
        ValueError: a size is not a number above 0, or a captured tensor is not as the mask_mod needs it.
    """
    from torch.nn.attention import flex_attention as flex

    if torch.compiler.is_dynamo_compiling():
        return flex.create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE)
    if not callable(mask_mod):
        raise TypeError(f"`mask_mod` must be a function of b, h, q and kv, got {mask_mod!r}")
    batch, nheads = (1 if size is None else size for size in (B, H))
    blocks = BLOCK_SIZE if isinstance(BLOCK_SIZE, tuple) else (BLOCK_SIZE, BLOCK_SIZE)
    if len(blocks) != 2:
        raise ValueError(f"`BLOCK_SIZE` must be one number or two, got {BLOCK_SIZE!r}")
    for name, sizes in {
        "B": (batch,),
        "H": (nheads,),
        "Q_LEN": (Q_LEN,),
        "KV_LEN": (KV_LEN,),
        "BLOCK_SIZE": blocks,
    }.items():
        if not all(type(size) is int and size >= 1 for size in sizes):
            given = sizes[0] if len(sizes) == 1 else sizes
            raise ValueError(f"`{name}` must be an int and at least 1, got {given!r}")
    rows, keys = blocks
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    device = torch.device(device)
    traced = trace_mask_mod(mask_mod, device)
    intervals = _intervals(traced, batch, Q_LEN, KV_LEN, device)
    is_seen, is_full = visible_blocks(intervals, rows, keys)
    # A block beyond the end of the mask is partial for PyTorch, whatever it shows.
    is_full[:, Q_LEN // rows :] = False
    is_full[:, :, KV_LEN // keys :] = False
    lists = (*_ordered(is_seen & ~is_full, nheads), *_ordered(is_full, nheads))
    return flex.BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=(rows, keys), mask_mod=mask_mod, seq_lengths=(Q_LEN, KV_LEN)
    )


def one_block_mask(
    mask_mod: MaskMod, batch: int, seqlen_q: int, seqlen_k: int, device: torch.device | str
) -> BlockMask:
    """A BlockMask of one block, which its mask_mod says everything about.

    Args:
        mask_mod: what may attend to what.
        batch: number of batch entries.
        seqlen_q: rows of a batch entry.
        seqlen_k: keys of a batch entry.
        device: of the block lists.
    """
    from torch.nn.attention.flex_attention import BlockMask

    one = torch.ones(batch, 1, 1, dtype=torch.int32, device=device)
    return BlockMask.from_kv_blocks(
        *(one, torch.zeros_like(one)[..., None]),
        BLOCK_SIZE=LARGE_SPARSE_BLOCK_SIZE,
        mask_mod=mask_mod,
        seq_lengths=(seqlen_q, seqlen_k),
    )


def _ordered(grid: Tensor, nheads: int) -> tuple[Tensor, Tensor]:
    """How many and which kv blocks of `grid [batch, q blocks, kv blocks]`, the others behind them."""
    indices = torch.argsort(grid.to(torch.int8), dim=-1, descending=True, stable=True)
    lists = (grid.sum(-1, dtype=torch.int32), indices.to(torch.int32))
    count, index = (x[:, None].repeat(1, nheads, *[1] * (x.dim() - 1)) for x in lists)
    return count, index


def slices_from_block_mask(block_mask: BlockMask, batch: int | None = None) -> AttnSlices:
    """The slices of a BlockMask over packed rows: row q of batch entry b is row `b * seqlen_q + q`.

    Waits for the device if the mask is on a GPU.

    Args:
        block_mask: made by `create_block_mask`, or by `BlockMask.from_kv_blocks` with or without a mask_mod.
        batch: number of batch entries; by default the mask's own. A mask made for one entry serves any number.

    Raises:
        TypeError: `block_mask` is something else.
        UnsupportedMaskError: intervals can not express the mask.
        ValueError: the mask_mod's captured tensors are not as it needs them, or the block lists contradict it.
    """
    return convert_block_mask(block_mask, batch).slices


class Converted(NamedTuple):
    """Slices, and the captured tensors that they were read from: as long as these stay as they are, so do the slices."""

    slices: AttnSlices
    watched: list[Tensor]


def convert_block_mask(block_mask: BlockMask, batch: int | None = None) -> Converted:
    """`slices_from_block_mask`, for somebody who keeps the result."""
    if not hasattr(block_mask, "kv_num_blocks"):
        raise TypeError(f"`block_mask` must be a BlockMask, got {type(block_mask).__name__}")
    own_batch = block_mask.shape[0]
    if batch is None:
        batch = own_batch
    if own_batch not in (1, batch):
        raise ValueError(
            f"`batch` must be {own_batch}, the batch size of `block_mask`, got {batch}"
        )
    seqlen_q, seqlen_k = block_mask.seq_lengths
    device = block_mask.kv_num_blocks.device
    traced = trace_mask_mod(block_mask.mask_mod, device)
    if traced.program.is_always_true:
        return Converted(_from_lists(block_mask, batch), traced.watched)
    intervals = _intervals(traced, batch, seqlen_q, seqlen_k, device)
    for check in _lists_of(block_mask).checks(intervals, *block_mask.BLOCK_SIZE):
        check.raise_if_broken()
    return Converted(slices_from_intervals(intervals), traced.watched)


def _intervals(
    traced: TracedMask, batch: int, seqlen_q: int, seqlen_k: int, device: torch.device
) -> RowIntervals:
    """The row intervals of a mask_mod, checked."""
    program, tables = traced.program, traced.tables
    intervals = row_intervals(
        program, tables, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, device=device
    )
    if not program.reads_tensors:
        refuse_broken(intervals.checks)
    intervals.check()
    if not is_verified(program.text):
        for check in check_intervals(program, tables, (), intervals):
            check.raise_if_broken()
        remember(program.text)
    return intervals


def _from_lists(block_mask: BlockMask, batch: int) -> AttnSlices:
    """All keys of all listed blocks."""
    (seqlen_q, seqlen_k), (rows, keys) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    partial, full = _lists_of(block_mask).grids(-(-seqlen_q // rows), -(-seqlen_k // keys))
    listed = partial | full
    if not bool((listed == listed[:, :1]).all()):
        raise UnsupportedMaskError(["the block lists of `block_mask` differ between heads"])
    listed = listed[:, 0].expand(batch, -1, -1).cpu()
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
    slices = AttnSlices.unchecked(*normal, batch * seqlen_q, batch * seqlen_k)
    return slices.to(block_mask.kv_num_blocks.device)


def _lists_of(block_mask: BlockMask) -> BlockLists:
    """The lists of `block_mask`, whose indices must be blocks of the mask."""
    lists = BlockLists(*(getattr(block_mask, name) for name in BlockLists._fields))
    num_q, num_k = (
        -(-seqlen // size)
        for seqlen, size in zip(block_mask.seq_lengths, block_mask.BLOCK_SIZE, strict=True)
    )
    for counts, name in ((0, "kv_indices"), (2, "full_kv_indices")):
        num_blocks, indices = lists[counts], getattr(lists, name)
        if num_blocks is None:
            continue
        num_blocks, indices = num_blocks[..., :num_q], indices[..., :num_q, :]
        is_listed = torch.arange(indices.shape[-1], device=indices.device) < num_blocks[..., None]
        is_bad = is_listed & ((indices < 0) | (indices >= num_k))
        if bool(is_bad.any()):
            raise ValueError(
                f"`block_mask.{name}` must be in [0, {num_k}), got {int(indices[is_bad][0])}"
            )
    return lists
