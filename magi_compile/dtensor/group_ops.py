"""Group collectives as custom ops, for use on their own: with fakes and autograd, waiting for their result.

    group_cast    home rows to the buffers of the ranks that need them    [rows, ...] -> [num_received, ...]
    group_reduce  the same way back; what arrives for one row is summed   [num_received, ...] -> [rows, ...]
    group_merge   the same way back; partial attention results merge by lse

A cast and a reduce on one route are each other's gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from magi_compile import _compat
from magi_compile.dtensor import rows
from magi_compile.dtensor.all_to_all import Exchange
from magi_compile.dtensor.collectives import Route, select
from magi_compile.kernels.merge import merge_partials
from magi_compile.ops.define import define

_lib = torch.library.Library("magi", "FRAGMENT")
_routes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class RouteTensors(NamedTuple):
    """A route as the ops take it, see `Route.unpack`."""

    host: Tensor  # int64 on the CPU
    runs: Tensor  # int32 `[num_sends + num_recvs, 4]` on the device of the data
    num_rows: int  # home rows of this rank
    num_received: int  # rows of its buffer


def _unpack(host: Tensor, runs: Tensor, group: dist.ProcessGroup) -> Route:
    if host not in _routes:
        _routes[host] = Route.unpack(host.tolist(), runs, group.size())
    return _routes[host]


def _group_cast(
    x: Tensor,
    host: Tensor,
    runs: Tensor,
    num_rows: int,
    num_received: int,
    collective: str,
    group_name: str,
) -> Tensor:
    group = _compat.resolve_process_group(group_name)
    casts = select(collective, group, x.device).casts([x], [_unpack(host, runs, group)], group)
    (buffer,) = next(casts).wait()
    assert next(casts, None) is None
    return buffer.contiguous()


def _group_cast_fake(
    x: Tensor, host: Tensor, runs: Tensor, num_rows: int, num_received: int, *_: str
) -> Tensor:
    return x.new_empty(num_received, *x.shape[1:])


def _group_reduce(
    x: Tensor,
    host: Tensor,
    runs: Tensor,
    num_rows: int,
    num_received: int,
    collective: str,
    group_name: str,
) -> Tensor:
    group = _compat.resolve_process_group(group_name)
    route = _unpack(host, runs, group)
    total = x.new_empty(num_rows, *x.shape[1:])
    select(collective, group, x.device).start_reduce([x], route, group).write_sums([total])
    return total


def _group_reduce_fake(
    x: Tensor, host: Tensor, runs: Tensor, num_rows: int, num_received: int, *_: str
) -> Tensor:
    return x.new_empty(num_rows, *x.shape[1:])


def _group_merge(
    out: Tensor,
    lse: Tensor,
    host: Tensor,
    runs: Tensor,
    num_rows: int,
    num_received: int,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    group = _compat.resolve_process_group(group_name)
    route = _unpack(host, runs, group)
    sent = rows.rows_of(route.recvs[:, 1], route.recvs[:, 3], route.num_received)
    home = rows.rows_of(route.sends[:, 1], route.sends[:, 3], route.num_sent)
    arrived = [
        Exchange(rows.gather([x], sent), route.recv_counts, route.send_counts, group)
        for x in (out, lse)
    ]
    outs, lses = (x.wait() for x in arrived)
    outs = outs.unflatten(1, out.shape[1:])
    total = out.new_zeros(num_rows, *out.shape[1:], dtype=torch.float32)
    total_lse = lse.new_full((num_rows, lse.shape[1]), -torch.inf)
    blocks = (x.split(route.send_counts) for x in (home.long(), outs, lses))
    for index, part, part_lse in zip(*blocks, strict=True):
        total[index], total_lse[index] = merge_partials(
            (total[index], part), (total_lse[index], part_lse)
        )
    return total.to(out.dtype), total_lse


def _group_merge_fake(
    out: Tensor,
    lse: Tensor,
    host: Tensor,
    runs: Tensor,
    num_rows: int,
    num_received: int,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    return out.new_empty(num_rows, *out.shape[1:]), lse.new_empty(num_rows, *lse.shape[1:])


_ROUTE = "Tensor host, Tensor runs, SymInt num_rows, SymInt num_received"
define(
    _lib,
    f"group_cast(Tensor x, {_ROUTE}, str collective, str group_name) -> Tensor",
    _group_cast,
    _group_cast_fake,
)
define(
    _lib,
    f"group_reduce(Tensor x, {_ROUTE}, str collective, str group_name) -> Tensor",
    _group_reduce,
    _group_reduce_fake,
)
define(
    _lib,
    f"group_merge(Tensor out, Tensor lse, {_ROUTE}, str group_name) -> (Tensor, Tensor)",
    _group_merge,
    _group_merge_fake,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, host, runs, *ctx.options = inputs
    ctx.save_for_backward(host, runs)


def _cast_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dx = torch.ops.magi.group_reduce(grad.contiguous(), *ctx.saved_tensors, *ctx.options)
    return dx, *[None] * 6


def _reduce_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dx = torch.ops.magi.group_cast(grad.contiguous(), *ctx.saved_tensors, *ctx.options)
    return dx, *[None] * 6


def _merge_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out, lse, host, runs, *ctx.options = inputs
    ctx.save_for_backward(out, lse, *output, host, runs)


def _merge_backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    """With w = exp(lse_i - lse): dout_i = w dout, dlse_i = w (dlse + dout . (out_i - out))."""
    out, lse, total, total_lse, host, runs = ctx.saved_tensors
    num_rows, num_received, group_name = ctx.options
    delta = (dout.float() * total.float()).sum(-1)
    home = torch.cat([dout.float().flatten(1), total_lse, dlse - delta], 1)
    arrived = torch.ops.magi.group_cast(
        home, host, runs, num_rows, num_received, "all_to_all", group_name
    )
    width, heads = dout[0].numel(), lse.shape[1]
    part_dout, part_lse, part_dlse = arrived.split([width, heads, heads], 1)
    part_dout = part_dout.unflatten(1, dout.shape[1:])
    # A row that sees nothing anywhere has lse -inf on both sides and no weight.
    weight = torch.exp(lse - part_lse).masked_fill(lse == -torch.inf, 0.0)
    grad_out = (part_dout * weight[..., None]).to(out.dtype)
    grad_lse = weight * (part_dlse + (part_dout * out.float()).sum(-1))
    return grad_out, grad_lse, *[None] * 5


for _name, _backward, _setup_context in (
    ("group_cast", _cast_backward, _setup),
    ("group_reduce", _reduce_backward, _setup),
    ("group_merge", _merge_backward, _merge_setup),
):
    torch.library.register_autograd(
        f"magi::{_name}", _backward, setup_context=_setup_context, lib=_lib
    )


def group_cast(x: Tensor, route: RouteTensors, group_name: str, collective: str = "auto") -> Tensor:
    """Rows of every rank to the ranks that need them; differentiable.

    Args:
        x: `[num_rows, ...]`, this rank's rows.
        route: who sends what to whom.
        group_name: the process group.
        collective: a name in `collectives.COLLECTIVES`, or "auto".

    Returns:
        `[num_received, ...]`, dtype of `x`.
    """
    return torch.ops.magi.group_cast(x, *route, collective, group_name)


def group_reduce(
    x: Tensor, route: RouteTensors, group_name: str, collective: str = "auto"
) -> Tensor:
    """The way back of `group_cast` on the same route: what arrives for one row is summed in fp32; differentiable.

    Args:
        x: `[num_received, ...]`, in the layout of what `group_cast` returns.
        route: as in `group_cast`, like `group_name` and `collective`.
        group_name: see `route`.
        collective: see `route`.

    Returns:
        `[num_rows, ...]`, dtype of `x`; rows for which nothing arrives are 0.
    """
    return torch.ops.magi.group_reduce(x, *route, collective, group_name)


def group_merge(
    out: Tensor, lse: Tensor, route: RouteTensors, group_name: str
) -> tuple[Tensor, Tensor]:
    """The way back of `group_cast` for partial attention results, which merge by lse in fp32, over an all-to-all;
    differentiable.

    Args:
        out: `[num_received, nheads, head_dim_v]`, results over disjoint sets of keys.
        lse: fp32 `[num_received, nheads]`, natural log.
        route: as in `group_cast`, like `group_name`.
        group_name: see `route`.

    Returns:
        out `[num_rows, nheads, head_dim_v]` and lse `[num_rows, nheads]`; a row for which nothing arrives has
        out 0 and lse -inf.
    """
    return torch.ops.magi.group_merge(out, lse, *route, group_name)
