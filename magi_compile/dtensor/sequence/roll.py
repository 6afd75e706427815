"""`torch.roll` of a sequence that lies on several ranks, as an op: `magi::cp_roll`. Each row travels once.

Rows go to the rank that holds the place they roll to, so a roll by one moves a row for each chunk. The gradient is the
roll back.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from magi_compile import _compat
from magi_compile.dtensor.on_device import Streams, to_device
from magi_compile.dtensor.planning.chunks import Placement
from magi_compile.ops.define import define

_lib = torch.library.Library("magi", "FRAGMENT")


class _Rows(NamedTuple):
    """The rows of a rank that travel, int64 on its device, grouped by the other rank, which both order alike."""

    sends: Tensor
    recvs: Tensor
    send_counts: list[int]
    recv_counts: list[int]


def _rows(where: Placement, rank: int, shifts: int) -> _Rows:
    # Row i of the sequence goes to row `i + shifts`; padding goes nowhere.
    places = where.inverse_positions()[: where.total]
    there = places.roll(-shifts)
    (source, row), (target, home) = (
        (x // where.seqlen_local, x % where.seqlen_local) for x in (places, there)
    )
    sends, recvs = (source == rank).nonzero()[:, 0], (target == rank).nonzero()[:, 0]
    sends = sends[target[sends].argsort(stable=True)]
    recvs = recvs[source[recvs].argsort(stable=True)]
    counts = (x.bincount(minlength=where.cp_size).tolist() for x in (target[sends], source[recvs]))
    return _Rows(row[sends], home[recvs], *counts)


@lru_cache(maxsize=64)
def _rows_of(
    chunks: tuple[int, ...],
    cp_size: int,
    chunk_size: int,
    total: int,
    rank: int,
    shifts: int,
    device: torch.device,
) -> tuple[_Rows, Streams]:
    with _compat.outside_of_modes():
        held = torch.tensor(chunks, device="cpu").view(cp_size, -1)
        rows = _rows(Placement(total, chunk_size, held), rank, shifts)
        rows = rows._replace(
            sends=to_device(rows.sends, device), recvs=to_device(rows.recvs, device)
        )
        return rows, Streams()


def _roll(
    x: Tensor, chunks: Tensor, chunk_size: int, total: int, shifts: int, group_name: str
) -> Tensor:
    group = _compat.resolve_process_group(group_name)
    held = tuple(chunks.flatten().tolist())
    sizes = (chunks.shape[0], chunk_size, total, group.rank(), shifts % max(total, 1))
    rows, streams = _rows_of(held, *sizes, x.device)
    streams.enter(x.device, rows.sends, rows.recvs)
    # As bytes, which every backend moves.
    row_bytes = math.prod(x.shape[1:]) * x.element_size()
    sent = x.index_select(0, rows.sends).contiguous().view(-1).view(torch.uint8)
    sent = sent.view(len(rows.sends), row_bytes)
    received = sent.new_empty(len(rows.recvs), row_bytes)
    dist.all_to_all_single(received, sent, rows.recv_counts, rows.send_counts, group=group)
    rolled = x.new_zeros(x.shape)
    values = received.view(-1).view(x.dtype).view(len(rows.recvs), *x.shape[1:])
    return rolled.index_copy_(0, rows.recvs, values)


define(
    _lib,
    "cp_roll(Tensor x, Tensor chunks, int chunk_size, int total, int shifts, str group_name) -> Tensor",
    _roll,
    lambda x, *_: x.new_empty(x.shape),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, chunks, *ctx.rest = inputs
    ctx.save_for_backward(chunks)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (chunks,), (chunk_size, total, shifts, group_name) = ctx.saved_tensors, ctx.rest
    rest = (chunk_size, total, -shifts, group_name)
    return torch.ops.magi.cp_roll(gradient, chunks, *rest), None, None, None, None, None


torch.library.register_autograd("magi::cp_roll", _backward, setup_context=_setup_context, lib=_lib)
