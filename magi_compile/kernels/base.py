"""The one interface of all kernels: plan a mask, run it forward, run it backward.

Tensors are packed: `q [total_q, nheads_q, head_dim]`, `k [total_k, nheads_kv, head_dim]`,
`v [total_k, nheads_kv, head_dim_v]`, with any strides on tokens and heads.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from magi_compile.kernels.plan import BlockMap, Plan
from magi_compile.masks.slices import AttnSlices
from magi_compile.score.program import ScoreCall

#: As a caller may ask for a kernel; `kernels/select.py` says which they are.
KernelName: TypeAlias = Literal["hopper", "cuda", "fa4", "triton", "cpu", "reference"]


@dataclass(frozen=True)
class AttnProblem:
    """The problem of a kernel, without the mask and the lengths: enough to choose one and to compile it.

    `device_arch` is the CUDA compute capability as (major, minor), or None on a CPU.
    `softmax_scale` is positive where a kernel runs: the ops put the sign of another one into q. With a score program it
    is as it comes. `softcap` is 0.0 where there is none: scores are `softcap * tanh(scores / softcap)` otherwise.
    `has_bits`: whether slices may have bit blocks (`masks/bits.py`).
    `has_score`: whether a score program changes the scores (`ScoreCall`).
    `has_max_scores`: whether a forward pass is asked for the largest score of each row.
    `block_map`: of a mask that block lists say, without slices; else None.
    """

    device_type: str
    device_arch: tuple[int, int] | None
    dtype: torch.dtype
    nheads_q: int
    nheads_kv: int
    head_dim: int
    head_dim_v: int
    softmax_scale: float
    softcap: float = 0.0
    has_bits: bool = False
    has_score: bool = False
    has_max_scores: bool = False
    block_map: BlockMap | None = None

    @property
    def qhead_per_kvhead(self) -> int:
        return self.nheads_q // self.nheads_kv

    def __str__(self) -> str:
        arch = (
            "" if self.device_arch is None else f" (sm_{self.device_arch[0]}{self.device_arch[1]})"
        )
        of_v = "" if self.head_dim_v == self.head_dim else f", head_dim of v {self.head_dim_v}"
        more = {
            f"soft-cap {self.softcap:g}": self.softcap,
            "a score_mod": self.has_score,
            "largest scores": self.has_max_scores,
            "bit blocks": self.has_bits,
            "block lists": self.block_map is not None,
        }
        return (
            f"this attention on {self.device_type!r}{arch}: {str(self.dtype).removeprefix('torch.')}, heads "
            f"{self.nheads_q}:{self.nheads_kv}, head_dim {self.head_dim}{of_v}"
            f"{''.join(f', {name}' for name, is_asked in more.items() if is_asked)}"
        )


def output_stride(
    shape: Sequence[Any], stride: Sequence[Any], head_dim_v: Any
) -> tuple[Any, Any, Any]:
    """The strides of the output of attention of a q `[total_q, nheads_q, head_dim]`: where all rows of a head of q are
    next to each other, so are those of the output; else all heads of a row are. Of ints or SymInts.

    The first is a contiguous `[1, nheads_q, total_q, head_dim]` as models have it: its output then needs no copy.
    """
    total_q, nheads_q, head_dim = shape
    is_by_head = (
        nheads_q != 1
        and stride[2] == 1
        and stride[0] == head_dim
        and stride[1] == total_q * head_dim
    )
    return (
        (head_dim_v, total_q * head_dim_v, 1)
        if is_by_head
        else (nheads_q * head_dim_v, head_dim_v, 1)
    )


def output_like(q: Tensor, head_dim_v: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for the output of attention of `q`, in `output_stride`."""
    total_q, nheads_q, _ = q.shape
    stride = output_stride(q.shape, q.stride(), head_dim_v)
    return q.new_empty_strided((total_q, nheads_q, head_dim_v), stride, dtype=dtype or q.dtype)


def in_output_layout(q: Tensor, out: Tensor) -> Tensor:
    """`out` itself where it has the strides that `output_stride` says for `q`, else a copy that has."""
    if out.stride() == output_stride(q.shape, q.stride(), out.shape[2]):
        return out
    return output_like(q, out.shape[2], out.dtype).copy_(out)


def new_max_scores(q: Tensor) -> Tensor:
    """The largest scores of the rows of q before any key is seen: `Kernel.forward` takes them along."""
    return q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32)


class ForwardOutput(NamedTuple):
    """Attention, in memory laid out as `output_stride` says where its dtype is that of q."""

    out: Tensor  # [total_q, nheads_q, head_dim_v], the dtype of q; rows that see nothing are 0
    lse: Tensor  # [nheads_q, total_q], fp32, natural log; rows that see nothing are -inf


