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
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from magi_compile import _compat
from magi_compile.kernels.base import AttnProblem, output_like
from magi_compile.lowering.across_ranks import emit_across_ranks, plan_of
from magi_compile.lowering.analysis import Analysis, analyze, decision_on
from magi_compile.lowering.emit import Emitter, value_of
from magi_compile.lowering.flex_call import FlexCall, graphs, may_write, writes_to
from magi_compile.lowering.masks import Mask, emit_mask
from magi_compile.lowering.options import DEFAULTS, LoweringOptions
from magi_compile.lowering.report import REPORT, Decision, LoweringRefusedError, LoweringReport
from magi_compile.ops.arguments import AttentionOptions, short
from magi_compile.ops.dtensors import are_distributed
from magi_compile.ops.layout import by_entries, inverse, memory_order


def emit_attention(emit: Emitter, call: FlexCall, found: Analysis, mask: Mask) -> tuple[Node, ...]:
    """Emits the attention itself.

    Returns the node that runs it, its out `[B, Hq, Sq, Dv]`, its lse `[B, Hq, Sq]` and, if the call asks for them, its
    largest scores `[B, Hq, Sq]`, in the units of the call.
    """
    problem = found.problem
    batch, seqlen_q = emit.size(call.q, 0), emit.size(call.q, 2)
    by_head = found.route.is_by_head
    qkv = tuple(
        _packed(emit, node, problem.dtype, batch, by_head=by_head)
        for node in (call.q, call.k, call.v)
    )
    by_entry = (batch, int(value_of(call.q).shape[1]), seqlen_q)
    given = _given_in_place(call, qkv)
    is_by_entry = given != qkv or _is_returned_in_place(emit, call, qkv[0], problem)
    plan = _emit_plan(emit, found, mask, qkv)
    result = _emit_op(emit, call, found, mask, plan, given, by_entry=is_by_entry)
    for node, same in zip(qkv, given, strict=True):
        if node is not same:
            emit.erase_unused(node, same)
    num_outputs = 3 if problem.has_max_scores else 2  # of those that are read
    out, *of_rows = (emit.call(operator.getitem, result, i) for i in range(num_outputs))
    if is_by_entry:
        pass
    elif by_head:
        out = emit.call(torch.reshape, out, (*by_entry, problem.head_dim_v))
    else:
        out = _unpacked(emit, out, batch, seqlen_q)
    order = memory_order(value_of(call.node)[0].stride())
    with emit.fake_mode:  # the graph's, where a compiler that calls Inductor has another one
        is_in_order = value_of(out).permute(order).is_contiguous()
    if not is_in_order and not _is_packed_again(call.node):
        # The call promises the memory order of q; code after it may rely on it.
        out = emit.call(torch.permute, out, order)
        out = emit.call(torch.clone, out, memory_format=torch.contiguous_format)
        out = emit.call(torch.permute, out, inverse(order))
    used = {item.args[1] for item in call.node.users if item.users}
    rows = [
        _of_entries(emit, node, found, by_entry, i + 1 in used) for i, node in enumerate(of_rows)
    ]
    return result, out, *rows


def _given_in_place(call: FlexCall, qkv: tuple[Node, ...]) -> tuple[Node, ...]:
    """q, k and v, packed, but for those that code outside of the graph gives and may write to before the backward: a
    graph must not save a view of them, so that autograd sees it."""
    if not _has_backward_here(call):
        return qkv
    return tuple(
        node
        if node in call.given and _compat.share_memory(value_of(node), value_of(packed))
        else packed
        for node, packed in zip((call.q, call.k, call.v), qkv, strict=True)
    )


def _has_backward_here(call: FlexCall) -> bool:
    """True if the call has a backward, whose saved tensors are this process's own and no shards."""
    q = value_of(call.q)
    return bool(value_of(call.node)[0].requires_grad) and not are_distributed(q, q, q)


def _is_returned_in_place(emit: Emitter, call: FlexCall, q: Node, problem: AttnProblem) -> bool:
    """True if code behind the graph may write to what the backward needs, so that autograd has to see it: the output
    itself is returned, without a copy."""
    result = value_of(call.node)[0]
    if not call.is_returned or not _has_backward_here(call):
        return False
    batch, nheads, seqlen, _ = result.shape
    with emit.fake_mode:
        out = by_entries(output_like(value_of(q), problem.head_dim_v), batch, seqlen, nheads)
        return out.permute(memory_order(result.stride())).is_contiguous()


