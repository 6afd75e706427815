"""The other end of a plan, inside the op: what `PlanTensors` say, on the device, with the kernels' own plans.

`planning/rank_plan.py` says how a plan is packed.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from magi_compile import _compat
from magi_compile.dtensor.call.entries import PLAIN, Packing, packed
from magi_compile.dtensor.on_device import Streams, to_device
from magi_compile.dtensor.planning.chunks import Placement, tensor_of
from magi_compile.dtensor.planning.cover import ONE_ENTRY, Entries, bytes_of
from magi_compile.dtensor.planning.local_cover import positions_of_keys
from magi_compile.dtensor.planning.rank_plan import Recent
from magi_compile.dtensor.transport.collectives import Collective, Route, refuse_to_be_recorded
from magi_compile.kernels.base import AttnProblem, Kernel
from magi_compile.kernels.overlap import EarlyKernel, PhasedKernel
from magi_compile.kernels.plan import Plan
from magi_compile.masks.slices import AttnSlices
from magi_compile.score.program import ScoreCall, ScoreProgram


class DeviceStage:
    """A stage as the op runs it, with the kernel's own plans: slices over the rows and keys that move, and the route
    of keys, None where they are the rank's own. `entry`, int32 `[num_slices]`, are the heads whose slices they are;
    None where all have the same. `rows_before` as in `planning.comm_plan.Stage`."""

    def __init__(
        self,
        slices: AttnSlices,
        route: Route | None,
        entry: Tensor | None = None,
        rows_before: list[list[int]] | None = None,
    ):
        self.slices = slices
        self.route = route
        self.entry = entry
        self.rows_before = rows_before
        self.is_empty = len(slices) == 0
        self._kept: dict[Hashable, Any] = {}

    def kept(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What was made of the stage under `key`, or what `make` makes."""
        if key not in self._kept:
            refuse_to_be_recorded(self.slices.q_ranges)
            with _compat.outside_of_modes():
                self._kept[key] = make()
        return self._kept[key]

    def slices_of(self, packing: Packing) -> AttnSlices:
        """The slices over the packed rows and keys of all entries of `packing`."""
        if packing is PLAIN:
            return self.slices
        return self.kept(packing, lambda: packing.slices(self.slices, self.entry))  # type: ignore[no-any-return]

    def kernel_plan(self, kernel: Kernel, problem: AttnProblem, packing: Packing = PLAIN) -> Plan:
        key = (kernel.name, kernel.plan_key(problem), packing)
        return self.kept(key, lambda: kernel.plan(self.slices_of(packing), problem))  # type: ignore[no-any-return]

    def of_share(self, rank: int, first: int, number: int, lengths: tuple[int, int]) -> DeviceStage:
        """The stage of `rank` over the rows of `number` batch entries from `first` on, where these have masks of their
        own; `lengths` are the rows and the keys that a rank holds of one."""
        (seqlen_q, held), route, before = lengths, None, self.rows_before
        begin_k, end_k = first * held, (first + number) * held
        if self.route is not None:
            assert before is not None
            firsts = [x[first] for x in before]
            counts = [x[first + number] - x[first] for x in before]
            begin_k, end_k = firsts[rank], firsts[rank] + counts[rank]
            route = self.route.part(
                (begin_k, end_k), (first * held, (first + number) * held), firsts, max(counts)
            )
        q_ranges, k_ranges, mask_types = self.slices.lists
        begin_q = first * seqlen_q
        is_here = (q_ranges[:, 0] >= begin_q) & (q_ranges[:, 0] < begin_q + number * seqlen_q)
        lists = (q_ranges[is_here] - begin_q, k_ranges[is_here] - begin_k, mask_types[is_here])
        totals = (number * seqlen_q, end_k - begin_k)
        slices = AttnSlices.unchecked(*lists, *totals, self.slices.bits)
        return DeviceStage(slices, route, None if self.entry is None else self.entry[is_here])


def routes_of(stages: Sequence[DeviceStage]) -> list[Route]:
    """The routes of keys, in the order of the stages that need remote ones."""
    return [stage.route for stage in stages if stage.route is not None]


