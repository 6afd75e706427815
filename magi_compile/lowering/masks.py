"""The way of a mask of a FlexAttention call, and why: by intervals, by block lists or by bit blocks.

A mask has intervals, from which slices follow (`magi::mask_slices`). If its block lists hide some of these, or say all,
there are no slices (`magi::plan_lists`, with `magi::mask_intervals`). If it has no intervals, its mask_mod is evaluated
for all queries and keys (`magi::mask_bits`). Some masks have intervals for data in some order alone, and lists may hide
something or nothing: on a CPU the data decide in each run, on a GPU in the call that is compiled.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from magi_compile import _compat
from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.heuristics import (
    MAX_BIT_BLOCKS,
    MIN_PERIOD,
    apply_now,
    repeats_too_often,
    slice_capacity,
)
from magi_compile.lowering.emit import Emitter, value_of
from magi_compile.lowering.example_data import examples_of, order_reasons
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
from magi_compile.masks.evaluation.block_lists import BlockLists, heads_that_differ
from magi_compile.masks.evaluation.block_table import shape_of_table
from magi_compile.masks.evaluation.sizes import ONE_MASK, Heads, MaskSizes
from magi_compile.masks.program.trace import read_graph
from magi_compile.masks.slices import MAX_SEQLEN
from magi_compile.ops.masks.plan_lists import has_table_of, shape_of_lists
from magi_compile.plan.block_map import ListShape


@dataclass(frozen=True)
class MaskOfCall:
    """The mask of a call, and what is known of it when the graph is made.

    Attributes:
        call: the attention.
        program: the mask.
        lengths: batch entries, and queries and keys of one; None where a graph is to serve several.
        symbols: the captured ints of the mask; None where a graph is to serve several.
        heads: those for which it has intervals of their own.
    """

    call: FlexCall
    program: MaskProgram
    lengths: tuple[int | None, int | None, int | None]
    symbols: list[int] | None
    heads: Heads

    @classmethod
    def of(cls, call: FlexCall) -> MaskOfCall:
        """That of `call`, read from its mask_mod."""
        names = [_compat.source_name(table) for table in call.mask_tables]
        captures = [value_of(buffer) for buffer in call.mask_buffers]
        program = read_graph(call.mask_mod, captures, names)
        batch, seqlen_q, seqlen_k = call.lengths
        symbols = [value_of(x) for x in call.mask_symbols]
        differs = not program.refusals and program.differs_by_head
        return cls(
            call,
            program,
            (_known(batch), _known(seqlen_q), _known(seqlen_k)),
            symbols if all(isinstance(symbol, int) for symbol in symbols) else None,
            call.heads if differs else ONE_MASK,
        )

    @property
    def is_on_cpu(self) -> bool:
        return value_of(self.call.q).device.type == "cpu"

    @property
    def varies(self) -> bool:
        """True if the mask depends on more than the lengths."""
        program = self.program
        return program.reads_tensors or bool(program.columns) or program.num_symbols > 0

    @property
    def max_intervals(self) -> int:
        """The most key intervals that a row sees, or intervals of rows that see a key.
        Raises UnsupportedMaskError for more than are representable."""
        return self.program.max_intervals(self.lengths[2], self.symbols)

    def sizes(self, heads: Heads) -> MaskSizes | None:
        """Those of the mask where `heads` have masks of their own; None where lengths are not known."""
        batch, seqlen_q, seqlen_k = self.lengths
        if batch is None or seqlen_q is None or seqlen_k is None:
            return None
        return MaskSizes(batch, seqlen_q, seqlen_k, heads)

    @cached_property
    def intervals(self) -> RowIntervals | None:
        """The key intervals, in every run, of a mask that depends on no tensor; None for others, and while lengths
        are not known."""
        sizes = self.sizes(self.heads)
        if self.program.reads_tensors or sizes is None or self.symbols is None:
            return None
        with _compat.without_fake_tensors():
            return row_intervals(self.program, (), self.symbols, **sizes._asdict(), device="cpu")

    @property
    def least_capacity(self) -> int:
        """The number of slices of a mask that depends on no tensor, on average over batch entries and heads with
        masks of their own; 0 where that is not known yet."""
        intervals = self.intervals
        if intervals is None or not intervals.sizes.entries:
            return 0
        with _compat.without_fake_tensors():
            _, fits = padded_slices_from_intervals(intervals, 1)
            return -(-int(fits.values[0]) // intervals.sizes.entries)

    def capacity(
        self,
        options: LoweringOptions,
        batch: Any,
        seqlen_q: Any,
        seqlen_k: Any,
        apply: Callable[..., Any] = apply_now,
    ) -> Any:
        """Room for the slices of intervals, for all entries and heads. The sizes are ints, or what `apply` takes for
        one, which computes `function(*args)`: at once, or by a node of a graph."""
        if options.slice_capacity is not None:
            capacity: Any = options.slice_capacity
        else:
            by_keys = self.program.by_keys
            seqlen = seqlen_k if by_keys else seqlen_q
            capacity = slice_capacity(seqlen, self.max_intervals, apply, by_keys=by_keys)
            if least := self.least_capacity:  # so that lengths are ints
                capacity = max(capacity, least)
        if self.heads.q > 1:
            capacity = apply(operator.mul, capacity, self.heads.q)
        return apply(operator.mul, capacity, batch)


def _known(size: Any) -> int | None:
    return size if isinstance(size, int) else None


def period_reasons(mask: MaskOfCall) -> list[str]:
    """Reasons against intervals for a mask that repeats along the keys, where there is an alternative. Raises
    UnsupportedMaskError where a row sees more intervals than are representable."""
    seqlen_k = mask.lengths[2]
    count, period = mask.max_intervals, mask.program.least_period(seqlen_k, mask.symbols)
    if period is None or not repeats_too_often(period, seqlen_k or MAX_SEQLEN):
        return []
    return [
        f"a row sees up to {count} key intervals, one in each period of {period} keys; with "
        f"periods of fewer than {MIN_PERIOD} keys FlexAttention is faster"
    ]


def refuse_without_data(mask: MaskOfCall) -> None:
    """Checks now the order of computed tables that depend on no tensor: it is the same in every run. Raises
    UnsupportedMaskError where it is not what intervals need."""
    if mask.program.reads_tensors or not mask.program.columns:
        return
    if mask.intervals is None:
        raise UnsupportedMaskError(
            [
                "the mask_mod computes tables whose lengths are dynamic in the graph; mark these lengths as static, or "
                "compute the tables outside the mask_mod"
            ]
        )
    with _compat.without_fake_tensors():
        refuse_broken(mask.intervals.checks)


def reasons_for_bits(mask: MaskOfCall) -> tuple[str, ...]:
    """Reasons against intervals for the mask, whatever its data; empty where it has them."""
    call, program = mask.call, mask.program
    if _compat.PERMUTED_TOKENS in map(_compat.source_name, call.mask_tables):
        return (
            "the mask is of tokens that a load balancer of PyTorch's context parallelism has "
            "permuted; spread them with magi_compile.dtensor.context_parallel, or pass the balancer to "
            "magi_compile.dtensor.plan(..., permutation=...)",
        )
    if program.refusals:
        return program.refusals
    if program.is_always_true and call.block_lists:
        return (
            "the mask_mod shows everything, so the block lists decide, whose values a graph does not know",
        )
    try:
        reasons = period_reasons(mask)
        refuse_without_data(mask)
    except UnsupportedMaskError as error:
        return tuple(error.reasons)
    return tuple(reasons)


@dataclass(frozen=True)
class MaskRoute:
    """The way of a mask.

    Attributes:
        mask: the mask.
        reasons: why it takes that of bit blocks; empty where it takes that of intervals.
        heads: those with masks of their own, in either way.
        decides: whether the data of each run decide between both.
        obstacles: why it cannot take that of bit blocks, if it has to.
        lists: the sizes of block lists that say all, or that hide something of what the mask_mod shows, where a kernel
            may walk these; else None.
    """

    mask: MaskOfCall
    reasons: tuple[str, ...]
    heads: Heads
    decides: bool
    obstacles: tuple[str, ...] = ()
    lists: ListShape | None = None

    @classmethod
    def of(cls, call: FlexCall, options: LoweringOptions) -> MaskRoute:
        """The way of the mask of `call`."""
        mask = MaskOfCall.of(call)
        reasons = reasons_for_bits(mask)
        heads = mask.heads
        if not reasons and mask.varies:
            reasons = _data_reasons(mask, options)
            for way in mask.program.ways[1:] if reasons and not options.bits else ():
                other = replace(mask, program=way)
                if not (reasons_for_bits(other) or _data_reasons(other, options)):
                    mask, reasons = other, ()
        lists, hide = None, not mask.program.is_always_true and _lists_hide(mask)
        if not mask.is_on_cpu and mask.program.block_look_up is not None:
            lists = _tabled(mask, options)
        if not mask.is_on_cpu and (mask.program.is_always_true or (hide and not reasons)):
            lists = _listed(mask)
        if hide:
            reasons = (*reasons, "block lists hide something of what its mask_mod shows")
        is_verifiable = mask.program.is_verifiable
        if reasons and is_verifiable and (_is_by_head(mask) or _lists_differ_by_head(call)):
            heads = call.heads
        # An op on a GPU would wait for the data.
        decides = not reasons and mask.varies and mask.is_on_cpu and is_verifiable
        obstacles = _room_reasons(mask.sizes(heads)) if reasons and not mask.is_on_cpu else ()
        return cls(mask, reasons, heads, decides, obstacles, lists)

    def by_lists(self) -> MaskRoute:
        """The way by block lists, which there are: nothing speaks against it, and heads stay heads."""
        return replace(self, reasons=(), heads=ONE_MASK, decides=False, obstacles=())

    @property
    def program(self) -> MaskProgram:
        return self.mask.program

    @property
    def has_table(self) -> bool:
        """True if its mask_mod looks up blocks of queries and keys, and a kernel may walk these."""
        return self.lists is not None and self.program.block_look_up is not None

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
        """For readers: which way it takes, if not that of intervals alone, and why;
        and whether heads have masks of their own."""
        found = [f"by bit blocks: {reason}" for reason in self.reasons]
        if self.lists is not None and not self.reasons:
            heads, count = self.lists.heads, self.lists.intervals
            of_heads = f"each of {heads} heads" if heads > 1 else "all heads"
            blocks = f"blocks of {self.lists.block_rows} x {self.lists.block_keys}"
            found.append(f"by the block lists of {of_heads}, {blocks}")
            if self.has_table:
                blocks = f"{self.lists.table_q} x {self.lists.table_k} blocks"
                found[-1] = f"by the block table of {of_heads}, {blocks}"
            if count:
                of_query = "one key interval" if count == 1 else f"up to {count} key intervals"
                found[-1] += f", in which a query sees {of_query} of its mask_mod"
        if self.decides:
            found.append("by intervals, or by bit blocks where the data is out of order")
        if self.program.by_keys and not self.reasons:
            found.append("by the rows that see a key, not the keys that a row sees")
        if self.is_by_head:
            found.append("each head has a mask of its own")
        return tuple(found)


def _data_reasons(mask: MaskOfCall, options: LoweringOptions) -> tuple[str, ...]:
    """Reasons for bit blocks where a mask has intervals only for data in some order,
    whatever the data of later runs."""
    call, program, sizes = mask.call, mask.program, mask.sizes(mask.heads)
    if options.bits and program.is_verifiable:
        return ("options={'magi.bits': True} asks for them",)
    if mask.is_on_cpu and program.is_verifiable:
        return ()  # they decide again in each run
    if sizes is None or mask.symbols is None:
        return ()
    capacity = mask.capacity(options, *sizes[:3])
    device = value_of(call.q).device
    return order_reasons(program, call.table_sources, mask.symbols, sizes, capacity, device)


def _room_reasons(sizes: MaskSizes | None) -> tuple[str, ...]:
    """Reasons against room for the bits of all blocks: how many need bits is known only with the data."""
    if sizes is None:
        return ("the lengths are dynamic in the graph, from which the room for bit blocks follows",)
    if sizes.num_blocks <= MAX_BIT_BLOCKS:
        return ()
    return (
        f"there would be room for {sizes.num_blocks} bit blocks; at most {MAX_BIT_BLOCKS} are kept",
    )


def _listed(mask: MaskOfCall) -> ListShape | None:
    """The sizes of the block lists of a mask, if it has some, and no intervals of each head or of unknown number."""
    call = mask.call
    if not call.block_lists or mask.heads != ONE_MASK or mask.program.by_keys:
        return None
    lists = BlockLists(*map(value_of, call.block_lists))
    # A mask_mod that shows nothing says so, too: none at all would be for lists that say all.
    count = 0 if mask.program.is_always_true else max(mask.max_intervals, 1)
    block_size = [int(value_of(x)) for x in call.block_size]  # static from here on
    return shape_of_lists(lists, block_size, call.lengths, count)


def _tabled(mask: MaskOfCall, options: LoweringOptions) -> ListShape | None:
    """The sizes of the block table of a mask that has one, if its blocks are not so small that all cells have some, and
    what is beside it is as intervals need it."""
    call, found = mask.call, mask.program.block_look_up
    assert found is not None
    beside = replace(mask, program=found.beside, heads=ONE_MASK)
    has_reasons = options.bits or (
        not found.beside.is_always_true
        and (reasons_for_bits(beside) or (beside.varies and _data_reasons(beside, options)))
    )
    tables = [x for x in call.mask_buffers if isinstance(value_of(x), Tensor)]
    captured = value_of(tables[found.look_up.args[0]])
    if has_reasons or captured.dtype != torch.bool:
        return None
    sizes = shape_of_table(found, captured.shape, MaskSizes(*call.lengths, call.heads))
    block_size = [int(value_of(x)) for x in call.block_size] if call.block_lists else []
    if not has_table_of(sizes, block_size, call.lengths):
        return None
    lists = BlockLists(*map(value_of, call.block_lists)) if call.block_lists else None
    count = 0 if found.beside.is_always_true else max(beside.max_intervals, 1)
    return shape_of_lists(lists, block_size, call.lengths, count, sizes)


def _lists_hide(mask: MaskOfCall) -> bool:
    """True if the block lists of a mask that has intervals may hide something of these: they are computed in the graph,
    or they do with the data, sizes and captured ints of the call that is compiled. Waits for the device."""
    call, program = mask.call, mask.program
    if not call.block_lists or program.refusals:
        return False
    if any(node.op != "placeholder" for node in call.list_sources):
        return True
    lengths, symbols, blocks = (
        [_compat.size_at_hand(value_of(x)) for x in sizes]
        for sizes in (call.lengths, call.mask_symbols, call.block_size)
    )
    if not all(isinstance(x, int) for x in (*lengths, *symbols, *blocks)):
        return False
    sizes = MaskSizes(*lengths)._replace(heads=mask.heads)
    with _compat.without_fake_tensors(), torch.no_grad():
        lists, tables = examples_of(call.list_sources), examples_of(call.table_sources)
        if lists is None or tables is None:
            return False
        device = lists[0].device
        try:
            intervals = row_intervals(program, tables, symbols, **sizes._asdict(), device=device)
            if not all(bool(check.ok) for check in intervals.checks):
                # Then bit blocks of each head show what lists of each head hide.
                return _lists_differ_by_head(call)
            holds_all, _ = BlockLists(*lists).checks(intervals, *blocks)
        except (UnsupportedMaskError, TypeError, ValueError, IndexError):  # said when it runs
            return False
        return not bool(holds_all.ok)


def _lists_differ_by_head(call: FlexCall) -> bool:
    """True if block lists of several heads may differ: they do in the call that is compiled, or are computed in the
    graph."""
    if not call.block_lists or value_of(call.block_lists[0]).shape[1] == 1:
        return False
    with _compat.without_fake_tensors(), torch.no_grad():
        lists = None
        if all(node.op == "placeholder" for node in call.list_sources):
            lists = examples_of(call.list_sources)
        num_q, num_k = value_of(call.block_lists[1]).shape[2:]
        if lists is None or not (isinstance(num_q, int) and isinstance(num_k, int)):
            return True
        return bool(heads_that_differ(*BlockLists(*lists).grids(num_q, num_k)).any())


def _is_by_head(mask: MaskOfCall) -> bool:
    program = mask.program
    if program.is_always_true:  # so that block lists decide
        return value_of(mask.call.block_lists[0]).shape[1] > 1
    # Its expression knows better than its code, where there is one.
    return program.looks_at("h") if program.refusals else program.differs_by_head


@dataclass
class Mask:
    """The nodes of a mask that calls of one graph share.

    Attributes:
        ranges: of its slices: ranges of queries, ranges of keys, and types; none where block lists are walked.
        bits: of its bit blocks; None where it has none.
        intervals: the key intervals of each query, where block lists are walked that do not say all; else None.
        table: the block table of its mask_mod, likewise: who sees whom, and the blocks of queries and of keys.
        plans: of its plans, by what these depend on.
    """

    ranges: tuple[Node, ...]
    bits: Node | None = None
    intervals: Node | None = None
    table: tuple[Node, ...] = ()
    plans: dict[Any, Node] = field(default_factory=dict)


def emit_mask(emit: Emitter, route: MaskRoute, options: LoweringOptions) -> Mask:
    """Derives the slices of the mask, for the packed rows of all batch entries; block lists need none."""
    call = route.mask.call
    is_by_lists = route.lists is not None and not route.reasons
    if is_by_lists and not (route.lists.intervals or route.has_table):  # type: ignore[union-attr]
        return Mask(())
    sizes, device = call.emit_lengths(emit), value_of(call.q).device

    def derived(op: Any, room: Any, lists: Sequence[Any], *rest: Any) -> Node:
        """The node of an op that evaluates the mask program."""
        program = call.mask_tables, call.mask_symbols, route.program.text
        return emit.call(op.default, *program, *sizes, room, device, *lists, options.verify, *rest)

    if is_by_lists:
        count = route.lists.intervals  # type: ignore[union-attr]
        if not route.has_table:
            return Mask((), intervals=derived(torch.ops.magi.mask_intervals, count, ([], [])))
        made = derived(torch.ops.magi.mask_table, count, ([], []), list(call.heads))
        table = tuple(emit.call(operator.getitem, made, i) for i in range(3))
        intervals = emit.call(operator.getitem, made, 3) if count else None
        return Mask((), intervals=intervals, table=table)
    has_bits = bool(route.reasons) or route.decides
    op = torch.ops.magi.mask_bits if has_bits else torch.ops.magi.mask_slices
    capacity = 0
    if not route.reasons:
        capacity = route.mask.capacity(options, *sizes, emit.arithmetic)
    lists = list(call.block_lists), call.block_size if call.block_lists else []
    heads = [list(route.heads)] if has_bits or route.is_by_head else []
    slices = derived(op, capacity, lists, *heads)
    ranges = tuple(emit.call(operator.getitem, slices, i) for i in range(3))
    return Mask(ranges, emit.call(operator.getitem, slices, 3) if has_bits else None)
