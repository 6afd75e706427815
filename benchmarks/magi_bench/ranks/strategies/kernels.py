"""The local kernel of a strategy: attention with a mask between some rows and some keys on one rank, by name.

A step of a strategy is attention of a rank's queries over keys that are there for the moment. Forward, it merges with
what the queries have seen before, weighed by logsumexp. Backward, it takes the output and the logsumexp of whole rows,
so that its gradients are exact parts of the whole.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_compile.kernels.base import (
    AttnProblem,
    BackwardOutput,
    ForwardOutput,
    Grads,
    Saved,
)
from magi_compile.kernels.select import select
from magi_compile.masks.slices import AttnSlices


class Piece(NamedTuple):
    """A call for some of a rank's rows and some of the keys, views of both; what depends on its mask is `prepared`."""

    rows: slice
    keys: slice
    prepared: Any


class LocalKernel(ABC):
    """A kernel for given heads, dtype and device."""

    # A mask takes one call, in whatever order keys lie; else keys that a row sees should lie next to each other.
    in_any_order = False

    def __init__(self, problem: AttnProblem):
        self.problem = problem

    def missing(self) -> str | None:
        """Why it cannot be had on this machine, or None."""
        return None

    def refusals(self, slices: AttnSlices) -> list[str]:
        """Every reason against a mask, or any part of one."""
        return []

    @abstractmethod
    def pieces(self, slices: AttnSlices, device: torch.device) -> list[Piece]:
        """The calls that make up attention with such a mask, between the rows of a rank and the keys of an owner, on
        the host, in normal form; none where nothing is visible."""

    @abstractmethod
    def merged(
        self, qkv: Sequence[Tensor], prepared: Any, prior: ForwardOutput | None, dtype: torch.dtype
    ) -> ForwardOutput:
        """Attention, merged with that of the same queries over other keys if there is such a `prior`."""

    @abstractmethod
    def backward(self, dout: Tensor, saved: Saved, prepared: Any) -> BackwardOutput:
        """The share of these keys in the gradients; `saved` has out and lse over all keys."""


class Ours(LocalKernel):
    """The kernel that this package chooses: any mask in one call."""

    in_any_order = True

    def pieces(self, slices: AttnSlices, device: torch.device) -> list[Piece]:
        if not len(slices):
            return []
        rows = bounds(slices.q_ranges, slices.seqlen_q)
        keys = bounds(slices.k_ranges, slices.seqlen_k)
        ranges = (slices.q_ranges - rows.start, slices.k_ranges - keys.start, slices.mask_types)
        part = AttnSlices.unchecked(*ranges, rows.stop - rows.start, keys.stop - keys.start)
        part, kernel = part.to(device), select(self.problem).kernel
        prepared = kernel, (part, kernel.plan(part, self.problem), self.problem)
        return [Piece(rows, keys, prepared)]

    def merged(
        self, qkv: Sequence[Tensor], prepared: Any, prior: ForwardOutput | None, dtype: torch.dtype
    ) -> ForwardOutput:
        kernel, plan = prepared
        return kernel.forward(*qkv, *plan, prior=prior, out_dtype=dtype)

    def backward(self, dout: Tensor, saved: Saved, prepared: Any) -> BackwardOutput:
        kernel, plan = prepared
        return kernel.backward(Grads(dout, None), saved, *plan)


#: A call takes all rows where those that take no part are fewer than this share: a view of the others saves little.
FEW = 1 / 8


def bounds(ranges: Tensor, total: int) -> slice:
    """The rows from the first to the last of `ranges`, or all where the others are few."""
    begin, end = int(ranges[:, 0].min()), int(ranges[:, 1].max())
    return slice(0, total) if total - (end - begin) < FEW * total else slice(begin, end)


