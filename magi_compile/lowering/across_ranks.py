"""Attention across ranks with a score_mod, in a graph: FlexAttention whose mask_mod names a plan.

Dynamo reads a score_mod only as a part of FlexAttention. So `magi_compile.dtensor` puts FlexAttention into the graph,
over a rank's own tokens, with a mask_mod that is one op: `magi::mask_over_ranks` of the plan and of how to run it. Here
it becomes `magi::cp_attention`. The op itself cannot be computed: another backend raises.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from magi_compile.lowering import regions
from magi_compile.lowering.emit import Emitter, value_of
from magi_compile.lowering.flex_call import FlexCall
from magi_compile.lowering.report import Decision, LoweringRefusedError
from magi_compile.lowering.scores import Scores
from magi_compile.ops.define import define


class OverRanks(NamedTuple):
    """The arguments of `magi::mask_over_ranks` behind the indices.

    Attributes:
        meta: of the plan.
        data: of the plan.
        at_queries: the tensor that stands for the positions of queries in the score_mod.
        at_keys: the same of keys.
        kernel: as of `magi::cp_attention`, like what follows.
        collective: see `kernel`.
        group_name: see `kernel`.
        reduce_group_name: see `kernel`.
        share: see `kernel`.
    """

    meta: Tensor
    data: Tensor
    at_queries: Tensor
    at_keys: Tensor
    kernel: str
    collective: str
    group_name: str
    reduce_group_name: str
    share: list[int]


# In a report, in place of a kernel, which is chosen when it runs.
ACROSS_RANKS = "attention across ranks"

REFUSAL = (
    "`score_mod` must be None in code compiled for another backend than 'magi' across ranks; compile it with "
    "backend='magi' or after magi_compile.enable(), or for a scale or a soft-cap call SequencePlan.attention(q, k, v, "
    "scale=..., softcap=...)"
)


def _mask_over_ranks(*_: Any) -> Tensor:
    raise RuntimeError(REFUSAL)


_lib = torch.library.Library("magi", "FRAGMENT")
define(
    _lib,
    "mask_over_ranks(Tensor b, Tensor h, Tensor q, Tensor kv, Tensor meta, Tensor data, Tensor at_queries, "
    "Tensor at_keys, str kernel, str collective, str group_name, str reduce_group_name, int[] share) -> Tensor",
    _mask_over_ranks,
    lambda b, *_: b.new_empty((), dtype=torch.bool),
)


def plan_of(call: FlexCall) -> OverRanks | None:
    """The plan that the mask of a call names, as nodes of the call's graph and constants; None for other masks."""
    graph = call.mask_mod.graph
    op: Any = torch.ops.magi.mask_over_ranks.default
    found = graph.find_nodes(op="call_function", target=op) or graph.find_nodes(
        op="call_function", target=torch.ops.magi.mask_over_ranks
    )
    if not found:
        return None
    indices, buffers = 4, call.mask_buffers
    captured = graph.find_nodes(op="placeholder")[indices:]
    outer: dict[Any, Any] = dict(zip(captured, buffers, strict=True))
    return OverRanks(
        *(outer.get(x, x) if isinstance(x, Node) else x for x in found[0].args[indices:])
    )


def emit_across_ranks(
    emit: Emitter, call: FlexCall, plan: OverRanks
) -> tuple[Decision, list[Node]]:
    """Emits the attention across ranks of a call over this rank's tokens, whose mask names `plan`.

    Returns what was decided, and the nodes of out, of the log-sum-exp and, if the call asks for them, of the largest
    scores, in the units of the call. Raises LoweringRefusedError where the score_mod cannot be read; nothing else runs
    it.
    """
    scores = Scores.of(call)
    decision = _decision_on(call, scores)
    if scores.reasons:
        where = f" at {call.location}" if call.location else ""
        raise LoweringRefusedError(
            f"`score_mod` of an attention across ranks{where} must be a pointwise function: {'; '.join(scores.reasons)}"
        )
    batch, nheads, seqlen, _ = (emit.size(call.q, dim) for dim in range(4))
    rows = [_packed(emit, node) for node in (call.q, call.k, call.v)]
    tables: list[Node] = []
    symbols: list[Any] = []
    places: list[int] = []
    text = ""
    if scores.program is not None:
        tables, symbols = scores.emit(emit, call)
        text = scores.program.text
        numbers: dict[Any, int] = {node: i for i, node in enumerate(tables)}
        places = [numbers.get(x, -1) for x in (plan.at_queries, plan.at_keys)]
    has_max_scores = bool(call.kernel_options.get("OUTPUT_MAX"))
    scale = float(value_of(call.scale)) * scores.factors.scale
    result = emit.call(
        torch.ops.magi.cp_attention.default,
        *(*rows, plan.meta, plan.data, scale, scores.factors.softcap),
        *(plan.kernel, plan.collective, plan.group_name, plan.reduce_group_name),
        *(batch, tables, symbols, text, places, list(plan.share), has_max_scores),
    )
    out = emit.call(operator.getitem, result, 0)
    out = emit.call(torch.reshape, out, (seqlen, batch, nheads, int(value_of(out).shape[2])))
    outputs = [emit.call(torch.permute, out, (1, 2, 0, 3))]
    for i in range(1, 3 if has_max_scores else 2):
        of_rows = emit.call(operator.getitem, result, i)
        of_rows = emit.call(torch.reshape, of_rows, (batch, nheads, seqlen))
        outputs.append(emit.call(operator.mul, of_rows, 1 / math.log(2)))
    return decision, outputs


def _packed(emit: Emitter, node: Node) -> Node:
    """`[B, H, S, D]` as `[S, B * H, D]`."""
    flatten: Callable[..., Any] = torch.flatten
    return emit.call(flatten, emit.call(torch.permute, node, (2, 0, 1, 3)), 1, 2)


def _decision_on(call: FlexCall, scores: Scores) -> Decision:
    q_shape, k_shape = call.shapes
    # As it was written: of the indices of the whole sequence.
    score = str(scores.program or "")
    score = score.replace("at_queries[q]", "q").replace("at_keys[kv]", "kv")
    kernel = None if scores.reasons else ACROSS_RANKS
    return Decision(
        location=call.location,
        q_shape=q_shape,
        k_shape=k_shape,
        mask="of the plan",
        kernel=kernel,
        reasons=scores.reasons,
        notes=("SequencePlan.explain() shows mask, balance and communication",),
        score=score,
    )


@torch.compiler.assume_constant_result
def is_lowered() -> bool:
    """True if Dynamo traces for a backend that lowers what it traces."""
    return regions.lowers_what_is_traced()
