"""Putting partial attention results together: each is exact for its own keys, lse says how much it weighs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from magi_compile.kernels.base import ForwardOutput


def merge_partials(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The attention over the union of disjoint sets of keys, from the attention over each.

    Args:
        outs: partial outputs `[..., head_dim_v]`, any floating dtype; a row that sees nothing is 0.
        lses: their logsumexps `[...]`, natural log; -inf in rows that see nothing. A kernel's
            `[nheads_q, total_q]` is passed transposed.

    Returns:
        out `[..., head_dim_v]` and lse `[...]`, both fp32, or fp64 where an input is. A row that sees nothing in
        any partial gives out 0 and lse -inf.
    """
    stacked = torch.stack([lse.to(_accumulator(lse)) for lse in lses])
    # Relative to the largest: exp(lse_i - lse) would carry the rounding of a large lse into the weights.
    peak = stacked.amax(0)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    weights = torch.exp(stacked - peak)
    total = weights.sum(0)
    lse = peak + torch.log(total)
    weights = (weights / total.masked_fill(total == 0, 1.0)).unsqueeze(-1)
    out = outs[0].to(_accumulator(outs[0])) * weights[0]
    for partial, weight in zip(outs[1:], weights[1:], strict=True):
        out = torch.addcmul(out, partial.to(out.dtype), weight)
    return out, lse


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def merge_prior(
    output: ForwardOutput, prior: ForwardOutput | None, out_dtype: torch.dtype
) -> ForwardOutput:
    """`output` merged with `prior`, if there is one, in `out_dtype`: for kernels that do not do it themselves."""
    if prior is None:
        return ForwardOutput(output.out.to(out_dtype), output.lse)
    outs, lses = zip(prior, output, strict=True)
    if _fits_triton(outs):
        return ForwardOutput(*_triton().merge(outs, lses, out_dtype))
    out, lse = merge_partials(outs, [lse.t() for lse in lses])
    return ForwardOutput(out.to(out_dtype), lse.t().contiguous())


def sum_partials(partials: Sequence[Tensor]) -> Tensor:
    """The sum of tensors of one shape and dtype, rounded once: added in fp32 or wider; one pass on a GPU."""
    if len(partials) == 1:
        return partials[0]
    if _fits_triton(partials):
        return _triton().add(partials)
    total = partials[0].to(_accumulator(partials[0]))
    for partial in partials[1:]:
        total = total + partial
    return total.to(partials[0].dtype)


def _fits_triton(partials: Sequence[Tensor]) -> bool:
    return partials[0].is_cuda and all(partial.dtype.itemsize <= 4 for partial in partials)


@cache
def _triton() -> ModuleType:
    """Imported at first use, because Triton need not be installed."""
    return importlib.import_module("magi_compile.kernels.triton.merge")
