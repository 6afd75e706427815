"""Context parallelism: which rank holds what, who sends what to whom, and attention across ranks.

with context_parallel(mesh, mask=block_mask, buffers=[tokens, labels], buffer_seq_dims=[1, 1]):
    model(tokens, labels, block_mask).backward()   # each rank computes its tokens, attention sees all
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from magi_compile.dtensor.attention import context_parallel_attention
    from magi_compile.dtensor.context.block import (
        context_parallel,
        context_parallel_shard,
        context_parallel_unshard,
    )
    from magi_compile.dtensor.context.style import ContextParallel
    from magi_compile.dtensor.planning.cost import CostModel
    from magi_compile.dtensor.planning.rank_plan import (
        ContextParallelOptions,
        plan_rank,
        plan_rank_ahead,
    )
    from magi_compile.dtensor.sequence.make_plan import HostPlan, plan, plan_ahead
    from magi_compile.dtensor.sequence.sequence_plan import SequencePlan
    from magi_compile.dtensor.sequence.spread_tokens import SpreadTokens
    from magi_compile.dtensor.tools.calibrate import calibrate

__all__ = [
    "ContextParallel",
    "ContextParallelOptions",
    "CostModel",
    "HostPlan",
    "SequencePlan",
    "SpreadTokens",
    "calibrate",
    "context_parallel",
    "context_parallel_attention",
    "context_parallel_shard",
    "context_parallel_unshard",
    "plan",
    "plan_ahead",
    "plan_rank",
    "plan_rank_ahead",
]

# Where each public name lives; resolved at first use.
_HOMES = {
    "ContextParallel": "context.style",
    "ContextParallelOptions": "planning.rank_plan",
    "CostModel": "planning.cost",
    "HostPlan": "sequence.make_plan",
    "SequencePlan": "sequence.sequence_plan",
    "SpreadTokens": "sequence.spread_tokens",
    "calibrate": "tools.calibrate",
    "context_parallel": "context.block",
    "context_parallel_attention": "attention",
    "context_parallel_shard": "context.block",
    "context_parallel_unshard": "context.block",
    "plan": "sequence.make_plan",
    "plan_ahead": "sequence.make_plan",
    "plan_rank": "planning.rank_plan",
    "plan_rank_ahead": "planning.rank_plan",
}


if not TYPE_CHECKING:  # type checkers know the names above, and report others

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
