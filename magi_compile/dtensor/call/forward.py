"""The forward across ranks: keys and values travel to the queries that see them.

    stages     start cast 1 | for each stage: wait for its cast, start the next, attend; merged with the stages before
    one call   start the cast | attend to local keys | when they have arrived, to remote ones

The next cast travels while a stage is computed. Partial results merge in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from magi_compile.dtensor.call.execution import Execution, MergedStage
from magi_compile.kernels.base import ForwardOutput


def forward(
    q: Tensor, k: Tensor, v: Tensor, execution: Execution, max_scores: Tensor | None = None
) -> ForwardOutput:
    """This rank's rows of the attention; all ranks of the group call it together. `q` and what comes out are packed by
    entries as `Prepared.packing` says, k and v by those that travel apart. `max_scores` as in `Kernel.forward`."""
    prepared, group, *_ = execution
    if prepared.merged is not None:
        return _forward_merged(q, k, v, prepared.merged, execution, max_scores)
    walks = prepared.forward  # what can fail does so before rows are on their way
    kernel, problem = prepared.kernel, prepared.problem
    result: ForwardOutput | None = None
    casts = prepared.collective.casts((k, v), prepared.forward_routes, group)
    cast = next(casts, None)  # the first one starts
    for (stage, slices, kernel_plan), dtype in zip(walks, prepared.out_dtypes, strict=True):
        keys: Sequence[Tensor] = (k, v)
        if stage.route is not None:
            assert cast is not None
            keys = cast.wait()
            cast = next(casts, None)  # the next one travels while this stage is computed
        if stage.is_empty:
            continue
        k_stage, v_stage = execution.keys(*keys)
        result = kernel.forward(
            *(q, k_stage, v_stage, slices, kernel_plan, problem),
            prior=result,
            out_dtype=dtype,
            score=execution.score_over(stage),
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
    prepared, group, *_ = execution
    kernel, problem = prepared.early, prepared.problem
    # What can fail does so before rows are on their way.
    walk = prepared.early_plan if kernel is not None else prepared.side_by_side
    casts = prepared.collective.casts((k, v), prepared.forward_routes, group)
    cast = next(casts)
    if kernel is not None:
        steps = kernel.early_forward(
            *(q, (k, v), cast.buffers, walk, problem), free_sms=cast.sms, max_scores=max_scores
        )
        steps.begin()
        with steps.beside():
            cast.wait()
            steps.main()
        result = steps.finish()
    else:
        both = [torch.cat(pair) for pair in zip((k, v), cast.wait(), strict=True)]
        k_all, v_all = execution.keys(*both)
        result = prepared.kernel.forward(
            *(q, k_all, v_all, walk.slices, walk.kernel_plan, problem),
            score=execution.score_over(stage.local, stage.remote),
            max_scores=max_scores,
        )
    assert next(casts, None) is None
    return result
