"""Stages: into how many parts the remote keys are cut so that communication hides behind compute.

More stages hide more, and each costs a kernel launch with its ramp and tail and one more merge. Both directions
are simulated with the rates of a `CostModel`, and the fastest degree wins; where little moves, that is 0: one cast
and one attention call over everything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magi_compile.dtensor.comm_plan import StageLoads
from magi_compile.dtensor.cost import CostModel

MAX_DEGREE = 4

#: Degrees whose predicted times differ by less than this are equally fast.
TIE = 0.005


def forward_seconds(loads: StageLoads, degree: int, cost: CostModel) -> float:
    """A forward pass of the slowest rank."""
    cast = _cast_seconds(loads, degree, cost)
    return _stage_ends(loads, degree, cast, cost.seconds_per_area, cost.stage_seconds)[-1]


def backward_seconds(loads: StageLoads, degree: int, cost: CostModel) -> float:
    """A backward pass of the slowest rank: keys are cast again, their gradients go home stage by stage."""
    cast = _cast_seconds(loads, degree, cost)
    home = 0.0
    rate = cost.seconds_per_area * cost.backward_area_factor
    # Fewer than five waves of thread blocks leave a growing part of the GPU idle in the end: a line through what
    # dealing the tiles of packed documents to 132 SMs gives.
    rows = loads.recv_rows.double().clamp(min=1) / max(degree, 1)
    idle = (cost.backward_wave_rows / rows - 0.2).clamp(min=0) if degree else None
    ends = _stage_ends(loads, degree, cast, rate, cost.backward_stage_seconds, idle)
    for end in ends:
        # A reduce starts when the slowest rank has computed the stage and the reduce before is done.
        home = max(home, end) + cast * cost.backward_reduce_factor
    return home


def choose_degree(
    loads: StageLoads, cost: CostModel, *, backward: bool = False, max_degree: int = MAX_DEGREE
) -> int:
    """The smallest degree within `TIE` of the fastest. All ranks compute the same."""
    seconds = backward_seconds if backward else forward_seconds
    if not int(loads.recv_rows.sum()):
        return 1  # nothing moves, and keys that are attended in place are not even copied
    predicted = [seconds(loads, degree, cost) for degree in range(max_degree + 1)]
    return next(i for i, x in enumerate(predicted) if x <= min(predicted) * (1 + TIE))


def _cast_seconds(loads: StageLoads, degree: int, cost: CostModel) -> float:
    """One cast of `degree`; the slowest link decides."""
    rows = max(int(loads.recv_rows.max()), int(loads.send_rows.max()))
    return cost.latency_seconds + rows * cost.seconds_per_row / max(degree, 1)


def _stage_ends(
    loads: StageLoads,
    degree: int,
    cast: float,
    seconds_per_area: float,
    stage_seconds: float,
    idle: Tensor | None = None,
) -> list[float]:
    """When the slowest rank is done with each stage that needs a cast: a stage starts once its keys have arrived
    and the stage before is done. `idle [cp_size]` is by what part remote stages take longer than their area."""
    parts = max(degree, 1)
    area = loads.area.double() * seconds_per_area
    done = torch.zeros_like(area)
    if degree:
        local = loads.local_area.double() * seconds_per_area
        area = area - local
        if idle is not None:
            area = area * (1 + idle)
        done = local + stage_seconds
    stage = area / parts + stage_seconds
    ends = []
    for index in range(parts):
        done = done.clamp(min=(index + 1) * cast) + stage
        ends.append(done.max().item())
    return ends