class MergedStage:
    """The stage of local keys, in place, and that of remote ones, in a buffer, in one attention call; none of the two
    is empty."""

    def __init__(self, local: DeviceStage, remote: DeviceStage):
        assert remote.route is not None
        self.local, self.remote, self.route = local, remote, remote.route

    @cached_property
    def side_by_side(self) -> DeviceStage:
        """The stage over one tensor, local keys in front of remote ones."""
        return self._joined(self.local.slices.seqlen_k)

    def early_plan(self, kernel: EarlyKernel, problem: AttnProblem) -> Any:
        """The plan of a forward that begins with the local keys."""
        # With a column between local and remote ones, so that no run has both.
        begin = self.local.slices.seqlen_k + 1
        key = "early", kernel.name, kernel.plan_key(problem)
        return self.local.kept(
            key, lambda: kernel.early_plan(self._joined(begin).slices, problem, begin)
        )

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
    forward_may_be_early: bool  # they are so under some masks with the options of this plan
    queries: Placement  # who holds which rows, and which keys
    keys: Placement
    bits: Tensor | None = None  # the blocks of bits of all stages
    entries: Entries = ONE_ENTRY
    batch: int = 1  # batch entries with masks of their own, whose rows move apart
    relayed: tuple[bool, bool] = (False, False)  # whether routes forward and backward have legs
    head_ranks: int = (
        1  # that share the heads of each rank of the plan, which is a group of so many
    )
    calls: dict[Hashable, Any] = field(default_factory=dict, repr=False)  # as the ops keep them
    streams: Streams = field(default_factory=Streams, repr=False)
    _positions: dict[Any, Tensor] = field(default_factory=dict, repr=False)
    _shares: dict[tuple[int, int], DevicePlan] = field(default_factory=dict, repr=False)

    @property
    def forward_is_early(self) -> bool:
        return self.merged is not None

    def of_share(self, first: int, number: int) -> DevicePlan:
        """The plan of `number` batch entries from `first` on; the plan itself where that is all, or all have one
        mask."""
        if self.batch == 1 or number == self.batch:
            return self
        key = first, number
        if key not in self._shares:
            refuse_to_be_recorded(self.forward[0].slices.q_ranges)
            with _compat.outside_of_modes():
                numbers = (self.rank, first, number, (self.rows, self.key_rows))
                forward, backward = (
                    [stage.of_share(*numbers) for stage in stages]
                    for stages in (self.forward, self.backward)
                )
            merged = _merged(forward) if self.forward_is_early else None
            self._shares[key] = replace(
                self,
                forward=forward,
                backward=backward,
                merged=merged,
                batch=number,
                relayed=(False, False),
                calls={},
                _positions={},
                _shares={},
            )
        return self._shares[key]

    def positions(self, stage: DeviceStage | None = None) -> Tensor:
        """The positions in the sequence of the keys of a stage, or of the rows of this rank: int32, on the device; 0
        for padding."""
        if stage not in self._positions:
            refuse_to_be_recorded(self.forward[0].slices.q_ranges)
            where = self.queries if stage is None else self.keys
            recvs = None if stage is None or stage.route is None else stage.route.host_recvs
            with _compat.outside_of_modes():
                repeated = where if stage is None else where.repeated(self.batch)
                found = positions_of_keys(repeated, self.rank, recvs).remainder(where.total_padded)
                found = found.masked_fill(found >= where.total, 0).int()
                self._positions[stage] = to_device(found, self.forward[0].slices.device)
        return self._positions[stage]