class BackwardOutput(NamedTuple):
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Saved(NamedTuple):
    """The inputs and the results of a forward pass, which its backward reads."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class Grads(NamedTuple):
    """The gradients of the results of a forward pass."""

    dout: Tensor  # [total_q, nheads_q, head_dim_v]
    dlse: Tensor | None  # [nheads_q, total_q]; None where the loss does not read lse


class Kernel(Protocol):
    """One implementation of attention over slices. Instances hold no state but caches."""

    name: str
    #: Whether the shapes of a plan depend on shapes alone, so that a graph can hold the plan as a value of its own.
    plans_in_graph: bool
    #: Whether its forward and backward look at slices although there is a plan.
    needs_slices: bool
    #: Whether calls on a GPU are prepared, so that they can be repeated without Python
    #: (`kernels/sm90/runtime/native.py`).
    prepares_calls: bool

    def refusals(self, problem: AttnProblem) -> list[str]:
        """Every reason why this kernel cannot run `problem`; empty when it can."""
        ...

    def notes(self, problem: AttnProblem) -> list[str]:
        """Notes on `problem` for a user of this kernel: parts that it leaves to another one, or runs as something
        else."""
        ...

    def plan(self, slices: AttnSlices, problem: AttnProblem) -> Plan:
        """The plan of this kernel for `slices`, shared by forward and backward and by all layers. On a GPU nothing
        waits for the device."""
        ...

    def plan_key(self, problem: AttnProblem) -> Hashable:
        """The inputs of a plan besides the slices (tile sizes): problems with equal keys share plans."""
        ...

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slices: AttnSlices | None,
        plan: Plan,
        problem: AttnProblem,
        *,
        prior: ForwardOutput | None = None,
        out_dtype: torch.dtype | None = None,
        score: ScoreCall | None = None,
        max_scores: Tensor | None = None,
    ) -> ForwardOutput:
        """Attention of `q` over `slices`, and where there is a `prior`, over its keys too.

        `prior` is the attention of the same queries over other keys, its `out` in fp32 or wider. What comes out has
        `out_dtype`: by default that of `q`, wider where it will be a prior.

        `score`, there where `problem.has_score` and only there, changes the scores of visible pairs to
        `program(softmax_scale * q @ k, b, h, q, kv)`; results for masked pairs are ignored. A row whose scores are all
        -inf has out 0 and lse -inf, like one that sees nothing.

        `max_scores`, there where `problem.has_max_scores` and only there, is written to: fp32 `[nheads_q, total_q]`,
        contiguous, each entry becomes the largest one of itself and of the scores of its row, as the softmax takes them
        (scaled, and capped or changed by `score`).
        """
        ...

    def backward(
        self,
        grads: Grads,
        saved: Saved,
        slices: AttnSlices | None,
        plan: Plan,
        problem: AttnProblem,
        *,
        score: ScoreCall | None = None,
        deterministic: bool | None = None,
    ) -> BackwardOutput:
        """Gradients; the same bits every time where `deterministic` is set, which is torch's setting by default. Those
        of the captured tensors of `score` are added to its `sums`."""
        ...


@runtime_checkable
class CompiledKernel(Protocol):
    """A kernel that is compiled when it first runs, and can begin with that before. All tensors may be fake; sizes are
    those of the call that is to come. `later` is for a call that may come, or not: what others need is compiled
    first."""

    def plan_of_sizes(
        self,
        num_slices: int,
        total_q: int,
        total_k: int,
        problem: AttnProblem,
        device: torch.device,
    ) -> Plan:
        """A plan with tensors where `Kernel.plan` has some for so many slices on `device`, and empty ones elsewhere;
        they have no values."""
        ...

    def begin_plan(self, plan: Plan, problem: AttnProblem, *, later: bool = False) -> None:
        """Begins to compile what makes a plan like this one."""
        ...

    def begin_forward(
        self,
        plan: Plan,
        problem: AttnProblem,
        score: ScoreCall | None = None,
        *,
        is_early: bool = False,
        later: bool = False,
    ) -> None:
        """Begins to compile what `Kernel.forward` launches without a prior, or where `is_early` what
        `EarlyKernel.early_forward` does."""
        ...

    def begin_backward(
        self,
        problem: AttnProblem,
        score: ScoreCall | None = None,
        *,
        wanted: Sequence[int] = (),
        deterministic: bool = False,
        later: bool = False,
    ) -> None:
        """Begins to compile what `Kernel.backward` launches; `wanted` are the numbers of the captured tensors that need
        gradients."""
        ...
