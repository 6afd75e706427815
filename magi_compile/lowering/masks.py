"""The way of a mask of a FlexAttention call, and why: by intervals or by bit blocks.

A mask has intervals, from which slices follow (`magi::mask_slices`), or it has none, and its mask_mod is evaluated for all
queries and keys (`magi::mask_bits`). Some masks have intervals for data in some order alone: on a CPU these decide in each run, on
a GPU in the call that is compiled.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from magi_compile import _compat
from magi_compile.kernels.base import AttnProblem
from magi_compile.lowering.emit import Emitter, value_of
from magi_compile.lowering.example_data import order_reasons
from magi_compile.lowering.flex_call import FlexCall
from magi_compile.lowering.options import LoweringOptions
from magi_compile.masks import (
    MaskProgram,
    RowIntervals,
    UnsupportedMaskError,
    padded_slices_from_intervals,
    row_intervals,
)
from magi_compile.masks.errors import refuse_broken
from magi_compile.masks.evaluation.bit_blocks import Grid
from magi_compile.masks.evaluation.sizes import ONE_MASK, Heads, MaskSizes
from magi_compile.masks.program.trace import read_graph
from magi_compile.masks.slices import MAX_SEQLEN

ROWS_PER_SLICE = 16  # of the default capacity: documents of 16 tokens on average
MIN_CAPACITY = 256
# Of keys, where a row sees several of a mask that repeats: what kernels walk for shorter ones is more than the blocks of a BlockMask.
MIN_PERIOD = 256
MAX_BIT_BLOCKS = 1 << 18  # on a GPU: 512 MB, one mask of 64K queries and keys
FEW_PERIODS = 4  # of which all keys consist: then there is little to walk


def sizes_of(call: FlexCall) -> tuple[int | None, list[int] | None]:
    """The number of keys of a batch entry, and the captured ints of the mask; None where a graph is to serve
    several."""
    seqlen_k, symbols = value_of(call.k).shape[2], [value_of(x) for x in call.mask_symbols]
    are_known = all(isinstance(symbol, int) for symbol in symbols)
    return seqlen_k if isinstance(seqlen_k, int) else None, symbols if are_known else None


def period_reasons(call: FlexCall, program: MaskProgram) -> list[str]:
    """Reasons against intervals for a mask that repeats along the keys, where there is an alternative.

    Args:
        call: the attention.
        program: its mask.

    Returns:
        The reasons; none where intervals are the way to go.

    Raises:
        UnsupportedMaskError: a row sees more intervals than are representable.
    """
    seqlen_k, symbols = sizes_of(call)
    count, period = (f(seqlen_k, symbols) for f in (program.max_intervals, program.least_period))
    if period is None or period >= MIN_PERIOD:
        return []
    if period * FEW_PERIODS >= (seqlen_k or MAX_SEQLEN):
        return []
    return [
        f"a row sees up to {count} key intervals, one in each period of {period} keys; with periods of fewer than {MIN_PERIOD} "
        "keys FlexAttention is faster"
    ]


def heads_of(call: FlexCall) -> Heads:
    """The numbers of heads of q and of keys, which are static in every graph."""
    return Heads(*(int(value_of(x).shape[1]) for x in (call.q, call.k)))


def heads_of_intervals(call: FlexCall, program: MaskProgram) -> Heads:
    """The heads for which a mask has intervals of their own."""
    return heads_of(call) if program.differs_by_head else ONE_MASK


def intervals_without_data(call: FlexCall, program: MaskProgram) -> RowIntervals | None:
    """The key intervals, in every run, of a mask that depends on no tensor; None for others, and while lengths are not
    known."""
    seqlen_k, symbols = sizes_of(call)
    batch, _, seqlen_q, _ = value_of(call.q).shape
    is_known = isinstance(seqlen_q, int) and isinstance(batch, int)
    if program.reads_tensors or not is_known or seqlen_k is None or symbols is None:
        return None
    sizes = MaskSizes(batch, seqlen_q, seqlen_k, heads_of_intervals(call, program))
    with _compat.without_fake_tensors():
        return row_intervals(program, (), symbols, **sizes._asdict(), device="cpu")


def refuse_without_data(call: FlexCall, program: MaskProgram) -> None:
    """Checks now the order of computed tables that depend on no tensor: it is the same in every run.

    Args:
        call: the attention.
        program: its mask.

    Raises:
        UnsupportedMaskError: the order of these tables is not what intervals need.
    """
    if program.reads_tensors or not program.columns:
        return
    intervals = intervals_without_data(call, program)
    if intervals is None:
        raise UnsupportedMaskError(
            [
                "the mask_mod computes tables whose lengths are dynamic in the graph; mark these lengths as static, or "
                "compute the tables outside the mask_mod"
            ]
        )
    with _compat.without_fake_tensors():
        refuse_broken(intervals.checks)


def least_capacity(call: FlexCall, program: MaskProgram) -> int:
    """The number of slices of a mask that depends on no tensor, on average over batch entries and heads with masks of
    their own; 0 where that is not known yet."""
    intervals = intervals_without_data(call, program)
    if intervals is None or not intervals.sizes.entries:
        return 0
    with _compat.without_fake_tensors():
        _, fits = padded_slices_from_intervals(intervals, 1)
        return -(-int(fits.values[0]) // intervals.sizes.entries)


def reasons_for_bits(call: FlexCall, program: MaskProgram) -> tuple[str, ...]:
    """Reasons against intervals for the mask of `call`; empty where it has them."""
    if _compat.PERMUTED_TOKENS in map(_compat.source_name, call.mask_tables):
        return (
            "the mask is of tokens that a load balancer of PyTorch's context parallelism has permuted; spread them with "
            "magi_compile.dtensor.context_parallel, or pass the balancer to magi_compile.dtensor.plan(..., permutation=...)",
        )
    if program.refusals:
        return program.refusals
    if program.is_always_true and call.block_lists:
        return (
            "the mask_mod shows everything, so the block lists decide, and they are inputs of the graph; "
            "make the BlockMask inside the compiled function, or convert it with "
            "magi_compile.masks.slices_from_block_mask",
        )
    try:
        reasons = period_reasons(call, program)
        refuse_without_data(call, program)
    except UnsupportedMaskError as error:
        return tuple(error.reasons)
    return tuple(reasons)


@dataclass(frozen=True)
class Way:
    """The way of a mask.

    Attributes:
        program: the mask.
        reasons: why it takes that of bit blocks; empty where it takes that of intervals.
        heads: those with masks of their own, in either way.
        decides: whether the data of each run decide between both.
        obstacles: why it cannot take that of bit blocks, if it has to.
    """

    program: MaskProgram
    reasons: tuple[str, ...]
    heads: Heads
    decides: bool
    obstacles: tuple[str, ...] = ()

    @classmethod
    def of(cls, call: FlexCall, options: LoweringOptions) -> Way:
        """The way of the mask of `call`."""
        names = [_compat.source_name(table) for table in call.mask_tables]
        captures = [value_of(buffer) for buffer in call.mask_buffers]
        program = read_graph(call.mask_mod, captures, names)
        reasons = reasons_for_bits(call, program)
        heads = ONE_MASK if program.refusals else heads_of_intervals(call, program)
        # An op on a GPU would wait for the data.
        is_on_cpu = value_of(call.q).device.type == "cpu"
        varies = program.reads_tensors or bool(program.columns) or program.num_symbols > 0
        if not reasons and varies:
            reasons = _data_reasons(call, program, heads, options)
        if reasons and program.is_verifiable and _is_by_head(call, program):
            heads = heads_of(call)
        decides = not reasons and varies and is_on_cpu and program.is_verifiable
        obstacles = _room_reasons(call, heads) if reasons and not is_on_cpu else ()
        return cls(program, reasons, heads, decides, obstacles)

    @property
    def may_have_bits(self) -> bool:
        """True if it uses bit blocks where a kernel has them."""
        return bool(self.reasons) and self.program.is_verifiable and not self.obstacles

    @property
    def is_by_head(self) -> bool:
        return self.heads != ONE_MASK

    def problem(self, problem: AttnProblem) -> AttnProblem:
        """The problem of a kernel for this mask: heads with masks of their own are rows of one head."""
        return replace(problem, nheads_q=1, nheads_kv=1) if self.is_by_head else problem

    @property
    def notes(self) -> tuple[str, ...]:
        """For readers: which way it takes, if not that of intervals alone, and why; and whether heads have masks of their own."""
        found = [f"by bit blocks: {reason}" for reason in self.reasons]
        if self.decides:
            found.append("by intervals, or by bit blocks where the data is out of order")
        if self.is_by_head:
            found.append("each head has a mask of its own")
        return tuple(found)


def _data_reasons(
    call: FlexCall, program: MaskProgram, heads: Heads, options: LoweringOptions
) -> tuple[str, ...]:
    """Reasons for bit blocks where a mask has intervals only for data in some order, whatever the data of later runs."""
    if options.bits and program.is_verifiable:
        return ("options={'magi.bits': True} asks for them",)
    if value_of(call.q).device.type == "cpu" and program.is_verifiable:
        return ()  # they decide again in each run
    batch, _, seqlen_q, _ = value_of(call.q).shape
    sizes = (batch, seqlen_q, value_of(call.k).shape[2])
    if not all(isinstance(size, int) for size in sizes):
        return ()
    capacity = _capacity(Emitter(call.node.graph, call.node), call, program, heads, options)
    return order_reasons(
        program,
        call.table_sources,
        [value_of(x) for x in call.mask_symbols],
        MaskSizes(*sizes, heads),
        capacity,
        value_of(call.q).device,
    )


def _room_reasons(call: FlexCall, heads: Heads) -> tuple[str, ...]:
    """Reasons against room for the bits of all blocks: how many need bits is known only with the data."""
    (batch, _, seqlen_q, _), (_, _, seqlen_k, _) = (value_of(x).shape for x in (call.q, call.k))
    sizes = (batch, seqlen_q, seqlen_k)
    if not all(isinstance(size, int) for size in sizes):
        return ("the lengths are dynamic in the graph, from which the room for bit blocks follows",)
    count = Grid(batch, heads, seqlen_q, seqlen_k).num_blocks
    if count <= MAX_BIT_BLOCKS:
        return ()
    return (f"there would be room for {count} bit blocks; at most {MAX_BIT_BLOCKS} are kept",)


def _is_by_head(call: FlexCall, program: MaskProgram) -> bool:
    if program.is_always_true:  # so that block lists decide
        return value_of(call.block_lists[0]).shape[1] > 1
    # Its expression knows better than its code, where there is one.
    return program.is_by_head if program.refusals else program.differs_by_head


@dataclass
class Mask:
    """The nodes of a mask that calls of one graph share: of its slices, three, or four with bit blocks."""

    slices: tuple[Node, ...]
    plans: dict[Any, Node] = field(default_factory=dict)


def emit_mask(emit: Emitter, call: FlexCall, way: Way, options: LoweringOptions) -> Mask:
    """Derives the slices of the mask, for the packed rows of all batch entries."""
    has_bits = bool(way.reasons) or way.decides
    op = torch.ops.magi.mask_bits.default if has_bits else torch.ops.magi.mask_slices.default
    slices = emit.call(
        op,
        call.mask_tables,
        call.mask_symbols,
        way.program.text,
        emit.size(call.q, 0),
        emit.size(call.q, 2),
        emit.size(call.k, 2),
        0 if way.reasons else _capacity(emit, call, way.program, way.heads, options),
        value_of(call.q).device,
        list(call.block_lists),
        call.block_size if call.block_lists else [],
        options.verify,
        *([list(way.heads)] if has_bits or way.is_by_head else []),
    )
    return Mask(tuple(emit.call(operator.getitem, slices, i) for i in range(3 + has_bits)))


def _capacity(
    emit: Emitter, call: FlexCall, program: MaskProgram, heads: Heads, options: LoweringOptions
) -> Any:
    """Room for the slices of intervals."""
    batch, seqlen_q = emit.size(call.q, 0), emit.size(call.q, 2)
    if options.slice_capacity is not None:
        capacity: Any = options.slice_capacity
    else:
        rows = emit.arithmetic(operator.floordiv, seqlen_q, ROWS_PER_SLICE)
        capacity = emit.arithmetic(operator.add, rows, MIN_CAPACITY)
        capacity = emit.arithmetic(
            operator.mul, capacity, max(1, program.max_intervals(*sizes_of(call)))
        )
        if isinstance(capacity, int):
            capacity = max(capacity, least_capacity(call, program))
    if heads.q > 1:
        capacity = emit.arithmetic(operator.mul, capacity, heads.q)
    return emit.arithmetic(operator.mul, capacity, batch)
