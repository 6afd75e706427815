"""Attention across ranks: every rank holds some rows of q, k and v, and keys travel to the queries that see them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from magi_compile import _compat
from magi_compile.dtensor.call import ops as _ops  # noqa: F401  the ops exist once it is imported
from magi_compile.dtensor.call.scores import attention_in_graph, read_score_mod
from magi_compile.dtensor.planning.rank_plan import PlanTensors
from magi_compile.dtensor.transport.collectives import CollectiveName, check_collective
from magi_compile.kernels.base import KernelName
from magi_compile.masks.arguments import check_count, check_flag
from magi_compile.ops.arguments import short
from magi_compile.ops.attention import AttnOutput
from magi_compile.ops.dtensors import (
    PACKED,
    are_distributed,
    as_dtensors,
    firsts_of,
    shards_of,
    share_of,
    shifted_score_mod,
)
from magi_compile.ops.validation import as_autocast, check_list, check_options, check_qkv


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: PlanTensors,
    group: dist.ProcessGroup | str | None,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    kernel: KernelName | None = None,
    collective: CollectiveName | None = None,
    reduce_group: dist.ProcessGroup | str | None = None,
    batch_entries: int = 1,
    return_max_scores: bool = False,
    score_mod: Callable[..., Any] | None = None,
    share: Sequence[int] = (),
) -> AttnOutput:
    """Attention over a sequence that is spread over the ranks of `group`; differentiable.

    All ranks call it together. Row i of the local tensors is the token `plan.dispatch.positions(rank)[i]`.

    Args:
        q: `[seqlen_local, nheads_q, head_dim]`, this rank's rows, fp32, bf16 or fp16, which autocast casts, as k and v;
            or a DTensor of them, as are k and v then: see `SequencePlan.attention`.
        k: `[seqlen_local, nheads_kv, head_dim]`, this rank's keys: row i is the key
            `plan.dispatch.keys.positions(rank)[i]`.
        v: `[seqlen_local, nheads_kv, head_dim_v]`, dtype of `k`.
        plan: `RankPlan.tensors(q.device)` of this rank.
        group: the ranks, or the name of their process group; None for the default group.
        softmax_scale: factor of the scores; None stands for `head_dim ** -0.5`.
        softcap: scores become `softcap * tanh(scores / softcap)`; 0.0 for none.
        kernel: the only kernel to use, by name; None chooses.
        collective: how rows move, "native", "all_to_all" or "hierarchical"; None chooses. The last one
            needs a plan that was made for it (`ContextParallelOptions.hierarchical`).
        reduce_group: the same ranks again, for gradients on their way home: they wait for no cast in `group`, at the
            price of another communicator. None takes `group`.
        batch_entries: how many entries of a batch are among the heads, the same on every rank.
        return_max_scores: whether to return the largest score of each of this rank's rows as well, over the keys of all
            ranks.
        score_mod: what becomes of the scaled scores, as FlexAttention takes it: a function of a score and of batch
            entry, head, query and key in the whole sequence. Gradients of tensors that it captures are this rank's
            parts. In compiled code for backend="magi" and `enable()`.
        share: four numbers where other ranks have other heads or batch entries: those of the first batch entry and of
            the first head of q, and how many batch entries and heads all ranks have.

    Returns:
        `AttnOutput(out, lse, max_scores)`: out `[seqlen_local, nheads_q, head_dim_v]`, lse and, with return_max_scores,
            max_scores
        `[nheads_q, seqlen_local]`.

    Raises:
        ValueError: if a tensor does not fit the others or the plan; on every rank, if the ranks differ in their plans,
            shapes, dtypes or options, or a plan does not fit the group.
        RuntimeError: if other ranks do not call it before the timeout of the group.
        TypeError: if an argument is of another kind.
        NotImplementedError: if no kernel or no collective can run this.
    """
    if type(share) is not tuple:  # in every call
        check_list("share", share)
    name = _name_of(group, "group")
    q, k, v = as_autocast(q, k, v)
    shards = None
    if are_distributed(q, k, v):
        shards = shards_of({"q": q, "k": k, "v": v}, PACKED, list(_ranks_of(name)))
        q, k, v = shards[:3]
        share, score_mod = (
            share or share_of(shards),
            shifted_score_mod(score_mod, *firsts_of(shards)),
        )
    numbers = (softmax_scale, softcap, batch_entries, return_max_scores, kernel, collective)
    _check(q, k, v, plan, numbers, share)
    if softmax_scale is None:
        softmax_scale = q.shape[2] ** -0.5
    names = [name, name if reduce_group is None else _name_of(reduce_group, "reduce_group")]
    chosen = (kernel or "", "auto" if collective is None else collective, *names)
    rest: tuple[Any, ...] = (batch_entries,)
    scored = None
    if score_mod is not None:
        if softcap:
            raise ValueError(
                f"`softcap` must be 0.0 beside a `score_mod`, which has it, got {softcap}"
            )
        if torch.compiler.is_compiling():
            found = attention_in_graph(
                *(q, k, v, plan, softmax_scale, score_mod, chosen, batch_entries, list(share)),
                return_max_scores=return_max_scores,
            )
            return AttnOutput(*as_dtensors(shards, PACKED, *found))
        factors, scored = read_score_mod(score_mod, q.device)
        softmax_scale, softcap = softmax_scale * factors.scale, factors.softcap
    if scored is not None or share or return_max_scores:
        of_score = (None, None, "", None) if scored is None else scored
        rest = short((batch_entries, *of_score, list(share), return_max_scores), 1)
    out, lse, max_scores = torch.ops.magi.cp_attention(
        *(q, k, v, plan.meta, plan.data, softmax_scale, softcap, *chosen), *rest
    )
    of_rows = (lse, max_scores if return_max_scores else None)
    return AttnOutput(*as_dtensors(shards, PACKED, out, *of_rows))


@torch.compiler.assume_constant_result
def _ranks_of(group_name: str) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(_compat.resolve_process_group(group_name)))


_fitting: set[Hashable] = set()
_MOST_FITTING = 1024


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: PlanTensors,
    numbers: tuple[Any, ...],
    share: Sequence[int],
) -> None:
    """Raises if arguments do not fit each other; asked once for arguments of such shapes."""
    tensors = (q, k, v, *plan) if isinstance(plan, PlanTensors) else (q, k, v)
    kind: Hashable = None
    if not torch.compiler.is_compiling() and all(
        [isinstance(x, Tensor) and not x.is_nested for x in tensors]
    ):
        of_tensors = [(x.shape, x.dtype, x.device, x.layout) for x in tensors[:3]]
        places = [x.device for x in tensors[3:]]
        # 1, 1.0 and True are equal, and not equally welcome.
        kind = (*of_tensors, *places, type(plan), *numbers, *map(type, numbers), tuple(share))
        try:
            if kind in _fitting:
                return
        except TypeError:  # something that cannot be hashed, which is not welcome either
            kind = None
    check_qkv(q, k, v, "[seqlen_local, nheads, head_dim]")
    if not isinstance(plan, PlanTensors):
        raise TypeError(
            f"`plan` must be PlanTensors, got {type(plan).__name__}; "
            "take those of this rank's plan, plan_rank(...).tensors(q.device)"
        )
    if plan.data.device != q.device:
        raise ValueError(
            f"`plan` must be on the device of `q`, {q.device}, got {plan.data.device}; take RankPlan.tensors(q.device)"
        )
    if plan.meta.device.type != "cpu":
        raise ValueError(f"`plan.meta` must stay on the CPU, got {plan.meta.device}")
    softmax_scale, softcap, batch_entries, return_max_scores, kernel, collective = numbers
    check_options("softmax_scale", softmax_scale, softcap, kernel)
    check_flag("return_max_scores", return_max_scores)
    check_count("batch_entries", batch_entries, 1)
    if collective is not None:
        check_collective(collective)
    if len(share) not in (0, 4):
        raise ValueError(
            "`share` must be the first batch entry, the first head, and the numbers of both on all ranks, or empty, "
            f"got {list(share)}"
        )
    if kind is not None:
        if len(_fitting) >= _MOST_FITTING:
            _fitting.clear()
        _fitting.add(kind)


def _name_of(group: Any, argument: str) -> str:
    """The name of a process group in ops; None is the default group, as in torch.distributed."""
    if isinstance(group, str):
        return group
    if group is None:
        if not dist.is_initialized():
            raise ValueError(
                f"`{argument}` must be a process group, got None, which means the default group, and there is none; "
                "call torch.distributed.init_process_group first"
            )
        return _compat.default_group_name()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"`{argument}` must be a process group of which this process is a member, its name, or None for the "
            f"default group, got {type(group).__name__}; a DeviceMesh has groups, mesh.get_group(dim)"
        )
    return group.group_name
