"""Our kernels, through the op that the lowering emits, each with a plan made beforehand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from magi_bench.contenders.base import Attend, Kernel
from magi_bench.workloads.workload import Inputs, Workload
from magi_compile import ops  # noqa: F401  (defines torch.ops.magi)
from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.select import problem_on, refusals
from magi_compile.masks.evaluation.block_lists import counts_and_order
from magi_compile.masks.program.read import read_mask_mod


class _Magi(Kernel):
    kernel: str
    levels = ("kernel", "sparse")
    is_ours = True

    def supports(self, workload: Workload, device: str) -> list[str]:
        return refusals(self.kernel, _problem(workload, device))

    def prepare(self, workload: Workload, inputs: Inputs) -> Attend:
        if walks_lists(self.kernel, workload):
            return self._of_lists(workload, inputs)
        slices = workload.slices.to(inputs.q.device)
        problem = _problem(workload, inputs.q.device.type)
        lists = slices.lists
        plan = torch.ops.magi.plan(
            *(*lists, slices.seqlen_q, slices.seqlen_k, problem.dtype),
            *(problem.nheads_q, problem.nheads_kv, problem.head_dim, problem.head_dim_v),
            *(0.0, self.kernel),
        )

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scale = problem.softmax_scale
            return torch.ops.magi.attention(q, k, v, lists, plan, scale, 0.0, self.kernel)[0]

        if not workload.block_map:
            return attend
        shape = (workload.case.seqlen, -1, problem.head_dim_v)
        return lambda q, k, v: (
            attend(*(_heads_as_rows(x) for x in (q, k, v)))
            .view(-1, shape[0], shape[2])
            .transpose(0, 1)
        )

    def _of_lists(self, workload: Workload, inputs: Inputs) -> Attend:
        case, device = workload.case, inputs.q.device
        heads = [case.nheads_q, case.nheads_kv, *case.head_dims]
        sizes = (1, case.seqlen, case.seqlen)
        beside: tuple[Any, ...] = ()
        lists: tuple[list[Tensor], list[int]] = ([], [])
        if workload.blocks.is_uniform:
            lists = lists_of_heads(workload, device), [case.block] * 2
        else:
            beside = (False, None, table_of_heads(workload, device))
        if workload.blocks.is_causal:
            intervals = torch.ops.magi.mask_intervals(
                *([], [], read_mask_mod(causal, device).program.text, *sizes, 1, device, [], [])
            )
            beside = (False, intervals)
        plan = torch.ops.magi.plan_lists(
            *(*lists, *sizes, getattr(torch, case.dtype), heads, 0.0, self.kernel, *beside)
        )
        scale = case.head_dim**-0.5
        return lambda q, k, v: torch.ops.magi.attention(q, k, v, [], plan, scale, 0.0, self.kernel)[
            0
        ]


def walks_lists(kernel: str, workload: Workload) -> bool:
    """True if the kernel takes the block lists of the workload as they are, or a table of its uneven blocks."""
    return kernel == "hopper" and workload.block_map is not None


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """The mask_mod beside the lists of causal blocks."""
    return q >= kv


def lists_of_heads(workload: Workload, device: torch.device) -> list[Tensor]:
    """The lists of all query heads, `[1, nheads_q, blocks]` and `[1, nheads_q, blocks, blocks]`."""
    blocks = workload.blocks
    visible = blocks.visible.to(device).repeat_interleave(blocks.group, 0)
    return list(counts_and_order(visible[None]))


def table_of_heads(workload: Workload, device: torch.device) -> list[Tensor]:
    """The blocks of all query heads that see each other, bool `[1, nheads_q, blocks, blocks]`, and the blocks of
    queries and of keys, int32 `[1, seqlen]`."""
    blocks = workload.blocks
    visible = blocks.visible.to(device).repeat_interleave(blocks.group, 0)
    return [visible[None], *(x.int()[None] for x in blocks.block_of_token(device))]


def _heads_as_rows(x: Tensor) -> Tensor:
    """`[tokens, heads, head_dim]`, a head's tokens together in memory, as rows of one head: masks may differ."""
    return x.transpose(0, 1).flatten(0, 1)[:, None]


def _problem(workload: Workload, device: str) -> AttnProblem:
    case = workload.case
    is_folded = workload.block_map and not walks_lists("hopper", workload)
    heads = (1, 1) if is_folded else (case.nheads_q, case.nheads_kv)
    dtype, scale = getattr(torch, case.dtype), case.head_dim**-0.5
    return problem_on(torch.device(device), dtype, (*heads, *case.head_dims), scale)


class MagiHopper(_Magi):
    name = "magi-hopper"
    label = "magi_compile (CUDA)"
    kernel = "hopper"
    module = "magi_compile.kernels.sm90"


class MagiTriton(_Magi):
    name = "magi-triton"
    label = "magi_compile (Triton)"
    kernel = "triton"
    dtypes = ("bfloat16", "float16", "float32")
    module = "magi_compile.kernels.triton"


class MagiCpu(_Magi):
    name = "magi-cpu"
    label = "magi_compile (CPU)"
    kernel = "cpu"
    devices = ("cpu",)
    dtypes = ("float32", "bfloat16", "float16")
