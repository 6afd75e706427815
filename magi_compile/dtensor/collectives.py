"""Group collectives: every rank gets exactly the rows it needs, and partial results go home.

    group_cast    rank r's rows `send_rows` go to the ranks that need them      [rows, ...] -> [buffer rows, ...]
    group_reduce  the same way back; what arrives for one row is summed         [buffer rows, ...] -> [rows, ...]
    group_merge   the same way back; partial attention results merge by lse

A route says who sends what: `send_rows` (local rows, ordered by receiver), `recv_rows` (where the arriving rows,
ordered by sender, go in the buffer) and `counts [2, cp_size]` on the CPU (rows sent to and received from each
rank). Rows are gathered, exchanged by one all-to-all and scattered; sums are fp32 whatever travels, and add up in
the order of ranks, so they are deterministic.

`start_cast` and `start_reduce` return at once, for the attention across ranks; the three custom ops wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from magi_compile import _compat
from magi_compile.kernels.merge import merge_partials


class Route(NamedTuple):
    """One rank's share of a collective; row tensors are int64, on the device of the data."""

    send_rows: Tensor
    recv_rows: Tensor
    send_counts: list[int]
    recv_counts: list[int]


class PendingCast:
    """A cast under way."""

    def __init__(self, exchange: _Exchange, route: Route, like: Sequence[Tensor]):
        self._exchange, self._route = exchange, route
        self._shapes = [x.shape[1:] for x in like]

    def wait(self) -> list[Tensor]:
        """The buffers, in the order of the tensors that were cast; views of one allocation."""
        arrived = self._exchange.wait()
        buffer = torch.empty_like(arrived)
        buffer[self._route.recv_rows] = arrived
        parts = buffer.split([shape.numel() for shape in self._shapes], 1)
        return [part.unflatten(1, shape) for part, shape in zip(parts, self._shapes, strict=True)]


class PendingReduce:
    """A reduce under way."""

    def __init__(self, exchange: _Exchange, route: Route):
        self._exchange, self._route = exchange, route

    def add_to(self, totals: Sequence[Tensor]) -> None:
        """Adds what arrives to the fp32 `totals`, in the order of the tensors that were reduced."""
        arrived = self._exchange.wait()
        parts = arrived.split([total[0].numel() for total in totals], 1)
        for total, part in zip(totals, parts, strict=True):
            values = part.to(total.dtype).unflatten(1, total.shape[1:])
            # One rank never sends two values for one row, so each of these additions is deterministic.
            for rows, block in zip(
                self._route.send_rows.split(self._route.send_counts),
                values.split(self._route.send_counts),
                strict=True,
            ):
                total.index_add_(0, rows, block)


def start_cast(tensors: Sequence[Tensor], route: Route, group: dist.ProcessGroup) -> PendingCast:
    """Starts to send rows of `tensors` (one dtype, rows first) to the ranks that need them, in one exchange."""
    rows = torch.cat([x.flatten(1).index_select(0, route.send_rows) for x in tensors], 1)
    return PendingCast(_Exchange(rows, route.send_counts, route.recv_counts, group), route, tensors)


def start_reduce(
    tensors: Sequence[Tensor], route: Route, group: dist.ProcessGroup
) -> PendingReduce:
    """Starts to send rows of buffers (one dtype, rows first) home, in one exchange."""
    rows = torch.cat([x.flatten(1).index_select(0, route.recv_rows) for x in tensors], 1)
    return PendingReduce(_Exchange(rows, route.recv_counts, route.send_counts, group), route)


class _Exchange:
    """An all-to-all of rows under way; keeps both buffers alive."""

    def __init__(
        self, rows: Tensor, send: list[int], recv: list[int], group: dist.ProcessGroup
    ) -> None:
        self._sent = rows
        self._arrived = rows.new_empty(sum(recv), rows.shape[1])
        # As bytes, because backends differ in the dtypes they know.
        outgoing, incoming = (x.view(torch.uint8) for x in (rows, self._arrived))
        self._work = dist.all_to_all_single(incoming, outgoing, recv, send, group, async_op=True)

    def wait(self) -> Tensor:
        self._work.wait()
        return self._arrived


