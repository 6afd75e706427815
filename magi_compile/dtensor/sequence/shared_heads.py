"""Ranks that share heads: each gets the rows of all ranks of its group for its share of the heads, and the output goes
back. An op, `magi::cp_share_heads`, whose gradient is the way back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from magi_compile import _compat
from magi_compile.ops.define import define

_lib = torch.library.Library("magi", "FRAGMENT")


def share_heads(x: Tensor, batch: int, group_name: str) -> Tensor:
    """The rows of all ranks by a rank's share of the heads.

    Args:
        x: `[rows, batch * heads, D]`, of this rank; the ranks of the group divide the heads.
        batch: entries of a batch among the heads.
        group_name: of the ranks that share heads.

    Returns:
        `[ranks * rows, batch * heads / ranks, D]`, rows in the order of ranks.
    """
    return torch.ops.magi.cp_share_heads(x, batch, group_name, False)  # type: ignore[no-any-return]


def give_back(x: Tensor, batch: int, group_name: str) -> Tensor:
    """The inverse of `share_heads`, with its arguments."""
    return torch.ops.magi.cp_share_heads(x, batch, group_name, True)  # type: ignore[no-any-return]


def _exchange(x: Tensor, batch: int, group_name: str, is_back: bool) -> Tensor:
    group = _compat.resolve_process_group(group_name)
    size, values = group.size(), x.shape[2]
    if is_back:
        heads = x.shape[1] // batch
        sent = x.unflatten(0, (size, -1))
    else:
        heads = x.shape[1] // (batch * size)
        sent = x.view(-1, batch, size, heads, values).permute(2, 0, 1, 3, 4)
    # As bytes, which every backend moves.
    sent = sent.contiguous().view(torch.uint8)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    received = received.view(x.dtype).view(size, -1, batch, heads, values)
    if is_back:
        return received.permute(1, 2, 0, 3, 4).reshape(-1, batch * size * heads, values)
    return received.view(-1, batch * heads, values)


def _fake(x: Tensor, batch: int, group_name: str, is_back: bool) -> Tensor:
    size = _compat.resolve_process_group(group_name).size()
    rows, heads, values = x.shape
    shape = (rows // size, heads * size) if is_back else (rows * size, heads // size)
    return x.new_empty(*shape, values)


define(
    _lib,
    "cp_share_heads(Tensor x, SymInt batch, str group_name, bool is_back) -> Tensor",
    _exchange,
    _fake,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.rest = inputs


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    batch, group_name, is_back = ctx.rest
    return torch.ops.magi.cp_share_heads(gradient, batch, group_name, not is_back), None, None, None


torch.library.register_autograd(
    "magi::cp_share_heads", _backward, setup_context=_setup_context, lib=_lib
)
