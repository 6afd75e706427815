"""One attention over the tokens of all ranks, and the truth that every contender is held to; the interface of whoever
spreads it over ranks, and our kernel on one of them."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import BlockMask

from magi_bench.arguments import Settings
from magi_bench.cases import Case
from magi_bench.clock import Ready, wait
from magi_bench.contenders.base import Attend, Contender, Layout, compiled
from magi_bench.gate import RESULTS, Check, Truth, weigh
from magi_bench.workloads import workload
from magi_bench.workloads.llama import Attention
from magi_bench.workloads.workload import Inputs, Workload
from magi_bench.world import World
from magi_compile import _compat
from magi_compile.kernels.plan import pack
from magi_compile.kernels.select import problem_on, select
from magi_compile.masks.slices import AttnSlices
from magi_compile.ops import library  # noqa: F401  (defines torch.ops.magi)

# Rows of queries whose scores are in memory at a time.
ROWS = 256


class Problem:
    """A mask and tensors over a whole sequence, the same on all ranks. If it `is_alone`, the sequence is as long as
    one rank's tokens, so that every rank has one of its own."""

    def __init__(
        self, settings: Settings, world: World, mask: str, tokens: int, is_alone: bool = False
    ):
        self.settings, self.world, self.tokens = settings, world, tokens
        self.total = tokens if is_alone else tokens * world.size
        case = settings.case("kernel", mask, self.total)
        self.workload: Workload = workload.build(case, str(world.device))

    @cached_property
    def inputs(self) -> Inputs:
        """The tensors of the whole sequence, on every rank."""
        return self.workload.inputs(str(self.world.device))

    def flops(self, which: str) -> float:
        """The mean over ranks."""
        flops = self.workload.flops(which)
        return flops * self.tokens / self.total

    @cached_property
    def truth(self) -> Truth:
        """Out, dq, dk and dv of the first and the last key-value head and their queries, `[tokens, heads, head_dim]`;
        computed by all ranks together: each has some of the rows."""
        dtype = getattr(torch, self.settings.dtype)
        exact, plain = (
            [self.world.total(part) for part in self._dense(dtype)]
            for dtype in (torch.float64, dtype)
        )
        return Truth.of(exact, plain, dtype)

    def check(self, results: Sequence[Tensor], positions: Tensor) -> Check:
        """Holds `results`, packed, of the tokens `positions` of this rank, to the truth;
        the same answer on all ranks."""
        kept = self._heads
        errors = {}
        for name, x, truth in zip(RESULTS, results, self.truth.exact, strict=False):
            heads = kept[0] if name in ("out", "dq") else kept[1]
            mine = truth[positions]
            off = (x.detach()[:, heads].double() - mine).square().sum()
            squares = self.world.total(torch.stack([off, mine.square().sum()]))
            error = float((squares[0] / squares[1]).sqrt())
            errors[name] = error if error == error else float("inf")
        return Check(self.total, errors, {name: self.truth.allowed[name] for name in errors})

    @property
    def _heads(self) -> tuple[list[int], list[int]]:
        """The heads of queries and of keys whose results are checked."""
        group = self.settings.nheads_q // self.settings.nheads_kv
        of_keys = sorted({0, self.settings.nheads_kv - 1})
        return [x * group + i for x in of_keys for i in range(group)], of_keys

    def _dense(self, dtype: torch.dtype) -> list[Tensor]:
        """This rank's share of out, dq, dk and dv, all in `dtype`; their sums over ranks are the results."""
        group = self.settings.nheads_q // self.settings.nheads_kv
        of_queries, of_keys = self._heads
        q, k, v, dout = (
            x[:, heads].transpose(0, 1).to(dtype)
            for x, heads in zip(
                self.inputs, (of_queries, of_keys, of_keys, of_queries), strict=True
            )
        )
        sums = [torch.zeros_like(x, dtype=torch.float64) for x in (q, q, k, v)]
        keys = torch.arange(self.total, device=q.device)
        zero = keys.new_zeros(())
        for begin in range(ROWS * self.world.rank, self.total, ROWS * self.world.size):
            rows = slice(begin, begin + ROWS)
            visible = self.workload.mask_mod(zero, zero, keys[rows, None], keys)
            visible = visible.expand(-1, self.total)  # of a mask that looks at queries alone, too
            seen = visible.any(0).nonzero()
            columns = slice(int(seen[0]), int(seen[-1]) + 1)
            for head in range(len(of_keys)):
                heads = slice(head * group, (head + 1) * group)
                parts = attend_rows(
                    *(q[heads, rows], k[head, columns], v[head, columns], dout[heads, rows]),
                    visible[:, columns],
                )
                out, dq, dk, dv = sums
                places = (out[heads, rows], dq[heads, rows], dk[head, columns], dv[head, columns])
                for place, part in zip(places, parts, strict=True):
                    place += part
        return [x.transpose(0, 1) for x in sums]


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, visible: Tensor
) -> tuple[Tensor, ...]:
    """Out of some rows `[heads, rows, head_dim]` of q, by the keys `[keys, head_dim]` of the one head that they share,
    and their share of dq, dk and dv; everything in the dtype of the arguments."""
    q, k, v = leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = weigh(q @ k.T * q.shape[-1] ** -0.5, visible, v)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


