"""A second opinion on a converted mask: the mask_mod's own graph, asked at points.

Whatever the solver made of a mask, intervals and slices have to show what the mask_mod shows. Here both are evaluated
at a few thousand points (b, h, q, kv): random ones, ones beside the edges of slices, ones beside the edges of blocks.
All on the tensors' device; on a GPU nothing waits for it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile._checks import MaskCheck, first_of
from magi_compile.functions.text import at_points, names_of_captures
from magi_compile.masks.bits import BLOCK as BIT_BLOCK
from magi_compile.masks.bits import FIRST_BITS
from magi_compile.masks.evaluation.bit_blocks import Listed
from magi_compile.masks.evaluation.block_table import BlockTable
from magi_compile.masks.evaluation.row_intervals import RowIntervals
from magi_compile.masks.evaluation.sizes import MaskSizes
from magi_compile.masks.program.program import MaskProgram
from magi_compile.masks.slices import AttnSlices

# Texts of the programs that were verified: once in a process is enough, unless a user asks for more.
_verified: set[str] = set()
MAX_VERIFIED = 1 << 16
NUM_POINTS = 4096
MAX_PAIRS = 2**24  # of points and slices
BLOCK = 64  # edges of the blocks of all kernels are multiples of it


class Points(NamedTuple):
    """Pairs of the mask, int64 `[num_points]` each; an entry is a batch entry, or a head of one: see `MaskSizes`."""

    entry: Tensor
    q: Tensor
    kv: Tensor


def is_verified(program: str) -> bool:
    """True if the program of this text has passed in this process."""
    return program in _verified


def remember(program: str) -> None:
    """The program of this text has passed."""
    if len(_verified) < MAX_VERIFIED:
        _verified.add(program)


def random_points(count: int, sizes: MaskSizes, device: torch.device) -> Points:
    """Points anywhere, every other one beside an edge of blocks."""
    lengths = (sizes.entries, sizes.seqlen_q, sizes.seqlen_k)
    entry, q, kv = (_below(count, size, device) for size in lengths)
    is_edge = torch.arange(count, device=device) % 2 == 0
    q, kv = (
        torch.where(is_edge, x // BLOCK * BLOCK - (x & 1), x).clamp(0, size - 1)
        for x, size in ((q, sizes.seqlen_q), (kv, sizes.seqlen_k))
    )
    return Points(entry, q, kv)


def points_of_slices(count: int, lists: Sequence[Tensor], sizes: MaskSizes) -> Points:
    """Points beside the edges of slices: the first row, the last one or any, and the keys at its ends."""
    q_ranges, k_ranges, mask_types = (x.long() for x in lists)
    device = q_ranges.device
    number = (q_ranges[:, 0] < q_ranges[:, 1]).cumsum(0)
    wanted = _random(count, device) % number[-1].clamp(min=1) + 1
    place = torch.searchsorted(number, wanted).clamp(max=len(number) - 1)
    (begin, end), (first, last), kind = (
        q_ranges[place].unbind(-1),
        k_ranges[place].unbind(-1),
        mask_types[place],
    )
    inside = begin + _random(count, device) % (end - begin).clamp(min=1)
    row = torch.stack([begin, end - 1, inside])[
        _below(count, 3, device), torch.arange(count, device=device)
    ]
    lo = first + torch.where(kind >= 2, row - begin, 0)
    hi = last - torch.where(kind % 2 == 1, end - 1 - row, 0)
    key = torch.where(_below(count, 2, device) == 0, lo, hi) - _below(count, 2, device)
    entry = (row // sizes.seqlen_q).clamp(0, sizes.entries - 1)
    q = (row - entry * sizes.seqlen_q).clamp(0, sizes.seqlen_q - 1)
    kv = key - entry // sizes.heads.group * sizes.seqlen_k
    return Points(entry, q, kv.clamp(0, sizes.seqlen_k - 1))


def points_of_intervals(count: int, intervals: RowIntervals, sizes: MaskSizes) -> Points:
    """Points beside the ends of a row's intervals, or of a key's."""
    device, sizes = intervals.lo.device, sizes.facing(intervals.by_keys)
    entry, q = (_below(count, size, device) for size in (sizes.entries, sizes.seqlen_q))
    ends = torch.stack([intervals.lo, intervals.hi])
    side, number = (_below(count, size, device) for size in ends.shape[:2])
    kv = ends[side, number, entry, q] - _below(count, 2, device)
    kv = kv.long().clamp(0, sizes.seqlen_k - 1)
    return Points(entry, kv, q) if intervals.by_keys else Points(entry, q, kv)


def joined(*points: Points) -> Points:
    return Points(*map(torch.cat, zip(*points, strict=True)))


def shown_by_slices(lists: Sequence[Tensor], points: Points, sizes: MaskSizes) -> Tensor:
    """The points that the slices show, bool `[num_points]`."""
    q_ranges, k_ranges, mask_types = lists
    row = (points.entry * sizes.seqlen_q + points.q).to(torch.int32)[:, None]
    key = points.entry // sizes.heads.group * sizes.seqlen_k + points.kv
    key = key.to(torch.int32)[:, None]
    lo = k_ranges[:, 0] + torch.where(mask_types >= 2, row - q_ranges[:, 0], 0)
    hi = k_ranges[:, 1] - torch.where(mask_types % 2 == 1, q_ranges[:, 1] - 1 - row, 0)
    is_inside = (row >= q_ranges[:, 0]) & (row < q_ranges[:, 1]) & (key >= lo) & (key < hi)
    return is_inside.any(1)


def check_slices(
    program: MaskProgram,
    tables: Sequence[Tensor],
    symbols: Sequence[int],
    lists: Sequence[Tensor],
    sizes: MaskSizes,
) -> list[MaskCheck]:
    """That the slices `(q_ranges, k_ranges, mask_types)` show what the mask_mod shows, at points."""
    if sizes.is_empty or not program.is_verifiable:
        return []
    count = max(64, min(NUM_POINTS, MAX_PAIRS // max(1, len(lists[2]))))
    device = lists[0].device
    points = joined(
        random_points(count // 2, sizes, device),
        points_of_slices(count - count // 2, lists, sizes),
    )
    shown = shown_by_slices(lists, points, sizes)
    return _checks(program, tables, symbols, points, shown, sizes.heads.q)


def check_intervals(
    program: MaskProgram, tables: Sequence[Tensor], symbols: Sequence[int], intervals: RowIntervals
) -> list[MaskCheck]:
    """The same of row intervals."""
    sizes = intervals.sizes
    if sizes.is_empty or not program.is_verifiable:
        return []
    device = intervals.lo.device
    points = joined(
        random_points(NUM_POINTS // 2, sizes, device),
        points_of_intervals(NUM_POINTS // 2, intervals, sizes),
    )
    row, key = (points.kv, points.q) if intervals.by_keys else (points.q, points.kv)
    lo, hi = (x[:, points.entry, row] for x in (intervals.lo, intervals.hi))
    shown = ((key >= lo) & (key < hi)).any(0)
    return _checks(program, tables, symbols, points, shown, sizes.heads.q)


def check_table(
    program: MaskProgram,
    tables: Sequence[Tensor],
    symbols: Sequence[int],
    table: BlockTable,
    intervals: RowIntervals | None,
    sizes: MaskSizes,
) -> list[MaskCheck]:
    """The same of a block table, and of the intervals beside it, if there are some."""
    if sizes.is_empty or not program.is_verifiable:
        return []
    points, heads = random_points(NUM_POINTS, sizes, table.listed.device), sizes.heads.q
    b, h = points.entry // heads, points.entry % heads
    place = [x.clamp(max=size - 1) for x, size in zip((b, h), table.listed.shape, strict=False)]
    place += [table.of_queries[b, points.q].long(), table.of_keys[b, points.kv].long()]
    shown = table.listed[tuple(place)]
    if intervals is not None:
        lo, hi = (x[:, b, points.q] for x in (intervals.lo, intervals.hi))
        shown = shown & ((points.kv >= lo) & (points.kv < hi)).any(0)
    return _checks(program, tables, symbols, points, shown, heads)


def check_bits(
    program: MaskProgram,
    tables: Sequence[Tensor],
    symbols: Sequence[int],
    slices: AttnSlices,
    sizes: MaskSizes,
    listed: Listed | None = None,
) -> list[MaskCheck]:
    """The same of slices of the blocks of a mask, of which the n-th may have bits, and in the blocks that are
    `listed`."""
    if not sizes.num_blocks or not program.is_verifiable:
        return []
    device = slices.mask_types.device
    points = random_points(NUM_POINTS, sizes, device)
    shown = shown_by_bits(slices, points, sizes)
    is_listed = None if listed is None else _are_listed(listed, points, sizes.heads.q)
    return _checks(program, tables, symbols, points, shown, sizes.heads.q, is_listed)


def _are_listed(listed: Listed, points: Points, heads: int) -> Tensor:
    b, h = points.entry // heads, points.entry % heads
    partial, full = listed.of_pairs(b, h, points.q[:, None], points.kv[:, None])
    return (partial | full).flatten()


def shown_by_bits(slices: AttnSlices, points: Points, sizes: MaskSizes) -> Tensor:
    """The points that such slices show, bool `[num_points]`."""
    assert slices.bits is not None
    line = points.entry * sizes.blocks_q + points.q // BIT_BLOCK
    number = line * sizes.blocks_k + points.kv // BIT_BLOCK
    mask_type, key = slices.mask_types[number].long(), points.kv % BIT_BLOCK
    block = (mask_type - FIRST_BITS).clamp(min=0)
    words = slices.bits[block, points.q % BIT_BLOCK, key // 32]
    is_whole = slices.q_ranges[number, 0] < slices.q_ranges[number, 1]
    return torch.where(mask_type >= FIRST_BITS, (words >> (key % 32)) & 1 != 0, is_whole)


def _checks(
    program: MaskProgram,
    tables: Sequence[Tensor],
    symbols: Sequence[int],
    points: Points,
    shown: Tensor,
    heads: int,
    is_listed: Tensor | None = None,
) -> list[MaskCheck]:
    named = names_of_captures(tables, symbols)
    b, h = points.entry // heads, points.entry % heads
    arguments = {"b": b, "h": h, "q": points.q, "kv": points.kv}
    names = [name for name in arguments if name != "h" or program.looks_at("h")]
    where = ", ".join(f"{name} = {{}}" for name in names)
    values = at_points(program.functions["mask"], arguments, named, program.names)
    wanted = (values != 0).expand_as(shown)
    if is_listed is not None:
        wanted = wanted & is_listed
    checks = []
    for is_wrong, mask_mod, slices in (
        (wanted & ~shown, "shows", "hide"),
        (shown & ~wanted, "hides", "show"),
    ):
        first = first_of(is_wrong)
        message = (
            f"magi_compile must convert the mask `{program}` exactly, and has not: this is a bug of "
            "ours, please report it; "
            "until it is mended, ask for FlexAttention with kernel_options={'BACKEND': 'TRITON'}"
        )
        detail = f"at {where} the mask_mod {mask_mod} what its slices {slices}"
        place = tuple(arguments[name][first] for name in names)
        checks.append(MaskCheck(~is_wrong.any(), f"{message} [{mask_mod}]", detail, place))
    return checks


def _below(count: int, size: int, device: torch.device) -> Tensor:
    return _random(count, device) % size


def _random(count: int, device: torch.device) -> Tensor:
    """Numbers from 0 up, others in each call, that PyTorch's generators know nothing of:
    those are the program's own."""
    salt = int.from_bytes(os.urandom(7), "little")
    x = torch.arange(count, device=device) * _ODD + salt
    for shift in (31, 29, 32):
        x = (x ^ (x >> shift)) * _ODD
    return (x ^ (x >> 31)) & (2**62 - 1)


_ODD = 0x1E3779B97F4A7C15
