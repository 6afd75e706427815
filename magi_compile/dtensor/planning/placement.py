"""The `local` strategy of dispatch: pack the ranks one after another, then repair the balance.

Two facts guide it. A heavy chunk (the end of a long document) needs the keys of its whole document, so few ranks
should hold such chunks, each as many as it can: a rank takes neighbours from the end of one document up to its
share of the load, and a fair part of the beginning, which all of these ranks need, so that none has to send it all.
Light chunks fill the rest. They lie in one list by the length of their document, so that a window of it holds
whole documents and the windows' areas ascend: each rank takes, by bisection, one whose area is what it lacks. What
is left of a long document joins the list when the list runs short. Swaps then repair the balance.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from functools import reduce
from itertools import accumulate
from operator import add, or_

import torch
from torch import Tensor

from magi_compile.dtensor.planning.chunks import Assignment, ChunkTable
from magi_compile.dtensor.planning.ranges import group, pick

#: Chunks lighter than this share of the heaviest one of their document are spread over the ranks that need them.
COMPANY = 1 / 3


class _LongDocument:
    """The heavy chunks of a long document (its end), and the lighter ones that they all need (its beginning):
    `(area, chunk)` pairs, ascending."""

    def __init__(self, heavy: list[tuple[int, int]], company: list[tuple[int, int]]):
        self.heavy = sorted(heavy)
        self.company = sorted(company)
        self._area = sum(area for area, _ in heavy)

    def heaviest(self) -> int:
        return self.heavy[-1][0] if self.heavy else 0

    def take_heavy(
        self, target: float, least_fills: list[int]
    ) -> tuple[list[tuple[int, int]], int]:
        """Pops the heaviest chunks that fit into `target` beside the lightest filling; also their area.

        `least_fills` are the least areas of 0, 1, ... other chunks; there is room for as many as it has.
        """
        taken: list[tuple[int, int]] = []
        load, end = 0, len(self.heavy)
        for fill in reversed(least_fills):
            end = bisect_right(self.heavy, (target - load - fill, 1 << 62), 0, end) - 1
            if end < 0:
                break
            item = self.heavy.pop(end)
            taken.append(item)
            load += item[0]
        self._area -= load
        return taken, load

    def take_company(self, load: int, count: int) -> list[tuple[int, int]]:
        """Pops as large a part of the company as `load` is of the document: what all of these ranks need is spread
        over them, so that none has to send it all."""
        if not load:
            return []
        share = min(round(len(self.company) * load / (load + self._area)), count)
        taken = self.company[:share]
        del self.company[:share]
        return taken

    def give_back(self, item: tuple[int, int]) -> None:
        insort(self.heavy, item)
        self._area += item[0]


def _long_documents(area: list[int], is_heavy: Tensor, lowest: Tensor) -> list[_LongDocument]:
    """Heavy chunks in a row that need the ones before them."""
    documents: list[_LongDocument] = []
    chunks = is_heavy.nonzero().flatten()
    starts = (chunks[1:] != chunks[:-1] + 1) | (pick(lowest, chunks[1:]) >= chunks[1:])
    firsts, lasts = group(starts, len(chunks))
    floors = torch.minimum(pick(lowest, pick(chunks, lasts)), pick(chunks, firsts))
    fields = (pick(chunks, firsts), pick(chunks, lasts) + 1, floors)
    is_taken = is_heavy.tolist()  # a chunk in the company of two documents stays with the first
    for begin, end, floor in zip(*(x.tolist() for x in fields), strict=True):
        areas = area[begin:end]
        limit = COMPANY * max(areas)
        company = [(area[i], i) for i in range(floor, begin) if not is_taken[i]]
        for _, chunk in company:
            is_taken[chunk] = True
        pairs = [*zip(areas, range(begin, end), strict=True)]
        company += [pair for pair in pairs if pair[0] < limit]
        documents.append(_LongDocument([pair for pair in pairs if pair[0] >= limit], company))
    return documents


class _Lights:
    """The other chunks, from which windows are taken: documents of about one length stand side by side, short ones
    first, so that a window holds whole documents and its area grows with its place. Chunks have `size` rows; `area` and
    `reach`, int64 `[num_chunks]`, are the visible pairs of every chunk and the most keys before it that it needs."""

    def __init__(self, chunks: Tensor, area: Tensor, reach: Tensor, size: int):
        # A document begins where no key of the chunk before is needed.
        first, last = group(
            (chunks[1:] != chunks[:-1] + 1) | (pick(reach, chunks[1:]) < size), len(chunks)
        )
        document = torch.arange(len(first), device="cpu").repeat_interleave(last - first + 1)
        longest = area.new_zeros(len(first)).scatter_reduce(0, document, pick(area, chunks), "amax")
        magnitude = torch.frexp(longest.double()).exponent
        chunks = pick(chunks, pick(magnitude, document).argsort(stable=True))
        self._area = area.tolist()
        self._needed_before = torch.where(reach >= size, reach, 0).tolist()
        self._chunks: list[int] = []
        self._sums = [0]  # of the areas before each of them, plus any number
        # What a window pays whose first chunk this is: the keys of the neighbour it leaves.
        self._cuts = [0]
        self.extend(chunks.tolist())

    def __len__(self) -> int:
        return len(self._chunks)

    def least_areas(self, count: int) -> list[int]:
        """The area of the 0, 1, ... `count - 1` chunks in front."""
        first = self._sums[0]
        areas = [x - first for x in self._sums[:count]]
        return areas + areas[-1:] * (count - len(areas))

    def most_area(self, count: int) -> int:
        """The area of the `count` chunks at the end."""
        return self._sums[-1] - self._sums[max(len(self) - count, 0)]

    def find(self, size: int, area: float, tolerance: float) -> tuple[int, int]:
        """The window of `size` chunks with about `area` that cuts least, and its area."""
        if not size:
            return 0, 0
        sums, cuts = self._sums, self._cuts
        last = len(self) - size

        def area_at(begin: int) -> int:
            return sums[begin + size] - sums[begin]

        starts = range(last + 1)
        low = bisect_left(starts, area - tolerance, key=area_at)
        high = bisect_right(starts, area + tolerance, low, key=area_at)
        if low < high:
            costs = [*map(add, cuts[low:high], cuts[low + size : high + size])]
            begin = low + costs.index(min(costs))
        else:
            near = range(max(low - 1, 0), min(low, last) + 1)
            begin = min(near, key=lambda i: abs(area_at(i) - area))
        return begin, area_at(begin)

    def extend(self, chunks: list[int]) -> None:
        """Puts chunks at the end."""
        needed = self._needed_before
        pairs = zip([-2, *chunks], chunks, strict=False)
        self._cuts[-1:] = [needed[i] if i == previous + 1 else 0 for previous, i in pairs]
        self._cuts.append(0)
        areas = [self._area[i] for i in chunks]
        self._sums += accumulate(areas, initial=self._sums.pop())
        self._chunks += chunks

    def take(self, begin: int, size: int) -> list[int]:
        end = begin + size
        taken = self._chunks[begin:end]
        del self._chunks[begin:end]
        del self._cuts[begin:end]
        self._cuts[begin] = 0
        # Only differences count, so the shorter side moves.
        sums = self._sums
        moved = sums[end] - sums[begin]
        if begin < len(sums) - end:
            sums[: end + 1] = [x + moved for x in sums[: begin + 1]]
        else:
            sums[begin:] = [x - moved for x in sums[end:]]
        return taken


def pack(table: ChunkTable, cp_size: int, slack: float) -> Assignment:
    """One rank after another: heavy chunks from the end of one document, their share of its beginning, then a window
    of light chunks. The target of each rank is the mean of what is left, so errors do not add up."""
    num_chunks, size = table.num_chunks, table.chunk_size
    per_rank = num_chunks // cp_size
    area = table.area.tolist()
    left = sum(area)
    begin = torch.arange(num_chunks, device="cpu") * size
    lowest = _lowest(table)
    is_heavy = table.area * num_chunks > left
    documents = _long_documents(area, is_heavy, lowest.div(size, rounding_mode="floor"))
    company = [chunk for document in documents for _, chunk in document.company]
    is_light = (~is_heavy).index_fill(
        0, torch.tensor(company, dtype=torch.int64, device="cpu"), False
    )
    light = _Lights(is_light.nonzero().flatten(), table.area, begin - lowest, size)
    assignment: Assignment = []
    for rank in range(cp_size):
        target = max(left / (cp_size - rank), 1.0)
        documents = [x for x in documents if x.heavy or x.company]
        documents.sort(key=_LongDocument.heaviest)
        while documents and len(light) < per_rank:
            document = documents.pop(0)
            light.extend(sorted(chunk for _, chunk in document.heavy + document.company))
        heavy: list[tuple[int, int]] = []
        sources: list[_LongDocument] = []  # of each chunk in `heavy`
        chunks: list[int] = []
        load = 0
        # One document, and others only where no window of light chunks could make up for what is missing.
        for document in reversed(documents):
            room = per_rank - len(heavy) - len(chunks)
            if heavy and target - load <= light.most_area(room):
                break
            taken, taken_area = document.take_heavy(target - load, light.least_areas(room))
            heavy += taken
            sources += [document] * len(taken)
            load += taken_area
            for company_area, chunk in document.take_company(taken_area, room - len(taken)):
                chunks.append(chunk)
                load += company_area
        kept, window = _fill(heavy, light, per_rank - len(chunks), target - load, slack * target)
        for item, document in zip(heavy[kept:], sources[kept:], strict=True):
            document.give_back(item)
        chunks += [chunk for _, chunk in heavy[:kept]]
        chunks += light.take(window, per_rank - len(chunks))
        assignment.append(chunks)
        left -= sum([area[chunk] for chunk in chunks])
    return assignment


def _lowest(table: ChunkTable) -> Tensor:
    """The first row that each chunk needs, or where keys are others,
    that of the first chunk that shares keys with it; at most its own."""
    begin, needs = torch.arange(table.num_chunks, device="cpu") * table.chunk_size, table.needs
    if table.keys is None:
        return begin.scatter_reduce(0, needs.owner, needs.lo, "amin")
    none = torch.full_like(begin, table.keys.placement.total_padded)
    lowest = none.scatter_reduce(0, needs.owner, needs.lo, "amin")
    reach = torch.zeros_like(begin).scatter_reduce(0, needs.owner, needs.hi, "amax")
    first = torch.searchsorted(reach.cummax(0).values, lowest, right=True)
    return torch.minimum(first * table.chunk_size, begin)


def _fill(
    heavy: list[tuple[int, int]], light: _Lights, room: int, missing: float, tolerance: float
) -> tuple[int, int]:
    """The number of chunks of `heavy` to keep, and the window of light ones that fills the room left: what comes
    nearest to adding the area `missing`."""
    best: tuple[float, int, int] | None = None  # error, kept, window
    for kept in range(len(heavy), -1, -1):
        window, area = light.find(room - kept, missing, tolerance)
        error = area - missing
        if best is None or abs(error) < best[0]:
            best = (abs(error), kept, window)
        if error <= tolerance or not kept:
            break
        missing += heavy[kept - 1][0]
    assert best is not None
    return best[1:]


class _Needs:
    """The chunks of keys that a chunk needs or a rank has, as the bits of an integer; `of` are those of each chunk, its
    own among them where keys are the rows themselves."""

    def __init__(self, table: ChunkTable):
        needs, keys = table.needs, table.keys
        size = table.chunk_size if keys is None else keys.placement.chunk_size
        num_key_chunks = table.num_chunks if keys is None else keys.placement.chunks.numel()
        first = needs.lo.div(size, rounding_mode="floor")
        end = (needs.hi + (size - 1)).div(size, rounding_mode="floor")
        powers = [1 << chunk for chunk in range(num_key_chunks + 1)]
        self.of = powers[:-1] if keys is None else [0] * table.num_chunks
        fields = (x.tolist() for x in (needs.owner, first, end))
        for chunk, i, j in zip(*fields, strict=True):
            self.of[chunk] |= powers[j] - powers[i]
        self._present: dict[int, int] = {}

    def present(self, rank: int, chunks: list[int]) -> int:
        """The keys that a rank with these chunks has, local or received; kept until it is told that they changed."""
        if rank not in self._present:
            self._present[rank] = reduce(or_, [self.of[i] for i in chunks])
        return self._present[rank]

    def forget(self, *ranks: int) -> None:
        for rank in ranks:
            self._present.pop(rank, None)


def repair(assignment: Assignment, table: ChunkTable, slack: float) -> Assignment:
    """Swaps chunks between the most loaded rank and lightly loaded ones until all are within `slack`.

    Of the swaps that settle a rank at once the one that adds the least traffic is taken; where there is none,
    the one that halves the difference best. The number of swaps is bounded.
    """
    cp_size = len(assignment)
    area = table.area.tolist()
    ranks = [sorted(chunks, key=area.__getitem__) for chunks in assignment]
    areas = [[area[chunk] for chunk in chunks] for chunks in ranks]
    loads = [*map(sum, areas)]
    limit = sum(loads) / cp_size * (1 + slack)
    needs: _Needs | None = None
    wide_searches = 2
    for _ in range(4 * cp_size + len(area) // 8):
        source = loads.index(max(loads))
        if loads[source] <= limit:
            break
        needs = needs or _Needs(table)
        swap = _best_swap(ranks, areas, loads, source, limit, needs, num_targets=4)
        if swap is None and wide_searches:
            wide_searches -= 1
            swap = _best_swap(ranks, areas, loads, source, limit, needs, num_targets=cp_size)
        if swap is None:
            break
        target, given, received = swap
        for rank, old, new in ((source, given, received), (target, received, given)):
            index = ranks[rank].index(old)
            del ranks[rank][index], areas[rank][index]
            index = bisect_right(areas[rank], area[new])
            ranks[rank].insert(index, new)
            areas[rank].insert(index, area[new])
            loads[rank] += area[new] - area[old]
        needs.forget(source, target)
    return ranks


def _best_swap(
    ranks: Assignment,
    areas: list[list[int]],
    loads: list[int],
    source: int,
    limit: float,
    needs: _Needs,
    num_targets: int,
) -> tuple[int, int, int] | None:
    """`(target rank, chunk given to it, chunk received from it)`, or None where nothing improves.

    The chunks of a rank ascend by their `areas`.
    """
    over = loads[source] - limit
    givens, given_areas = ranks[source], areas[source]
    targets = sorted(range(len(ranks)), key=loads.__getitem__)[:num_targets]

    settling: list[tuple[int, int, int]] = []
    for target in targets:
        others = areas[target]
        # The moved area must take the source below the limit and leave the target below it.
        room = limit - loads[target]
        if room < over or len(settling) >= 12:  # enough to choose from
            break
        for i in range(bisect_left(given_areas, others[0] + over), len(givens)):
            index = bisect_left(others, given_areas[i] - room)
            if index == len(others):
                break
            if others[index] <= given_areas[i] - over:
                settling.append((target, givens[i], ranks[target][index]))
    if not settling:
        easing: list[tuple[float, int, int, int]] = []  # distance from half of the difference, swap
        for target in targets:
            others = areas[target]
            middle = (loads[source] - loads[target]) / 2
            for given_area, given in zip(given_areas, givens, strict=True):
                index = min(bisect_left(others, given_area - middle), len(others) - 1)
                moved = given_area - others[index]
                if 0.1 * middle < moved < 1.9 * middle:
                    easing.append((abs(moved - middle), target, given, ranks[target][index]))
        return min(easing)[1:] if easing else None
    absent = {
        rank: ~needs.present(rank, ranks[rank]) for rank in {source, *(s[0] for s in settling)}
    }

    def added_traffic(swap: tuple[int, int, int]) -> int:
        target, given, received = swap
        to_target = (needs.of[given] & absent[target]).bit_count()
        return to_target + (needs.of[received] & absent[source]).bit_count()

    return min(settling, key=added_traffic)
