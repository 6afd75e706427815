"""BlockMask and slices: one from the other through its mask_mod, or from its block lists where it has none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from magi_compile._compat import (
    LARGE_SPARSE_BLOCK_SIZE,
    outside_of_modes,
    scalar_indexing,
    without_autograd,
)
from magi_compile.functions.reached import Reached
from magi_compile.masks.arguments import MAX_SEQLEN, check_count, check_device, is_int
from magi_compile.masks.errors import UnsupportedMaskError, refuse_broken
from magi_compile.masks.evaluation.bit_blocks import (
    Listed,
    slices_with_bits,
    without_padding,
)
from magi_compile.masks.evaluation.bit_blocks import visible_blocks as blocks_of_mask_mod
from magi_compile.masks.evaluation.block_lists import (
    BlockLists,
    counts_and_order,
    visible_blocks,
)
from magi_compile.masks.evaluation.block_table import BlockTable, block_table
from magi_compile.masks.evaluation.row_intervals import (
    RowIntervals,
    exact_intervals,
    row_intervals,
)
from magi_compile.masks.evaluation.sizes import ONE_MASK, Heads, MaskSizes
from magi_compile.masks.evaluation.to_slices import slices_from_intervals
from magi_compile.masks.evaluation.verify import (
    check_intervals,
    check_table,
    is_verified,
    remember,
)
from magi_compile.masks.geometry import Rects
from magi_compile.masks.normal_form import normal_form
from magi_compile.masks.program.read import MaskMod, TracedMask, read_mask_mod, trace_mask_mod
from magi_compile.masks.slices import AttnSlices

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
    the lowering does not need and does not compute: the place for a mask that is another one in every step. Waits for
    the device if that is a GPU.

    Args:
        mask_mod: what may attend to what. Where intervals cannot express it, it is evaluated for all pairs, some blocks
            at a time.
        B: number of batch entries; None for one that serves any number.
        H: number of heads; None for one that serves any number.
        Q_LEN: rows of a batch entry.
        KV_LEN: keys of a batch entry.
        device: of the lists and of the captured tensors; by default PyTorch's current accelerator, or "cpu".
        BLOCK_SIZE: rows and keys of a block, one number or two.

    Returns:
        The BlockMask, with the lists of partial and of full blocks, both for rows and for keys.

    Raises:
        TypeError: `mask_mod` is not a function, or returns neither a bool nor a tensor of bools or integers;
            `device` is none.
        UnsupportedMaskError: the mask_mod can be neither read nor evaluated: it branches on its arguments, or is
            random.
        MaskDataError: the mask_mod looks up what a captured tensor does not have.
        ValueError: a size is not a number above 0 and below 2**30.
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
        if max(sizes) >= MAX_SEQLEN:
            raise ValueError(f"`{name}` must be below 2**30, got {max(sizes)}")
    rows, keys = blocks
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    device = check_device(device)
    of_mask = MaskSizes(batch, Q_LEN, KV_LEN, Heads(nheads))
    with outside_of_modes():
        is_seen, is_full = _visible_blocks(mask_mod, of_mask, rows, keys, device)
        # A block beyond the end of the mask is partial for PyTorch, whatever it shows.
        is_full[..., Q_LEN // rows :, :] = False
        is_full[..., KV_LEN // keys :] = False
        lists = (*_ordered(is_seen & ~is_full, nheads), *_ordered(is_full, nheads))
        return flex.BlockMask.from_kv_blocks(
            *lists, BLOCK_SIZE=(rows, keys), mask_mod=mask_mod, seq_lengths=(Q_LEN, KV_LEN)
        )


def _visible_blocks(
    mask_mod: MaskMod, sizes: MaskSizes, rows: int, keys: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """In which blocks some pair is visible, and in which all are: `[batch, 1 or nheads, q blocks, kv blocks]`; by
    intervals, or where there are none, by the mask_mod itself."""
    traced, reasons = _read(mask_mod, device)
    intervals = _exact(traced, sizes, device)
    if traced is not None and intervals is not None:
        _verify(traced, intervals)
        return visible_blocks(intervals, rows, keys)
    if not _looks_at("h", traced):
        sizes = sizes._replace(heads=ONE_MASK)
    with _evaluating(reasons):
        return blocks_of_mask_mod(mask_mod, sizes, rows, keys, device)


@contextlib.contextmanager
def _evaluating(reasons: Sequence[str]) -> Iterator[None]:
    """For code that evaluates a mask_mod. Where PyTorch cannot,
    the error has the `reasons` why reading it did not do."""
    try:
        with scalar_indexing():
            yield
    except RuntimeError as error:
        if not reasons or isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)):
            raise
        what = "`mask_mod` must be a function of tensors that PyTorch can evaluate for all pairs at once, but"
        raise UnsupportedMaskError(reasons, what) from error


def one_block_mask(
    mask_mod: MaskMod, batch: int, seqlen_q: int, seqlen_k: int, device: torch.device | str
) -> BlockMask:
    """A BlockMask of one block, for all heads, which its mask_mod says everything about; its lists are on `device`."""
    from torch.nn.attention.flex_attention import BlockMask

    one = torch.ones(batch, 1, 1, dtype=torch.int32, device=device)
    first = torch.zeros_like(one)[..., None]
    # Not by `from_kv_blocks`, which finds the lists of key blocks, the same ones, in twenty operations.
    return BlockMask(
        seq_lengths=(seqlen_q, seqlen_k),
        kv_num_blocks=one,
        kv_indices=first,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=one,
        q_indices=first,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(LARGE_SPARSE_BLOCK_SIZE, LARGE_SPARSE_BLOCK_SIZE),
        mask_mod=mask_mod,
    )


def _ordered(grid: Tensor, nheads: int) -> tuple[Tensor, Tensor]:
    """The numbers and indices of kv blocks of `grid [batch, 1 or nheads, q blocks, kv blocks]`, the others behind
    them."""
    return counts_and_order(grid.repeat(1, nheads // grid.shape[1], 1, 1))


def slices_from_block_mask(block_mask: BlockMask, batch: int | None = None) -> AttnSlices:
    """The slices of a BlockMask over packed rows: row q of batch entry b is row `b * seqlen_q + q`.

    Waits for the device if the mask is on a GPU.

    Args:
        block_mask: made by `create_block_mask`, or by `BlockMask.from_kv_blocks` with or without a mask_mod.
        batch: number of batch entries; by default the mask's own. A mask made for one entry serves any number.

    Returns:
        The slices, in normal form, on the device of the mask.

    Raises:
        TypeError: `block_mask` is something else.
        UnsupportedMaskError: intervals cannot express the mask, or it differs between heads.
        ValueError: the mask_mod's captured tensors are not as it needs them, or the block lists contradict it.
    """
    if not hasattr(block_mask, "kv_num_blocks"):
        raise TypeError(f"`block_mask` must be a BlockMask, got {type(block_mask).__name__}")
    own_batch = block_mask.shape[0]
    if batch is None:
        batch = own_batch
    batch = int(batch) if is_int(batch) else batch  # of NumPy's
    check_count("batch", batch, 1)
    most = (MAX_SEQLEN - 1) // max(*block_mask.seq_lengths, 1)
    if batch > most:
        raise ValueError(
            f"`batch` must be at most {most}, so that all rows and keys are less than 2**30, got {batch}"
        )
    if own_batch not in (1, batch):
        raise ValueError(
            f"`batch` must be {own_batch}, the batch size of `block_mask`, got {batch}"
        )
    device = block_mask.kv_num_blocks.device
    traced = trace_mask_mod(block_mask.mask_mod, device)
    if traced.program.is_always_true:
        return _from_lists(block_mask, batch)
    intervals = _intervals_of(traced, batch, block_mask.seq_lengths, device)
    return _agreed(traced, intervals, block_mask)


def reached_by(block_mask: BlockMask) -> Reached:
    """All that a BlockMask says, and that its mask_mod can reach."""
    says = ("mask_mod", "seq_lengths", "BLOCK_SIZE", *BlockLists._fields)
    return Reached(block_mask, "mask_mod", says)


class Converted(NamedTuple):
    """A converted BlockMask.

    Attributes:
        slices: what it shows.
        watched: the captured tensors that they were read from: as long as these stay as they are, so do the slices;
            None where nobody knows which those are.
        is_by_head: whether the slices are those of heads, each of which is a batch entry of its own.
        batch: how many batch entries the slices are of.
        is_of_entry: whether the mask may depend on the batch entry.
        is_of_head: whether the mask may depend on the head.
    """

    slices: AttnSlices
    watched: list[Tensor] | None
    is_by_head: bool = False
    batch: int = 1
    is_of_entry: bool = False
    is_of_head: bool = False


def convert_any_block_mask(block_mask: BlockMask, batch: int, heads: Heads) -> Converted:
    """The slices of any BlockMask, for `batch` entries and `heads`, with bit blocks where intervals cannot express it.

    Waits for the device if the mask is on a GPU. Beside a mask_mod that shows everything the block lists decide.
    Raises MaskDataError where the mask_mod's captured tensors mean nothing to it, or the block lists contradict it.
    """
    traced, reasons = _read(block_mask.mask_mod, block_mask.kv_num_blocks.device)
    return _converted(block_mask, batch, heads, traced, reasons)


def convert_whole_block_mask(block_mask: BlockMask) -> Converted:
    """`convert_any_block_mask` of the batch entries and heads that a BlockMask is made for, and no more entries than
    have masks of their own. Each of these heads reads keys of its own. The result says of what the mask depends."""
    *_, batch, nheads = (1, 1, *block_mask.kv_indices.shape[:-2])
    traced, reasons = _read(block_mask.mask_mod, block_mask.kv_num_blocks.device)
    is_of_entry = _depends_on("b", traced)
    if batch > 1 and not is_of_entry and not _lists_differ_by_entry(block_mask):
        batch = 1
    found = _converted(block_mask, batch, Heads(nheads, nheads), traced, reasons)
    is_of_head = _depends_on("h", traced) or found.is_by_head
    return found._replace(batch=batch, is_of_entry=is_of_entry, is_of_head=is_of_head)


def _lists_differ_by_entry(block_mask: BlockMask) -> bool:
    """True if beside a mask_mod that may show everything the lists of batch entries differ."""
    grids = _lists_of(block_mask).grids(*_num_blocks(block_mask))
    return any(bool((x != x[:1]).any()) for x in grids)


def beside_lists(block_mask: BlockMask, sizes: tuple[int, int, int]) -> RowIntervals | None:
    """The key intervals beside block lists of which both hide something, or none if the lists say all. Waits for a
    GPU.

    They are those of a mask that is the same for all heads; None where the lists hide nothing of what the mask_mod
    shows, or this has no intervals. `sizes` are batch entries, and queries and keys of one. Raises MaskDataError where
    the mask_mod's captured tensors mean nothing to it, or it hides keys in a full block.
    """
    device = block_mask.kv_num_blocks.device
    traced, _ = _read(block_mask.mask_mod, device)
    if traced is None:
        return None
    batch, seqlen_q, seqlen_k = sizes
    if traced.program.is_always_true:
        nothing = torch.empty(0, batch, seqlen_q, dtype=torch.int32, device=device)
        return RowIntervals(nothing, nothing, seqlen_k)
    program = traced.program
    if tuple(block_mask.seq_lengths) != sizes[1:] or program.refusals or program.differs_by_head:
        return None
    intervals = _exact(traced, MaskSizes(*sizes), device)
    if intervals is None or intervals.by_keys or not lists_hide(block_mask, intervals):
        return None
    _verify(traced, intervals)
    return intervals


class TableBeside(NamedTuple):
    """The block table that the mask_mod of a BlockMask looks up, and key intervals beside it, if there are some."""

    table: BlockTable
    intervals: RowIntervals | None


def table_beside_lists(
    block_mask: BlockMask, sizes: tuple[int, int, int], heads: Heads
) -> TableBeside | None:
    """The block table of a BlockMask whose mask_mod looks up blocks of queries and keys. Waits for a GPU.

    It has the intervals of all heads beside it; None of other masks, and where data are not in the order that
    intervals need. `sizes` are batch entries, and queries and keys of one. Raises MaskDataError where the mask_mod's
    captured tensors mean nothing to it.
    """
    device = block_mask.kv_num_blocks.device
    traced, _ = _read(block_mask.mask_mod, device)
    found = None if traced is None else traced.program.block_look_up
    if traced is None or found is None or tuple(block_mask.seq_lengths) != sizes[1:]:
        return None
    if traced.tables[found.look_up.args[0]].dtype != torch.bool:
        return None
    of_heads, intervals = MaskSizes(*sizes, heads), None
    table, checks = block_table(traced.program, traced.tables, (), of_heads, device)
    for check in checks:
        check.raise_if_broken()
    if not found.beside.is_always_true:
        intervals = exact_intervals(found.beside, traced.tables, (), MaskSizes(*sizes), device)
        if intervals is None or intervals.by_keys:
            return None
    known_as = f"table of {traced.program.text}"
    if not is_verified(known_as):
        for check in check_table(traced.program, traced.tables, (), table, intervals, of_heads):
            check.raise_if_broken()
        remember(known_as)
    return TableBeside(table, intervals)


def _read(mask_mod: MaskMod, device: torch.device) -> tuple[TracedMask | None, tuple[str, ...]]:
    """A mask_mod as a program, if it can be read, and why it has no intervals."""
    try:
        traced = read_mask_mod(mask_mod, device)
    except UnsupportedMaskError as error:
        return None, tuple(error.reasons)
    return traced, traced.program.refusals


def _exact(
    traced: TracedMask | None, sizes: MaskSizes, device: torch.device
) -> RowIntervals | None:
    """`exact_intervals` of a mask_mod that captures no ints; None of one that could not be read."""
    if traced is None:
        return None
    return exact_intervals(traced.program, traced.tables, (), sizes, device)


def _converted(
    block_mask: BlockMask,
    batch: int,
    heads: Heads,
    traced: TracedMask | None,
    reasons: Sequence[str],
) -> Converted:
    """`convert_any_block_mask` of a mask_mod that was read."""
    device, (seqlen_q, seqlen_k) = block_mask.kv_num_blocks.device, block_mask.seq_lengths
    mask_mod, watched = block_mask.mask_mod, traced.watched if traced else None
    is_everything = traced is not None and traced.program.is_always_true
    sizes = MaskSizes(batch, seqlen_q, seqlen_k, heads)
    if traced is not None and not is_everything:
        intervals = _exact(traced, sizes, device)
        if intervals is not None and not lists_hide(block_mask, intervals):
            is_by_head = intervals.heads != ONE_MASK
            return Converted(_agreed(traced, intervals, block_mask), watched, is_by_head)
    listed = Listed.of(_lists_of(block_mask), *block_mask.BLOCK_SIZE, sizes)
    is_by_head = listed.differ_by_head or (not is_everything and _looks_at("h", traced))
    if is_everything and not is_by_head:
        return Converted(_from_lists(block_mask, batch), watched)
    sizes = sizes if is_by_head else sizes._replace(heads=ONE_MASK)
    with _evaluating(reasons):
        slices = slices_with_bits(mask_mod, sizes, listed, device)
    return Converted(without_padding(slices), watched, is_by_head)


def convert_mask_mod(
    mask_mod: MaskMod, seqlen_q: int, seqlen_k: int, device: torch.device
) -> Converted:
    """The slices of a mask_mod of the first batch entry and head, without a BlockMask, with bit blocks where intervals
    cannot express it.

    They are where the captured tensors are, or on the CPU where the mask_mod only compares b, h, q and kv, which it
    sees on `device`. Nothing waits for a GPU where the mask_mod captures no tensor on one, and makes none there.
    Raises UnsupportedMaskError where the mask_mod can be neither read nor evaluated, and MaskDataError where captured
    tensors are not as it needs them.
    """
    traced, reasons = _read(mask_mod, device)
    place = device if traced is None else _place_of(traced, device)
    watched = None if traced is None else traced.watched
    depends = {"is_of_entry": _depends_on("b", traced), "is_of_head": _depends_on("h", traced)}
    sizes = MaskSizes(1, seqlen_q, seqlen_k)
    with without_autograd():
        intervals = _exact(traced, sizes, place)
    if traced is not None and intervals is not None:
        _verify(traced, intervals)
        with without_autograd():
            slices = slices_from_intervals(intervals)
        return Converted(slices, watched, **depends)
    with _evaluating(reasons):
        slices = slices_with_bits(mask_mod, sizes, None, place)
    return Converted(without_padding(slices), watched, **depends)


def _place_of(traced: TracedMask, device: torch.device) -> torch.device:
    """The device of the captured tensors; the CPU where there are none, and none were made on `device`."""
    places = {x.device for x in traced.tables}
    if not (places or traced.program.columns or not traced.program.is_verifiable):
        return torch.device("cpu")
    return places.pop() if len(places) == 1 else device


def _intervals_of(
    traced: TracedMask, batch: int, lengths: tuple[int, int], device: torch.device
) -> RowIntervals:
    """Checked."""
    sizes = MaskSizes(batch, *lengths)
    intervals = _exact(traced, sizes, device)
    if intervals is not None:
        return intervals
    of_all_heads = {**sizes._asdict(), "heads": None}
    intervals = row_intervals(traced.program, traced.tables, (), **of_all_heads, device=device)
    if not traced.program.reads_tensors:
        refuse_broken(intervals.checks)
    intervals.check()
    return intervals


def lists_hide(block_mask: BlockMask, intervals: RowIntervals) -> bool:
    """True if there are keys that a query sees in its intervals and not in the block lists. Waits for a GPU."""
    holds_all, _ = _lists_of(block_mask).checks(intervals, *block_mask.BLOCK_SIZE)
    return not bool(holds_all.ok)


def _agreed(traced: TracedMask, intervals: RowIntervals, block_mask: BlockMask) -> AttnSlices:
    """The slices of intervals, which the mask_mod, asked at points, and the block lists have to agree with."""
    _verify(traced, intervals)
    for check in _lists_of(block_mask).checks(intervals, *block_mask.BLOCK_SIZE):
        check.raise_if_broken()
    return slices_from_intervals(intervals)


def _verify(traced: TracedMask, intervals: RowIntervals) -> None:
    """Once for each program."""
    if is_verified(traced.program.text):
        return
    for check in check_intervals(traced.program, traced.tables, (), intervals):
        check.raise_if_broken()
    remember(traced.program.text)


def _from_lists(block_mask: BlockMask, batch: int) -> AttnSlices:
    """All keys of all listed blocks."""
    (seqlen_q, seqlen_k), (rows, keys) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    partial, full = _lists_of(block_mask).grids(*_num_blocks(block_mask))
    listed = partial | full
    if not bool((listed == listed[:, :1]).all()):
        raise UnsupportedMaskError(["the block lists of `block_mask` differ between heads"])
    listed = listed[:, 0].expand(batch, -1, -1).cpu()
    change = torch.nn.functional.pad(listed.to(torch.int8), (1, 1)).diff(dim=-1)
    entry, q_block, first = (change > 0).nonzero().unbind(1)
    last = (change < 0).nonzero()[:, 2]
    blocks = Rects.rectangles(
        entry * seqlen_q + q_block * rows,
        entry * seqlen_q + ((q_block + 1) * rows).clamp(max=seqlen_q),
        entry * seqlen_k + first * keys,
        entry * seqlen_k + (last * keys).clamp(max=seqlen_k),
    )
    slices = AttnSlices.unchecked(
        *normal_form(blocks).to_ranges(), batch * seqlen_q, batch * seqlen_k
    )
    return slices.to(block_mask.kv_num_blocks.device)


def _looks_at(index: str, traced: TracedMask | None) -> bool:
    """True if a mask_mod may look at an index, "b" or "h"."""
    if traced is None or not traced.program.is_verifiable:
        return True
    return traced.program.looks_at(index)


def _depends_on(index: str, traced: TracedMask | None) -> bool:
    """True if a mask may depend on an index, "b" or "h"."""
    if traced is None or traced.program.refusals:
        return _looks_at(index, traced)
    return index in traced.program.expr.variables


def _num_blocks(block_mask: BlockMask) -> tuple[int, int]:
    """The q blocks and the kv blocks of a head."""
    (seqlen_q, seqlen_k), (rows, keys) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    return -(-seqlen_q // rows), -(-seqlen_k // keys)


def _lists_of(block_mask: BlockMask) -> BlockLists:
    """The lists of `block_mask`, whose indices must be blocks of the mask."""
    lists = BlockLists(*(getattr(block_mask, name) for name in BlockLists._fields))
    for check in lists.index_checks(*_num_blocks(block_mask)):
        check.raise_if_broken()
    return lists