class Spread(NamedTuple):
    """A contender for one mask."""

    positions: Tensor  # int64 `[tokens of a rank]`, where in the sequence this rank's tokens are
    attend: Attend  # packed `[tokens, heads, head_dim]` q, k and v of them to out; differentiable
    received: tuple[int, int]  # bytes that this rank gets from others, forward and backward
    counted: str  # how they are known: "plan" or "shapes"


class RanksContender(Contender):
    """A way to run the attention of a sequence over ranks; if it `is_alone`, every rank has a sequence of its own, as
    long as its tokens."""

    _positions: Tensor

    @classmethod
    def around(cls, local_kernels: Sequence[str]) -> list[RanksContender]:
        """One for each local kernel; one alone of those that choose none."""
        return [cls()]

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
        inputs = [x[made.positions] for x in problem.inputs]
        return Ready(call_of(made.attend, inputs, case), facts=facts)

    def check(self, problem: Problem, case: Case, results: Sequence[Tensor]) -> Check:
        return problem.check(results, self._positions)


def call_of(attend: Attend, inputs: Sequence[Tensor], case: Case) -> Callable[[], Sequence[Tensor]]:
    """A call with copies q, k, v and dout, which gives out, and gradients if the pass has a backward."""
    needs_grad = case.which == "fwdbwd"
    *tensors, dout = inputs
    leaves = [x.requires_grad_(needs_grad) for x in tensors]

    def call() -> Sequence[Tensor]:
        out = attend(*leaves)
        return [out, *torch.autograd.grad(out, leaves, dout)] if needs_grad else [out]

    return call


def kernel_on(
    workload: Workload, world: World, heads: Sequence[int], slices: AttnSlices | None = None
) -> Attend:
    """Our kernel on one rank, with a plan made beforehand; packed tensors with so many query and key-value heads, and
    the mask of the workload or another."""
    case = workload.case
    slices = (workload.slices if slices is None else slices).to(world.device)
    sizes = (heads[0], heads[1], case.head_dim, case.head_dim)
    asked = problem_on(world.device, getattr(torch, case.dtype), sizes, case.head_dim**-0.5)
    kernel = select(asked).kernel
    made, lists = pack(kernel.plan(slices, asked)), slices.lists

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = asked.softmax_scale
        out: Tensor = torch.ops.magi.attention(q, k, v, lists, made, scale, 0.0, kernel.name)[0]
        return out

    return attend


def flex_on(world: World, block_mask: BlockMask, *, over_ranks: bool) -> Attend:
    """Compiled FlexAttention of packed tensors, with PyTorch's style of context parallelism or on one rank."""
    module = Attention(None)
    if over_ranks:
        parallelize_module(module, world.mesh, _compat.context_parallel_style_of_torch())

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
