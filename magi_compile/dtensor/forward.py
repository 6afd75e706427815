"""The forward across ranks: keys and values travel to the queries that see them.

    stages     start cast 1 | for each stage: wait for its cast, start the next, attend; merged with the stages before
    one call   start the cast | attend to local keys | when they have arrived, to remote ones

The next cast travels while a stage is computed. Partial results merge in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from magi_compile.dtensor.entries import packed
from magi_compile.dtensor.execution import Execution, MergedStage, routes_of
from magi_compile.kernels.base import ForwardOutput
from magi_compile.kernels.overlap import EarlyKernel
from magi_compile.kernels.plan import Plan


def forward(
    q: Tensor, k: Tensor, v: Tensor, execution: Execution, max_scores: Tensor | None = None
) -> ForwardOutput:
    """This rank's rows of the attention; all ranks of the group call it together. `q` and what comes out are packed by
    entries as `execution.packing` says, k and v are not. `max_scores` as in `Kernel.forward`."""
    plan, kernel, problem, collective, group, _, packing, _ = execution
    if plan.merged is not None:
        return _forward_merged(q, k, v, plan.merged, execution, max_scores)
    partial_dtype = torch.promote_types(q.dtype, torch.float32)
    last = max((i for i, stage in enumerate(plan.forward) if not stage.is_empty), default=-1)
    result: ForwardOutput | None = None
    casts = collective.casts((k, v), routes_of(plan.forward), group)
    cast = next(casts, None)  # the first one starts
    for i, stage in enumerate(plan.forward):
        keys: Sequence[Tensor] = (k, v)
        if stage.route is not None:
            assert cast is not None
            keys = cast.wait()
            cast = next(casts, None)  # the next one travels while this stage is computed
        if stage.is_empty:
            continue
        k_stage, v_stage, slices, score = execution.inputs(stage, keys)
        kernel_plan = stage.kernel_plan(kernel, problem, packing)
        result = kernel.forward(
            *(q, k_stage, v_stage, slices, kernel_plan, problem),
            prior=result,
            out_dtype=q.dtype if i == last else partial_dtype,
            score=score,
            max_scores=max_scores,
        )
    if result is not None:
        return result
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    return ForwardOutput(out, q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32))


def _forward_merged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stage: MergedStage,
    execution: Execution,
    max_scores: Tensor | None,
) -> ForwardOutput:
    """Attention over local and remote keys in one call, which begins with the local ones if the kernel can."""
    plan, kernel, problem, collective, group, _, packing, scoring = execution
    # What can fail does so before rows are on their way.
    early_plan = stage.early_plan(kernel, problem)
    both = stage.side_by_side if early_plan is None else None
    kernel_plan = both.kernel_plan(kernel, problem, packing) if both else Plan()
    casts = collective.casts((k, v), [stage.route], group)
    cast = next(casts)
    if both is None:
        assert isinstance(kernel, EarlyKernel)
        steps = kernel.early_forward(
            *(q, (k, v), cast.buffers, early_plan, problem),
            free_sms=cast.sms,
            max_scores=max_scores,
        )
        steps.begin()
        with steps.beside():
            cast.wait()
            steps.main()
        result = steps.finish()
    else:
        pairs = zip((k, v), cast.wait(), strict=True)
        k_all, v_all = (packed(torch.cat(pair), packing.keys) for pair in pairs)
        result = kernel.forward(
            *(q, k_all, v_all, both.slices_of(packing), kernel_plan, problem),
            score=None
            if scoring is None
            else scoring.over(plan, packing, stage.local, stage.remote),
            max_scores=max_scores,
        )
    assert next(casts, None) is None
    return result
