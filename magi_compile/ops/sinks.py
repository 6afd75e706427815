"""Attention sinks: a learned score of each head that joins every softmax, with a value of 0.

The kernels know nothing of it: what they return without sinks, and the log-sum-exp, say what to keep.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from magi_compile.ops.validation import shown


def out_with_sinks(out: Tensor, lse: Tensor, sinks: Tensor, *, heads_first: bool) -> Tensor:
    """The output of attention with `sinks [nheads_q]`, -inf where a head has none, from that of attention without:
    `[rows, nheads_q, head_dim_v]`, or, with `heads_first`, `[..., nheads_q, rows, head_dim_v]`. `lse`, fp32 `[...,
    nheads_q, rows]`, is that without sinks, -inf for rows that see nothing."""
    lowest = torch.finfo(torch.float32).min  # -inf - -inf is not a number
    kept = torch.sigmoid(lse - sinks.float().clamp(min=lowest)[:, None])
    return (out * (kept if heads_first else kept.mT)[..., None]).to(out.dtype)


def lse_with_sinks(lse: Tensor, sinks: Tensor) -> Tensor:
    """The log-sum-exp of attention with sinks, from that of attention without: `[..., nheads_q, rows]`, fp32."""
    return torch.logaddexp(lse, sinks.float()[:, None])


def check_sinks(sinks: Any, q: Tensor) -> None:
    """Raises TypeError or ValueError if `sinks` are not one score for each head of `q`, packed."""
    if not isinstance(sinks, Tensor):
        raise TypeError(f"`sinks` must be a tensor or None, got {type(sinks).__name__}")
    if not sinks.is_floating_point():
        raise ValueError(f"`sinks` must be of a floating-point dtype, got {sinks.dtype}")
    if tuple(sinks.shape) != (q.shape[1],):
        raise ValueError(
            f"`sinks` must have one score for each head of `q`, [{shown(q.shape[1])}], got shape "
            f"{shown(sinks.shape)}"
        )
    if sinks.device != q.device:
        raise ValueError(f"`sinks` must be on the device of `q`, {q.device}, got {sinks.device}")
