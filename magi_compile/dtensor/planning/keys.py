"""Keys that are a sequence of their own (cross attention): how they are cut, and which rank holds which.

Every rank holds as many keys as the others, and of those the ones that its queries see, so that little travels. Where
several ranks see a chunk alike, each holds its share of such chunks, so that none has to send them all. Where keys lie
already, ranks of queries, which are all alike, are named after the keys that they see.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from magi_compile.dtensor.planning.chunks import ChunkTable, Keys, Placement
from magi_compile.dtensor.planning.ranges import group, pick

#: Chunks of keys on a rank, at least, where there are so many keys.
KEY_CHUNKS = 16


def cut_keys(total: int, cp_size: int, chunks_per_rank: int, multiple: int = 1) -> Placement:
    """`total` keys in chunks of equal size, a multiple of `multiple`, in order, equally many on each rank: as many as
    queries have, or more."""
    size = max(total // (cp_size * max(chunks_per_rank, KEY_CHUNKS)), 1)
    size = -(-size // multiple) * multiple
    per_rank = max(-(-total // (size * cp_size)), 1)
    return Placement(
        total, size, torch.arange(cp_size * per_rank, device="cpu").view(cp_size, per_rank)
    )


def key_placement(table: ChunkTable, chunks: Tensor) -> Placement | None:
    """Who holds the keys of `table` where `chunks [cp_size, chunks_per_rank]` says who holds the rows;
    None for self-attention."""
    if table.keys is None:
        return None
    if not table.keys.is_free:
        return table.keys.placement
    return _placed(_wanted(table, chunks, table.keys.placement), table.keys.placement)


def _wanted(table: ChunkTable, chunks: Tensor, keys: Placement) -> Tensor:
    """The number of keys of each chunk that each rank sees, int64 `[cp_size, num_key_chunks]`."""
    rank = Placement(table.total, table.chunk_size, chunks).rank_of_chunk()
    pieces, chunk = table.needs_of_ranks(rank, keys)
    num_chunks = keys.chunks.numel()
    wanted = torch.zeros(len(chunks) * num_chunks, dtype=torch.int64, device="cpu")
    wanted.index_add_(0, pieces.owner * num_chunks + chunk, pieces.hi - pieces.lo)
    return wanted.view(len(chunks), num_chunks)


def _placed(wanted: Tensor, keys: Placement) -> Placement:
    """Each chunk on the rank that sees most of it and has room;
    of chunks that want one rank the ones of which it sees most."""
    cp_size, num_chunks = wanted.shape
    # Among ranks that see as much of a chunk, the one whose turn it is: all are to send equally many rows.
    sent = wanted.sum(0)
    turn = (2 * sent.cumsum(0) - sent) * cp_size // max(2 * int(sent.sum()), 1)
    from_turn = (torch.arange(cp_size, device="cpu")[:, None] - turn.clamp(max=cp_size - 1)).abs()
    score = wanted * (2 * cp_size) - from_turn
    full_up = -2 * cp_size
    room = torch.full((cp_size,), num_chunks // cp_size, device="cpu")
    holder = torch.empty(num_chunks, dtype=torch.int64, device="cpu")
    left = torch.arange(num_chunks, device="cpu")
    while len(left):
        best, rank = score[:, left].masked_fill((room == 0)[:, None], full_up).max(0)
        order = best.argsort(descending=True, stable=True)
        order = pick(order, pick(rank, order).argsort(stable=True))
        rank = pick(rank, order)
        first, last = group(rank[1:] != rank[:-1], len(rank))
        number = torch.arange(len(rank), device="cpu") - first.repeat_interleave(last - first + 1)
        is_taken = number < pick(room, rank)
        holder[pick(left, order[is_taken])] = rank[is_taken]
        room -= torch.bincount(rank[is_taken], minlength=cp_size)
        left = pick(left, order[~is_taken].sort().values)
    chunks = holder.argsort(stable=True).view(cp_size, -1)
    return Placement(keys.total, keys.chunk_size, chunks)


def named_after_keys(
    chunks: Tensor, tables: Sequence[ChunkTable], weights: Sequence[int]
) -> Tensor:
    """`chunks [cp_size, chunks_per_rank]` with ranks in another order,
    so that each holds what it sees of the keys that lie already."""
    cp_size = len(chunks)
    # Keys that a rank sees, by holder.
    held = torch.zeros(cp_size, cp_size, dtype=torch.int64, device="cpu")
    for table, weight in zip(tables, weights, strict=True):
        if table.keys is not None and not table.keys.is_free:
            keys = table.keys.placement
            held.index_add_(1, keys.rank_of_chunk(), weight * _wanted(table, chunks, keys))
    if not bool(held.any()):
        return chunks
    # Pairs from most keys to fewest; among equal ones those that change no name.
    pairs = (2 * held + torch.eye(cp_size, dtype=torch.int64, device="cpu")).flatten()
    name_of: dict[int, int] = {}
    is_given = [False] * cp_size
    for pair in pairs.argsort(descending=True, stable=True).tolist():
        rank, name = divmod(pair, cp_size)
        if rank not in name_of and not is_given[name]:
            name_of[rank], is_given[name] = name, True
    named = torch.empty_like(chunks)
    named[torch.tensor([name_of[rank] for rank in range(cp_size)], device="cpu")] = chunks
    return named


def keys_of(
    lengths: tuple[int, int],
    held: Placement | None,
    cp_size: int,
    chunks_per_rank: int,
    multiple: int = 1,
) -> Keys | None:
    """The keys of a mask with `lengths` of queries and keys, by `cut_keys` unless they are held; None where they are
    the rows themselves."""
    if held is not None:
        return Keys(held, is_free=False)
    if lengths[0] == lengths[1]:
        return None
    return Keys(cut_keys(lengths[1], cp_size, chunks_per_rank, multiple), is_free=True)
