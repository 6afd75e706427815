"""Dispatch: which rank holds which tokens.

The sequence is cut into chunks of equal length and every rank gets equally many of them, so tensors keep one
shape on all ranks. What is left to choose is the permutation:

    sequential   rank r holds the r-th run of chunks. Least traffic, no balance.
    zigzag       rank r holds runs r and 2 * cp_size - 1 - r of 2 * cp_size. Balances one causal sequence.
    min_heap     chunks from heavy to light, each to the least loaded rank that has room (MagiAttention's).
                 Balances anything, scatters every document over all ranks.
    local        ours: balanced within a tolerance, and documents stay together.

`local` rests on two facts. A heavy chunk (the end of a long document) needs the keys of its whole document, so
few ranks should hold such chunks, each as many as it can: a rank takes neighbours from the end of one document
up to its share of the load. Light chunks fill the rest, and those from one window of the sequence need few
remote keys: each rank takes the window whose load is what it lacks. Swaps then repair the balance.

Everything here runs on the host, is deterministic, and needs no communication: every rank computes the same.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.dtensor.cost import DEFAULT_COST, CostModel
from magi_compile.dtensor.ranges import Ranges, split_at_multiples, total_by_owner, unite
from magi_compile.masks import bands
from magi_compile.masks.slices import AttnSlices

#: Chunk sizes tried by `choose_chunk_size`, largest first.
CHUNK_SIZES = (2048, 1024, 512, 256, 128)

Assignment = list[list[int]]  # the chunks of each rank


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """What each chunk of rows costs and needs.

    Attributes:
        chunk_size: rows of a chunk.
        area: int64 `[num_chunks]`, visible (row, key) pairs.
        needs: the keys that the rows of a chunk see, `owner` is the chunk; a chunk may have several ranges,
            which may overlap.
    """

    chunk_size: int
    area: Tensor
    needs: Ranges

    @property
    def num_chunks(self) -> int:
        return len(self.area)

    @property
    def total(self) -> int:
        return self.chunk_size * self.num_chunks

    @staticmethod
    def of(slices: AttnSlices, chunk_size: int, num_chunks: int) -> ChunkTable:
        whole = bands.drop_empty(bands.trim(_bands(slices)))
        cuts = torch.arange(1, num_chunks) * chunk_size
        parts, _ = bands.cut_at(whole, cuts)
        # A band that sees a key in every row sees one interval: its edges move by at most one per row.
        rows = parts.end - parts.begin
        chunk = parts.begin.div(chunk_size, rounding_mode="floor")
        area = rows * (parts.hi - parts.lo) + (parts.dhi - parts.dlo) * (rows * (rows - 1) // 2)
        needs = Ranges(chunk, parts.lo, parts.hi + parts.dhi * (rows - 1))
        total = torch.zeros(num_chunks, dtype=torch.int64).index_add_(0, chunk, area)
        return ChunkTable(chunk_size, total, needs)


class RankLoads(NamedTuple):
    """What a placement asks of each rank, int64 `[cp_size]` each."""

    area: Tensor  # visible (row, key) pairs of its rows
    recv_rows: Tensor  # remote key rows it needs
    send_rows: Tensor  # key rows it sends, once for every rank that needs them

    @property
    def imbalance(self) -> float:
        """The largest area over the mean, 1.0 at best."""
        mean = self.area.double().mean().item()
        return self.area.max().item() / mean if mean else 1.0

    def seconds(self, cost: CostModel) -> float:
        """max over ranks of max(compute, communication) of a forward pass."""
        compute = self.area * cost.seconds_per_area
        communication = torch.maximum(self.recv_rows, self.send_rows) * cost.seconds_per_row
        return torch.maximum(compute, communication).max().item()


@dataclass(frozen=True, eq=False)
class Dispatch:
    """Where every token lives: rank r holds the chunks `chunks[r]`, in ascending order.

    Attributes:
        chunk_size: tokens of a chunk.
        total: tokens of the sequence; what follows up to `total_padded` sees and is seen by nothing.
        chunks: int64 `[cp_size, chunks_per_rank]`, on the CPU.
    """

    chunk_size: int
    total: int
    chunks: Tensor

    @property
    def cp_size(self) -> int:
        return self.chunks.shape[0]

    @property
    def seqlen_local(self) -> int:
        """Tokens of one rank, padding included."""
        return self.chunk_size * self.chunks.shape[1]

    @property
    def total_padded(self) -> int:
        return self.chunk_size * self.chunks.numel()

    def rank_of_chunk(self) -> Tensor:
        """int64 `[num_chunks]`."""
        rank = torch.empty(self.chunks.numel(), dtype=torch.int64)
        rank[self.chunks.flatten()] = torch.arange(self.cp_size).repeat_interleave(
            self.chunks.shape[1]
        )
        return rank

    def slot_of_chunk(self) -> Tensor:
        """How many chunks lie before a chunk on its rank, int64 `[num_chunks]`."""
        slot = torch.empty(self.chunks.numel(), dtype=torch.int64)
        slot[self.chunks.flatten()] = torch.arange(self.chunks.shape[1]).repeat(self.cp_size)
        return slot

    def positions(self, rank: int | None = None) -> Tensor:
        """The position in the sequence of every token of `rank`, or of all ranks one after another, int64."""
        chunks = self.chunks.flatten() if rank is None else self.chunks[rank]
        return (chunks[:, None] * self.chunk_size + torch.arange(self.chunk_size)).flatten()

    def inverse_positions(self) -> Tensor:
        """Where the tokens of the padded sequence went: the inverse permutation of `positions()`, int64."""
        return torch.argsort(self.positions())


def dispatch(
    slices: AttnSlices,
    cp_size: int,
    *,
    chunk_size: int | None = None,
    strategy: str = "local",
    slack: float = 0.025,
    cost: CostModel = DEFAULT_COST,
) -> Dispatch:
    """Decides which rank holds which tokens of a self-attention sequence.

    Args:
        slices: the mask over the whole sequence.
        cp_size: number of ranks.
        chunk_size: tokens of a chunk; None chooses it from the mask.
        strategy: a name in `STRATEGIES`.
        slack: how far above the mean a rank's area may lie in favour of less communication.
        cost: what compute and communication cost.

    Returns:
        The dispatch, the same on every rank.

    Raises:
        ValueError: if an argument is out of range.
        NotImplementedError: if the mask is not square.
    """
    check_self_attention(slices)
    if cp_size < 1:
        raise ValueError(f"`cp_size` must be at least 1, got {cp_size}")
    if strategy not in STRATEGIES:
        raise ValueError(f"`strategy` must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    if slack < 0:
        raise ValueError(f"`slack` must not be negative, got {slack}")
    if chunk_size is None:
        chunk_size = choose_chunk_size(slices, cp_size)
    if chunk_size < 1:
        raise ValueError(f"`chunk_size` must be at least 1, got {chunk_size}")
    per_rank = max(-(-slices.seqlen_q // (chunk_size * cp_size)), 1)
    table = ChunkTable.of(slices, chunk_size, per_rank * cp_size)
    assignment = STRATEGIES[strategy](table, cp_size, slack, cost)
    return Dispatch(chunk_size, slices.seqlen_q, torch.tensor(assignment).sort(1).values)


def check_self_attention(slices: AttnSlices) -> None:
    if slices.seqlen_q != slices.seqlen_k:
        raise NotImplementedError(
            "context parallelism shards queries and keys alike, so `slices` must have seqlen_q == seqlen_k, "
            f"got {slices.seqlen_q} and {slices.seqlen_k}"
        )


def choose_chunk_size(slices: AttnSlices, cp_size: int) -> int:
    """The largest chunk size that leaves the balance enough freedom.

    Every rank should hold at least 8 chunks, and no chunk of 1024 tokens or more may weigh more than a quarter
    of a rank's share. Sequences too short for that get the smallest size, with fewer chunks per rank.
    """
    for chunk_size in CHUNK_SIZES:
        per_rank = -(-slices.seqlen_q // (chunk_size * cp_size))
        if per_rank < 8:
            continue
        area = ChunkTable.of(slices, chunk_size, per_rank * cp_size).area
        if chunk_size <= 512 or int(area.max()) * 4 * cp_size <= int(area.sum()):
            return chunk_size
    return CHUNK_SIZES[-1]


def rank_loads(table: ChunkTable, assignment: Assignment | Tensor) -> RankLoads:
    """Exact load and traffic of every rank."""
    chunks = torch.as_tensor(assignment)
    cp_size = chunks.shape[0]
    rank = torch.empty(table.num_chunks, dtype=torch.int64)
    rank[chunks.flatten()] = torch.arange(cp_size).repeat_interleave(chunks.shape[1])
    needs = table.needs
    needs = unite(Ranges(rank[needs.owner], needs.lo, needs.hi), table.total)
    pieces, chunk = split_at_multiples(needs, table.chunk_size)
    is_remote = rank[chunk] != pieces.owner
    remote, source = pieces.take(is_remote), rank[chunk[is_remote]]
    return RankLoads(
        torch.zeros(cp_size, dtype=torch.int64).index_add_(0, rank, table.area),
        total_by_owner(remote, cp_size),
        total_by_owner(remote._replace(owner=source), cp_size),
    )


# Strategies


def sequential(table: ChunkTable, cp_size: int, slack: float, cost: CostModel) -> Assignment:
    return torch.arange(table.num_chunks).view(cp_size, -1).tolist()


def zigzag(table: ChunkTable, cp_size: int, slack: float, cost: CostModel) -> Assignment:
    per_rank = table.num_chunks // cp_size
    head = per_rank // 2  # from the front; the rest of every rank from the back, in reverse order
    chunks = torch.arange(table.num_chunks)
    front = chunks[: head * cp_size].view(cp_size, head)
    back = chunks[head * cp_size :].view(cp_size, per_rank - head).flip(0)
    return torch.cat([front, back], 1).tolist()


def min_heap(table: ChunkTable, cp_size: int, slack: float, cost: CostModel) -> Assignment:
    per_rank = table.num_chunks // cp_size
    area = table.area.tolist()
    heap = [(0, rank) for rank in range(cp_size)]
    assignment: Assignment = [[] for _ in range(cp_size)]
    for chunk in sorted(range(len(area)), key=lambda i: -area[i]):
        load, rank = heapq.heappop(heap)
        assignment[rank].append(chunk)
        if len(assignment[rank]) < per_rank:
            heapq.heappush(heap, (load + area[chunk], rank))
    return assignment


def local(table: ChunkTable, cp_size: int, slack: float, cost: CostModel) -> Assignment:
    """The best of a contiguous placement, ours and min_heap: least `RankLoads.seconds` within the slack, then
    least traffic."""
    contiguous = sequential(table, cp_size, slack, cost)
    if rank_loads(table, contiguous).imbalance <= 1 + slack:
        return contiguous
    packed = _repair(_pack(table, cp_size, slack), table, slack)
    candidates = [contiguous, packed]
    loads = [rank_loads(table, candidate) for candidate in candidates]
    if loads[-1].imbalance > 1 + 2 * slack:
        candidates.append(min_heap(table, cp_size, slack, cost))
        loads.append(rank_loads(table, candidates[-1]))
    seconds = [load.seconds(cost) for load in loads]
    traffic = [int(load.recv_rows.sum()) for load in loads]
    good = [i for i in range(len(loads)) if seconds[i] <= min(seconds) * (1 + slack)]
    return candidates[min(good, key=lambda i: (traffic[i], seconds[i]))]


Strategy = Callable[[ChunkTable, int, float, CostModel], Assignment]

STRATEGIES: Mapping[str, Strategy] = {
    "sequential": sequential,
    "zigzag": zigzag,
    "min_heap": min_heap,
    "local": local,
}


# The local strategy: pack, then repair


class _Run:
    """Neighbouring chunks above the mean area that need each other's keys (the end of a long document), and
    the light chunks they all need (its beginning): `(area, chunk)` pairs, ascending."""

    def __init__(self, heavy: list[tuple[int, int]], company: list[tuple[int, int]]):
        self.heavy = sorted(heavy)
        self.company = sorted(company)

    def take_heavy(self, count: int, target: float, least_fill: list[int]) -> list[tuple[int, int]]:
        """Pops the heaviest chunks that fit into `target` beside the lightest possible filling."""
        taken: list[tuple[int, int]] = []
        load, end = 0.0, len(self.heavy)
        while end and len(taken) < count:
            fill = least_fill[min(count - len(taken), len(least_fill)) - 1]
            end = bisect_right(self.heavy, (target - load - fill, 1 << 62), 0, end)
            if not end:
                break
            end -= 1
            taken.append(self.heavy.pop(end))
            load += taken[-1][0]
        return taken

    def take_company(self, load: float, count: int) -> list[tuple[int, int]]:
        """Pops as large a part of the company as `load` is of the run: what all of these ranks need is spread
        over them, so that none has to send it all."""
        area = load + sum(area for area, _ in self.heavy)
        share = min(round(len(self.company) * load / area), count) if area else 0
        taken = self.company[:share]
        del self.company[:share]
        return taken

    def give_back(self, items: list[tuple[int, int]]) -> None:
        for item in items:
            insort(self.heavy, item)


class _Runs:
    """All runs, by their heaviest chunk."""

    def __init__(self, area: list[int], is_heavy: list[bool], lowest: list[int]):
        self._runs: list[_Run] = []
        begin = 0
        while begin < len(area):
            end = begin + 1
            if is_heavy[begin]:
                while end < len(area) and is_heavy[end] and lowest[end] < end:
                    end += 1
                floor = min(lowest[end - 1], begin)
                company = [(area[i], i) for i in range(floor, begin) if not is_heavy[i]]
                self._runs.append(_Run([(area[i], i) for i in range(begin, end)], company))
            begin = end
        self._heap = [(-run.heavy[-1][0], index) for index, run in enumerate(self._runs)]
        heapq.heapify(self._heap)
        seen: set[int] = set()  # a chunk in the company of two runs stays with the first
        for run in self._runs:
            run.company = [item for item in run.company if item[1] not in seen]
            seen.update(chunk for _, chunk in run.company)
        self.company = seen

    def heaviest(self) -> _Run | None:
        while self._heap:
            key, index = self._heap[0]
            run = self._runs[index]
            if run.heavy and -run.heavy[-1][0] == key:
                return run
            heapq.heappop(self._heap)
            if run.heavy:
                heapq.heappush(self._heap, (-run.heavy[-1][0], index))
        return None

    def pop_lightest(self) -> tuple[int, int]:
        """The lightest chunk left in any run, company first."""
        left = [run.company or run.heavy for run in self._runs if run.company or run.heavy]
        return min(left, key=lambda items: items[0]).pop(0)


class _LightWindows:
    """The other chunks in sequence order, from which windows of neighbours are taken.

    `sums [2, n + 1]` are prefix sums of area and of the keys needed across a gap, that is, where a chunk's left
    neighbour is not in the list.
    """

    def __init__(self, table: ChunkTable, chunks: Tensor, reach: Tensor):
        self.chunks = chunks.tolist()
        reach = reach[chunks].double()
        is_gap = torch.ones(len(chunks), dtype=torch.bool)
        torch.ne(chunks[1:], chunks[:-1] + 1, out=is_gap[1:])
        gaps = reach * is_gap
        self.sums = torch.zeros(2, len(chunks) + 1, dtype=torch.float64)
        torch.cumsum(torch.stack([table.area[chunks].double(), gaps]), 1, out=self.sums[:, 1:])
        self.first_costs = reach - gaps  # what a window pays besides its gaps for starting here

    def __len__(self) -> int:
        return len(self.chunks)

    def find(self, size: int, area: float, rows_per_area: float) -> tuple[int, float]:
        """The window of `size` chunks with the least remote keys and deviation from `area`, and its area."""
        sums = self.sums[:, size:] - self.sums[:, : len(self) - size + 1]
        score = (sums[0] - area).abs_().mul_(rows_per_area).add_(sums[1])
        score.add_(self.first_costs[: len(score)] if size < len(self) else self.first_costs[:1])
        begin = int(score.argmin())
        return begin, float(sums[0, begin])

    def take(self, begin: int, size: int) -> list[int]:
        end = begin + size
        taken = self.chunks[begin:end]
        del self.chunks[begin:end]
        removed = self.sums[:, end] - self.sums[:, begin]
        tail = self.first_costs[end:].clone()
        if len(tail):  # the chunk behind the window has a gap in front of it now
            removed[1] -= tail[0]
            tail[0] = 0
        self.sums = torch.cat(
            [self.sums[:, : begin + 1], self.sums[:, end + 1 :] - removed[:, None]], 1
        )
        self.first_costs = torch.cat([self.first_costs[:begin], tail])
        return taken


def _pack(table: ChunkTable, cp_size: int, slack: float) -> Assignment:
    """One rank after another: heavy chunks from the end of one run, their share of its beginning, then a window
    of light chunks. The target of each rank is the mean of what is left, so errors do not add up."""
    num_chunks, size = table.num_chunks, table.chunk_size
    per_rank = num_chunks // cp_size
    area = table.area.tolist()
    left = sum(area)
    is_heavy = table.area * num_chunks > left
    begin = torch.arange(num_chunks) * size
    lowest = begin.scatter_reduce(0, table.needs.owner, table.needs.lo, "amin")
    runs = _Runs(area, is_heavy.tolist(), lowest.div(size, rounding_mode="floor").tolist())
    is_window = ~is_heavy
    is_window[list(runs.company)] = False
    light = _LightWindows(table, is_window.nonzero().flatten(), begin - lowest)
    least_fill = [0, *accumulate(sorted(a for a in area if a * num_chunks <= left))]
    # A rank that is off by `slack` of its share is as bad as one that needs a tenth more than it holds.
    rows_per_share = 0.1 * size * per_rank / slack if slack else 1e9 * size
    assignment: Assignment = []
    for rank in range(cp_size):
        target = max(left / (cp_size - rank), 1.0)
        taken, company = [], []
        run = runs.heaviest()
        if run is not None:
            taken = run.take_heavy(per_rank, target, least_fill)
            company = run.take_company(sum(a for a, _ in taken), per_rank - len(taken))
        while per_rank - len(taken) - len(company) > len(light):
            company.append(runs.pop_lightest())
        room = per_rank - len(company)
        fixed = sum(a for a, _ in company)
        kept, window = _fill(taken, light, room, target, fixed, slack, rows_per_share / target)
        if run is not None:
            run.give_back(taken[kept:])
        chunks = [chunk for _, chunk in company + taken[:kept]]
        chunks += light.take(window, room - kept)
        assignment.append(chunks)
        left -= sum(area[chunk] for chunk in chunks)
    return assignment


def _fill(
    taken: list[tuple[int, int]],
    light: _LightWindows,
    room: int,
    target: float,
    fixed: float,
    slack: float,
    rows_per_area: float,
) -> tuple[int, int]:
    """How many of the heavy chunks `taken` to keep, and the window of light ones that fills the room left."""
    load = fixed + sum(area for area, _ in taken)
    best: tuple[float, int, int] | None = None  # error, kept, window
    for kept in range(len(taken), -1, -1):
        size = room - kept
        if size > len(light):
            break
        window, area = light.find(size, target - load, rows_per_area) if size else (0, 0.0)
        error = load + area - target
        if best is None or abs(error) < best[0]:
            best = (abs(error), kept, window)
        if error <= slack * target or not kept:
            break
        load -= taken[kept - 1][0]
    assert best is not None
    return best[1:]


class _Needs:
    """The chunks that a chunk needs or a rank has, as the bits of an integer."""

    def __init__(self, table: ChunkTable):
        size = table.chunk_size
        self._first = table.needs.lo.div(size, rounding_mode="floor").tolist()
        self._last = (table.needs.hi - 1).div(size, rounding_mode="floor").tolist()
        self._ranges: dict[int, list[int]] = {}
        for index, chunk in enumerate(table.needs.owner.tolist()):
            self._ranges.setdefault(chunk, []).append(index)
        self._bits: dict[int, int] = {}

    def of(self, chunk: int) -> int:
        if chunk not in self._bits:
            bits = 0
            for index in self._ranges.get(chunk, ()):
                first, last = self._first[index], self._last[index]
                bits |= ((1 << (last - first + 1)) - 1) << first
            self._bits[chunk] = bits
        return self._bits[chunk]

    def present(self, chunks: list[int]) -> int:
        """What a rank with these chunks has, local or received."""
        bits = 0
        for chunk in chunks:
            bits |= self.of(chunk) | (1 << chunk)
        return bits


def _repair(assignment: Assignment, table: ChunkTable, slack: float) -> Assignment:
    """Swaps chunks between the most loaded rank and lightly loaded ones until all are within `slack`.

    Of the swaps that settle a rank at once the one that adds the least traffic is taken; where there is none,
    the one that halves the difference best. The number of swaps is bounded by the number of ranks.
    """
    cp_size = len(assignment)
    area = table.area.tolist()
    ranks = [sorted(chunks, key=area.__getitem__) for chunks in assignment]
    loads = [sum(area[chunk] for chunk in chunks) for chunks in ranks]
    limit = sum(loads) / cp_size * (1 + slack)
    needs: _Needs | None = None
    for _ in range(2 * cp_size):
        source = max(range(cp_size), key=loads.__getitem__)
        if loads[source] <= limit:
            break
        needs = needs or _Needs(table)
        swap = _best_swap(ranks, loads, source, limit, area, needs)
        if swap is None:
            break
        target, given, received = swap
        for rank, old, new in ((source, given, received), (target, received, given)):
            ranks[rank].remove(old)
            insort(ranks[rank], new, key=area.__getitem__)
            loads[rank] += area[new] - area[old]
    return ranks


def _best_swap(
    ranks: Assignment,
    loads: list[int],
    source: int,
    limit: float,
    area: list[int],
    needs: _Needs,
    num_targets: int = 8,
    num_partners: int = 2,
    num_choices: int = 16,
) -> tuple[int, int, int] | None:
    """`(target rank, chunk given to it, chunk received from it)`, or None where nothing improves."""
    settling: list[tuple[int, int, int, int]] = []  # chunks to receive because of the swap, swap
    easing: list[tuple[float, int, int, int]] = []  # distance from half of the difference, swap
    absent = ~needs.present(ranks[source])
    for target in heapq.nsmallest(num_targets, range(len(ranks)), key=loads.__getitem__):
        if len(settling) >= num_choices:
            break
        difference = loads[source] - loads[target]
        areas = [area[chunk] for chunk in ranks[target]]
        target_absent = ~needs.present(ranks[target])
        for given in ranks[source]:
            # The moved area must take the source below the limit and leave the target below it.
            first = bisect_left(areas, area[given] - (limit - loads[target]))
            last = bisect_right(areas, area[given] - (loads[source] - limit))
            if first < last:
                added = (needs.of(given) & target_absent).bit_count()
                for received in ranks[target][first : min(last, first + num_partners)]:
                    extra = (needs.of(received) & absent).bit_count()
                    settling.append((added + extra, target, given, received))
            elif not settling:
                middle = bisect_left(areas, area[given] - difference / 2)
                for index in range(max(middle - 1, 0), min(middle + 1, len(areas))):
                    moved = area[given] - areas[index]
                    if 0 < moved < difference * 0.99:
                        error = abs(moved - difference / 2)
                        easing.append((error, target, given, ranks[target][index]))
    best = min(settling or easing, default=None)
    return None if best is None else best[1:]


def _bands(slices: AttnSlices) -> bands.Bands:
    host = (x.cpu() for x in (slices.q_ranges, slices.k_ranges, slices.mask_types))
    return bands.from_ranges(*host)