def _of_entries(
    emit: Emitter, node: Node, found: Analysis, by_entry: tuple[Any, int, Any], is_used: bool
) -> Node:
    """The log-sum-exp or the largest scores `[Hq, B * Sq]` as those of the operator, `[B, Hq, Sq]` in base 2."""
    batch, _, seqlen_q = by_entry
    if found.route.is_by_head:
        node = emit.call(torch.reshape, node, by_entry)
    else:
        node = emit.call(torch.reshape, node, (found.problem.nheads_q, batch, seqlen_q))
        node = emit.call(torch.transpose, node, 0, 1)
    if is_used:
        node = emit.call(torch.clone, node, memory_format=torch.contiguous_format)
    return emit.call(operator.mul, node, 1 / math.log(2))


def _emit_op(
    emit: Emitter,
    call: FlexCall,
    found: Analysis,
    mask: Mask,
    plan: list[Node],
    qkv: tuple[Node, ...],
    *,
    by_entry: bool,
) -> Node:
    """Emits the op, of packed tensors or by entries of the batch."""
    problem, kernel = found.problem, found.kernel
    needs_slices = kernel.needs_slices or not plan or problem.has_bits
    slices: Any = list(mask.ranges) if needs_slices else []
    planned: Any = plan
    bits: Any = mask.bits
    options = AttentionOptions(
        *(slices, planned, problem.softmax_scale, problem.softcap, kernel.name, bits),
        by_entry=by_entry,
        return_max_scores=problem.has_max_scores,
    )
    has_score = found.scores.program is not None
    is_by_list = (
        problem.block_map is not None and problem.block_map.heads > 1
    )  # so that nobody divides its heads
    if has_score or by_entry or is_by_list:
        batch, nheads, seqlen_q, _ = (emit.size(call.q, dim) for dim in range(4))
        by_head = int(found.route.is_by_head)
        sizes: Any = [batch, nheads, seqlen_q, emit.size(call.k, 2), by_head]
        options = options._replace(numbering=sizes)
    if found.scores.program is not None:
        captured: Any = found.scores.emit(emit, call)
        score = found.scores.program.text
        options = options._replace(tables=captured[0], symbols=captured[1], score=score)
    return emit.call(torch.ops.magi.attention.default, *qkv, *options.short())


def _emit_plan(emit: Emitter, found: Analysis, mask: Mask, qkv: tuple[Node, ...]) -> list[Node]:
    """The plan, which calls of one mask share; nothing where it is found out in each call."""
    problem, kernel = found.problem, found.kernel
    if not kernel.plans_in_graph:
        return []
    key = (kernel.name, kernel.plan_key(problem))
    if problem.block_map is not None and key not in mask.plans:
        mask.plans[key] = _emit_plan_of_lists(emit, found, mask)
    if key not in mask.plans:
        heads = (problem.nheads_q, problem.nheads_kv, problem.head_dim, problem.head_dim_v)
        totals = (emit.size(qkv[0], 0), emit.size(qkv[1], 0))
        rest = short((mask.bits, problem.has_score), 0)
        sizes = (*totals, problem.dtype, *heads, problem.softcap, kernel.name)
        mask.plans[key] = emit.call(torch.ops.magi.plan.default, *mask.ranges, *sizes, *rest)
    node = mask.plans[key]
    return [emit.call(operator.getitem, node, i) for i in range(len(value_of(node)))]


