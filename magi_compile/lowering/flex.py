"""The rewrite: FlexAttention calls of a Dynamo graph become attention over slices.

It runs before autograd, so one rewrite serves forward and backward, training and inference:

    flex_attention(q, k, v, block_mask)   ->   slices = mask_slices(captured tables, "the mask's expression")
                                               plan   = plan(slices)
                                               out    = attention(q, k, v, slices, plan)

Calls with the same mask share the slices and the plan. Values of captured tensors are read when the graph runs:
a new document layout each step compiles nothing.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from magi_compile import _compat
from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.select import (
    ONLY_IF_FORCED,
    load,
    problem_of,
    refusals_by_kernel,
    select,
)
from magi_compile.lowering.emit import Emitter, value_of
from magi_compile.lowering.flex_call import FlexCall, graphs
from magi_compile.lowering.options import DEFAULTS, LoweringOptions
from magi_compile.lowering.report import REPORT, Decision, LoweringRefusedError, LoweringReport
from magi_compile.masks import (
    MaskProgram,
    RowIntervals,
    UnsupportedMaskError,
    padded_slices_from_intervals,
    row_intervals,
)
from magi_compile.masks.program.trace import trace_graph
from magi_compile.masks.slices import MAX_SEQLEN
from magi_compile.masks.solver.solve import refuse_broken
from magi_compile.ops.layout import inverse, memory_order
from magi_compile.ops.score_mod import ScoreMod, UnsupportedScoreModError, trace_score_mod

ROWS_PER_SLICE = 16  # of the default capacity: documents of 16 tokens on average
MIN_CAPACITY = 256
# Of keys, where a row sees several of a mask that repeats: what kernels walk for shorter ones is more than the blocks of a BlockMask.
MIN_PIECE = 256
FEW_PIECES = 4  # of which all keys consist: then there is little to walk


@dataclass(frozen=True)
class Analysis:
    """Whether and how one call can be lowered: it can where there are no `reasons`, and then nothing is None."""

    reasons: tuple[str, ...]
    problem: AttnProblem
    program: MaskProgram | None
    kernel: str | None


def sizes_of(call: FlexCall) -> tuple[int | None, list[int] | None]:
    """How many keys a batch entry has, and the captured ints of the mask; None where a graph is to serve several."""
    seqlen_k, symbols = value_of(call.k).shape[2], [value_of(x) for x in call.mask_symbols]
    are_known = all(isinstance(symbol, int) for symbol in symbols)
    return seqlen_k if isinstance(seqlen_k, int) else None, symbols if are_known else None


def piece_reasons(call: FlexCall, program: MaskProgram) -> list[str]:
    """What speaks against a mask that repeats along the keys, where FlexAttention is the alternative.

    Raises:
        UnsupportedMaskError: a row sees more intervals than are representable.
    """
    seqlen_k, symbols = sizes_of(call)
    count, piece = (f(seqlen_k, symbols) for f in (program.max_intervals, program.least_piece))
    if piece is None or piece >= MIN_PIECE or _needs_cpu_gradients(call):
        return []
    if piece * FEW_PIECES >= (seqlen_k or MAX_SEQLEN):
        return []
    return [
        f"a row sees up to {count} key intervals, one in each piece of {piece} keys; with pieces of fewer than {MIN_PIECE} "
        "keys FlexAttention is faster"
    ]


def intervals_without_data(call: FlexCall, program: MaskProgram) -> RowIntervals | None:
    """What a mask that depends on no tensor shows in every run; None for others, and while lengths are not known."""
    seqlen_k, symbols = sizes_of(call)
    batch, _, seqlen_q, _ = value_of(call.q).shape
    is_known = isinstance(seqlen_q, int) and isinstance(batch, int)
    if program.reads_tensors or not is_known or seqlen_k is None or symbols is None:
        return None
    sizes = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    with _compat.without_fake_tensors():
        return row_intervals(program, (), symbols, **sizes, device="cpu")


def refuse_without_data(call: FlexCall, program: MaskProgram) -> None:
    """Finds out now what a mask of computed tables that depends on no tensor would find in every run.

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
    """How many slices a mask that depends on no tensor has, on average over batch entries; 0 where that is not known yet."""
    intervals = intervals_without_data(call, program)
    if intervals is None or not intervals.batch:
        return 0
    with _compat.without_fake_tensors():
        _, fits = padded_slices_from_intervals(intervals, 1)
        return -(-int(fits.values[0]) // intervals.batch)


def analyze(call: FlexCall, options: LoweringOptions) -> Analysis:
    """Collects everything that speaks against lowering `call`, and what is needed to do it."""
    reasons = []
    q, k, v = (value_of(node) for node in (call.q, call.k, call.v))
    backend = call.kernel_options.get("BACKEND", "AUTO")
    if backend != "AUTO":
        reasons.append(f"kernel_options asks for FlexAttention's BACKEND={backend!r}")
    if call.kernel_options.get("OUTPUT_MAX"):
        reasons.append("return_aux asks for max_scores, which the kernels do not return")
    if not q.dtype == k.dtype == v.dtype:
        reasons.append(f"q, k and v differ in dtype: {q.dtype}, {k.dtype}, {v.dtype}")
    if q.shape[0] != k.shape[0]:
        reasons.append(f"q and k differ in batch size: {q.shape[0]} and {k.shape[0]}")

    score = ScoreMod()
    try:
        score = trace_score_mod(call.score_mod, len(call.score_buffers))
    except UnsupportedScoreModError as error:
        reasons.append(str(error))

    program = None
    names = [_compat.source_name(table) for table in call.mask_tables]
    if _compat.PERMUTED_TOKENS in names:
        reasons.append(
            "the mask is of tokens that a load balancer of PyTorch's context parallelism has permuted; spread them with "
            "magi_compile.dtensor.context_parallel, or pass the balancer to magi_compile.dtensor.plan(..., permutation=...)"
        )
    try:
        captures = [value_of(buffer) for buffer in call.mask_buffers]
        program = trace_graph(call.mask_mod, captures, names)
        reasons += piece_reasons(call, program)
        refuse_without_data(call, program)
    except UnsupportedMaskError as error:
        reasons.extend(error.reasons)
    if program is not None and program.is_always_true and call.block_lists:
        reasons.append(
            "the mask_mod shows everything, so the block lists decide, and they are inputs of the graph; "
            "make the BlockMask inside the compiled function, or convert it with "
            "magi_compile.masks.slices_from_block_mask"
        )

    problem, kernel = _problem(call, score), None
    try:
        kernel = select(problem, options.kernel).name
    except NotImplementedError as error:
        reasons.append(str(error))
    return Analysis(tuple(reasons), problem, program, kernel)


def _problem(call: FlexCall, score: ScoreMod) -> AttnProblem:
    q, k, v = (value_of(node) for node in (call.q, call.k, call.v))
    softmax_scale = float(value_of(call.scale)) * score.scale
    return problem_of(q, k, v, softmax_scale, score.softcap, _out_dtype(call))


def _out_dtype(call: FlexCall) -> torch.dtype:
    """Under autocast the call computes in the autocast dtype, not in that of q."""
    return value_of(call.node)[0].dtype


@dataclass
class Mask:
    """The nodes of a mask that calls of one graph share."""

    slices: tuple[Node, Node, Node]
    plans: dict[Any, Node] = field(default_factory=dict)


def emit_mask(
    emit: Emitter, call: FlexCall, program: MaskProgram, options: LoweringOptions
) -> Mask:
    """Derives the slices of the mask, for the packed rows of all batch entries."""
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
    capacity = emit.arithmetic(operator.mul, capacity, batch)
    slices = emit.call(
        torch.ops.magi.mask_slices.default,
        call.mask_tables,
        call.mask_symbols,
        program.text,
        batch,
        seqlen_q,
        emit.size(call.k, 2),
        capacity,
        value_of(call.q).device,
        list(call.block_lists),
        call.block_size if call.block_lists else [],
        options.verify,
    )
    q_ranges, k_ranges, mask_types = (emit.call(operator.getitem, slices, i) for i in range(3))
    return Mask((q_ranges, k_ranges, mask_types))


def emit_attention(
    emit: Emitter, call: FlexCall, found: Analysis, mask: Mask
) -> tuple[Node, Node, Node]:
    """Emits the attention itself.

    Returns:
        The node that runs it, its out `[B, Hq, Sq, Dv]` and its lse `[B, Hq, Sq]`, in the units of the call.
    """
    problem = found.problem
    assert found.kernel is not None
    batch, seqlen_q = emit.size(call.q, 0), emit.size(call.q, 2)
    q, k, v = (_packed(emit, node, problem.dtype) for node in (call.q, call.k, call.v))
    plan: Any = []
    kernel = load(found.kernel)
    if kernel.plans_in_graph:
        key = (kernel.name, kernel.plan_key(problem))
        if key not in mask.plans:
            heads = (problem.nheads_q, problem.nheads_kv, problem.head_dim, problem.head_dim_v)
            totals = (emit.size(q, 0), emit.size(k, 0))
            mask.plans[key] = emit.call(
                torch.ops.magi.plan.default,
                *mask.slices,
                *totals,
                problem.dtype,
                *heads,
                problem.softcap,
                kernel.name,
            )
        node = mask.plans[key]
        plan = [emit.call(operator.getitem, node, i) for i in range(len(value_of(node)))]
    result = emit.call(
        torch.ops.magi.attention.default,
        q,
        k,
        v,
        list(mask.slices) if kernel.needs_slices or not plan else [],
        plan,
        problem.softmax_scale,
        problem.softcap,
        kernel.name,
    )
    out, lse = (emit.call(operator.getitem, result, i) for i in range(2))
    out = _unpacked(emit, out, batch, seqlen_q)
    order = memory_order(value_of(call.node)[0].stride())
    if not value_of(out).permute(order).is_contiguous() and not _is_packed_again(call.node):
        # The call promises the memory order of q; code after it may rely on it.
        out = emit.call(torch.permute, out, order)
        out = emit.call(torch.clone, out, memory_format=torch.contiguous_format)
        out = emit.call(torch.permute, out, inverse(order))
    lse = emit.call(torch.reshape, lse, (problem.nheads_q, batch, seqlen_q))
    lse = emit.call(torch.transpose, lse, 0, 1)
    if any(item.args[1] == 1 and item.users for item in call.node.users):
        lse = emit.call(torch.clone, lse, memory_format=torch.contiguous_format)
    lse = emit.call(operator.mul, lse, 1 / math.log(2))  # the operator's lse is in base 2
    return result, out, lse


def _unpacked(emit: Emitter, out: Node, batch: Any, seqlen_q: Any) -> Node:
    """`[B * S, H, D]` as `[B, H, S, D]`, a view, whichever of rows and heads come first in memory."""
    nheads, head_dim = (int(size) for size in value_of(out).shape[1:])
    is_by_head = nheads > 1 and value_of(out).stride(0) == head_dim
    if not is_by_head:
        out = emit.call(torch.reshape, out, (batch, seqlen_q, nheads, head_dim))
        return emit.call(torch.transpose, out, 1, 2)
    out = emit.call(torch.transpose, out, 0, 1)
    if isinstance(batch, int) and batch == 1:
        return emit.call(torch.reshape, out, (1, nheads, seqlen_q, head_dim))
    out = emit.call(torch.reshape, out, (nheads, batch, seqlen_q, head_dim))
    return emit.call(torch.transpose, out, 0, 1)


def _is_packed_again(attention: Node) -> bool:
    """Whether all that becomes of the output is `out.transpose(1, 2).reshape(...)`: the order that it has before it is
    given the layout of q, so that both copies can go."""
    outputs = (item for item in attention.users if item.args[1] == 0)
    exchanged = [user for item in outputs for user in item.users]
    return all(_exchanges_heads_and_rows(node) for node in exchanged) and all(
        reader.op == "call_method" and reader.target in ("reshape", "flatten", "contiguous")
        for node in exchanged
        for reader in node.users
    )


def _exchanges_heads_and_rows(node: Node) -> bool:
    dims = [dim % 4 if isinstance(dim, int) else dim for dim in node.args[1:]]
    return node.op == "call_method" and (
        (node.target == "transpose" and dims in ([1, 2], [2, 1]))
        or (node.target == "permute" and dims in ([0, 2, 1, 3], [(0, 2, 1, 3)]))
    )


def _packed(emit: Emitter, node: Node, dtype: torch.dtype) -> Node:
    """`[B, H, S, D]` as `[B * S, H, D]`: a view wherever the strides allow."""
    if value_of(node).dtype != dtype:
        node = emit.call(torch.ops.aten._to_copy.default, node, dtype=dtype)
    nheads, head_dim = (int(value_of(node).shape[dim]) for dim in (1, 3))
    return emit.call(torch.reshape, emit.call(torch.transpose, node, 1, 2), (-1, nheads, head_dim))


class LoweredCall(NamedTuple):
    """A decision, the node that now runs the attention, `magi::attention`, or FlexAttention where it was refused, and the
    nodes of its slices, which need not be among its arguments."""

    decision: Decision
    node: Node
    slices: tuple[Node, ...] = ()


def lower_flex_attention(
    root: GraphModule,
    options: LoweringOptions = DEFAULTS,
    report: LoweringReport = REPORT,
) -> list[LoweredCall]:
    """Replaces the FlexAttention calls of `root` and of the graphs inside it (checkpointed regions), in place.

    Args:
        root: a graph as Dynamo hands it to a backend.
        options: see `LoweringOptions`.
        report: where the decisions are written.

    Returns:
        What became of every FlexAttention call.

    Raises:
        LoweringRefusedError: a call cannot be lowered and `options.strict` is set, or it needs gradients on a CPU,
            where FlexAttention has none.
    """
    # Without gradients: hooks for saved tensors, as those of a checkpoint that is around the compilation, must not see
    # the fake tensors of the rewrite.
    with torch.no_grad():
        calls = [call for gm in graphs(root) for call in _lower_graph(gm, root, options, report)]
    report.num_graphs += bool(calls)
    return calls


def _lower_graph(
    gm: GraphModule, root: GraphModule, options: LoweringOptions, report: LoweringReport
) -> list[LoweredCall]:
    hop = torch.ops.higher_order.flex_attention
    nodes = [node for node in gm.graph.nodes if node.op == "call_function" and node.target is hop]
    masks: dict[Any, Mask] = {}
    lowered = []
    for node in nodes:
        call = FlexCall.parse(gm, node, root)
        found = analyze(call, options)
        decision = _decision(call, found)
        report.add(decision)
        slices: tuple[Node, ...] = ()
        if not found.reasons:
            node, slices = _replace(call, found, masks, options)
        elif options.strict or _needs_cpu_gradients(call):
            raise LoweringRefusedError(str(decision))
        lowered.append(LoweredCall(decision, node, slices))
    if nodes:
        # Not eliminate_dead_code(): it deletes calls with effects that FX does not know (vmap nesting, autocast).
        gm.graph.lint()
        gm.recompile()
    return lowered


def _decision(call: FlexCall, found: Analysis) -> Decision:
    shapes = (value_of(node).shape for node in (call.q, call.k))
    q_shape, k_shape = (
        tuple(s if isinstance(s, int) else str(s) for s in shape) for shape in shapes
    )
    passed_over = []
    for name, why in refusals_by_kernel(found.problem).items():
        if name == found.kernel:
            break
        if name in ONLY_IF_FORCED:
            continue
        passed_over.append((name, tuple(why)))
    kernel = None if found.reasons else found.kernel
    return Decision(
        call.location,
        q_shape,
        k_shape,
        str(found.program) if found.program else "",
        kernel,
        found.reasons,
        tuple(passed_over),
        tuple(load(kernel).notes(found.problem)) if kernel else (),
    )


def _needs_cpu_gradients(call: FlexCall) -> bool:
    tensors = [value_of(node) for node in (call.q, call.k, call.v)]
    return tensors[0].device.type == "cpu" and any(tensor.requires_grad for tensor in tensors)


def _replace(
    call: FlexCall, found: Analysis, masks: dict[Any, Mask], options: LoweringOptions
) -> tuple[Node, tuple[Node, ...]]:
    assert found.program is not None
    emit = Emitter(call.node.graph, call.node)
    sizes = (value_of(call.q).shape[0], value_of(call.q).shape[2], value_of(call.k).shape[2])
    key = (found.program.text, call.mask_buffers, call.block_lists, str(sizes))
    if key not in masks:
        masks[key] = emit_mask(emit, call, found.program, options)
    attention, *outputs = emit_attention(emit, call, found, masks[key])
    for user in list(call.node.users):
        assert user.target is operator.getitem, user
        if user.users:
            index: Any = user.args[1]
            # What was computed without gradients says so; the next call reads here whether it needs them.
            value_of(outputs[index]).requires_grad_(value_of(user).requires_grad)
            user.replace_all_uses_with(outputs[index])
        call.node.graph.erase_node(user)
    call.node.graph.erase_node(call.node)
    return attention, masks[key].slices