@dataclass
class Step:
    """Attention of all rows of a rank over the keys of one owner, as one of several steps."""

    kernel: LocalKernel
    pieces: list[Piece]  # its calls
    num_rows: int  # of the rank
    is_only: bool = False  # whether no other call has a part in any row
    is_last: bool = False  # whether no step comes after it

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, so_far: ForwardOutput | None
    ) -> ForwardOutput | None:
        """The attention of the rows over these keys and those of the steps before; None if they saw nothing."""
        wide = torch.promote_types(q.dtype, torch.float32)
        everything = slice(0, self.num_rows)
        for number, (rows, keys, prepared) in enumerate(self.pieces, 1):
            ends = self.is_last and number == len(self.pieces) and rows == everything
            prior = None
            if so_far is not None and not self.is_only:
                prior = ForwardOutput(so_far.out[rows], so_far.lse[:, rows].contiguous())
            dtype = q.dtype if ends or self.is_only else wide
            qkv = (q[rows], k[keys], v[keys])
            part = self.kernel.merged(qkv, prepared, prior, dtype)
            if rows == everything:
                so_far = part
                continue
            if so_far is None:
                so_far = nothing_seen(q, v, dtype)
            so_far.out[rows], so_far.lse[:, rows] = part
        return so_far

    def backward(
        self, dout: Tensor, saved: Saved, dq: Tensor | None
    ) -> tuple[Tensor | None, list[Share]]:
        """The gradient of q with this step's share, and this step's shares of those of k and v. `saved` has the keys
        of this step, and out and lse over the keys of all; dq the shares of other steps, in fp32 or wider, or None."""
        q, k, v, out, lse = saved
        dtype = q.dtype if self.is_only else torch.promote_types(q.dtype, torch.float32)
        shares = []
        for rows, keys, prepared in self.pieces:
            part = Saved(q[rows], k[keys], v[keys], out[rows], lse[:, rows].contiguous())
            grads = self.kernel.backward(dout[rows], part, prepared)
            dq = added(dq, grads.dq, rows, self.num_rows, dtype)
            shares.append(Share(keys, (grads.dk, grads.dv)))
        return dq, shares


class Share(NamedTuple):
    """The share of a call in the gradients of k and v of some rows."""

    rows: slice
    gradients: tuple[Tensor, Tensor]


def steps_of(kernel: LocalKernel, masks: Iterable[AttnSlices], device: torch.device) -> list[Step]:
    """A step for each of the masks between the rows of a rank and the keys of the owners that it meets in turn."""
    steps = [Step(kernel, kernel.pieces(mask, device), mask.seqlen_q) for mask in masks]
    steps[-1].is_last = True
    if is_disjoint([piece.rows for step in steps for piece in step.pieces]):
        for step in steps:
            step.is_only = True
    return steps


def is_disjoint(rows: Sequence[slice]) -> bool:
    """True if no row is in two of these."""
    rows = sorted(rows, key=lambda x: x.start)
    return all(one.stop <= other.start for one, other in itertools.pairwise(rows))


def nothing_seen(q: Tensor, v: Tensor, dtype: torch.dtype) -> ForwardOutput:
    """The attention of rows that have seen nothing yet."""
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2], dtype=dtype)
    return ForwardOutput(out, q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32))


def sums_of(
    before: Sequence[Tensor] | None, shares: Sequence[Share], keys: Sequence[Tensor]
) -> Sequence[Tensor]:
    """The gradients of `keys`, k and v: those of `before`, in their memory, and the shares, rounded to the dtype of the
    keys after each."""
    totals: Sequence[Tensor | None] = before or [None] * len(keys)
    for rows, gradients in shares:
        parts = zip(totals, gradients, keys, strict=True)
        totals = [added(total, part, rows, len(x), x.dtype) for total, part, x in parts]
    pairs = zip(totals, keys, strict=True)
    return [torch.zeros_like(x) if total is None else total for total, x in pairs]


def added(
    total: Tensor | None, part: Tensor, rows: slice, num_rows: int, dtype: torch.dtype
) -> Tensor:
    """The `total` of `num_rows` rows, in place where there is one, with a `part` of some of them."""
    if total is None and rows == slice(0, num_rows):
        return part.to(dtype)
    if total is None:
        total = part.new_zeros(num_rows, *part.shape[1:], dtype=dtype)
    total[rows] += part
    return total
