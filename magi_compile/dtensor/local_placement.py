"""The `local` strategy of dispatch: pack the ranks one after another, then repair the balance.

Two facts guide it. A heavy chunk (the end of a long document) needs the keys of its whole document, so few ranks
should hold such chunks, each as many as it can: a rank takes neighbours from the end of one document up to its
share of the load, and a fair part of the beginning, which all of these ranks need, so that none has to send it all.
Light chunks fill the rest, and those from one window of the sequence need few remote keys: each rank takes the
window whose load is what it lacks. Swaps then repair the balance.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from itertools import accumulate

import torch
from torch import Tensor

from magi_compile.dtensor.chunks import Assignment, ChunkTable

#: Chunks lighter than this share of the heaviest one of their document are spread over the ranks that need them.
COMPANY = 1 / 3


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


def pack(table: ChunkTable, cp_size: int, slack: float) -> Assignment:
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


def repair(assignment: Assignment, table: ChunkTable, slack: float) -> Assignment:
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
