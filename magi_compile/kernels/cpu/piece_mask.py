"""The mask of a piece, as tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.cpu.pieces import Piece, additive_mask, shown_by_bits


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
