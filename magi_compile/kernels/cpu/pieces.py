"""Cuts slices, for the CPU kernel, into pieces that are one call of PyTorch's flash attention each, and their masks.

That op knows rectangles, squares that are causal from their first row, and masks given as a tensor:

    FULL: 1 rectangle    CAUSAL: 1 rectangle      BI_CAUSAL (and INV_CAUSAL): blocks of rows with a mask
                         and 1 causal square
          # # # #               # #|# . .                # # # . . .
          # # # #               # #|# # .                . # # # . .
          # # # #               # #|# # #                ------------
                                                             # # # .
                                                             . # # #

Bit blocks that follow one another are a rectangle with a mask.

A piece is a rect of `masks/geometry.py` in Python's ints, as each is an own call: pieces are made of rects, and tensors
end here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.kernels.base import AttnProblem
from magi_compile.masks.bits import BLOCK, FIRST_BITS, unpack
from magi_compile.masks.geometry import NO_DIAG
from magi_compile.masks.slices import AttnSlices

# A block of rows with this many keys or fewer is one masked call; a longer one masks its edges only.
MAX_MASKED_KEYS = 4096


class Piece(NamedTuple):
    """Row r of `[q_begin, q_end)` sees the keys `max(k_begin, r + diag_lo) <= c < min(k_end, r + diag_hi)`, at least
    one. `is_first`: no piece before this one in the plan has any of its rows. Of one with bits, which are those of the
    blocks from `first_block` on, a row sees what these say, maybe nothing."""

    q_begin: int
    q_end: int
    k_begin: int
    k_end: int
    diag_lo: int = -NO_DIAG
    diag_hi: int = NO_DIAG
    is_first: bool = False
    first_block: int = -1

    @property
    def has_bits(self) -> bool:
        return self.first_block >= 0

    @property
    def rows(self) -> slice:
        return slice(self.q_begin, self.q_end)

    @property
    def keys(self) -> slice:
        return slice(self.k_begin, self.k_end)

    @property
    def cuts_lower(self) -> bool:
        """True if some row does not see the first key."""
        return self.q_end - 1 + self.diag_lo > self.k_begin

    @property
    def cuts_upper(self) -> bool:
        """True if some row does not see the last key."""
        return self.q_begin + self.diag_hi < self.k_end

    @property
    def is_causal(self) -> bool:
        """True if the piece is a square whose first row sees one key and whose last row sees all."""
        return (
            not self.cuts_lower
            and self.q_begin + self.diag_hi == self.k_begin + 1
            and self.q_end - self.q_begin == self.k_end - self.k_begin
        )


def plan_pieces(slices: AttnSlices) -> Tensor:
    """The pieces of `slices` in order of rows: int32 `[num_pieces, 8]`, the fields of `Piece`."""
    rects = slices.untrimmed_rects()
    number = torch.full_like(rects.row_begin, -1)
    if slices.bits is not None and len(slices):
        types = slices.mask_types.long()
        has_bits = types >= FIRST_BITS
        number = torch.where(has_bits, types - FIRST_BITS, -1)
        rects = rects._replace(
            diag_lo=torch.where(has_bits, -NO_DIAG, rects.diag_lo),
            diag_hi=torch.where(has_bits, NO_DIAG, rects.diag_hi),
        )
    rects = rects.trimmed()
    table = torch.stack([*rects, torch.zeros_like(number), number], 1)[rects.has_area()]
    pieces = [piece for row in table.tolist() for piece in _pieces(Piece(*row))]
    if slices.bits is not None:
        pieces = _joined_down(_joined_along(pieces))
    pieces.sort(key=lambda piece: (piece.q_begin, -piece.q_end, piece.k_begin))
    rows_seen = 0
    for i, piece in enumerate(pieces):
        pieces[i] = piece._replace(is_first=piece.q_begin >= rows_seen)
        rows_seen = max(rows_seen, piece.q_end)
    return torch.tensor(pieces, dtype=torch.int32, device="cpu").view(-1, len(Piece._fields))


def cut(piece: Piece, max_rows: int, max_keys: int) -> Iterator[Piece]:
    """`piece` in tiles of a bounded size, by rows; tiles in which no row sees a key are left out. In the others some
    rows may see none, unlike in a `Piece`."""
    for q_begin in range(piece.q_begin, piece.q_end, max_rows):
        q_end = min(q_begin + max_rows, piece.q_end)
        k_first = max(piece.k_begin, q_begin + piece.diag_lo)
        k_last = min(piece.k_end, q_end - 1 + piece.diag_hi)
        for k_begin in range(k_first, k_last, max_keys):
            k_end = min(k_begin + max_keys, k_last)
            yield Piece(q_begin, q_end, k_begin, k_end, piece.diag_lo, piece.diag_hi)


def _joined_along(pieces: list[Piece]) -> Iterator[Piece]:
    """The same pieces, where rectangles of the same rows that follow one another along the keys are one; of bit blocks
    as many as have a mask together."""
    last = None
    for piece in sorted(pieces, key=lambda piece: (piece.q_begin, piece.q_end, piece.k_begin)):
        if last is not None and _goes_on(last, piece):
            last = last._replace(k_end=piece.k_end)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _goes_on(left: Piece, right: Piece) -> bool:
    if left.rows != right.rows or left.k_end != right.k_begin or left.has_bits != right.has_bits:
        return False
    if not left.has_bits:
        return not (left.cuts_upper or right.cuts_lower or left.cuts_lower or right.cuts_upper)
    width = left.k_end - left.k_begin
    is_next = right.first_block == left.first_block + width // BLOCK
    return is_next and right.k_end - left.k_begin <= MAX_MASKED_KEYS


def _joined_down(pieces: Iterable[Piece]) -> list[Piece]:
    """The same pieces, where rectangles of the same keys that follow one another along the rows are one."""
    joined: list[Piece] = []
    latest: dict[tuple[int, int], int] = {}
    for piece in pieces:
        is_rectangle = not (piece.has_bits or piece.cuts_lower or piece.cuts_upper)
        place = latest.get((piece.k_begin, piece.k_end)) if is_rectangle else None
        if place is not None and joined[place].q_end == piece.q_begin:
            joined[place] = joined[place]._replace(q_end=piece.q_end)
            continue
        if is_rectangle:
            latest[piece.k_begin, piece.k_end] = len(joined)
        joined.append(piece)
    return joined


def shown_by_bits(piece: Piece, bits: Tensor) -> Tensor:
    """The visible keys for the rows of a piece with bits: bool `[rows, keys]`."""
    num_rows, num_keys = piece.q_end - piece.q_begin, piece.k_end - piece.k_begin
    last = piece.first_block + -(-num_keys // BLOCK)
    blocks = unpack(bits[piece.first_block : last, :num_rows])
    return blocks.transpose(0, 1).flatten(1)[:, :num_keys]


@lru_cache(maxsize=8)
def additive_mask(
    seqlen_q: int, seqlen_k: int, diag_lo: int, diag_hi: int, dtype: torch.dtype
) -> Tensor:
    """0 where `r + diag_lo <= c < r + diag_hi` and -inf elsewhere: `[seqlen_q, seqlen_k]`. Not to be written to."""
    offset = torch.arange(seqlen_k, device="cpu") - torch.arange(seqlen_q, device="cpu")[:, None]
    visible = (offset >= diag_lo) & (offset < diag_hi)
    return torch.where(visible, 0.0, -torch.inf).to(dtype)


def has_scores(problem: AttnProblem) -> bool:
    """True if scores exist in memory: PyTorch's flash attention has no soft-cap and no score programs, and does not
    tell the largest score."""
    return bool(problem.softcap) or problem.has_score or problem.has_max_scores


class PieceMask(NamedTuple):
    """The mask of a piece for PyTorch's flash attention: row r sees the keys up to r, or a bias for the scores."""

    piece: Piece
    is_causal: bool
    added: Tensor | None

    @classmethod
    def of(
        cls, piece: Piece, bits: Tensor | None, problem: AttnProblem, dtype: torch.dtype
    ) -> PieceMask:
        if piece.has_bits:
            assert bits is not None
            return cls(
                piece, False, torch.where(shown_by_bits(piece, bits), 0.0, -torch.inf).to(dtype)
            )
        if piece.is_causal and not has_scores(problem):
            return cls(piece, True, None)
        return cls(
            piece, False, _cut_corners(piece, torch.float32 if has_scores(problem) else dtype)
        )

    @property
    def visible(self) -> Tensor | None:
        """bool `[rows, keys]`; None where all is visible. Of one that is not causal."""
        return None if self.added is None else self.added == 0


