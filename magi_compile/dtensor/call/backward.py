"""The backward across ranks: keys and values travel to the queries that see them, and their gradients travel home.

    stages     start cast 1 | for each stage: begin, wait for its cast, start the next, main, start its reduce, finish

Of a kernel in steps (`magi_compile.kernels.overlap`): `begin` needs no keys, `main` gives dk and dv, `finish` gives dq.
The next cast travels while a stage is computed, and so do the gradients of the stage before. Keys and values are cast
again rather than kept from the forward. Gradients add up in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from magi_compile.dtensor.call.entries import unpacked
from magi_compile.dtensor.call.execution import Execution
from magi_compile.dtensor.transport.collectives import Collective, PendingReduce, Route
from magi_compile.kernels.base import BackwardOutput, Grads, Saved
from magi_compile.kernels.merge import sum_partials
from magi_compile.kernels.overlap import KeyTensors, SavedQueries


def backward(grads: Grads, saved: Saved, execution: Execution) -> BackwardOutput:
    """Gradients of this rank's rows of q, k and v; all ranks of the group call it together. Rows of queries and dq are
    packed by entries as `Prepared.packing` says; k, v, dk and dv by those that travel apart. Those of captured tensors
    are added to the sums of `execution.scoring`.

    Every stage is given the whole row's out and lse, so its share of each gradient is exact and shares add up.
    """
    prepared, group, reduce_group, _ = execution
    q, k, v, out, lse = saved
    queries = SavedQueries(q, out, lse)
    home = _KeyGradients(k, v, prepared.collective, reduce_group)
    dq_shares: list[Tensor] = []
    walks = prepared.backward  # what can fail does so before rows are on their way
    kernel, phased, problem = prepared.kernel, prepared.phased, prepared.problem
    casts = prepared.collective.casts((k, v), prepared.backward_routes, group)
    cast = next(casts, None)  # the first one starts
    for stage, slices, kernel_plan in walks:
        keys: Sequence[Tensor] = (k, v)
        route, steps = stage.route, None
        if route is not None:
            if phased is not None and not stage.is_empty:
                steps = phased.phased_backward(grads, queries, slices, kernel_plan, problem)
                steps.begin()  # what needs no keys, while they travel
            assert cast is not None
            keys = cast.wait()
            cast = next(casts, None)  # the next one travels while this stage is computed
        if stage.is_empty:
            dk, dv = (torch.zeros_like(x) for x in keys)
            home.send(route, dk, dv)
        elif route is not None and steps is not None:
            dk, dv = home.room(route, keys)
            steps.main(KeyTensors(keys[0], keys[1], dk, dv))
            home.send(route, dk, dv)  # while dq is completed, and during the next stage
            dq_shares.append(steps.finish())
        else:
            k_stage, v_stage = execution.keys(*keys)
            of_stage = Saved(q, k_stage, v_stage, out, lse)
            score = execution.score_over(stage)
            dq, dk, dv = kernel.backward(grads, of_stage, slices, kernel_plan, problem, score=score)
            if (entries := prepared.key_entries) > 1:
                dk, dv = unpacked(dk, entries), unpacked(dv, entries)
            home.send(route, dk, dv)
            dq_shares.append(dq)
    # Before the wait for the last reduce, because it hides a little of it.
    dq = sum_partials(dq_shares) if dq_shares else q.new_zeros(q.shape)
    return BackwardOutput(dq, *home.sums())


class _KeyGradients:
    """dk and dv of a rank's rows `k` and `v`: what other ranks have of them arrives while the next stage is
    computed."""

    def __init__(self, k: Tensor, v: Tensor, collective: Collective, group: dist.ProcessGroup):
        self._like, self._collective, self._group = (k, v), collective, group
        self._sum: Sequence[Tensor] | None = None
        self._reducing: PendingReduce | None = None

    def room(self, route: Route, keys: Sequence[Tensor]) -> Sequence[Tensor]:
        """The room for dk and dv of a stage with these keys and values."""
        if self._reducing is None:
            return self._collective.outbox(self._like, route, self._group)
        return [x.new_empty(x.shape) for x in keys]

    def send(self, route: Route | None, dk: Tensor, dv: Tensor) -> None:
        """dk and dv of a stage, on their way to the ranks whose rows they are;
        without a route those are this rank's."""
        if route is None:
            self._sum = (dk.contiguous(), dv.contiguous())
            return
        if self._reducing is not None:
            self._sum = self._add(torch.promote_types(dk.dtype, torch.float32))
        self._reducing = self._collective.start_reduce((dk, dv), route, self._group)

    def sums(self) -> Sequence[Tensor]:
        """dk and dv of all stages."""
        if self._reducing is None:
            assert self._sum is not None
            return self._sum
        return self._add(self._like[0].dtype)

    def _add(self, dtype: torch.dtype) -> list[Tensor]:
        assert self._reducing is not None
        outs = [x.new_empty(x.shape, dtype=dtype) for x in self._like]
        self._reducing.write_sums(outs, self._sum)
        return outs
