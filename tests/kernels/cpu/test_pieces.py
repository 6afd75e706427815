"""The pieces of a mask cover it exactly once, and are few."""

from collections import Counter

import pytest
import torch

from magi_compile.kernels.cpu import pieces as cpu_pieces
from magi_compile.kernels.cpu.pieces import Piece, additive_mask, cut, plan_pieces
from magi_compile.masks.slices import MaskType
from tests.support.cases import MASKS, Case, one, random_disjoint, sliding_window, varlen


def pieces_of(case: Case) -> list[Piece]:
    return [Piece(*row) for row in plan_pieces(case.slices()).tolist()]


def visible(piece: Piece, case: Case) -> torch.Tensor:
    row = torch.arange(case.seqlen_q)[:, None]
    col = torch.arange(case.seqlen_k)
    inside = (row >= piece.q_begin) & (row < piece.q_end)
    inside = inside & (col >= piece.k_begin) & (col < piece.k_end)
    return inside & (col >= row + piece.diag_lo) & (col < row + piece.diag_hi)


def covered(pieces: list[Piece], case: Case) -> torch.Tensor:
    total = torch.zeros(case.seqlen_q, case.seqlen_k, dtype=torch.int32)
    for piece in pieces:
        total += visible(piece, case)
    return total


@pytest.mark.parametrize("case", MASKS, ids=lambda case: case.id)
def test_cover_the_mask_once(case):
    assert torch.equal(covered(pieces_of(case), case), case.slices().to_dense().int())


@pytest.mark.parametrize("mask_type", list(MaskType), ids=lambda t: t.name)
def test_cover_the_mask_once_where_blocks_are_wide(mask_type, monkeypatch):
    monkeypatch.setattr(cpu_pieces, "MAX_MASKED_KEYS", 600)
    case = one(mask_type, 300, 1521)
    pieces = pieces_of(case)
    assert torch.equal(covered(pieces, case), case.slices().to_dense().int())
    masked = [p for p in pieces if (p.cuts_lower or p.cuts_upper) and not p.is_causal]
    assert all(piece.k_end - piece.k_begin <= 600 for piece in masked)


@pytest.mark.parametrize("case", MASKS, ids=lambda case: case.id)
def test_every_row_of_a_piece_sees_a_key(case):
    """The op behind a piece gives a wrong lse otherwise."""
    for piece in pieces_of(case):
        assert visible(piece, case)[piece.rows].any(1).all()


@pytest.mark.parametrize("case", MASKS, ids=lambda case: case.id)
def test_is_first(case):
    rows_seen = torch.zeros(case.seqlen_q, dtype=torch.bool)
    for piece in pieces_of(case):
        assert not (piece.is_first and rows_seen[piece.rows].any())
        rows_seen[piece.rows] = True


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        (one(MaskType.FULL, 1000), {"full": 1}),
        (one(MaskType.CAUSAL, 1000), {"causal": 1}),
        (one(MaskType.CAUSAL, 700, 1000), {"full": 1, "causal": 1}),
        (one(MaskType.CAUSAL, 1000, 700), {"causal": 1}),
        (varlen("documents", [1, 63, 200], MaskType.CAUSAL), {"full": 1, "causal": 2}),
        (sliding_window(2000, 500), {"causal": 1, "masked": 6}),
        (one(MaskType.INV_CAUSAL, 512), {"masked": 2}),
        (one(MaskType.BI_CAUSAL, 100, 60), {}),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_few_pieces(case, kinds):
    def kind(piece: Piece) -> str:
        if piece.is_causal and piece.q_end - piece.q_begin > 1:
            return "causal"
        return "masked" if piece.cuts_lower or piece.cuts_upper else "full"

    assert Counter(kind(piece) for piece in pieces_of(case)) == kinds


def test_cut_covers_the_piece_with_small_tiles():
    case = random_disjoint(257, 391, seed=1)
    for piece in pieces_of(case):
        tiles = list(cut(piece, max_rows=50, max_keys=70))
        assert all(t.q_end - t.q_begin <= 50 and t.k_end - t.k_begin <= 70 for t in tiles)
        assert all(visible(tile, case).any() for tile in tiles)
        assert torch.equal(covered(tiles, case), visible(piece, case).int())


def test_additive_mask():
    mask = additive_mask(3, 5, -1, 2, torch.bfloat16)
    inf = torch.inf
    expected = [[0, 0, -inf, -inf, -inf], [0, 0, 0, -inf, -inf], [-inf, 0, 0, 0, -inf]]
    assert torch.equal(mask, torch.tensor(expected, dtype=torch.bfloat16))
