"""The other end of a plan, inside the op: what `PlanTensors` say, on the device, with the kernels' own plans.

`planning/rank_plan.py` says how a plan is packed.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from magi_compile import _compat
from magi_compile.dtensor.planning.rank_plan import recent
from magi_compile.dtensor.transport.collectives import Collective, Route, refuse_to_be_recorded
from magi_compile.kernels.base import AttnProblem, Kernel
from magi_compile.kernels.overlap import EarlyKernel
from magi_compile.kernels.plan import Plan
from magi_compile.masks.slices import AttnSlices


class DeviceStage:
    """A stage as the op runs it: slices and rows on the device, and the kernel's own plans of them."""

    def __init__(self, slices: AttnSlices, route: Route | None):
        self.slices = slices
        self.route = route
        self._plans: dict[Hashable, Plan] = {}

    @property
    def is_empty(self) -> bool:
        return len(self.slices) == 0

    def kernel_plan(self, kernel: Kernel, problem: AttnProblem) -> Plan:
        key = kernel.name, kernel.plan_key(problem)
        if key not in self._plans:
            refuse_to_be_recorded(self.slices.q_ranges)
            with _compat.outside_of_modes():
                self._plans[key] = kernel.plan(self.slices, problem)
        return self._plans[key]


def routes_of(stages: Sequence[DeviceStage]) -> list[Route]:
    """The routes of keys, in the order of the stages that need remote ones."""
    return [stage.route for stage in stages if stage.route is not None]


class MergedStage:
    """Local keys, in place, and remote ones, in a buffer, in one attention call; none of the two is empty.

    Args:
        local: the stage of the local keys.
        remote: that of the remote ones.
    """

    def __init__(self, local: DeviceStage, remote: DeviceStage):
        assert remote.route is not None
        self.local, self.remote, self.route = local, remote, remote.route
        self._early: dict[Hashable, Any] = {}

    @cached_property
    def side_by_side(self) -> DeviceStage:
        """The stage over one tensor, local keys in front of remote ones."""
        return self._joined(self.local.slices.seqlen_k)

    def early_plan(self, kernel: Kernel, problem: AttnProblem) -> Any:
        """The early plan of an `EarlyKernel`; None for other kernels."""
        key = kernel.name, kernel.plan_key(problem)
        if key not in self._early:
            plan = None
            if isinstance(kernel, EarlyKernel):
                # With a column between local and remote ones, so that no run has both.
                remote_begin = self.local.slices.seqlen_k + 1
                slices = self._joined(remote_begin).slices
                with _compat.outside_of_modes():
                    plan = kernel.early_plan(slices, problem, remote_begin)
            self._early[key] = plan
        return self._early[key]

    @_compat.outside_of_modes()
    def _joined(self, remote_begin: int) -> DeviceStage:
        local, remote = self.local.slices, self.remote.slices
        refuse_to_be_recorded(local.q_ranges)
        slices = AttnSlices.unchecked(
            torch.cat([local.q_ranges, remote.q_ranges]),
            torch.cat([local.k_ranges, remote.k_ranges + remote_begin]),
            torch.cat([local.mask_types, remote.mask_types]),
            local.seqlen_q,
            remote_begin + remote.seqlen_k,
        )
        return DeviceStage(slices, None)


@dataclass(frozen=True, eq=False)
class DevicePlan:
    """A plan of `PlanTensors`, ready to run."""

    digest: int
    rank: int
    cp_size: int
    rows: int
    key_rows: int
    forward: list[DeviceStage]
    backward: list[DeviceStage]
    merged: MergedStage | None  # of the forward stages, if they are one


class Execution(NamedTuple):
    """The means to run a call: the plan of this rank, the kernel, and how rows move."""

    plan: DevicePlan
    kernel: Kernel
    problem: AttnProblem
    collective: Collective
    group: dist.ProcessGroup
    reduce_group: dist.ProcessGroup  # of gradients on their way home


_device_plans: OrderedDict[Hashable, DevicePlan] = OrderedDict()


def unpack(meta: Tensor, data: Tensor) -> DevicePlan:
    """Reads `PlanTensors`; recent plans are kept by their digest, with the kernels' plans."""
    key = (*meta[:2].tolist(), data.device)
    if key not in _device_plans:
        with _compat.outside_of_modes():
            _device_plans[key] = _unpack(meta.tolist(), data)
    return recent(_device_plans, key)


def _unpack(meta: list[int], data: Tensor) -> DevicePlan:
    digest, rank, cp_size, rows, key_rows, num_forward, num_backward, is_early = meta[:8]
    counts = iter(meta[8:])
    position = 0

    def take_counts(number: int) -> list[int]:
        return list(itertools.islice(counts, number))

    def take(*shape: int) -> Tensor:
        nonlocal position
        begin = position
        position += torch.Size(shape).numel()
        return data[begin:position].view(shape)

    def stage() -> DeviceStage:
        is_local, num_slices, seqlen_k = take_counts(3)
        ranges = take(num_slices, 2), take(num_slices, 2), take(num_slices)
        slices = AttnSlices.unchecked(*ranges, rows, seqlen_k)
        if is_local:
            return DeviceStage(slices, None)
        num_runs, rest = take_counts(2), take_counts(1 + 2 * cp_size)
        host = num_runs + rest + take_counts(4 * sum(num_runs))
        return DeviceStage(slices, Route.unpack(host, take(sum(num_runs), 4), cp_size))

    stages = [stage() for _ in range(num_forward + num_backward)]
    forward, backward = stages[:num_forward], stages[num_forward:]
    merged = None
    # A rank of which all keys are local or all are remote has one stage anyway.
    if is_early and len(forward) == 2 and not any(stage.is_empty for stage in forward):
        merged = MergedStage(*forward)
    return DevicePlan(digest, rank, cp_size, rows, key_rows, forward, backward, merged)
