"""The interface of whoever spreads the attention of a sequence over ranks, and our kernel on one of them."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import BlockMask

from magi_bench.cases import Case
from magi_bench.clock import Ready, wait
from magi_bench.contenders.base import Attend, Contender, Layout
from magi_bench.gate import Check
from magi_bench.own_code import compiled
from magi_bench.ranks.problem import Problem
from magi_bench.step.contenders import NO_BACKWARD
from magi_bench.workloads.llama import Attention
from magi_bench.workloads.workload import Workload
from magi_bench.world import World
from magi_compile import _compat
from magi_compile.kernels.plan import pack
from magi_compile.kernels.select import problem_on, select
from magi_compile.ops import library  # noqa: F401  (defines torch.ops.magi)


class Spread(NamedTuple):
    """A contender for one mask."""

    positions: Tensor  # int64 `[tokens of a rank]`, where in the sequence this rank's tokens are
    attend: Attend  # packed `[tokens, heads, head_dim]` q, k and v of them to out; differentiable
    received: tuple[int, int]  # bytes that this rank gets from others, forward and backward
    counted: str  # how they are known: "plan" or "shapes"


class RanksContender(Contender):
    """A way to run the attention of a sequence over ranks; if it `is_alone`, every rank has a sequence of its own, as
    long as its tokens."""

    has_local_kernel: bool = False  # whether it takes the name of one
    _positions: Tensor

    @abstractmethod
    def spread(self, problem: Problem) -> Spread:
        """Everything that depends on the mask and the shapes alone; all ranks call it together."""

    def prepare(self, problem: Problem, case: Case) -> Ready:
        began = time.perf_counter()
        made = self.spread(problem)
        wait(problem.world.kind)
        needs_grad = case.which == "fwdbwd"
        facts = {
            "prepare_s": time.perf_counter() - began,
            "received_bytes": made.received[0] + (made.received[1] if needs_grad else 0),
            "counted": made.counted,
            "rank_tokens": len(made.positions),
        }
        self._positions = made.positions
        *tensors, dout = (x[made.positions] for x in problem.inputs)
        leaves = [x.requires_grad_(needs_grad) for x in tensors]

        def call() -> Sequence[Tensor]:
            out = made.attend(*leaves)
            return [out, *torch.autograd.grad(out, leaves, dout)] if needs_grad else [out]

        return Ready(call, facts=facts)

    def check(self, problem: Problem, case: Case, results: Sequence[Tensor]) -> Check:
        return problem.check(results, self._positions)


def kernel_on(workload: Workload, world: World, heads: Sequence[int]) -> Attend:
    """Our kernel on one rank, with a plan made beforehand; packed tensors with so many query and key-value heads."""
    case, slices = workload.case, workload.slices.to(world.device)
    sizes = (heads[0], heads[1], case.head_dim, case.head_dim)
    asked = problem_on(world.device, getattr(torch, case.dtype), sizes, case.head_dim**-0.5)
    kernel = select(asked).kernel
    made = pack(kernel.plan(slices, asked))
    lists = (slices.q_ranges, slices.k_ranges, slices.mask_types)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = asked.softmax_scale
        out: Tensor = torch.ops.magi.attention(q, k, v, lists, made, scale, 0.0, kernel.name)[0]
        return out

    return attend


def flex_refusals(world: World, case: Case) -> list[str]:
    """Why FlexAttention cannot run it."""
    return [NO_BACKWARD] if world.kind == "cpu" and case.which == "fwdbwd" else []


def flex_on(world: World, block_mask: BlockMask, *, over_ranks: bool) -> Attend:
    """Compiled FlexAttention of packed tensors, with PyTorch's style of context parallelism or on one rank."""
    module = Attention(None)
    if over_ranks:
        parallelize_module(module, world.mesh, _compat.context_parallel_style_of_torch(2))

    def call(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
        out: Tensor = module(q, k, v, block_mask)
        return out

    flex = compiled(call)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flex(*(Layout.HEADS_FIRST.of(x) for x in (q, k, v)), block_mask)
        return Layout.HEADS_FIRST.to_packed(out)

    return attend


def bytes_of_keys(problem: Problem) -> int:
    """The bytes of the key and the value of a token, or of their gradients."""
    settings = problem.settings
    return 2 * settings.nheads_kv * settings.head_dim * getattr(torch, settings.dtype).itemsize