class Scoring(NamedTuple):
    """The score program of a call, and the tensors that it takes. It reads indices of this rank's rows and of a stage's
    keys, and looks up their positions."""

    plan: DevicePlan
    program: ScoreProgram
    tables: Sequence[Tensor]  # that it captures
    symbols: Sequence[int]  # likewise
    places: Sequence[
        int
    ]  # the numbers of the tables of positions, of queries and of keys; -1 for one that is not read
    sums: Mapping[int, Tensor] = {}  # as in `ScoreCall`

    def over(self, packing: Packing, *stages: DeviceStage) -> ScoreCall:
        """The call over the keys of stages, one behind the other."""
        plan = self.plan
        parts = [plan.positions(stage) for stage in stages]
        keys = parts[0] if len(parts) == 1 else torch.cat(parts)
        tables = list(self.tables)
        at_queries, at_keys = self.places
        if at_queries >= 0:
            tables[at_queries] = plan.positions()
        if at_keys >= 0:
            tables[at_keys] = keys
        sizes = (plan.rows, len(keys), packing.nheads if packing.by_head else 1)
        return ScoreCall(self.program, tables, self.symbols, *sizes, self.sums)


class StageWalk(NamedTuple):
    """A stage as a kernel walks it."""

    stage: DeviceStage
    slices: AttnSlices  # over rows and keys that are packed by entries
    kernel_plan: Plan  # of these; nothing where there are none


class Prepared:
    """The parts that all calls of a kind have in common: stages, a kernel, and how rows move. Kernels' plans are made
    when a pass asks for them first.

    The plan keeps it, so it does not keep the plan, whose tensors would stay until Python looks for cycles.
    """

    def __init__(
        self,
        plan: DevicePlan,
        kernel: Kernel,
        problem: AttnProblem,
        collective: Collective,
        packing: Packing = PLAIN,
    ):
        self._stages = (plan.forward, plan.backward)
        self.merged = plan.merged  # of the stages of a forward, if they are one call
        self.kernel, self.problem = kernel, problem
        self.collective, self.packing = collective, packing
        # With rows, with keys that have travelled, and with keys that travel apart.
        self.entries, self.key_entries = packing.queries, packing.keys_together
        self.apart = packing.apart
        # The kernel, where it begins a forward before remote keys are there, and where it does a backward in steps. No
        # kernel does any other call in steps.
        has_steps = not (problem.has_score or problem.has_bits or packing.by_head)
        has_steps = has_steps and self.key_entries == 1
        self.early, self.phased = None, None
        if has_steps:
            self.early, self.phased = _in_steps(kernel)  # type: ignore[arg-type]  # hashed by identity
        self.forward_routes, self.backward_routes = map(routes_of, self._stages)

    @cached_property
    def forward(self) -> list[StageWalk]:
        """The stages of a forward that is not one call."""
        return [self._walk(stage) for stage in self._stages[0]]

    @cached_property
    def backward(self) -> list[StageWalk]:
        """The stages of a backward."""
        return [self._walk(stage) for stage in self._stages[1]]

    @cached_property
    def side_by_side(self) -> StageWalk:
        """Local and remote keys of a merged stage, in one tensor."""
        assert self.merged is not None
        return self._walk(self.merged.side_by_side)

    @cached_property
    def early_plan(self) -> Any:
        """The plan of a forward that begins early."""
        assert self.merged is not None
        assert self.early is not None
        return self.merged.early_plan(self.early, self.problem)

    @cached_property
    def out_dtypes(self) -> list[torch.dtype]:
        """The dtype of what each stage of a forward leaves: that of q in the last one that sees something."""
        forward, _ = self._stages
        seen = [i for i, stage in enumerate(forward) if not stage.is_empty]
        partial, dtypes = torch.promote_types(self.problem.dtype, torch.float32), []
        for i in range(len(forward)):
            dtypes.append(self.problem.dtype if i == max(seen, default=-1) else partial)
        return dtypes

    def _walk(self, stage: DeviceStage) -> StageWalk:
        if stage.is_empty:
            return StageWalk(stage, stage.slices, Plan())
        kernel_plan = stage.kernel_plan(self.kernel, self.problem, self.packing)
        return StageWalk(stage, stage.slices_of(self.packing), kernel_plan)


@lru_cache(maxsize=64)
def _in_steps(kernel: Kernel) -> tuple[EarlyKernel | None, PhasedKernel | None]:
    """The kernel for passes in steps, if it does them. To ask costs 20 microseconds."""
    return (
        kernel if isinstance(kernel, EarlyKernel) else None,
        kernel if isinstance(kernel, PhasedKernel) else None,
    )


