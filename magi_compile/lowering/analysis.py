"""The analysis of a FlexAttention call: kernel, mask and scores, or every reason to leave it where it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from magi_compile import _compat
from magi_compile.kernels.base import AttnProblem, Kernel
from magi_compile.kernels.select import Selection, problem_of, select, select_for_lists
from magi_compile.lowering.emit import value_of
from magi_compile.lowering.flex_call import FlexCall
from magi_compile.lowering.masks import MaskRoute
from magi_compile.lowering.options import LoweringOptions
from magi_compile.lowering.report import Decision
from magi_compile.lowering.scores import Scores
from magi_compile.ops.validation import check_block_lists, check_padded_shapes


@dataclass(frozen=True)
class Analysis:
    """The analysis of one call: it can be lowered if there are no `reasons`, and then there is a kernel."""

    reasons: tuple[str, ...]
    problem: AttnProblem
    route: MaskRoute
    scores: Scores
    selection: Selection | None

    @property
    def kernel(self) -> Kernel:
        """The kernel of a call that can be lowered."""
        assert self.selection is not None
        return self.selection.kernel


def analyze(call: FlexCall, options: LoweringOptions) -> Analysis:
    """Collects everything that speaks against lowering `call`, and what is needed to do it."""
    reasons = []
    q, k, v = (value_of(node) for node in (call.q, call.k, call.v))
    _check_shapes(call, q, k, v)
    backend = call.kernel_options.get("BACKEND", "AUTO")
    if backend != "AUTO":
        reasons.append(f"kernel_options asks for FlexAttention's BACKEND={backend!r}")
    if not q.dtype == k.dtype == v.dtype and not _is_cast(call):
        reasons.append(f"q, k and v differ in dtype: {q.dtype}, {k.dtype}, {v.dtype}")

    scores = Scores.of(call)
    reasons += scores.reasons

    route = MaskRoute.of(call, options)
    whole = _problem(call, scores)
    listed = _by_lists(route, whole, scores, options)
    if isinstance(listed, Analysis):
        return replace(listed, reasons=tuple(reasons))
    if listed:
        route = replace(
            route, reasons=(*route.reasons, *(f"by block lists alone: {x}" for x in listed))
        )
    route = replace(route, lists=None)
    problem = replace(route.problem(whole), has_bits=route.may_have_bits)
    try:
        selection, refusals = select(problem, options.kernel, scores.needs), []
    except NotImplementedError as error:
        selection, refusals = None, [str(error)]
    if selection is None or not route.may_have_bits:
        reasons += (*route.reasons, *route.obstacles)
    return Analysis((*reasons, *refusals), problem, route, scores, selection)


def _by_lists(
    route: MaskRoute, problem: AttnProblem, scores: Scores, options: LoweringOptions
) -> Analysis | list[str]:
    """The call by the way of block lists and a kernel that walks them, or the reasons against it; none of these where
    there are no lists that say all."""
    if route.lists is None:
        return []
    try:
        problem, selection = select_for_lists(problem, route.lists, options.kernel, scores.needs)
    except NotImplementedError as error:
        return [str(error)]
    return Analysis((), problem, route.by_lists(), scores, selection)


def _problem(call: FlexCall, scores: Scores) -> AttnProblem:
    q, k, v = (value_of(node) for node in (call.q, call.k, call.v))
    factors = scores.factors
    softmax_scale = float(value_of(call.scale)) * factors.scale
    problem = problem_of(q, k, v, softmax_scale, factors.softcap, _out_dtype(call))
    return replace(
        problem,
        has_score=scores.program is not None,
        has_max_scores=bool(call.kernel_options.get("OUTPUT_MAX")),
    )


def _check_shapes(call: FlexCall, q: Any, k: Any, v: Any) -> None:
    """Raises ValueError where tensors do not fit together: FlexAttention looks at v only when it computes with it."""
    try:
        check_padded_shapes(q, k, v)
        lists = [value_of(node) for node in call.block_mask[2:6] if node is not None]
        check_block_lists(lists, q)
    except ValueError as error:
        where = f" (flex_attention at {call.location})" if call.location else ""
        raise _compat.as_user_error(ValueError(f"{error}{where}")) from None


def _is_cast(call: FlexCall) -> bool:
    """True if autocast is on, so that q, k and v will have one dtype; where that is not known they stay as they are."""
    q = value_of(call.q)
    return _out_dtype(call) != q.dtype or torch.is_autocast_enabled(q.device.type)


def _out_dtype(call: FlexCall) -> torch.dtype:
    """Under autocast the call computes in the autocast dtype, not in that of q."""
    return value_of(call.node)[0].dtype


def decision_on(call: FlexCall, found: Analysis) -> Decision:
    """The decision on `call`, for readers."""
    kernel = None if found.reasons else found.kernel
    return Decision(
        call.location,
        *call.shapes,
        str(found.route.program),
        kernel.name if kernel else None,
        found.reasons,
        tuple(found.selection.passed_over.items()) if found.selection else (),
        (*found.route.notes, *kernel.notes(found.problem)) if kernel else (),
        str(found.scores.program or ""),
    )
