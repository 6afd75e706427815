"""RowIntervals: for each row of each batch entry, or of each head of it, the keys it sees, as a few disjoint intervals.

The exact meeting point of all kinds of masks. `row_intervals` evaluates a mask program with plain tensor
operations, on the device of the captured tensors, in O(rows) memory. On a GPU nothing waits for the device:
what a program takes for granted about its tensors comes back as `MaskCheck`s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from magi_compile._checks import MaskCheck
from magi_compile.masks.errors import UnsupportedMaskError
from magi_compile.masks.evaluation.evaluate import Evaluation, with_columns
from magi_compile.masks.evaluation.ranges import expect_ranges
from magi_compile.masks.evaluation.sizes import ONE_MASK, Heads, MaskSizes
from magi_compile.masks.expr.expr import Expr
from magi_compile.masks.expr.integers import MAX_SYMBOL
from magi_compile.masks.program.program import MaskProgram


@dataclass(frozen=True, eq=False)
class RowIntervals:
    """The keys each row sees: the union of `[lo[j], hi[j])` over j.

    Attributes:
        lo: int32 `[num_intervals, batch * heads.q, seqlen_q]`.
        hi: int32, the same shape. Intervals that are not empty are disjoint, not adjacent, and in increasing
            order of j; empty ones are `[0, 0)`.
        seqlen_k: number of keys of a batch entry.
        checks: the intervals are right if all of them are ok.
        heads: those with masks of their own.
        by_keys: whether rows and keys are exchanged: each key is seen by the rows `[lo[j], hi[j])`. What is called a
            row here is a key then, and what is called a key a row, but for `sizes` and `to_dense`.
    """

    lo: Tensor
    hi: Tensor
    seqlen_k: int
    checks: tuple[MaskCheck, ...] = ()
    heads: Heads = ONE_MASK
    by_keys: bool = False

    @property
    def num_intervals(self) -> int:
        return self.lo.shape[0]

    @property
    def seqlen_q(self) -> int:
        return self.lo.shape[2]

    @property
    def sizes(self) -> MaskSizes:
        batch = self.lo.shape[1] // self.heads.q
        return MaskSizes(batch, self.seqlen_q, self.seqlen_k, self.heads).facing(self.by_keys)

    def check(self) -> None:
        """Raises ValueError for the first check that fails. Waits for the device if it is a GPU."""
        for check in self.checks:
            check.raise_if_broken()

    def to_dense(self) -> Tensor:
        """The mask as bool `[batch * heads.q, seqlen_q, seqlen_k]`. For tests and small masks."""
        key = torch.arange(self.seqlen_k, device=self.lo.device)
        inside = (key >= self.lo[..., None]) & (key < self.hi[..., None])
        return inside.any(0).mT if self.by_keys else inside.any(0)


def row_intervals(
    program: MaskProgram | str,
    tables: Sequence[Tensor] = (),
    symbols: Sequence[int] = (),
    *,
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    heads: Heads | None = None,
    device: torch.device | str | None = None,
) -> RowIntervals:
    """Evaluates a mask program.

    Args:
        program: a `MaskProgram` or its printed form.
        tables: the captured tensors, integer or bool, on `device` (scalars may be elsewhere).
        symbols: the captured ints.
        batch: number of batch entries.
        seqlen_q: rows of a batch entry.
        seqlen_k: keys of a batch entry.
        heads: those with masks of their own, each an entry; None where the mask must be the same for all heads.
        device: where to compute; by default where the first table with entries is.

    Returns:
        The intervals, and as checks what they rely on in the data.

    Raises:
        UnsupportedMaskError: intervals cannot express the mask, or it depends on the head and `heads` are None.
        TypeError: a table has the wrong dtype.
        ValueError: too few tables or symbols, or a table with the wrong device or shape.
    """
    if isinstance(program, str):
        program = MaskProgram.parse(program)
    if device is None:
        device = next((t.device for t in tables if t.dim()), torch.device("cpu"))
    device = torch.device(device)
    check_arguments(program, tables, symbols, device)
    if heads is None:
        program.require_one_mask()
    sizes_of_mask = MaskSizes(batch, seqlen_q, seqlen_k, heads or ONE_MASK)
    by_keys = program.by_keys
    sizes = sizes_of_mask.facing(by_keys)
    shape = (sizes.entries, sizes.seqlen_q)
    keys = program.keys(sizes.seqlen_k, symbols)
    if sizes.is_empty:
        empty = torch.zeros(max(len(keys.lanes), 1), *shape, dtype=torch.int32, device=device)
        return RowIntervals(empty, empty, sizes.seqlen_k, (), sizes.heads, by_keys)
    tables = with_columns(program, tables, symbols, sizes_of_mask, device)
    run = Evaluation(program, tables, symbols, sizes, device)
    expect_ranges(run)
    lanes = run.intervals(keys)
    if not lanes:
        zero = torch.zeros(1, 1, dtype=torch.int32, device=device)
        lanes = [(zero, zero)]
    lanes = _disjoint(lanes)
    lo, hi = (torch.stack([x.expand(shape) for x in edges]) for edges in zip(*lanes, strict=True))
    return RowIntervals(lo, hi, sizes.seqlen_k, tuple(run.checks), sizes.heads, by_keys)


def exact_intervals(
    program: MaskProgram,
    tables: Sequence[Tensor],
    symbols: Sequence[int],
    sizes: MaskSizes,
    device: torch.device,
) -> RowIntervals | None:
    """The row intervals of a mask and its data, or those of keys, all of whose checks hold; None where there are none:
    the mask has no intervals, or the data are not in the order that they need. Waits for the device if that is a GPU.

    `heads` of the sizes are those whose masks may differ; where they do, each is an entry. Raises MaskDataError where
    the data mean nothing: what is looked up is not there, or a divisor is zero.
    """
    if program.refusals:
        return None
    if not program.differs_by_head:
        sizes = sizes._replace(heads=ONE_MASK)
    found = (_exact(way, tables, symbols, sizes, device) for way in program.ways)
    return next((intervals for intervals in found if intervals is not None), None)


def _exact(
    program: MaskProgram,
    tables: Sequence[Tensor],
    symbols: Sequence[int],
    sizes: MaskSizes,
    device: torch.device,
) -> RowIntervals | None:
    """`exact_intervals` in one way."""
    try:
        intervals = row_intervals(program, tables, symbols, **sizes._asdict(), device=device)
    except UnsupportedMaskError:  # too many, which depends on lengths
        return None
    is_exact = True
    for check in intervals.checks:
        if check.of_conversion:
            is_exact = is_exact and bool(check.ok)
        else:
            check.raise_if_broken()
    return intervals if is_exact else None


def check_arguments(
    program: MaskProgram, tables: Sequence[Tensor], symbols: Sequence[int], device: torch.device
) -> None:
    """Raises TypeError or ValueError for what `row_intervals` cannot take, whatever its size."""
    if len(tables) < program.num_captures:
        raise ValueError(f"`tables` must hold {program.num_captures} tensors, got {len(tables)}")
    if len(symbols) < program.num_symbols:
        raise ValueError(f"`symbols` must hold {program.num_symbols} ints, got {len(symbols)}")
    for symbol in symbols:
        if abs(symbol) > MAX_SYMBOL:
            raise ValueError(f"a captured int must be within 2**40, got {symbol}")
    looked_up = program.expr.tables
    for index, tensor in enumerate(tables[: program.num_captures]):
        if index not in looked_up:
            continue
        name = program.describe(Expr("table", (index,)))
        if tensor.is_floating_point() or tensor.is_complex():
            raise TypeError(f"captured tensor `{name}` must hold ints or bools, got {tensor.dtype}")
        here = (tensor.device, torch.device(tensor.device.type))  # "cuda" means any of them
        if tensor.dim() and device not in here:
            raise ValueError(f"captured tensor `{name}` must be on {device}, got {tensor.device}")


def _disjoint(lanes: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Sorts the intervals of each row and joins those that overlap or touch; the others become `[0, 0)`."""
    if len(lanes) == 1:
        ((lo, hi),) = lanes
        is_live = lo < hi
        if is_live.device.type == "cpu" and type(is_live) is Tensor and bool(is_live.all()):
            return lanes
        return [(torch.where(is_live, lo, 0), torch.where(is_live, hi, 0))]
    far = 2**31 - 1
    lanes = [(torch.where(lo < hi, lo, far), torch.where(lo < hi, hi, far)) for lo, hi in lanes]
    count = len(lanes)
    for step in range(count):  # odd-even transposition sort
        for j in range(step % 2, count - 1, 2):
            (a, b), (x, y) = lanes[j : j + 2]
            swap = a > x
            lanes[j] = torch.where(swap, x, a), torch.where(swap, y, b)
            lanes[j + 1] = torch.where(swap, a, x), torch.where(swap, b, y)
    for j in range(count - 1):
        (a, b), (x, y) = lanes[j : j + 2]
        join = (x <= b) & (x < far)
        lanes[j] = torch.where(join, far, a), torch.where(join, far, b)
        lanes[j + 1] = torch.where(join, a, x), torch.where(join, torch.maximum(b, y), y)
    return [(torch.where(lo < far, lo, 0), torch.where(lo < far, hi, 0)) for lo, hi in lanes]
