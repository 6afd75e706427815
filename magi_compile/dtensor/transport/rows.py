"""Moving rows between tensors `[rows, ...]`: one kernel for all of them on a GPU, indexed copies elsewhere.

`packed [num, width]` holds rows of several tensors side by side, as they travel. Indices are int32.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch
from torch import Tensor


def rows_of(first: Tensor, count: Tensor, total: int) -> Tensor:
    """Every row of the ranges `[first, first + count)`, which hold `total` together, in order; int32."""
    row = torch.arange(total, dtype=torch.int32, device=count.device)
    end = count.cumsum(0, dtype=torch.int32)
    return (first - end + count)[torch.searchsorted(end, row, right=True)].add_(row)


def move(
    sources: Sequence[Tensor],
    source_rows: Tensor | None,
    targets: Sequence[Tensor],
    target_rows: Tensor | None,
) -> None:
    """Row `source_rows[i]`, int32 `[num]`, of each of `sources` to row `target_rows[i]` of `targets`, no row twice;
    None is i itself. All are `[rows, ...]`, with equally many values in a row, which lie side by side; sources are
    copied to do so."""
    if targets[0].is_cuda:
        _kernels().move(sources, source_rows, targets, target_rows)
        return
    read, write = (slice(None) if x is None else x.long() for x in (source_rows, target_rows))
    for source, target in zip(sources, targets, strict=True):
        values = source.flatten(1)[read]
        target.view(len(target), values.shape[1])[write] = values.to(target.dtype)


def gather(tensors: Sequence[Tensor], rows: Tensor) -> Tensor:
    """`packed`, the rows `rows` of all tensors."""
    sizes = widths(tensors)
    packed = tensors[0].new_empty(rows.shape[0], sum(sizes))
    move(tensors, rows, torch.split_with_sizes(packed, sizes, 1), None)
    return packed


def split(packed: Tensor, like: Sequence[Tensor], sizes: list[int] | None = None) -> list[Tensor]:
    """The tensors that lie side by side in `packed`, as views with rows like those of `like`; `sizes` are their widths,
    where these are at hand."""
    parts = torch.split_with_sizes(packed, widths(like) if sizes is None else sizes, 1)
    return [torch.unflatten(part, 1, x.shape[1:]) for part, x in zip(parts, like, strict=True)]


def widths(tensors: Sequence[Tensor]) -> list[int]:
    """Values in one row of each tensor."""
    return [x.shape[1:].numel() for x in tensors]


OWN = -1  # among ranks: the rank itself


def order_of_sums(rank: int, hosts: Sequence[int] | None) -> list[list[int]] | None:
    """The order in which rows of `rank` are added up, as `Sums` takes it: its own, those of its host by rank, and then
    host by host what ranks of that host add up to. `hosts` are those of all ranks; None where all are on one."""
    if hosts is None:
        return None
    peers = range(len(hosts))
    near = [peer for peer in peers if hosts[peer] == hosts[rank] and peer != rank]
    others = sorted({*hosts} - {hosts[rank]})
    far = [[peer for peer in peers if hosts[peer] == host] for host in others]
    return [[OWN], *([peer] for peer in near), *far]


class Sums:
    """The rows that add up to each home row, in order: by default one of the rank itself, then those of others by rank.

    Args:
        rows: int32 `[num]`, the home row of each row that arrives, where these come in the order of ranks.
        num_rows: of the result.
        counts: rows that arrive from each rank. A rank never sends two for one home row.
        own_home_rows: int32 `[num_own]`, home rows to which the rank itself has something to add, no row twice.
        own_buffer_rows: int32 `[num_own]`, where that lies.
        order: groups of ranks, of which one is `OWN`; those of a group are added up first, and rounded as rows travel.
            A rank that is in none has nothing to add. None is the default.
    """

    def __init__(
        self,
        rows: Tensor,
        num_rows: int,
        counts: list[int],
        own_home_rows: Tensor,
        own_buffer_rows: Tensor,
        order: list[list[int]] | None = None,
    ):
        self._rows, self._counts = rows, counts
        self._own_home_rows, self._own_buffer_rows = own_home_rows, own_buffer_rows
        self._groups = order or [[OWN], *([peer] for peer in range(len(counts)))]
        # Rows of others by number, own ones as -1 - row, in the order of groups; then by home row.
        home, source = rows, None
        if order is not None or own_home_rows.shape[0]:
            homes = [*rows.split(counts), own_home_rows]
            number = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
            sources = [*number.split(counts), -1 - own_buffer_rows]
            ranks = [peer for group in self._groups for peer in group]
            home, source = (torch.cat([x[peer] for peer in ranks]) for x in (homes, sources))
        home, by_home = torch.sort(home, stable=True)
        self._order = by_home.int() if source is None else source[by_home]
        edges = torch.arange(num_rows + 1, dtype=torch.int32, device=rows.device)
        self._begin = torch.searchsorted(home, edges, out_int32=True)
        self._opens: Tensor | None = None  # int8, 1 where a group begins
        if any(len(group) > 1 for group in self._groups):
            numbers = [
                homes[peer].new_full(homes[peer].shape, i)
                for i, group in enumerate(self._groups)
                for peer in group
            ]
            group = torch.cat(numbers)[by_home]
            self._opens = torch.ones_like(group, dtype=torch.int8)
            self._opens[1:] = (group[1:] != group[:-1]) | (home[1:] != home[:-1])

    def write(
        self,
        outs: Sequence[Tensor],
        prior: Sequence[Tensor] | None,
        buffers: Sequence[Tensor],
        arrived: Sequence[Tensor],
    ) -> None:
        """The sums of several tensors at once, added up in fp32 or wider and rounded once.

        Args:
            outs: `[num_rows, ...]`, of one dtype; the values of a row lie side by side.
            prior: contiguous tensors of the same shapes, to which all else is added; None for zeros. May be `outs`.
            buffers: `[num_received, ...]`, what the rank itself has; copied where values of a row lie apart.
            arrived: `[num, ...]`, likewise, of one dtype with `buffers`.
        """
        if outs[0].is_cuda:
            order = (self._begin, self._order, self._opens)
            _kernels().write_sums(outs, prior, buffers, arrived, *order)
            return
        rows = [*self._rows.split(self._counts), self._own_home_rows]
        for i, out in enumerate(outs):
            total = torch.zeros_like(out, dtype=torch.promote_types(out.dtype, torch.float32))
            total = total.contiguous()
            if prior is not None:
                total += prior[i]
            flat = total.flatten(1)
            blocks = [
                *arrived[i].flatten(1).split(self._counts),
                buffers[i].flatten(1)[self._own_buffer_rows.long()],
            ]
            for group in self._groups:
                sums = flat if len(group) == 1 else torch.zeros_like(flat)
                for peer in group:
                    sums[rows[peer].long()] += blocks[peer]
                if sums is not flat:
                    flat += sums.to(arrived[i].dtype)
            out.copy_(total)


@cache
def _kernels() -> ModuleType:
    """Imported at first use, because Triton need not be installed."""
    return importlib.import_module("magi_compile.dtensor.transport.rows_triton")
