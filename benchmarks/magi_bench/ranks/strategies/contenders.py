"""The strategies of the field by name, each a placement, a local kernel and moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from magi_bench.cases import Case
from magi_bench.clock import Ready
from magi_bench.contenders.base import Attend
from magi_bench.contenders.flex import make_block_mask, no_backward
from magi_bench.ranks import base
from magi_bench.ranks.base import Problem
from magi_bench.ranks.strategies import placement
from magi_bench.ranks.strategies.attention import (
    GatherAttention,
    GatherPlan,
    RingPlan,
    across_heads,
)
from magi_bench.ranks.strategies.kernels import LocalKernel, steps_of
from magi_bench.ranks.strategies.schedule import Group, best_schedule
from magi_bench.ranks.strategies.transport import Ring, Rings, group_of, without_moves
from magi_bench.ranks.strategies.varlen import LOCAL_KERNELS
from magi_bench.world import World
from magi_compile.kernels.select import problem_on
from magi_compile.masks.slices import AttnSlices

#: Masks that depend on nothing but documents, and whether they know them.
DOCUMENT_MASKS = {"full": False, "causal": False, "document_full": True, "document_causal": True}
#: Times that keys are gathered in a call, each time of some heads: the first time, nothing is computed yet.
GATHERS = 4


class Strategy(base.RanksContender):
    """A strategy of others around a local kernel of `LOCAL_KERNELS`, whose name is part of its own if not ours."""

    takes_any_mask = False

    @classmethod
    def around(cls, local_kernels: Sequence[str]) -> list[base.RanksContender]:
        return [cls(x) for x in local_kernels]

    def __init__(self, local_kernel: str = "ours"):
        self.local_kernel = local_kernel
        if local_kernel != "ours":
            self.name, self.label = f"{self.name}-{local_kernel}", f"{self.label}, {local_kernel}"

    def prepare(self, problem: Problem, case: Case) -> Ready:
        ready = super().prepare(problem, case)
        if not problem.settings.exposed or self.is_alone:
            return ready

        def call() -> Sequence[Tensor]:
            with without_moves():
                return ready.call()

        return ready._replace(without_moves=call)

    def supports(self, problem: Problem, case: Case) -> list[str]:
        reasons = []
        if not self.takes_any_mask and problem.workload.case.mask not in DOCUMENT_MASKS:
            reasons.append(f"takes {', '.join(DOCUMENT_MASKS)}")
        return reasons or self.kernel(problem).refusals(problem.workload.slices)

    def kernel(self, problem: Problem, num_ranks: int = 1, parts: int = 1) -> LocalKernel:
        """The local kernel, where `num_ranks` share the heads and each call takes one of so many parts of them."""
        settings, share = problem.settings, num_ranks * parts
        heads = (settings.nheads_q // share, settings.nheads_kv // share)
        sizes = (*heads, settings.head_dim, settings.head_dim)
        dtype = getattr(torch, settings.dtype)
        asked = problem_on(problem.world.device, dtype, sizes, settings.head_dim**-0.5)
        kernel = LOCAL_KERNELS[self.local_kernel](asked)
        if missing := kernel.missing():
            raise ImportError(f"local kernel {self.local_kernel}: {missing}")
        return kernel

    def alone(self, problem: Problem, ulysses: int = 1) -> Attend:
        """Attention of all tokens on one rank, with its share of the heads."""
        workload, world = problem.workload, problem.world
        if self.local_kernel == "ours":
            return base.kernel_on(workload, world, heads_of(problem, ulysses))
        kernel, everything = self.kernel(problem, ulysses), [[(0, problem.total)]]
        return ring_plan(kernel, workload.slices, everything, (), world.device).attend


def documents_of(problem: Problem) -> placement.Spans:
    """The documents that a mask of `DOCUMENT_MASKS` knows, or the whole sequence."""
    knows = DOCUMENT_MASKS[problem.workload.case.mask]
    return placement.spans_of(problem.workload.documents if knows else [problem.total])


# Two dimensions: heads and rings


class Mesh(NamedTuple):
    """The ranks in two dimensions: those of a column share the tokens of a place in the ring, each has some heads."""

    ulysses: int  # ranks that share heads
    windows: int  # of the ring
    window: int  # ranks of a window
    head_first: bool = True  # whether ranks that share heads are consecutive, or those of a ring

    @property
    def ring(self) -> int:
        return self.windows * self.window

    def rank(self, place: int, head: int) -> int:
        """The number of the rank at a place of the ring that has these heads."""
        return place * self.ulysses + head if self.head_first else head * self.ring + place

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Place and heads of a rank."""
        if self.head_first:
            return divmod(rank, self.ulysses)
        head, place = divmod(rank, self.ring)
        return place, head