class Execution(NamedTuple):
    """One call: what it has in common with others, the ranks, and the score program with its tensors."""

    prepared: Prepared
    group: dist.ProcessGroup
    reduce_group: dist.ProcessGroup  # of gradients on their way home
    scoring: Scoring | None = None

    def keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v of a stage packed by entries."""
        entries = self.prepared.key_entries
        return (k, v) if entries == 1 else (packed(k, entries), packed(v, entries))

    def score_over(self, *stages: DeviceStage) -> ScoreCall | None:
        """The call of the score program over the keys of stages, one behind the other."""
        if self.scoring is None:
            return None
        return self.scoring.over(self.prepared.packing, *stages)


# Eight are kept whatever their size: of the layers of a model, which take turns.
_device_plans: Recent[DevicePlan] = Recent(least=8)


def unpack(meta: Tensor, data: Tensor) -> DevicePlan:
    """Reads `PlanTensors`; recent plans are kept by their digest, with the kernels' plans. The current stream may use
    them."""

    def make() -> list[DevicePlan]:
        with _compat.outside_of_modes():
            return [_unpack(meta, data)]

    # Both numbers as they lie in memory: a slice of the tensor and its list take ten times as long.
    digest, rank = _TwoNumbers.from_address(meta.data_ptr())
    plan = _device_plans.get([(digest, rank, data.device)], make)[0]
    plan.streams.enter(data.device, plan.forward[0].slices.q_ranges)
    return plan


_TwoNumbers = ctypes.c_int64 * 2
_Numbers: TypeAlias = tuple[int, list[int], list[int], int]  # behind the tables of `Route.of`


def _unpack(meta: Tensor, data: Tensor) -> DevicePlan:
    sizes, of_mask, placements, passes, rest = pickle.loads(bytes_of(meta[2:]))
    (cp_size, rows, key_rows), (of_bits, of_entries) = sizes, of_mask
    is_early, may_be_early, hosts, relayed, head_ranks = rest
    entries = Entries(*of_entries)
    seqlen_q = entries.batch * rows
    position = 0

    def take(shape: tuple[int, ...]) -> Tensor:
        nonlocal position
        begin = position
        position += torch.Size(shape).numel()
        return data[begin:position].view(shape)

    def way(table: list[int], shape: tuple[int, ...], numbers: _Numbers) -> Route:
        on_host = torch.tensor(table, dtype=torch.int32, device="cpu").view(shape)
        return Route.of(on_host, take(shape), *numbers, hosts)

    def stage(
        lists: list[Any], of_entry: Any, seqlen_k: int, ways: list[Any], rows_before: Any
    ) -> DeviceStage:
        slices = AttnSlices.unchecked(*map(take, lists), seqlen_q, seqlen_k, bits)  # type: ignore[call-arg, arg-type]
        entry = None if of_entry is None else take(of_entry)
        routes: list[Any] = [way(*x) for x in ways]
        if len(routes) > 1:
            routes[0] = replace(routes[0], legs=(routes[1], routes[2]))
        return DeviceStage(slices, routes[0] if routes else None, entry, rows_before)

    bits = None if of_bits is None else take(of_bits)
    queries, keys = (
        None if x is None else Placement(x[0], x[1], tensor_of(x[2])) for x in placements
    )
    assert queries is not None
    forward, backward = ([stage(*x) for x in stages] for stages in passes)
    merged = _merged(forward) if is_early else None
    digest, rank = meta[:2].tolist()
    where = (queries, queries if keys is None else keys)
    passes_of_rank = (forward, backward, merged, may_be_early)
    of_plan = (digest, rank, cp_size, rows, key_rows, *passes_of_rank, *where)
    return DevicePlan(*of_plan, bits, entries, entries.batch, relayed, head_ranks)


def _merged(forward: Sequence[DeviceStage]) -> MergedStage | None:
    """The stages of a forward that is one call; None where a rank has one anyway, as all of its keys are local or all
    are remote."""
    if len(forward) != 2 or any(stage.is_empty for stage in forward):
        return None
    return MergedStage(*forward)