# The custom ops

_lib = torch.library.Library("magi", "FRAGMENT")


def _define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.split("(")[0]
    _lib.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _lib.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"magi::{name}", fake, lib=_lib)


def _route(send_rows: Tensor, recv_rows: Tensor, counts: Tensor) -> Route:
    return Route(send_rows, recv_rows, *counts.tolist())


def _group_cast(
    x: Tensor, send_rows: Tensor, recv_rows: Tensor, counts: Tensor, group_name: str
) -> Tensor:
    group = _compat.resolve_process_group(group_name)
    (buffer,) = start_cast([x], _route(send_rows, recv_rows, counts), group).wait()
    return buffer


def _group_cast_fake(
    x: Tensor, send_rows: Tensor, recv_rows: Tensor, counts: Tensor, group_name: str
) -> Tensor:
    return x.new_empty(recv_rows.shape[0], *x.shape[1:])


def _group_reduce(
    x: Tensor, send_rows: Tensor, recv_rows: Tensor, counts: Tensor, num_rows: int, group_name: str
) -> Tensor:
    group = _compat.resolve_process_group(group_name)
    dtype = torch.promote_types(x.dtype, torch.float32)
    total = x.new_zeros(num_rows, *x.shape[1:], dtype=dtype)
    start_reduce([x], _route(send_rows, recv_rows, counts), group).add_to([total])
    return total.to(x.dtype)


def _group_reduce_fake(
    x: Tensor, send_rows: Tensor, recv_rows: Tensor, counts: Tensor, num_rows: int, group_name: str
) -> Tensor:
    return x.new_empty(num_rows, *x.shape[1:])


