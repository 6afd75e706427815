"""The custom ops: schemas, implementations, fakes, autograd. Functional, with fresh outputs.

    magi::mask_slices  program + captured tables -> slices of a fixed capacity
    magi::plan         slices -> how the chosen kernel walks them
    magi::ffa_fwd      attention over slices -> (out, lse)
    magi::ffa_bwd      its gradients -> (dq, dk, dv)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from magi_compile.kernels.base import AttnProblem, Kernel
from magi_compile.kernels.select import select
from magi_compile.masks import AttnSlices, MaskProgram, row_intervals, slices_from_intervals
from magi_compile.ops.checks import raise_pending, require

_lib = torch.library.Library("magi", "DEF")


def _define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.split("(")[0]
    _lib.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _lib.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"magi::{name}", fake, lib=_lib)


@dataclass(frozen=True)
class RecordedCall:
    """One forward call of attention as it ran: the slices it saw and the kernel that ran it."""

    slices: AttnSlices
    problem: AttnProblem
    kernel: str


_recorders: list[list[RecordedCall]] = []


@contextmanager
def record_calls() -> Iterator[list[RecordedCall]]:
    """Collects every forward call made inside the block, for `explain` and for tests."""
    calls: list[RecordedCall] = []
    _recorders.append(calls)
    try:
        yield calls
    finally:
        _recorders.remove(calls)


# mask_slices


@lru_cache(maxsize=256)
def _parse(program: str) -> MaskProgram:
    return MaskProgram.parse(program)


def _mask_slices(
    tables: Sequence[Tensor],
    symbols: Sequence[int],
    program: str,
    names: str,
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    capacity: int,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    intervals = row_intervals(
        _parse(program), tables, symbols, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, device=device
    )
    slices, fits = slices_from_intervals(intervals, capacity=capacity)
    checks = [*intervals.checks, fits]
    messages = [check.message for check in checks]
    for i, name in enumerate(names.split("\n") if names else []):
        messages = [message.replace(f"t{i}", f"`{name}`") for message in messages]
    require([check.ok for check in checks], messages)
    return slices.q_ranges, slices.k_ranges, slices.mask_types


def _mask_slices_fake(
    tables: Sequence[Tensor],
    symbols: Sequence[int],
    program: str,
    names: str,
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    capacity: int,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    def ranges() -> Tensor:
        return torch.empty(capacity, 2, dtype=torch.int32, device=device)

    return ranges(), ranges(), torch.empty(capacity, dtype=torch.int32, device=device)


_define(
    "mask_slices(Tensor[] tables, SymInt[] symbols, str program, str names, SymInt batch, SymInt seqlen_q, "
    "SymInt seqlen_k, SymInt capacity, Device device) -> (Tensor, Tensor, Tensor)",
    _mask_slices,
    _mask_slices_fake,
)
