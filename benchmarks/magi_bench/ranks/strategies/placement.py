"""Who holds which tokens, and the mask between the queries of one owner and the keys of another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from magi_compile.dtensor.planning.ranges import Ranges, expand, unite
from magi_compile.masks.geometry import NO_DIAG, Rects
from magi_compile.masks.normal_form import normal_form
from magi_compile.masks.slices import AttnSlices

#: Tokens `[begin, end)` of the sequence.
Span = tuple[int, int]
#: The tokens of an owner, in the order of its rows; ascending, and none is empty.
Spans = list[Span]


def spans_of(lengths: Sequence[int]) -> Spans:
    """Documents of these lengths, one after the other."""
    return list(itertools.pairwise([0, *itertools.accumulate(lengths)]))


def contiguous(total: int, owners: int) -> list[Spans]:
    """The sequence in as many equal parts as there are owners."""
    return split([(0, total)], owners)


def zigzag(documents: Spans, owners: int) -> list[Spans]:
    """Each document in `2 * owners` chunks, of which owner i gets i and `2 * owners - 1 - i`, next to each other:
    equal work under a causal mask. Without padding: tokens that a document has beyond a multiple go to the owners
    that have fewest so far, so that their numbers differ by one at most."""
    made: list[Spans] = [[] for _ in range(owners)]
    held = [0] * owners
    for begin, end in documents:
        least, rest = divmod(end - begin, 2 * owners)
        sizes = [least] * (2 * owners)
        for _ in range(rest):
            # The front chunk takes the first extra token of an owner, the back chunk the second.
            owner = min(
                (i for i in range(owners) if sizes[-1 - i] == least),
                key=lambda i: held[i] + sizes[i],
            )
            sizes[owner if sizes[owner] == least else -1 - owner] += 1
        chunks = spans_of(sizes)
        for owner, spans in enumerate(made):
            both = (chunks[owner], chunks[-1 - owner])
            spans += [(begin + first, begin + last) for first, last in both if first < last]
            held[owner] += sizes[owner] + sizes[-1 - owner]
    return [_joined(spans) for spans in made]


def split(spans: Spans, parts: int) -> list[Spans]:
    """The tokens of an owner in equal parts, in their order; `parts` divides their number."""
    size, rest = divmod(count(spans), parts)
    assert not rest
    return [_between(spans, size * i, size * (i + 1)) for i in range(parts)]


def _between(spans: Spans, first: int, last: int) -> Spans:
    """The rows `[first, last)` of an owner."""
    found, row = [], 0
    for begin, end in spans:
        low, high = max(first - row, 0), min(last - row, end - begin)
        found += [(begin + low, begin + high)] if low < high else []
        row += end - begin
    return found


def _joined(spans: Spans) -> Spans:
    """The same tokens, neighbours in one."""
    found: Spans = []
    for begin, end in spans:
        if found and found[-1][1] == begin:
            begin = found.pop()[0]
        found.append((begin, end))
    return found


def count(spans: Spans) -> int:
    """The number of tokens."""
    return sum(end - begin for begin, end in spans)


def positions(spans: Spans, device: torch.device | str) -> Tensor:
    """The place of each row in the sequence, int64 `[tokens]`."""
    rows = [torch.arange(*span, device=device) for span in spans]
    return torch.cat([torch.empty(0, dtype=torch.int64, device=device), *rows])


def runs_of(positions: Tensor) -> Spans:
    """The tokens at ascending places in the sequence, int64 `[tokens]`."""
    return _joined([(at, at + 1) for at in positions.tolist()])


def seen(slices: AttnSlices, queries: Spans) -> Spans:
    """The keys that the rows of an owner see, of whomever."""
    begin, end = between(slices, queries, [(0, slices.seqlen_k)]).k_ranges.long().T
    _, *bounds = unite(Ranges(torch.zeros_like(begin), begin, end), slices.seqlen_k)
    return list(zip(*(x.tolist() for x in bounds), strict=True))


def between(slices: AttnSlices, queries: Spans, keys: Spans) -> AttnSlices:
    """The mask between the rows of one owner and the keys of another, counted as they hold them; exact, on the host,
    in normal form."""
    rects = _gathered(slices.rects().live(), queries)
    rects = _gathered(rects.transposed(), keys).transposed()
    normal = normal_form(rects.trimmed().straight().live())
    return AttnSlices.unchecked(*normal.to_ranges(), count(queries), count(keys))


def _gathered(rects: Rects, spans: Spans) -> Rects:
    """The rows of trimmed rects that lie in `spans`, numbered as an owner of these has them."""
    begin, end = torch.tensor(spans, dtype=torch.int64).view(-1, 2).T.contiguous()
    first = torch.searchsorted(end, rects.row_begin, right=True)
    last = torch.searchsorted(begin, rects.row_end)
    owner, step = expand((last - first).clamp(min=0))
    span = first[owner] + step
    shift = ((end - begin).cumsum(0) - end)[span]
    cut = rects.select(owner).clipped(begin[span], end[span])
    lo, hi = cut.diag_lo, cut.diag_hi
    return cut._replace(
        row_begin=cut.row_begin + shift,
        row_end=cut.row_end + shift,
        diag_lo=torch.where(lo == -NO_DIAG, lo, lo - shift),
        diag_hi=torch.where(hi == NO_DIAG, hi, hi - shift),
    ).live()
