"""Stages: into how many parts the remote keys are cut so that communication hides behind compute.

More stages hide more, and each costs another pass over the rank's query rows: a partial result is written in fp32
and read again. So what a stage costs does not depend on the mask, and what it hides does. Both directions are simulated
with the rates of a `CostModel`, and the fastest degree wins; where little moves, that is 0: one cast and one
attention call over everything.

A kernel that begins a forward pass before remote keys are there (`EarlyKernel`) hides the cast in one call, with
another pass over as few rows as it takes. It takes a little longer over all keys: that pays where much moves for what
is computed, and where it does not, a pass waits, or a stage hides as much.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from magi_compile.dtensor.planning.comm_plan import StageLoads
from magi_compile.dtensor.planning.cost import CostModel

MAX_DEGREE = 4

#: Degrees whose predicted times differ by less than this are equally fast.
TIE = 0.003

#: Waves of thread blocks that a remote stage leaves idle backward, of `CostModel.backward_wave_rows` keys each.
IDLE_WAVES = 0.5

#: How much of what a backward call costs beyond its area comes before it needs keys, and runs beside the cast.
BEFORE_KEYS = 1 / 3

#: By how much longer the forward of an `EarlyKernel` computes, beyond what the pass over the rows of splits takes. On
#: one GPU it is 0 to 3.5 %, most on full masks: thread blocks begin with remote keys one after another, and share less
#: of them in the L2 cache.
EARLY_FORWARD_COST = 0.02


def forward_seconds(loads: StageLoads, degree: int, cost: CostModel) -> float:
    """A forward pass of the slowest rank."""
    call = _Call(loads.query_rows * cost.stage_seconds_per_row)
    cast = _cast(loads, degree, cost)
    return _first_and_last_end(degree, cast, loads, cost.seconds_per_area, call)[1]


def backward_seconds(loads: StageLoads, degree: int, cost: CostModel) -> float:
    """A backward pass of the slowest rank: keys are cast again, their gradients go home stage by stage."""
    seconds_per_area = cost.seconds_per_area * cost.backward_area_factor
    stage = loads.query_rows * cost.backward_stage_seconds_per_row
    # Half a wave of thread blocks idles at the end of a remote stage: what dealing the tiles of packed documents to
    # 132 SMs gives, between the mean over ranks and the slowest one.
    call = _Call(stage, BEFORE_KEYS * stage, IDLE_WAVES * cost.backward_wave_rows)
    cast = _cast(loads, degree, cost)
    first, last = _first_and_last_end(degree, cast, loads, seconds_per_area, call)
    # A reduce starts when the slowest rank has computed the stage and the reduce before is done: either they follow
    # each other from the first stage on, or the last one starts as its stage ends.
    reduce = cast * cost.backward_reduce_factor
    return max(first + max(degree, 1) * reduce, last + reduce)


def early_seconds(loads: StageLoads, cost: CostModel) -> float:
    """A forward pass with degree 0 of the slowest rank, by a kernel that begins before remote keys are there."""
    cast, stage = _cast(loads, 1, cost), loads.query_rows * cost.stage_seconds_per_row
    return max(
        _early_forward(area, local, cast) + min(min(cast, local) / max(area, 1e-9), 1.0) * stage
        for area, local in _areas(loads, cost.seconds_per_area)
    )


def forward_begins_early(loads: StageLoads, cost: CostModel) -> bool:
    """True if a forward pass with degree 0 is to begin before its remote keys are there. All ranks compute the same.

    That is where it hides more than it costs. What splits of tiles cost is left out: where rows have few keys, tiles
    without remote ones keep a rank busy for most of the time, and have none.
    """
    areas, cast = _areas(loads, cost.seconds_per_area), _cast(loads, 1, cost)
    early = max(_early_forward(area, local, cast) for area, local in areas)
    return early < max(area + cast for area, _ in areas)


class PassWay(NamedTuple):
    """The way of a pass."""

    degree: int  # remote stages
    is_early: bool  # a forward begins before its remote keys are there; its degree is 0 then
    is_relayed: bool  # rows cross hosts by way of relays
    seconds: float  # predicted


def choose_pass(
    loads: StageLoads,
    cost: CostModel,
    *,
    degree: int | None = None,
    backward: bool = False,
    early: bool = False,
    relayed: bool | None = None,
) -> PassWay:
    """The stages of a pass, and the way of its rows; what is None takes what is predicted to be faster. All ranks
    compute the same.

    Relays need several hosts, and a choice of one stage at most: those that need a row share its way if they need it in
    one stage. `early` allows a forward pass with degree 0 to begin before remote keys are there.
    """

    def way(its_loads: StageLoads, *, is_relayed: bool) -> PassWay:
        stages, most = degree, 1 if is_relayed else MAX_DEGREE
        if stages is None:
            stages = choose_degree(its_loads, cost, backward=backward, early=early, max_degree=most)
        if backward:
            return PassWay(stages, False, is_relayed, backward_seconds(its_loads, stages, cost))
        if early and stages == 0 and forward_begins_early(its_loads, cost):
            return PassWay(stages, True, is_relayed, early_seconds(its_loads, cost))
        return PassWay(stages, False, is_relayed, forward_seconds(its_loads, stages, cost))

    found = []
    if not relayed or loads.relayed is None:
        found.append(way(loads, is_relayed=False))
    if relayed is not False and loads.relayed is not None:
        found.append(way(loads.relayed, is_relayed=True))
    least = min(x.seconds for x in found)
    return next(x for x in found if x.seconds <= least * (1 + TIE))


def choose_degree(
    loads: StageLoads,
    cost: CostModel,
    *,
    backward: bool = False,
    early: bool = False,
    max_degree: int = MAX_DEGREE,
) -> int:
    """The smallest number of remote stages, 0 for a single call, within `TIE` of the fastest. `early` as in
    `choose_pass`."""
    if not any(loads.received):
        return 1  # nothing moves, and keys that are attended in place are not even copied
    seconds = backward_seconds if backward else forward_seconds
    predicted = [seconds(loads, i, cost) for i in range(max_degree + 1)]
    if early and not backward and forward_begins_early(loads, cost):
        predicted[0] = early_seconds(loads, cost)
    return next(i for i, x in enumerate(predicted) if x <= min(predicted) * (1 + TIE))


# In floats: for a few ranks, tensors would take ten times as long.


#: Seconds of all keys and of the local ones, of each rank.
_Areas: TypeAlias = list[tuple[float, float]]


def _areas(loads: StageLoads, seconds_per_area: float) -> _Areas:
    return [(area * seconds_per_area, local * seconds_per_area) for area, local in loads.areas]


def _early_forward(area: float, local: float, cast: float) -> float:
    """Seconds of a forward pass that begins early on a rank, but for those that splits of tiles cost."""
    return area * (1 + EARLY_FORWARD_COST) + max(cast - local, 0.0)


def _cast(loads: StageLoads, degree: int, cost: CostModel) -> float:
    """Seconds of one of `degree` casts; the slowest link decides, and exchanges follow each other."""
    hops = loads.exchanges
    rows = sum(max(hop.near, hop.far * cost.other_host_factor) for hop in hops)
    return len(hops) * cost.latency_seconds + rows * cost.seconds_per_row / max(degree, 1)


class _Call(NamedTuple):
    """The cost of a call for any rank beyond that."""

    seconds: float
    before_keys: float = 0.0  # of which so many need no keys
    idle_rows: float = 0.0  # what a stage is longer by, of rows that it receives


def _first_and_last_end(
    degree: int, cast: float, loads: StageLoads, seconds_per_area: float, call: _Call
) -> tuple[float, float]:
    """When the slowest rank is done with the first and with the last stage that needs a cast.

    A stage starts once the stage before is done, and goes on once its keys have arrived. Stages and casts take equally
    long each, so stages either follow each other from the first one on, or the last one goes on as its cast ends.
    """
    parts, firsts, lasts = max(degree, 1), [], []
    areas = _areas(loads, seconds_per_area)
    for (area, local), rows in zip(areas, loads.received, strict=True):
        done, stage = 0.0, area + call.seconds
        if degree:
            idle, remote = call.idle_rows * parts / max(rows, 1), area - local
            done, stage = local + call.seconds, remote * (1 + idle) / parts + call.seconds
        with_keys = stage - call.before_keys
        first = max(done + call.before_keys, cast) + with_keys
        firsts.append(first)
        lasts.append(max(first + (parts - 1) * stage, parts * cast + with_keys))
    return max(firsts), max(lasts)