def _emit_plan_of_lists(emit: Emitter, found: Analysis, mask: Mask) -> Node:
    problem, call, lists = found.problem, found.route.mask.call, found.route.lists
    assert lists is not None
    heads = [problem.nheads_q, problem.nheads_kv, problem.head_dim, problem.head_dim_v]
    return emit.call(
        torch.ops.magi.plan_lists.default,
        list(call.block_lists),
        [lists.block_rows, lists.block_keys] if call.block_lists else [],
        *call.emit_lengths(emit),
        *(problem.dtype, heads, problem.softcap, found.kernel.name),
        *short((problem.has_score, mask.intervals, list(mask.table) or None), 0),
    )


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
    """True if the only use of the output is `out.transpose(1, 2).reshape(...)`: the order that it has before it is
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


def _packed(emit: Emitter, node: Node, dtype: torch.dtype, batch: Any, *, by_head: bool) -> Node:
    """`[B, H, S, D]` as `[B * S, H, D]`, or `by_head` as `[B * H * S, 1, D]`: a view wherever the strides allow, but of
    one batch entry that is to serve several."""
    if value_of(node).dtype != dtype:
        node = emit.call(torch.ops.aten._to_copy.default, node, dtype=dtype)
    nheads, head_dim = (int(value_of(node).shape[dim]) for dim in (1, 3))
    if value_of(node).shape[0] == 1 and not (isinstance(batch, int) and batch == 1):
        node = emit.call(torch.Tensor.expand, node, batch, -1, -1, -1)
    if by_head:
        return emit.call(torch.reshape, node, (-1, 1, head_dim))
    return emit.call(torch.reshape, emit.call(torch.transpose, node, 1, 2), (-1, nheads, head_dim))


class LoweredCall(NamedTuple):
    """A decision, the node that now runs the attention: `magi::attention`, or FlexAttention where it was refused; its
    mask, whose slices need not be among its arguments; and where there are no slices, the block lists that say all, or
    the block table."""

    decision: Decision
    node: Node
    mask: Mask | None = None
    block_lists: tuple[Node, ...] = ()
    block_table: tuple[Node, ...] = ()


def lower_flex_attention(
    root: GraphModule,
    options: LoweringOptions = DEFAULTS,
    report: LoweringReport = REPORT,
) -> list[LoweredCall]:
    """Replaces the FlexAttention calls of `root`, a graph as Dynamo hands it to a backend, and of the graphs inside it
    (checkpointed regions), in place. Decisions are written to `report`.

    Returns what became of every FlexAttention call, but of those across ranks. Raises LoweringRefusedError where a
    call cannot be lowered and `options.strict` is set, or it needs gradients on a CPU, where FlexAttention has none.
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
    nodes: list[Node] = []
    writers: dict[Node, list[Node]] = {}  # in front of each call
    so_far: list[Node] = []
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target is hop:
            nodes.append(node)
            writers[node] = [*so_far]
        elif may_write(node):
            so_far.append(node)
    masks: dict[Any, Mask] = {}
    lowered = []
    for node in nodes:
        call = FlexCall.parse(gm, node, root)
        if (plan := plan_of(call)) is not None:
            decision, outputs = emit_across_ranks(Emitter(gm.graph, node), call, plan)
            report.add(decision)
            _replace_outputs(call, outputs)
            continue
        found = analyze(call, options)
        decision = decision_on(call, found)
        report.add(decision)
        mask: Mask | None = None
        if not found.reasons:
            writes = _writes_to_mask(call, writers[node])
            node, mask = _replace(call, found, masks, writes, options)
        elif options.strict:
            raise LoweringRefusedError(str(decision))
        elif call.needs_cpu_gradients:
            raise LoweringRefusedError(
                f"cannot be {decision}\nand FlexAttention has no gradients on a CPU, so nothing can "
                "run it; compute them on a GPU, or change what is refused"
            )
        table = () if mask is None else mask.table
        listed = call.block_lists if mask is not None and not (mask.ranges or table) else ()
        lowered.append(LoweredCall(decision, node, mask, listed, table))
    if nodes:
        # Not eliminate_dead_code(): it deletes calls with effects that FX does not know (vmap nesting, autocast).
        gm.graph.lint()
        gm.recompile()
    return lowered


def _replace(
    call: FlexCall,
    found: Analysis,
    masks: dict[Any, Mask],
    writes: Sequence[Node],
    options: LoweringOptions,
) -> tuple[Node, Mask]:
    emit = Emitter(call.node.graph, call.node)
    route = found.route
    # A table is of all heads of its call, which those of another call may be more than.
    way = (call.heads if route.has_table else route.heads, route.lists is not None)
    lists = (call.block_lists, tuple(call.block_size))
    key = (route.program.text, way, call.mask_buffers, lists, str(call.lengths), *writes)
    if key not in masks:
        masks[key] = emit_mask(emit, route, options)
    attention, *outputs = emit_attention(emit, call, found, masks[key])
    _replace_outputs(call, outputs)
    return attention, masks[key]


def _writes_to_mask(call: FlexCall, writers: Sequence[Node]) -> list[Node]:
    """Those of `writers` that may change what the mask of a call reads: calls with the same mask, and a write between
    them, have two masks."""
    read = [value_of(node) for node in (*call.mask_tables, *call.block_lists)]
    return [node for node in writers if writes_to(node, read)]


def _replace_outputs(call: FlexCall, outputs: Sequence[Node]) -> None:
    """Puts the results of other nodes in place of a call."""
    for user in list(call.node.users):
        assert user.target is operator.getitem, user
        if user.users:
            index: Any = user.args[1]
            # What was computed without gradients says so; the next call reads here whether it needs them.
            value_of(outputs[index]).requires_grad_(value_of(user).requires_grad)
            user.replace_all_uses_with(outputs[index])
        call.node.graph.erase_node(user)
    call.node.graph.erase_node(call.node)
