"""Checks that numbers fit the dtype in which PyTorch computes them: the marks of a mask expression ask for it.

Without data only the dtypes are known, and sums of two tables may wrap around. With data, bounds of each table bound
the sum.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile._checks import MaskCheck
from magi_compile.masks.evaluation import messages
from magi_compile.masks.evaluation.evaluate import Evaluation
from magi_compile.masks.evaluation.sizes import MaskSizes
from magi_compile.masks.expr.expr import FITS, Expr
from magi_compile.masks.expr.integers import INT32, INT64, bounds_by, counted
from magi_compile.masks.program.program import MaskProgram


class _Range(NamedTuple):
    """Bounds of a number, fp64 and 0-d; exact below 2**53 and rounded by less than 2**11 below 2**63."""

    low: Tensor
    high: Tensor


def expect_ranges(run: Evaluation) -> None:
    """Adds the checks of all marks in the program to those of `run`."""
    for node in dict.fromkeys(run.program.facing.walk()):
        if node.op in FITS:
            run.checks.append(_check(run, node))


def range_checks(
    program: MaskProgram,
    tables: Sequence[Tensor],
    symbols: Sequence[int],
    sizes: MaskSizes,
    device: torch.device,
) -> list[MaskCheck]:
    """The same checks alone; `tables` are the captured tensors and those computed."""
    if sizes.is_empty or not any(node.op in FITS for node in program.expr.walk()):
        return []
    run = Evaluation(program, tables, symbols, sizes.facing(program.by_keys), device)
    expect_ranges(run)
    return run.checks


def _check(run: Evaluation, mark: Expr) -> MaskCheck:
    (inner,) = mark.args
    low, high = _bounds(run, inner)
    limits = INT32 if mark.op == "int32" else (INT64[0] / 2, INT64[1] / 2)
    words = messages.fits_dtype(run.program.describe(inner), mark.op)
    is_within = (low >= limits[0]) & (high <= limits[1])
    return MaskCheck(is_within, *words, of_conversion=True)


def _bounds(run: Evaluation, expr: Expr) -> _Range:
    op, args = expr.op, expr.args
    if op in ("int", "bool", "var", "symbol", "table"):
        value = counted(run.value(expr))
        if op == "table" and isinstance(value.data, Tensor):
            return _Range(*(x.double() for x in torch.aminmax(value.data)))
        ends = (value.low, value.high)
        return _Range(
            *(torch.tensor(float(end), dtype=torch.float64, device="cpu") for end in ends)
        )
    if op in FITS:
        return _bounds(run, args[0])
    if expr.kind == "bool":
        return _Range(*torch.tensor([0.0, 1.0], dtype=torch.float64, device="cpu").unbind())
    inner = [_bounds(run, arg) for arg in (args[1:] if op == "where" else args)]
    found = bounds_by(op, inner, _least, _most)
    if found is not None:
        return _Range(*found)
    (a, b), (x, y) = inner[0], inner[-1]
    # Of abs and of a quotient nothing else is known.
    corners = [x, y, torch.zeros_like(x)] if op == "mod" else [a, b, -a, -b]
    return _Range(_least(*corners), _most(*corners))


def _least(*values: Tensor) -> Tensor:
    return functools.reduce(torch.minimum, values)


def _most(*values: Tensor) -> Tensor:
    return functools.reduce(torch.maximum, values)
