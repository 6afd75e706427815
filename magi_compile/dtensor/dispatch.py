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
up to its share of the load, and a fair part of the beginning, which all of these ranks need, so that none has to
send it all. Light chunks fill the rest, and those from one window of the sequence need few remote keys: each rank
takes the window whose load is what it lacks. Swaps then repair the balance.

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
CHUNK_SIZES = (8192, 4096, 2048, 1024, 512, 256, 128)

#: Chunks lighter than this share of the heaviest one of their document are spread over the ranks that need them.
COMPANY = 1 / 3

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
    slack: float = 0.01,
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

    Above 512 tokens every rank must hold at least 16 chunks, none of which weighs more than an eighth of a rank's
    share; below, 8 chunks are enough. Sequences too short for that get the smallest size, with fewer chunks.
    """
    for chunk_size in CHUNK_SIZES:
        per_rank = -(-slices.seqlen_q // (chunk_size * cp_size))
        if per_rank < (16 if chunk_size > 512 else 8):
            continue
        if chunk_size <= 512:
            return chunk_size
        area = ChunkTable.of(slices, chunk_size, per_rank * cp_size).area
        if int(area.max()) * 8 * cp_size <= int(area.sum()):
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
    contiguous = table.area.view(cp_size, -1).sum(1)
    if int(contiguous.max()) * cp_size <= int(table.area.sum()) * (1 + slack):
        return sequential(table, cp_size, slack, cost)
    packed = _repair(_pack(table, cp_size, slack), table, slack)
    candidates = [packed]
    if _imbalance(table, packed) > 1 + 2 * slack:
        candidates.append(min_heap(table, cp_size, slack, cost))
    # A contiguous placement can only win where an all-gather takes longer than its compute.
    all_gather = (table.total - table.total // cp_size) * cost.seconds_per_row
    if int(contiguous.max()) * cost.seconds_per_area < all_gather:
        candidates.append(sequential(table, cp_size, slack, cost))
    if len(candidates) == 1:
        return packed
    loads = [rank_loads(table, candidate) for candidate in candidates]
    seconds = [load.seconds(cost) for load in loads]
    traffic = [int(load.recv_rows.sum()) for load in loads]
    good = [i for i in range(len(loads)) if seconds[i] <= min(seconds) * (1 + slack)]
    return candidates[min(good, key=lambda i: (traffic[i], seconds[i]))]


def _imbalance(table: ChunkTable, assignment: Assignment) -> float:
    loads = table.area[torch.tensor(assignment)].sum(1)
    return loads.max().item() / max(loads.double().mean().item(), 1.0)


Strategy = Callable[[ChunkTable, int, float, CostModel], Assignment]

STRATEGIES: Mapping[str, Strategy] = {
    "sequential": sequential,
    "zigzag": zigzag,
    "min_heap": min_heap,
    "local": local,
}


# The local strategy: pack, then repair


class _Run:
    """The heavy chunks of a long document (its end), and the lighter ones that they all need (its beginning):
    `(area, chunk)` pairs, ascending."""

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
                limit = COMPANY * max(area[begin:end])
                items = [(area[i], i) for i in range(begin, end)]
                company += [item for item in items if item[0] < limit]
                self._runs.append(_Run([item for item in items if item[0] >= limit], company))
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

    A window of chunks pays for its deviation from the wanted area, for the keys that its chunks need across gaps
    (where a chunk's left neighbour is not in the list), and for those its first chunk needs if there is no gap.

    `sums [3, n + 1]`: prefix sums of area, counted in rows; prefix sums of the keys needed across gaps; what a
    window that starts here pays for its first chunk, minus the second row.
    """

    def __init__(self, table: ChunkTable, chunks: Tensor, reach: Tensor, rows_per_area: float):
        self.chunks = chunks.tolist()
        self._rows_per_area = rows_per_area
        reach = reach[chunks].double()
        is_gap = torch.ones(len(chunks), dtype=torch.bool)
        torch.ne(chunks[1:], chunks[:-1] + 1, out=is_gap[1:])
        gaps = reach * is_gap
        self._sums = torch.zeros(3, len(chunks) + 1, dtype=torch.float64)
        area = table.area[chunks].double() * rows_per_area
        torch.cumsum(torch.stack([area, gaps]), 1, out=self._sums[:2, 1:])
        self._sums[2] = -self._sums[1]
        self._sums[2, :-1] += reach - gaps
        self._rows = self._sums.unbind()

    def __len__(self) -> int:
        return len(self.chunks)

    def find(self, size: int, area: float) -> tuple[int, float]:
        """The window of `size` chunks that pays least, and its area."""
        count = len(self) - size + 1
        area_sums, gap_sums, first = self._rows
        rows = area_sums[size : size + count] - area_sums[:count]
        price = (rows - area * self._rows_per_area).abs_()
        price.add_(gap_sums[size : size + count]).add_(first[:count])
        begin = int(price.argmin())
        return begin, float(rows[begin]) / self._rows_per_area

    def take(self, begin: int, size: int) -> list[int]:
        end, count = begin + size, len(self)
        taken = self.chunks[begin:end]
        del self.chunks[begin:end]
        area, gaps, _ = self._sums[:, begin].tolist()
        end_area, end_gaps, end_first = self._sums[:, end].tolist()
        # The chunk behind the window has a gap in front of it now, if it had none before.
        new_gap = end_first + end_gaps
        shift = gaps - end_gaps + new_gap
        moved = torch.tensor([[area - end_area], [shift], [-shift]], dtype=torch.float64)
        self._sums[:, begin : count - size + 1] = self._sums[:, end : count + 1] + moved
        self._rows[1][begin] = gaps
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
    # A rank that is off by `slack` of its share is as bad as one that needs a tenth more than it holds.
    rows_per_share = 0.1 * size * per_rank / max(slack, 1e-6)
    light = _LightWindows(
        table,
        is_window.nonzero().flatten(),
        begin - lowest,
        rows_per_share * cp_size / max(left, 1),
    )
    least_fill = [0, *accumulate(sorted(a for a in area if a * num_chunks <= left))]
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
        kept, window = _fill(taken, light, room, target, fixed, slack)
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
) -> tuple[int, int]:
    """How many of the heavy chunks `taken` to keep, and the window of light ones that fills the room left."""
    load = fixed + sum(area for area, _ in taken)
    best: tuple[float, int, int] | None = None  # error, kept, window
    for kept in range(len(taken), -1, -1):
        size = room - kept
        if size > len(light):
            break
        window, area = light.find(size, target - load) if size else (0, 0.0)
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
    the one that halves the difference best. The number of swaps is bounded.
    """
    cp_size = len(assignment)
    area = table.area.tolist()
    ranks = [sorted(chunks, key=area.__getitem__) for chunks in assignment]
    loads = [sum(area[chunk] for chunk in chunks) for chunks in ranks]
    limit = sum(loads) / cp_size * (1 + slack)
    needs: _Needs | None = None
    wide_searches = 8
    for _ in range(4 * cp_size + len(area) // 8):
        source = max(range(cp_size), key=loads.__getitem__)
        if loads[source] <= limit:
            break
        needs = needs or _Needs(table)
        swap = _best_swap(ranks, loads, source, limit, area, needs, num_targets=4)
        if swap is None and wide_searches:
            wide_searches -= 1
            swap = _best_swap(ranks, loads, source, limit, area, needs, num_targets=cp_size)
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
    num_targets: int,
    num_choices: int = 12,
) -> tuple[int, int, int] | None:
    """`(target rank, chunk given to it, chunk received from it)`, or None where nothing improves."""
    over = loads[source] - limit
    given_areas = [(area[chunk], chunk) for chunk in ranks[source]]
    targets = heapq.nsmallest(num_targets, range(len(ranks)), key=loads.__getitem__)
    target_areas = [[area[chunk] for chunk in ranks[target]] for target in targets]

    settling: list[tuple[int, int, int]] = []
    for target, areas in zip(targets, target_areas, strict=True):
        # The moved area must take the source below the limit and leave the target below it.
        room = limit - loads[target]
        if room < over or len(settling) >= num_choices:
            break
        for given_area, given in given_areas:
            index = bisect_left(areas, given_area - room)
            if index < len(areas) and areas[index] <= given_area - over:
                settling.append((target, given, ranks[target][index]))
    if not settling:
        easing: list[tuple[float, int, int, int]] = []  # distance from half of the difference, swap
        for target, areas in zip(targets, target_areas, strict=True):
            middle = (loads[source] - loads[target]) / 2
            for given_area, given in given_areas:
                index = min(bisect_left(areas, given_area - middle), len(areas) - 1)
                moved = given_area - areas[index]
                if 0.1 * middle < moved < 1.9 * middle:
                    easing.append((abs(moved - middle), target, given, ranks[target][index]))
        return min(easing)[1:] if easing else None
    absent = {rank: ~needs.present(ranks[rank]) for rank in {source, *(s[0] for s in settling)}}

    def added_traffic(swap: tuple[int, int, int]) -> int:
        target, given, received = swap
        to_target = (needs.of(given) & absent[target]).bit_count()
        return to_target + (needs.of(received) & absent[source]).bit_count()

    return min(settling, key=added_traffic)


def _bands(slices: AttnSlices) -> bands.Bands:
    host = (x.cpu() for x in (slices.q_ranges, slices.k_ranges, slices.mask_types))
    return bands.from_ranges(*host)
