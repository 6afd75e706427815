"""Attention by scores that exist in memory, as the CPU kernel has them with a soft-cap, a score program or a wish for
the largest ones; and score programs on tiles of the score matrix."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.kernels.base import AttnProblem, Saved
from magi_compile.kernels.cpu.pieces import PieceMask
from magi_compile.score.evaluate import Tile
from magi_compile.score.program import ScoreCall


class Partial(NamedTuple):
    """The results of a piece of the mask: `[nheads_kv, qhead_per_kvhead, rows, head_dim_v]` and, of the others, without
    the last dimension."""

    out: Tensor
    lse: Tensor
    max_scores: Tensor | None = None  # where the problem asks for them


def attention_of_scores(scores: Tensor, v: Tensor, problem: AttnProblem) -> Partial:
    """The attention of fp32 scores, -inf where nothing is visible."""
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return Partial(p @ v.float(), lse, scores.amax(-1) if problem.has_max_scores else None)


class ScoredTiles:
    """One pass of attention with a score program, tile by tile. Tensors are
    `[nheads_kv, qhead_per_kvhead, seqlen, head_dim]`.

    Gradients of captured tensors are added to `score.sums`.
    """

    def __init__(self, score: ScoreCall, problem: AttnProblem):
        self.score, self.problem = score, problem
        self.tables = [table.detach() for table in score.tables]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: PieceMask) -> Partial:
        """The attention of a tile."""
        scores = self._scores(self._tile(q.float(), k.float(), mask))
        return attention_of_scores(scores.view(*q.shape[:3], -1), v, self.problem)

    def backward(
        self, dout: Tensor, saved: Saved, mask: PieceMask
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv of a tile, whose rows may see more keys than these."""
        q, k, v, out, lse = saved
        tile, visible = self._tile(q, k, mask), mask.visible
        shape = (*q.shape[:3], k.shape[2])
        lse = lse.masked_fill(lse == -torch.inf, 0.0)[..., None]
        p = self._shown(torch.exp(self._scores(tile).view(shape) - lse), visible)
        delta = (dout * out).sum(-1, keepdim=True)
        gradient = p * (dout @ v.mT - delta)
        grid = gradient.flatten(0, 1)
        dscores = torch.zeros_like(gradient)
        slope = tile.run("d_score", g=grid)
        if slope is not None:
            dscores = self._shown(slope.float().expand(grid.shape).view(shape), visible)
            dscores = dscores * self.problem.softmax_scale
        for look in self.score.program.looks:
            part = tile.run(look.derivative, g=grid) if look.table in self.score.sums else None
            if part is not None:
                part = self._shown(part.expand(grid.shape), visible)
                tile.add_gradient(look, part, self.score.sums[look.table])
        return dscores @ k, dscores.mT @ q, p.mT @ dout

    def _tile(self, q: Tensor, k: Tensor, mask: PieceMask) -> Tile:
        score, nheads, piece = self.score, self.problem.nheads_q, mask.piece
        rows = torch.arange(piece.q_begin, piece.q_end, dtype=torch.int32, device="cpu")[:, None]
        keys = torch.arange(piece.k_begin, piece.k_end, dtype=torch.int32, device="cpu")
        b, head, query = score.entry(rows)
        if score.nheads == 1:
            head = torch.arange(nheads, dtype=torch.int32, device="cpu")[:, None, None]
        index = {"b": b, "h": head, "q": query, "kv": (keys % score.seqlen_k)[None]}
        values = {
            "score": (q @ k.mT * self.problem.softmax_scale).flatten(0, 1),
            **{name: x if x.dim() == 3 else x[None] for name, x in index.items()},
            **{f"s{i}": symbol for i, symbol in enumerate(score.symbols)},
        }
        return Tile(score.program, self.tables, values, mask.visible)

    def _scores(self, tile: Tile) -> Tensor:
        """The new scores, fp32 `[nheads_q, rows, keys]`, -inf where nothing is visible."""
        scores = tile.run("score")
        assert scores is not None
        scores = scores.float().expand(tile.values["score"].shape)
        if tile.visible is None:
            return scores.contiguous()
        return torch.where(tile.visible, scores, -torch.inf)

    @staticmethod
    def _shown(x: Tensor, visible: Tensor | None) -> Tensor:
        return x if visible is None else torch.where(visible, x, 0.0)