def _group_merge(
    out: Tensor,
    lse: Tensor,
    send_rows: Tensor,
    recv_rows: Tensor,
    counts: Tensor,
    num_rows: int,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    group = _compat.resolve_process_group(group_name)
    route = _route(send_rows, recv_rows, counts)
    arrived = [
        _Exchange(
            x.flatten(1).index_select(0, recv_rows), route.recv_counts, route.send_counts, group
        )
        for x in (out, lse)
    ]
    outs, lses = (x.wait() for x in arrived)
    outs = outs.unflatten(1, out.shape[1:])
    total = out.new_zeros(num_rows, *out.shape[1:], dtype=torch.float32)
    total_lse = lse.new_full((num_rows, lse.shape[1]), -torch.inf)
    blocks = (x.split(route.send_counts) for x in (send_rows, outs, lses))
    for rows, part, part_lse in zip(*blocks, strict=True):
        total[rows], total_lse[rows] = merge_partials(
            (total[rows], part), (total_lse[rows], part_lse)
        )
    return total.to(out.dtype), total_lse


def _group_merge_fake(
    out: Tensor,
    lse: Tensor,
    send_rows: Tensor,
    recv_rows: Tensor,
    counts: Tensor,
    num_rows: int,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    return out.new_empty(num_rows, *out.shape[1:]), lse.new_empty(num_rows, *lse.shape[1:])


_define(
    "group_cast(Tensor x, Tensor send_rows, Tensor recv_rows, Tensor counts, str group_name) -> Tensor",
    _group_cast,
    _group_cast_fake,
)
_define(
    "group_reduce(Tensor x, Tensor send_rows, Tensor recv_rows, Tensor counts, SymInt num_rows, "
    "str group_name) -> Tensor",
    _group_reduce,
    _group_reduce_fake,
)
_define(
    "group_merge(Tensor out, Tensor lse, Tensor send_rows, Tensor recv_rows, Tensor counts, SymInt num_rows, "
    "str group_name) -> (Tensor, Tensor)",
    _group_merge,
    _group_merge_fake,
)


def _cast_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *route, ctx.group_name = inputs
    ctx.num_rows = x.shape[0]
    ctx.save_for_backward(*route)


def _cast_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    route = ctx.saved_tensors
    dx = torch.ops.magi.group_reduce(grad, *route, ctx.num_rows, ctx.group_name)
    return dx, None, None, None, None


def _reduce_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *route, _, ctx.group_name = inputs
    ctx.save_for_backward(*route)


def _reduce_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dx = torch.ops.magi.group_cast(grad, *ctx.saved_tensors, ctx.group_name)
    return dx, None, None, None, None, None


def _merge_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out, lse, *route, _, ctx.group_name = inputs
    ctx.save_for_backward(out, lse, *output, *route)


def _merge_backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    """With w = exp(lse_i - lse): dout_i = w dout, dlse_i = w (dlse + dout . (out_i - out))."""
    out, lse, total, total_lse, *route = ctx.saved_tensors
    delta = (dout.float() * total.float()).sum(-1)
    rows = torch.cat([dout.float().flatten(1), total_lse, dlse - delta], 1)
    arrived = torch.ops.magi.group_cast(rows, *route, ctx.group_name)
    width, heads = dout[0].numel(), lse.shape[1]
    part_dout, part_lse, part_dlse = arrived.split([width, heads, heads], 1)
    part_dout = part_dout.unflatten(1, dout.shape[1:])
    # A row that sees nothing anywhere has lse -inf on both sides and no weight.
    weight = torch.exp(lse - part_lse).masked_fill(lse == -torch.inf, 0.0)
    grad_out = (part_dout * weight[..., None]).to(out.dtype)
    grad_lse = weight * (part_dlse + (part_dout * out.float()).sum(-1))
    return grad_out, grad_lse, None, None, None, None, None


for _name, _backward, _setup in (
    ("group_cast", _cast_backward, _cast_setup),
    ("group_reduce", _reduce_backward, _reduce_setup),
    ("group_merge", _merge_backward, _merge_setup),
):
    torch.library.register_autograd(f"magi::{_name}", _backward, setup_context=_setup, lib=_lib)


def group_cast(
    x: Tensor, send_rows: Tensor, recv_rows: Tensor, counts: Tensor, group_name: str
) -> Tensor:
    """Rows of every rank to the ranks that need them; differentiable.

    Args:
        x: `[rows, ...]`, this rank's rows.
        send_rows: int64 `[num_sent]`, which rows go out, ordered by receiver.
        recv_rows: int64 `[num_received]`, a permutation: where arriving rows, ordered by sender, go.
        counts: int64 `[2, cp_size]` on the CPU, rows sent to and received from each rank.
        group_name: the process group.

    Returns:
        `[num_received, ...]`, dtype of `x`.
    """
    return torch.ops.magi.group_cast(x, send_rows, recv_rows, counts, group_name)


def group_reduce(
    x: Tensor, send_rows: Tensor, recv_rows: Tensor, counts: Tensor, num_rows: int, group_name: str
) -> Tensor:
    """The way back of `group_cast` on the same route: what arrives for one row is summed in fp32; differentiable.

    Args:
        x: `[num_received, ...]`, in the layout of what `group_cast` returns.
        send_rows: as in `group_cast`, like `recv_rows`, `counts` and `group_name`.
        recv_rows: see `send_rows`.
        counts: see `send_rows`.
        num_rows: rows of the result.
        group_name: see `send_rows`.

    Returns:
        `[num_rows, ...]`, dtype of `x`; rows for which nothing arrives are 0.
    """
    return torch.ops.magi.group_reduce(x, send_rows, recv_rows, counts, num_rows, group_name)


def group_merge(
    out: Tensor,
    lse: Tensor,
    send_rows: Tensor,
    recv_rows: Tensor,
    counts: Tensor,
    num_rows: int,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    """The way back of `group_cast` for partial attention results, which merge by lse in fp32; differentiable.

    Args:
        out: `[num_received, nheads, head_dim_v]`, results over disjoint sets of keys.
        lse: fp32 `[num_received, nheads]`, natural log.
        send_rows: as in `group_cast`, like `recv_rows`, `counts` and `group_name`.
        recv_rows: see `send_rows`.
        counts: see `send_rows`.
        num_rows: rows of the result.
        group_name: see `send_rows`.

    Returns:
        out `[num_rows, nheads, head_dim_v]` and lse `[num_rows, nheads]`; a row for which nothing arrives has
        out 0 and lse -inf.
    """
    return torch.ops.magi.group_merge(out, lse, send_rows, recv_rows, counts, num_rows, group_name)
