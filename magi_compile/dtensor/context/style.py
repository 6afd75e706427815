"""A parallel style for `torch.distributed.tensor.parallel.parallelize_module`: attention modules over ranks."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from magi_compile.dtensor.context.attention import SpreadAttention, spread_attention
from magi_compile.dtensor.sequence.make_plan import group_of


class ContextParallel(ParallelStyle):
    """Runs the attention of a module over the ranks of the mesh, by the plan that its mask carries.

    Call the module with this rank's tokens. It passes `SequencePlan.block_mask` (which `context_parallel_shard` makes
    of a BlockMask) to `flex_attention`, or `SequencePlan.slices` to `magi_compile.flex_flash_attention`. Attention with
    another mask or without one raises, as in `context_parallel`. No collective is added around the module: each
    attention moves the rows that it needs.

        parallelize_module(model, mesh["cp"], {"layers.*.attention": ContextParallel()})
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group_of(device_mesh)  # or it raises
        forward = module.forward

        @wraps(forward)
        def spread(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                with SpreadAttention(()):
                    return forward(*args, **kwargs)
            with spread_attention(()):
                return forward(*args, **kwargs)

        module.forward = spread
        return module
