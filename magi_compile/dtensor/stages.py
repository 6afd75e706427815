"""Stages: into how many parts the remote keys are cut so that communication hides behind compute.

More stages hide more, and each costs a kernel launch with its ramp and tail and one more merge. Both directions
are simulated with the rates of a `CostModel`, and the fastest degree wins; where little moves, that is 0: one cast
and one attention call over everything.
"""

from __future__ import annotations

from magi_compile.dtensor.comm_plan import StageLoads
from magi_compile.dtensor.cost import CostModel

MAX_DEGREE = 4


def forward_seconds(loads: StageLoads, degree: int, cost: CostModel) -> float:
    """A forward pass of the slowest rank."""
    casts = _cast_seconds(loads, degree, cost)
    local, stage = _compute_seconds(loads, degree, cost)
    if degree == 0:
        return casts + max(stage)
    return max(
        _pipeline(own, [part] * degree, casts)[-1] for own, part in zip(local, stage, strict=True)
    )


def backward_seconds(loads: StageLoads, degree: int, cost: CostModel) -> float:
    """A backward pass of the slowest rank: keys are cast again, their gradients go home stage by stage."""
    casts = _cast_seconds(loads, degree, cost)
    reduces = casts * cost.backward_reduce_factor
    local, stage = _compute_seconds(loads, degree, cost, cost.backward_area_factor)
    if degree == 0:
        return casts + max(stage) + reduces
    finished = [
        _pipeline(own, [part] * degree, casts) for own, part in zip(local, stage, strict=True)
    ]
    home = 0.0
    for ends in zip(*finished, strict=True):
        # A reduce starts when the slowest rank has computed the stage and the reduce before is done.
        home = max(home, *ends) + reduces
    return home


def choose_degree(
    loads: StageLoads, cost: CostModel, *, backward: bool = False, max_degree: int = MAX_DEGREE
) -> int:
    """The fastest degree, the smaller one where two are equal. All ranks compute the same."""
    seconds = backward_seconds if backward else forward_seconds
    if not int(loads.recv_rows.sum()):
        return 1  # nothing moves, and keys that are attended in place are not even copied
    return min(range(max_degree + 1), key=lambda degree: (seconds(loads, degree, cost), degree))


def _cast_seconds(loads: StageLoads, degree: int, cost: CostModel) -> float:
    """One cast of `degree`; the slowest link decides."""
    rows = max(int(loads.recv_rows.max()), int(loads.send_rows.max()))
    return cost.latency_seconds + rows * cost.seconds_per_row / max(degree, 1)


def _compute_seconds(
    loads: StageLoads, degree: int, cost: CostModel, factor: float = 1.0
) -> tuple[list[float], list[float]]:
    """Of every rank: the local stage and each other stage."""
    rate = cost.seconds_per_area * factor
    own = loads.local_area if degree else loads.local_area * 0
    rest = (loads.area - own).double() * rate / max(degree, 1)
    local = own.double() * rate + cost.stage_seconds * (degree > 0)
    return local.tolist(), (rest + cost.stage_seconds).tolist()


def _pipeline(local: float, stages: list[float], cast: float) -> list[float]:
    """When each stage is done: it starts once its keys have arrived and the stage before is done."""
    done, arrived, ends = local, 0.0, []
    for stage in stages:
        arrived += cast
        done = max(done, arrived) + stage
        ends.append(done)
    return ends
