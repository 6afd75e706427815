"""Dispatch: which rank holds which tokens.

The sequence is cut into chunks of equal length and every rank gets equally many of them, so tensors keep one
shape on all ranks. What is left to choose is the permutation:

    sequential   rank r holds the r-th range of chunks. Least traffic, no balance.
    zigzag       rank r holds ranges r and 2 * cp_size - 1 - r of 2 * cp_size. Balances one causal sequence.
    min_heap     chunks from heavy to light, each to the least loaded rank that has room (MagiAttention's).
                 Balances anything, scatters every document over all ranks.
    local        ours (`placement`): balanced within a tolerance, and documents stay together; on several hosts first
                 within these.

Everything here runs on the host, is deterministic, and needs no communication: every rank computes the same.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from magi_compile.dtensor.planning.chunks import (
    Assignment,
    ChunkTable,
    Keys,
    Placement,
    rank_loads,
    tensor_of,
)
from magi_compile.dtensor.planning.cost import DEFAULT_COST, CostModel
from magi_compile.dtensor.planning.cover import Cover
from magi_compile.dtensor.planning.keys import key_placement, keys_of, named_after_keys
from magi_compile.dtensor.planning.placement import pack, repair
from magi_compile.dtensor.planning.ranges import pick
from magi_compile.masks.arguments import check_count
from magi_compile.masks.slices import AttnSlices
from magi_compile.ops.validation import check_number

#: Chunk sizes tried by `choose_chunk_size`, largest first.
CHUNK_SIZES = (8192, 4096, 2048, 1024, 512, 256, 128)

#: Placements whose predicted times differ by less than this are equally fast; the one that moves less wins.
TIE = 0.025

#: Where a rank's area lies further above the mean, chunks of half the size are tried, and half of that.
BALANCE = 0.025


@dataclass(frozen=True, eq=False)
class Dispatch(Placement):
    """The rank and place of every token and every key."""

    table: ChunkTable  # what the chunks cost and need
    # Where keys live that are no rows of the sequence (cross attention)
    other_keys: Placement | None = None
    batch: int = 1  # sequences that lie in it, one behind the other

    @property
    def keys(self) -> Placement:
        """The placement of keys: this placement itself for self-attention."""
        return self if self.other_keys is None else self.other_keys


def dispatch(slices: AttnSlices, cp_size: int, **options: Any) -> Dispatch:
    """`dispatch_together` of one mask, with the same options."""
    return dispatch_together([slices], [1], cp_size, **options)[0]


def dispatch_together(
    masks: Sequence[AttnSlices],
    weights: Sequence[int],
    cp_size: int,
    *,
    chunk_size: int | None = None,
    strategy: str = "local",
    slack: float = 0.01,
    cost: CostModel = DEFAULT_COST,
    keys: Sequence[Placement | None] | None = None,
    hosts: Sequence[int] | None = None,
    multiple: int = 1,
) -> list[Dispatch]:
    """Decides which rank holds which tokens of a sequence that several masks are attended to with, each so often as its
    weight says: what is balanced is the sum of work. All ranks decide alike; a `Dispatch` for each mask.

    A chunk of `chunk_size` tokens stays together; None chooses it from the masks. A rank's area may lie above the mean
    by `slack` in favour of less communication. `keys` says where the keys of each mask lie already. Otherwise they are
    the tokens themselves where they are as many, and where they are not a sequence of their own, one for all masks with
    as many keys, which is placed by what is seen of it. `hosts` is the host of each rank, None where all are on one:
    "local" places tokens on hosts first. The sizes of chunks that are chosen here are multiples of `multiple`.

    Raises ValueError if an argument is out of range, or masks have other lengths.
    """
    seqlen = check_masks(masks, weights)
    check_count("cp_size", cp_size, 1)
    _check_keys(masks, cp_size, keys)
    check_strategy(strategy)
    check_number("slack", slack)
    if chunk_size is not None:
        check_count("chunk_size", chunk_size, 1)

    @cache
    def tables_of(size: int) -> list[ChunkTable]:
        chunks_per_rank = max(-(-seqlen // (size * cp_size)), 1)
        return _tables(masks, size, chunks_per_rank, cp_size, keys, multiple)

    def area_of(size: int) -> Tensor:
        return ChunkTable.together(tables_of(size), weights).area

    sizes = [chunk_size] if chunk_size else _chunk_sizes(seqlen, cp_size, area_of)
    if not chunk_size and multiple > 1:
        sizes = [-(-size // multiple) * multiple for size in sizes]
    least: tuple[float, int, Tensor] | None = None  # imbalance, of what
    for size in sizes:
        table = ChunkTable.together(tables_of(size), weights)
        if strategy == "local" and hosts is not None:
            assignment = local_by_hosts(table, hosts, slack, cost)
        else:
            assignment = STRATEGIES[strategy](table, cp_size, slack, cost)
        imbalance = _imbalance(table, assignment)
        if least is None or imbalance < least[0]:
            least = (imbalance, size, assignment)
        if strategy not in BALANCED or imbalance <= 1 + BALANCE:
            break
    assert least is not None
    _, size, assignment = least
    chunks, tables = assignment.sort(1).values, tables_of(size)
    if strategy == "local":
        chunks = named_after_keys(chunks, tables, weights)
    return _dispatches(seqlen, chunks, tables)


def _tables(
    masks: Sequence[AttnSlices],
    size: int,
    chunks_per_rank: int,
    cp_size: int,
    held: Sequence[Placement | None] | None,
    multiple: int = 1,
) -> list[ChunkTable]:
    """The tables of all masks, with one object `Keys` for all that have the same keys."""
    known: dict[Any, Keys | None] = {}
    tables = []
    for mask, placement in zip(masks, held or [None] * len(masks), strict=True):
        kind = mask.seqlen_k if placement is None else placement
        if kind not in known:
            lengths = mask.seqlen_q, mask.seqlen_k
            known[kind] = keys_of(lengths, placement, cp_size, chunks_per_rank, multiple)
        tables.append(ChunkTable.of(mask, size, chunks_per_rank * cp_size, known[kind]))
    return tables


def _dispatches(total: int, chunks: Tensor, tables: Sequence[ChunkTable]) -> list[Dispatch]:
    """The dispatches of all masks, for tokens placed by `chunks`."""
    placed: dict[int, Placement | None] = {}
    for table in tables:
        if id(table.keys) not in placed:
            alike = [x for x in tables if x.keys is table.keys]
            joined = ChunkTable.together(alike, [1] * len(alike))
            placed[id(table.keys)] = key_placement(joined, chunks)
    size = tables[0].chunk_size
    return [Dispatch(total, size, chunks, table, placed[id(table.keys)]) for table in tables]


def dispatch_as(
    masks: Sequence[AttnSlices],
    cp_size: int,
    permutation: Tensor | Placement,
    keys: Sequence[Placement | None] | None = None,
) -> list[Dispatch]:
    """The dispatch of tokens that lie somewhere already, for each mask over the sequence in its own order.
    `permutation` says which token lies where, int64 `[seqlen]` on the CPU, of which rank r holds the r-th of `cp_size`
    equal parts; or it is the placement of another plan, which may have padding. `keys` as in `dispatch_together`.
    Chunks are those of the placement, or as large as the stretches of ascending tokens allow.

    Raises ValueError if `permutation` is none, or has another length.
    """
    seqlen = check_masks(masks, [1] * len(masks))
    _check_keys(masks, cp_size, keys)
    if isinstance(permutation, Placement):
        if (permutation.total, permutation.cp_size) != (seqlen, cp_size):
            raise ValueError(
                f"`permutation` must be a plan of the {seqlen} tokens of the mask on {cp_size} ranks, got one of "
                f"{permutation.total} tokens on {permutation.cp_size}"
            )
        size, chunks = permutation.chunk_size, permutation.chunks
        return _dispatches(seqlen, chunks, _tables(masks, size, chunks.shape[1], cp_size, keys))
    if permutation.shape != (seqlen,) or seqlen % cp_size:
        raise ValueError(
            f"`permutation` must have the {seqlen} tokens of the mask, a multiple of the {cp_size} "
            f"ranks, got shape {list(permutation.shape)}"
        )
    ascending = permutation.sort().values
    is_wrong = ascending != torch.arange(seqlen, device="cpu")
    if bool(is_wrong.any()):
        first = int(is_wrong.nonzero()[0])
        raise ValueError(
            f"`permutation` must contain each of 0 ... S - 1 exactly once for S = {seqlen}, got "
            f"{int(ascending[first])} in place of {first} in ascending order"
        )
    begins = (permutation[1:] != permutation[:-1] + 1).nonzero().flatten() + 1
    borders = [seqlen // cp_size, int(permutation[0]), *begins.tolist()]
    size = math.gcd(*borders, *permutation[begins].tolist())
    chunks = permutation[::size].div(size, rounding_mode="floor").view(cp_size, -1)
    return _dispatches(seqlen, chunks, _tables(masks, size, chunks.shape[1], cp_size, keys))


def dispatch_packed(where: Dispatch, mask: Cover) -> tuple[Dispatch, AttnSlices]:
    """The dispatch of the rows of all batch entries of `mask`, one entry behind the other and each as `where` has it,
    and the mask over these."""
    batch, other = mask.entries.batch, where.other_keys
    packed = mask.packed(where.total_padded, where.keys.total_padded)
    rows = where.repeated(batch)
    keys = None if other is None else other.repeated(batch)
    held = None if keys is None else Keys(keys, is_free=False)
    table = ChunkTable.of(packed, rows.chunk_size, rows.chunks.numel(), held)
    return Dispatch(rows.total, rows.chunk_size, rows.chunks, table, keys, batch), packed


def check_strategy(strategy: Any) -> None:
    if not isinstance(strategy, str):
        raise TypeError(f"`strategy` must be a name, got {strategy!r}")
    if strategy not in STRATEGIES:
        raise ValueError(f"`strategy` must be one of {', '.join(STRATEGIES)}, got {strategy!r}")


def check_masks(masks: Sequence[AttnSlices], weights: Sequence[int]) -> int:
    """The length of the sequence that all masks are of."""
    for mask in masks:
        _check_slices(mask)
    if not masks:
        raise ValueError("`masks` must hold at least one mask, got none")
    lengths = [mask.seqlen_q for mask in masks]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"`masks` must have the same length, got {lengths}; masks of other queries have a plan of their own"
        )
    if len(weights) != len(masks):
        raise ValueError(
            f"`weights` must have an entry for each of the {len(masks)} masks, got {len(weights)}"
        )
    for weight in weights:
        check_count("weights", weight, 1)
    return lengths[0]


def _check_keys(
    masks: Sequence[AttnSlices], cp_size: int, keys: Sequence[Placement | None] | None
) -> None:
    if keys is None:
        return
    if len(keys) != len(masks):
        raise ValueError(
            f"`keys` must have an entry for each of the {len(masks)} masks, got {len(keys)}"
        )
    for mask, placement in zip(masks, keys, strict=True):
        if placement is None:
            continue
        if (placement.total, placement.cp_size) != (mask.seqlen_k, cp_size):
            raise ValueError(
                f"`keys` must hold the {mask.seqlen_k} keys of the mask on {cp_size} ranks, got {placement.total} "
                f"tokens on {placement.cp_size}"
            )


def _check_slices(slices: AttnSlices) -> None:
    if not isinstance(slices, AttnSlices):
        raise TypeError(
            f"`slices` must be AttnSlices, got {type(slices).__name__}; make them of document borders "
            "(AttnSlices.from_cu_seqlens), of ranges (AttnSlices.from_slices) or of a BlockMask "
            "(magi_compile.masks.slices_from_block_mask)"
        )


def _chunk_sizes(seqlen: int, cp_size: int, area_of: Callable[[int], Tensor]) -> list[int]:
    """The sizes to try, largest first: that of `choose_chunk_size`, and what is left down to a quarter of it."""
    first = CHUNK_SIZES.index(choose_chunk_size(seqlen, cp_size, area_of))
    return list(CHUNK_SIZES[first : first + 3])


def choose_chunk_size(seqlen: int, cp_size: int, area_of: Callable[[int], Tensor]) -> int:
    """The largest chunk size that leaves the balance enough freedom, as a rule; `area_of(size)` are the areas of such
    chunks.

    Above 512 tokens every rank must hold at least 16 chunks, none of which weighs more than a quarter of a rank's
    share; below, 8 chunks are enough. Sequences too short for that get the smallest size, with fewer chunks.
    """
    for chunk_size in CHUNK_SIZES:
        per_rank = -(-seqlen // (chunk_size * cp_size))
        if per_rank < (16 if chunk_size > 512 else 8):
            continue
        if chunk_size <= 512:
            return chunk_size
        area = area_of(chunk_size)
        if int(area.max()) * 4 * cp_size <= int(area.sum()):
            return chunk_size
    return CHUNK_SIZES[-1]


# Strategies


def sequential(table: ChunkTable, cp_size: int, slack: float, cost: CostModel) -> Tensor:
    return torch.arange(table.num_chunks, device="cpu").view(cp_size, -1)


def zigzag(table: ChunkTable, cp_size: int, slack: float, cost: CostModel) -> Tensor:
    per_rank = table.num_chunks // cp_size
    head = per_rank // 2  # from the front; the rest of every rank from the back, in reverse order
    chunks = torch.arange(table.num_chunks, device="cpu")
    front = chunks[: head * cp_size].view(cp_size, head)
    back = chunks[head * cp_size :].view(cp_size, per_rank - head).flip(0)
    return torch.cat([front, back], 1)


def min_heap(table: ChunkTable, cp_size: int, slack: float, cost: CostModel) -> Tensor:
    per_rank = table.num_chunks // cp_size
    area = table.area.tolist()
    heap = [(0, rank) for rank in range(cp_size)]
    assignment: Assignment = [[] for _ in range(cp_size)]
    for chunk in sorted(range(len(area)), key=lambda i: -area[i]):
        load, rank = heapq.heappop(heap)
        assignment[rank].append(chunk)
        if len(assignment[rank]) < per_rank:
            heapq.heappush(heap, (load + area[chunk], rank))
    return tensor_of(assignment)


def local(table: ChunkTable, cp_size: int, slack: float, cost: CostModel) -> Tensor:
    """The simplest placement that is balanced, or else the best of ours, min_heap and a contiguous one: least
    `RankLoads.seconds`, and of those within `TIE` of it the one with the least traffic."""
    for simple in (sequential, zigzag):
        assignment = simple(table, cp_size, slack, cost)
        if _imbalance(table, assignment) <= 1 + slack:
            return assignment
    packed = tensor_of(repair(pack(table, cp_size, slack), table, slack))
    candidates = [packed]
    if _imbalance(table, packed) > 1 + max(slack, TIE):
        candidates.append(min_heap(table, cp_size, slack, cost))
    # A contiguous placement can only win where an all-gather takes longer than its compute.
    num_keys = table.total if table.keys is None else table.keys.placement.total_padded
    all_gather = (num_keys - num_keys // cp_size) * cost.seconds_per_row
    if int(table.area.view(cp_size, -1).sum(1).max()) * cost.seconds_per_area < all_gather:
        candidates.append(sequential(table, cp_size, slack, cost))
    if len(candidates) == 1:
        return packed
    loads = cache(lambda i: rank_loads(table, candidates[i], key_placement(table, candidates[i])))

    def seconds_of(i: int) -> float:
        # Nobody moves more than in an all-gather.
        compute = int(table.area[candidates[i]].sum(1).max()) * cost.seconds_per_area
        return compute if compute >= all_gather else loads(i).seconds(cost)

    seconds = [seconds_of(i) for i in range(len(candidates))]
    good = [i for i in range(len(candidates)) if seconds[i] <= min(seconds) * (1 + TIE)]
    if len(good) == 1:
        return candidates[good[0]]
    return candidates[min(good, key=lambda i: (int(loads(i).recv_rows.sum()), seconds[i]))]


def _imbalance(table: ChunkTable, assignment: Tensor) -> float:
    loads = pick(table.area, assignment.flatten()).view(assignment.shape).sum(1).tolist()
    return max(loads) * len(loads) / max(sum(loads), 1)


def local_by_hosts(
    table: ChunkTable, hosts: Sequence[int], slack: float, cost: CostModel
) -> Tensor:
    """`local` on hosts, and on the ranks of each, so that fewer rows cross hosts. `local` on all ranks where that is
    predicted to be faster or, within `TIE`, crosses less, where hosts have different numbers of ranks, and where keys
    are others."""
    flat = local(table, len(hosts), slack, cost)
    members = [[rank for rank, x in enumerate(hosts) if x == host] for host in sorted({*hosts})]
    size = len(members[0])
    if table.keys is not None or any(len(x) != size for x in members):
        return flat
    far = replace(cost, seconds_per_row=cost.seconds_per_row * cost.other_host_factor)
    # Balanced within half the slack each, which is the slack together.
    groups = local(table, len(members), slack / 2, far).sort(1).values
    found = torch.empty_like(flat)
    for ranks, chunks in zip(members, groups, strict=True):
        found[ranks] = chunks[local(table.part(chunks), size, slack / 2, cost)]
    if _imbalance(table, found) > 1 + slack:  # a host's chunks alone are too few
        found = tensor_of(repair(found.tolist(), table, slack))

    def cost_of(assignment: Tensor) -> tuple[float, int]:
        """Seconds, and the most rows that cross from or to a host, each once."""
        of_hosts = torch.stack([assignment[ranks].flatten() for ranks in members])
        crossing = rank_loads(table, of_hosts)
        rows = int(torch.maximum(crossing.recv_rows, crossing.send_rows).max())
        seconds = rank_loads(table, assignment).seconds(cost)
        return max(seconds, rows / size * far.seconds_per_row), rows

    (seconds, rows), (flat_seconds, flat_rows) = map(cost_of, (found, flat))
    is_tie = seconds <= flat_seconds * (1 + TIE) and rows < flat_rows
    return found if is_tie or seconds * (1 + TIE) < flat_seconds else flat


Strategy = Callable[[ChunkTable, int, float, CostModel], Tensor]

StrategyName: TypeAlias = Literal["sequential", "zigzag", "min_heap", "local"]
STRATEGIES: Mapping[str, Strategy] = {
    "sequential": sequential,
    "zigzag": zigzag,
    "min_heap": min_heap,
    "local": local,
}

#: Those that look at the mask.
BALANCED = ("min_heap", "local")