def largest_ulysses(size: int, nheads_kv: int, least_ring: int) -> int:
    """The most of `size` ranks that can share the heads, where `least_ring` ranks or more are left for a ring, if there
    are so many; 1 where heads do not divide."""
    fitting = [x for x in range(1, size + 1) if size % x == 0 and nheads_kv % x == 0]
    return max(x for x in fitting if size // x >= min(least_ring, size))


def widest_window(ring: int) -> int:
    """The ranks of a window, such that there are not more windows than that."""
    return min(x for x in range(1, ring + 1) if ring % x == 0 and x * x >= ring)


class OnMesh(Strategy):
    """A zigzag ring, each of whose places is a group of ranks that share heads."""

    # The ranks of a ring that those which share heads leave at least, if there are so many: all by default.
    least_ring = 0
    has_windows = False  # the ring is one of windows
    head_first = True  # see `Mesh`

    @classmethod
    def mesh_of(cls, size: int, nheads_kv: int, ulysses: int = 0, window: int = 0) -> Mesh:
        """The ranks, by the number of heads and what was asked for; 0 asks for nothing."""
        shared = 1
        if cls.least_ring:
            shared = ulysses or largest_ulysses(size, nheads_kv, cls.least_ring)
        ring = max(size // shared, 1)
        window = (window or widest_window(ring)) if cls.has_windows else ring
        return Mesh(shared, ring // window, window, cls.head_first)

    def mesh(self, problem: Problem) -> Mesh:
        """That of a problem."""
        settings = problem.settings
        asked = settings.ulysses_degree, settings.window
        return self.mesh_of(problem.world.size, settings.nheads_kv, *asked)

    def supports(self, problem: Problem, case: Case) -> list[str]:
        return self.mesh_refusals(problem) or super().supports(problem, case)

    def mesh_refusals(self, problem: Problem) -> list[str]:
        """Why the ranks and the heads cannot be spread over the mesh."""
        mesh, nheads, size = self.mesh(problem), problem.settings.nheads_kv, problem.world.size
        if size % mesh.ulysses:
            return [f"{size} ranks do not divide by {mesh.ulysses} that share heads"]
        if nheads % mesh.ulysses:
            return [f"{nheads} key-value heads do not divide by {mesh.ulysses} ranks"]
        if mesh.ulysses * mesh.ring != size:
            return [f"a ring of {size // mesh.ulysses} ranks has no windows of {mesh.window}"]
        return []

    def owners(self, problem: Problem, ring: int) -> list[placement.Spans]:
        """The tokens of each place of the ring."""
        return placement.zigzag(documents_of(problem), ring)

    def spread(self, problem: Problem) -> base.Spread:
        mesh, world = self.mesh(problem), problem.world
        place, head = mesh.coordinates(world.rank)
        made = self.of_place(problem, mesh, place)
        if mesh.ulysses == 1:
            return made
        columns = [[mesh.rank(i, j) for j in range(mesh.ulysses)] for i in range(mesh.ring)]
        heads = heads_of(problem, mesh.ulysses)
        attend = across_heads(made.attend, group_of(world, columns), heads)
        # Of q, k, v and out, from those with which it shares heads; of gradients as many.
        settings = problem.settings
        whole = base.bytes_of_keys(problem) * (settings.nheads_q + settings.nheads_kv)
        whole = whole * problem.tokens // settings.nheads_kv
        exchanged = whole * (mesh.ulysses - 1) // mesh.ulysses
        forward, backward = (exchanged + x for x in made.received)
        mine = made.positions.view(mesh.ulysses, -1)[head]
        return base.Spread(mine, attend, (forward, backward), made.counted)

    def of_place(self, problem: Problem, mesh: Mesh, place: int) -> base.Spread:
        """The tokens of a place of the ring, all of them, by a rank's share of the heads."""
        world, owners = problem.world, self.owners(problem, mesh.ring)
        attend: Attend
        if mesh.ring > 1:
            levels, slices = rings_of(mesh, world), problem.workload.slices
            kernel = self.kernel(problem, mesh.ulysses)
            made = ring_plan(kernel, slices, owners, levels, world.device)
            attend, moved = made.attend, made.rings.received()
        else:
            attend, moved = self.alone(problem, mesh.ulysses), (0, 0)
        row = base.bytes_of_keys(problem) // mesh.ulysses
        where = placement.positions(owners[place], world.device)
        return base.Spread(where, attend, (moved[0] * row, sum(moved) * row), "shapes")


def rings_of(mesh: Mesh, world: World) -> tuple[Ring, ...]:
    """The rings that this rank is in: of windows, and of the ranks of its window, where there are several."""
    place, head = mesh.coordinates(world.rank)
    window, number = divmod(place, mesh.window)
    found = []
    for name, size, own, first, stride in (
        ("windows", mesh.windows, window, number, mesh.window),
        ("window", mesh.window, number, window * mesh.window, 1),
    ):
        if size > 1:
            ranks = [mesh.rank(first + i * stride, head) for i in range(size)]
            found.append(Ring(ranks, own, *lanes_of(world, name)))
    return tuple(found)


def lanes_of(world: World, name: str) -> list[ProcessGroup]:
    """The lanes of keys and of gradients in rings of this name; all ranks ask for them together."""
    everyone = [range(world.size)]
    return [group_of(world, everyone, f"{kind} of {name}") for kind in ("keys", "gradients")]


def heads_of(problem: Problem, ulysses: int) -> tuple[int, int]:
    """The query and key-value heads of a rank."""
    settings = problem.settings
    return settings.nheads_q // ulysses, settings.nheads_kv // ulysses


def ring_plan(
    kernel: LocalKernel,
    slices: AttnSlices,
    owners: Sequence[placement.Spans],
    levels: tuple[Ring, ...],
    device: torch.device,
) -> RingPlan:
    """Attention of this rank's tokens over those of all owners, whose keys come around."""
    rings = Rings(levels, [placement.count(spans) for spans in owners])
    order = rings.owners()
    masks = [placement.between(slices, owners[order[0]], owners[owner]) for owner in order]
    return RingPlan(rings, steps_of(kernel, masks, device))


class Ulysses(OnMesh):
    """DeepSpeed-Ulysses: a rank gets all tokens of some heads, attends by itself, and the output goes back. Tokens are
    in order."""

    name = "ulysses"
    label = "Ulysses: all-to-all over heads"
    takes_any_mask = True

    @classmethod
    def mesh_of(cls, size: int, nheads_kv: int, ulysses: int = 0, window: int = 0) -> Mesh:
        return Mesh(size, 1, 1)

    def owners(self, problem: Problem, ring: int) -> list[placement.Spans]:
        return placement.contiguous(problem.total, ring)


class AroundFlex(Strategy):
    """A strategy whose local kernel is compiled FlexAttention."""

    @classmethod
    def around(cls, local_kernels: Sequence[str]) -> list[base.RanksContender]:
        return [cls()]

    def supports(self, problem: Problem, case: Case) -> list[str]:
        return no_backward(case, problem.world.kind)

    def alone(self, problem: Problem, ulysses: int = 1) -> Attend:
        block_mask = make_block_mask(problem.workload, problem.world.device)
        return base.flex_on(problem.world, block_mask, over_ranks=False)


class UlyssesFlex(AroundFlex, Ulysses):
    name = "ulysses-flex"
    label = "Ulysses, compiled FlexAttention"

    def supports(self, problem: Problem, case: Case) -> list[str]:
        return [*self.mesh_refusals(problem), *super().supports(problem, case)]


class OneRank(Strategy):
    """The yardstick of each local kernel, ours among them: no other rank, no communication. FLOP/s are what to compare,
    not times."""

    name = "one-rank"
    label = "our kernel, one rank, its tokens alone"
    is_alone = True
    takes_any_mask = True

    def __init__(self, local_kernel: str = "ours"):
        super().__init__(local_kernel)
        if local_kernel != "ours":
            self.label = f"{local_kernel}, one rank, its tokens alone"

    @classmethod
    def around(cls, local_kernels: Sequence[str]) -> list[base.RanksContender]:
        return super().around(list(dict.fromkeys(("ours", *local_kernels))))

    def spread(self, problem: Problem) -> base.Spread:
        positions = torch.arange(problem.total, device=problem.world.device)
        return base.Spread(positions, self.alone(problem), (0, 0), "shapes")


class OneRankFlex(AroundFlex, OneRank):
    name = "one-rank-flex"
    label = "compiled FlexAttention, one rank, its tokens alone"


class RingP2P(OnMesh):
    """Ring attention with point-to-point sends: keys go around, each document is cut in a zigzag."""

    name = "ring"
    label = "Ring P2P, zigzag"


class Usp(OnMesh):
    """Unified sequence parallelism: Ulysses in groups of consecutive ranks, a ring across groups."""

    name = "usp"
    label = "USP: Ulysses in a zigzag ring"
    least_ring = 2


class LoongTrain(OnMesh):
    """2D attention with a double ring: keys pass through a window while the window's keys are on their way to the next
    one. Ranks that share heads have consecutive numbers."""

    name = "loongtrain"
    label = "LoongTrain: Ulysses in a double ring, head first"
    least_ring = 4
    has_windows = True


class LoongTrainContextFirst(LoongTrain):
    """The same with consecutive ranks in a ring."""

    name = "loongtrain-context-first"
    label = "LoongTrain, context first"
    head_first = False


# Gathered keys


class RingAllGather(Strategy):
    """Llama 3's: keys of all ranks are gathered, in parts of the heads, while the part before is computed. The sequence
    is cut in a zigzag as a whole, whatever its documents are."""

    name = "ring-all-gather"
    label = "Ring AllGather (Llama 3)"
    takes_any_mask = True

    def spread(self, problem: Problem) -> base.Spread:
        world = problem.world
        owners = placement.zigzag([(0, problem.total)], world.size)
        mine = owners[world.rank]
        parts = math.gcd(problem.settings.nheads_kv, GATHERS)
        kernel = self.kernel(problem, parts=parts)
        made = gather_plan(kernel, problem.workload.slices, mine, owners, world, parts)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = GatherAttention.apply(q, k, v, made)
            return out

        moved = (problem.total - problem.tokens) * base.bytes_of_keys(problem)
        # A backward gathers keys again, and a reduce-scatter brings a rank as many rows of gradients.
        return base.Spread(
            placement.positions(mine, world.device), attend, (moved, 2 * moved), "shapes"
        )


def gather_plan(
    kernel: LocalKernel,
    slices: AttnSlices,
    mine: placement.Spans,
    owners: Sequence[placement.Spans],
    world: World,
    parts: int,
) -> GatherPlan:
    """Attention of this rank's tokens over the keys of all owners: as they come, or in the order of the sequence for a
    kernel that wants that."""
    if kernel.in_any_order:
        (step,) = steps_of(kernel, [between_all(slices, mine, owners)], world.device)
        return GatherPlan(world.group, step, parts)
    (step,) = steps_of(
        kernel, [placement.between(slices, mine, [(0, slices.seqlen_k)])], world.device
    )
    places = [slice(*span) for spans in owners for span in spans]
    ends = accumulate(place.stop - place.start for place in places)
    runs = [slice(end - (x.stop - x.start), end) for x, end in zip(places, ends, strict=True)]
    order = [run for _, run in sorted(zip(places, runs, strict=True), key=lambda x: x[0].start)]
    return GatherPlan(world.group, step, parts, order, places)


def between_all(
    slices: AttnSlices, queries: placement.Spans, owners: Sequence[placement.Spans]
) -> AttnSlices:
    """The mask between the rows of one owner and the keys of all owners, one after the other."""
    parts = [placement.between(slices, queries, spans) for spans in owners]
    shifts = [0, *accumulate(part.seqlen_k for part in parts)]
    return AttnSlices.unchecked(
        torch.cat([part.q_ranges for part in parts]),
        torch.cat([part.k_ranges + shift for part, shift in zip(parts, shifts, strict=False)]),
        torch.cat([part.mask_types for part in parts]),
        placement.count(queries),
        shifts[-1],
    ).normalize()


# Groups by documents


class HybridCP(Strategy):
    """Megatron's hybrid context parallelism: a document gets as many ranks as its length asks for. The documents that a
    group has in a round are packed in one zigzag ring. A rank has the tokens of its documents, more or fewer than
    others."""

    name = "hybrid-cp"
    label = "HybridCP: a ring for each group of documents"

    def spread(self, problem: Problem) -> base.Spread:
        world, documents = problem.world, documents_of(problem)
        lengths = [end - begin for begin, end in documents]
        # All ranks connect their lanes, also those that have nothing to send.
        lanes = lanes_of(world, "window")
        kernel, attends, mine = self.kernel(problem), [], []
        moved = [0, 0]
        for groups in best_schedule(lengths, world.size, problem.tokens):
            group, ranks = group_with(world.rank, groups)
            owners = placement.zigzag(sorted(documents[i] for i in group.documents), group.size)
            place = world.rank - ranks[0]
            levels = (Ring(ranks, place, *lanes),) if group.size > 1 else ()
            slices = problem.workload.slices
            made = ring_plan(kernel, slices, owners, levels, world.device)
            attends.append(made.attend)
            mine.append(owners[place])
            moved = [x + y for x, y in zip(moved, made.rings.received(), strict=True)]
        sizes = [placement.count(spans) for spans in mine]

        def attend_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rounds = zip(attends, *(x.split(sizes) for x in (q, k, v)), strict=True)
            return torch.cat([attend(*tensors) for attend, *tensors in rounds])

        row = base.bytes_of_keys(problem)
        received = (moved[0] * row, sum(moved) * row)
        where = torch.cat([placement.positions(spans, world.device) for spans in mine])
        return base.Spread(where, attend_all, received, "shapes")


def group_with(rank: int, groups: Sequence[Group]) -> tuple[Group, list[int]]:
    """The group that a rank is in, and its ranks."""
    ends = list(accumulate(group.size for group in groups))
    number = next(i for i, end in enumerate(ends) if rank < end)
    group = groups[number]
    return group, list(range(ends[number] - group.size, ends[number]))


#: In the order of reports; FlexAttention, which compiles for long, is not among them.
STRATEGIES: tuple[type[base.RanksContender], ...] = (
    *(Ulysses, RingP2P, RingAllGather, Usp, LoongTrain, LoongTrainContextFirst, HybridCP),
)
