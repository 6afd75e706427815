"""Attention by scores that exist in memory, as the CPU kernel has them with a soft-cap,
a score program or a wish for the largest ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.kernels.base import AttnProblem


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
