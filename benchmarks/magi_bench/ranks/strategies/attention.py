"""Attention whose keys are moved to the queries, or whose heads are: local steps and moves, differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from magi_bench.contenders.base import Attend
from magi_bench.ranks.strategies import transport
from magi_bench.ranks.strategies.kernels import Step, nothing_seen, sums_of
from magi_compile.kernels.base import ForwardOutput, Saved


class RingPlan(NamedTuple):
    """The way of keys around, and a step for each of `rings.owners()`."""

    rings: transport.Rings
    steps: Sequence[Step]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of this rank's queries over the keys of all owners."""
        out: Tensor = RingAttention.apply(q, k, v, self)[0]
        return out


class RingAttention(torch.autograd.Function):
    """Keys and values go around; queries stay. Gradients of k and v travel in their dtype, one step behind, and every
    rank adds its share; that of q is added up in fp32. With no ring it is attention of one rank."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, made: RingPlan) -> tuple[Tensor, Tensor]:
        seen: ForwardOutput | None = None
        for step, (k_step, v_step) in zip(
            made.steps, transport.around((k, v), made.rings), strict=True
        ):
            seen = step.forward(q, k_step, v_step, seen)
        seen = seen or nothing_seen(q, v, q.dtype)
        out = seen.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, seen.lse)
        ctx.made = made
        ctx.mark_non_differentiable(seen.lse)
        return out, seen.lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dout, steps, dq = gradients[0], iter(ctx.made.steps), None

        def add(held: Sequence[Tensor], coming: transport.Coming | None) -> Sequence[Tensor]:
            nonlocal dq
            k_step, v_step = held
            dq, shares = next(steps).backward(dout, Saved(q, k_step, v_step, out, lse), dq)
            return sums_of(coming and coming.wait(), shares, held)

        dk, dv = transport.there_and_back((k, v), ctx.made.rings, add)
        return torch.zeros_like(q) if dq is None else dq.to(q.dtype), dk, dv, None


class GatherPlan(NamedTuple):
    """Keys of all ranks, some heads at a time."""

    group: dist.ProcessGroup  # the ranks, in the order in which their rows lie in what is gathered
    step: Step  # of some heads of k and v, and the heads of q that belong to them
    parts: int  # how many times heads are gathered
    # the runs of gathered rows in the order in which the step has keys; None for that of ranks
    order: Sequence[slice] | None = None
    places: Sequence[slice] | None = None  # the runs of the step's keys in the order of ranks


class GatherAttention(torch.autograd.Function):
    """Keys and values of all ranks come as a whole, a part of the heads while the part before is computed. A backward
    gathers again, and sums of gradients go home in the dtype of k."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, made: GatherPlan) -> Tensor:
        ctx.made, results, packs = made, [], Packs(k, v, made)
        for i, heads in enumerate(q.chunk(made.parts, 1)):
            seen = made.step.forward(heads, *packs.take(i), None)
            results.append(seen or nothing_seen(heads, v, q.dtype))
        out = torch.cat([x.out.to(q.dtype) for x in results], 1)
        ctx.save_for_backward(q, k, v, out, torch.cat([x.lse for x in results]))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        made: GatherPlan = ctx.made
        q, k, v, out, lse = ctx.saved_tensors
        packs, of_queries = Packs(k, v, made), []
        home: list[Tensor] = []
        coming: transport.Coming | None = None
        parts = (x.chunk(made.parts, 1) for x in (gradients[0], q, out))
        for i, (dout, q_part, out_part, lse_part) in enumerate(
            zip(*parts, lse.chunk(made.parts), strict=True)
        ):
            keys = packs.take(i)
            dq, shares = made.step.backward(dout, Saved(q_part, *keys, out_part, lse_part), None)
            of_queries.append(torch.zeros_like(q_part) if dq is None else dq.to(q.dtype))
            both = torch.cat(list(sums_of(None, shares, keys)), 1)
            home += coming.wait() if coming else []
            coming = transport.scatter_sums(in_order(both, made.places), made.group)
        home += coming.wait() if coming else []
        dk, dv = (torch.cat(x, 1) for x in zip(*(x.chunk(2, 1) for x in home), strict=True))
        return torch.cat(of_queries, 1), dk, dv, None


class Packs:
    """Keys and values of all ranks, part by part: with one part, the next one is on its way."""

    def __init__(self, k: Tensor, v: Tensor, made: GatherPlan):
        self._made = made
        self._parts = list(zip(*(x.chunk(made.parts, 1) for x in (k, v)), strict=True))
        self._coming = self._gather(0)

    def _gather(self, number: int) -> transport.Coming:
        return transport.gather(torch.cat(self._parts[number], 1), self._made.group)

    def take(self, number: int) -> tuple[Tensor, Tensor]:
        """The keys and the values of the heads of a part: views of one tensor."""
        (gathered,) = self._coming.wait()
        if number + 1 < self._made.parts:
            self._coming = self._gather(number + 1)
        k, v = in_order(gathered, self._made.order).chunk(2, 1)
        return k, v


def in_order(x: Tensor, runs: Sequence[slice] | None) -> Tensor:
    """These runs of rows, one after the other; `x` itself for None."""
    return x if runs is None else torch.cat([x[run] for run in runs])


def across_heads(inner: Attend, group: dist.ProcessGroup, heads: tuple[int, int]) -> Attend:
    """Ulysses: a rank gets all tokens of some heads of the ranks of `group`, attends by itself with `inner`, which
    takes so many query and key-value `heads`, and the output goes back."""
    size, (nheads_q, nheads_kv) = dist.get_world_size(group), heads

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [x.unflatten(1, (size, -1)).transpose(0, 1) for x in (q, k, v)]
        mine = transport.Exchange.apply(torch.cat(parts, 2), group).flatten(0, 1)
        out = inner(*mine.split((nheads_q, nheads_kv, nheads_kv), 1))
        back = transport.Exchange.apply(out.unflatten(0, (size, -1)), group)
        return back.transpose(0, 1).flatten(1, 2)

    return attend