def _cut_corners(piece: Piece, dtype: torch.dtype) -> Tensor | None:
    if not piece.cuts_lower and not piece.cuts_upper:
        return None
    seqlen_q, seqlen_k = piece.q_end - piece.q_begin, piece.k_end - piece.k_begin
    shift = piece.q_begin - piece.k_begin
    diag_lo = max(piece.diag_lo + shift, -seqlen_q)
    diag_hi = min(piece.diag_hi + shift, seqlen_k)
    return additive_mask(seqlen_q, seqlen_k, diag_lo, diag_hi, dtype)


def _pieces(rect: Piece) -> Iterator[Piece]:
    """A whole rect in pieces that PyTorch's flash attention knows."""
    if rect.diag_lo != -NO_DIAG:
        # Each block computes max_rows - 1 keys a row more than it needs, so short windows want short blocks.
        window = rect.diag_hi - rect.diag_lo
        yield from _masked_blocks(rect, max_rows=min(max(64, window // 2), 256))
    elif rect.diag_hi != NO_DIAG:
        split = rect.q_begin + rect.diag_hi - 1  # what all rows see ends in front of it
        if rect.k_begin < split:
            yield rect._replace(k_end=split, diag_hi=NO_DIAG)
        yield rect._replace(k_begin=split)
    else:
        yield rect


def _masked_blocks(band: Piece, max_rows: int) -> Iterator[Piece]:
    """A band in blocks of rows; where a block has many keys, the edges that need a mask are pieces of their own."""
    for block in cut(band, max_rows, max_keys=band.k_end - band.k_begin):
        q_begin, q_end, k_begin, k_end, *_ = block
        if k_end - k_begin <= MAX_MASKED_KEYS:
            yield block
            continue
        seqlen_q = q_end - q_begin
        if block.cuts_lower:
            yield Piece(q_begin, q_end, k_begin, k_begin + seqlen_q, diag_lo=band.diag_lo)
            k_begin += seqlen_q
        if block.cuts_upper:
            yield Piece(q_begin, q_end, k_end - seqlen_q, k_end, diag_hi=band.diag_hi)
            k_end -= seqlen_q
        yield Piece(q_begin, q_end, k_begin, k_end)
