"""Who takes part: ours, PyTorch's own context parallelism, all-to-all over heads,
and a rank that has nobody beside it."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from magi_bench.cases import Case
from magi_bench.clock import Ready, wait
from magi_bench.contenders.base import Contender
from magi_bench.contenders.flex import BLOCK, make_block_mask
from magi_bench.gate import Check
from magi_bench.own_code import with_own_code
from magi_bench.ranks.problem import Problem
from magi_bench.step.contenders import NO_BACKWARD
from magi_bench.workloads.llama import Attention
from magi_bench.workloads.workload import Workload
from magi_bench.world import World
from magi_compile import _compat
from magi_compile.dtensor import ContextParallelOptions, plan
from magi_compile.kernels.plan import pack
from magi_compile.kernels.select import problem_on, select
from magi_compile.ops import library  # noqa: F401  (defines torch.ops.magi)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Spread(NamedTuple):
    """A contender for one mask.

    Attributes:
        positions: int64 `[tokens of a rank]`, where in the sequence this rank's tokens are.
        attend: packed `[tokens, heads, head_dim]` q, k and v of them to out; differentiable.
        received: bytes that this rank gets from others, forward and backward.
        counted: how they are known: "plan" or "shapes".
    """

    positions: Tensor
    attend: Attend
    received: tuple[int, int]
    counted: str


class RanksContender(Contender):
    """A way to run the attention of a sequence over ranks; if it `is_alone`, every rank has a sequence of its own, as
    long as its tokens."""

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


class Magi(RanksContender):
    name = "magi"
    label = "magi_compile.dtensor.plan"
    is_ours = True
    options = ContextParallelOptions()

    def spread(self, problem: Problem) -> Spread:
        made = plan(problem.workload.slices, problem.world.mesh, options=self.options)
        told = made.explain()
        received, sent = (x[problem.world.rank] for x in (told.received_rows, told.sent_rows))
        row = bytes_of_keys(problem)
        # Keys and values come again in a backward, and gradients of those that were sent come home.
        return Spread(
            made.positions, made.attention, (received * row, (received + sent) * row), "plan"
        )


class MagiWaits(Magi):
    """Without the early start, which `magi` has: the difference is its gain."""

    name = "magi-waits"
    label = "the same, waiting for remote keys"
    is_ours = False
    options = ContextParallelOptions(degree=0, backward_degree=0, early=False)


class MagiOneStage(Magi):
    """With one stage of remote keys, of which `magi` may have more: the difference is their gain."""

    name = "magi-one-stage"
    label = "the same, local keys and then remote ones"
    is_ours = False
    options = ContextParallelOptions(degree=1, backward_degree=1)


class OneRank(RanksContender):
    """The yardstick: no other rank, no communication; FLOP/s are what to compare, not times."""

    name = "one-rank"
    label = "our kernel, one rank, its tokens alone"
    is_alone = True

    def spread(self, problem: Problem) -> Spread:
        heads = problem.settings.nheads_q, problem.settings.nheads_kv
        attend = kernel_on(problem.workload, problem.world, heads)
        positions = torch.arange(problem.total, device=problem.world.device)
        return Spread(positions, attend, (0, 0), "shapes")


class TorchContextParallel(RanksContender):
    """FlexAttention over gathered keys and values, as PyTorch's style of context parallelism has it,
    in one compiled graph."""

    name = "torch"
    label = "PyTorch's context parallelism, FlexAttention"
    balancer: str | None = None

    def supports(self, problem: Problem, case: Case) -> list[str]:
        return flex_refusals(problem, case)

    def spread(self, problem: Problem) -> Spread:
        world, block_mask = problem.world, make_block_mask(problem.workload, problem.world.device)
        balancer = self.load_balancer(problem, block_mask)
        positions = positions_by(balancer, problem)
        local = _compat.block_mask_of_torch_rank(world.mesh, block_mask, balancer)
        module = compiled_attention(world)
        row, others = bytes_of_keys(problem), problem.total - problem.tokens

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            out: Tensor = module(q, k, v, local)
            return out[0].transpose(0, 1)

        # A reduce-scatter brings a rank as many rows as it has, from each of the others.
        return Spread(positions, attend, (others * row, others * row), "shapes")

    def load_balancer(self, problem: Problem, block_mask: BlockMask) -> Any:
        """The load balancer that places the tokens; None leaves them in the order of the sequence."""
        return None


class HeadTail(TorchContextParallel):
    name = "torch-head-tail"
    label = "PyTorch's, head-tail balancer"

    def load_balancer(self, problem: Problem, block_mask: BlockMask) -> Any:
        world = problem.world
        return _compat.load_balancer_of_torch("HeadTail", problem.total, world.size, world.kind)


class PerDocument(TorchContextParallel):
    name = "torch-documents"
    label = "PyTorch's, head-tail balancer of each document"

    def supports(self, problem: Problem, case: Case) -> list[str]:
        part, documents = 2 * problem.world.size, problem.workload.documents
        odd = [x for x in documents if x % part]
        reasons = super().supports(problem, case)
        if odd:
            text = f"takes documents of a multiple of {part} tokens, {len(odd)} of {len(documents)} are not"
            reasons.append(text)
        return reasons

    def load_balancer(self, problem: Problem, block_mask: BlockMask) -> Any:
        lengths, world = [problem.workload.documents], problem.world
        name = "PerDocumentHeadTail"
        return _compat.load_balancer_of_torch(name, lengths, world.size, world.kind)


class RoundRobin(TorchContextParallel):
    name = "torch-ptrr"
    label = "PyTorch's, round-robin balancer"

    def supports(self, problem: Problem, case: Case) -> list[str]:
        rows = problem.total // BLOCK
        reasons = super().supports(problem, case)
        if rows % problem.world.size:
            reasons.append(f"takes blocks of {BLOCK} rows that ranks divide, got {rows}")
        return reasons

    def load_balancer(self, problem: Problem, block_mask: BlockMask) -> Any:
        return _compat.load_balancer_of_torch("PTRR", block_mask, problem.world.size)


class Ulysses(RanksContender):
    """All-to-all: a rank gets all tokens of some heads, attends by itself, and the output goes back.
    Tokens are in order."""

    def supports(self, problem: Problem, case: Case) -> list[str]:
        nheads, size = problem.settings.nheads_kv, problem.world.size
        return [f"{nheads} key-value heads do not divide by {size} ranks"] if nheads % size else []

    def spread(self, problem: Problem) -> Spread:
        world, settings = problem.world, problem.settings
        nheads_q, nheads_kv = (n // world.size for n in (settings.nheads_q, settings.nheads_kv))
        inner = self.attention(problem, (nheads_q, nheads_kv))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            parts = [x.unflatten(1, (world.size, -1)).transpose(0, 1) for x in (q, k, v)]
            mine = Exchange.apply(torch.cat(parts, 2), world.group).flatten(0, 1)
            out = inner(*mine.split((nheads_q, nheads_kv, nheads_kv), 1))
            back = Exchange.apply(out.unflatten(0, (world.size, -1)), world.group)
            return back.transpose(0, 1).flatten(1, 2)

        nheads = 2 * settings.nheads_q + 2 * settings.nheads_kv
        itemsize = getattr(torch, settings.dtype).itemsize
        whole = problem.tokens * nheads * settings.head_dim * itemsize
        moved = whole * (world.size - 1) // world.size
        return Spread(positions_by(None, problem), attend, (moved, moved), "shapes")

    @abstractmethod
    def attention(self, problem: Problem, heads: tuple[int, int]) -> Attend:
        """Attention of the whole sequence with so many query and key-value heads, on packed tensors."""


class UlyssesMagi(Ulysses):
    name = "ulysses-magi"
    label = "all-to-all over heads, our kernel"

    def attention(self, problem: Problem, heads: tuple[int, int]) -> Attend:
        return kernel_on(problem.workload, problem.world, heads)


class UlyssesFlex(Ulysses):
    name = "ulysses-flex"
    label = "all-to-all over heads, FlexAttention"

    def supports(self, problem: Problem, case: Case) -> list[str]:
        return [*super().supports(problem, case), *flex_refusals(problem, case)]

    def attention(self, problem: Problem, heads: tuple[int, int]) -> Attend:
        block_mask = make_block_mask(problem.workload, problem.world.device)
        flex = torch.compile(with_own_code(_flex), dynamic=False)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            out: Tensor = flex(q, k, v, block_mask)
            return out[0].transpose(0, 1)

        return attend


#: In the order in which they run and of reports: those that compile for long come last.
CONTENDERS: tuple[type[RanksContender], ...] = (
    Magi,
    MagiWaits,
    MagiOneStage,
    OneRank,
    UlyssesMagi,
    UlyssesFlex,
    HeadTail,
    RoundRobin,
    PerDocument,
    TorchContextParallel,
)


class Exchange(torch.autograd.Function):
    """`x [ranks, ...]`: part i goes to rank i; part i of the result comes from it.
    The gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradients[0], ctx.group), None


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def _flex(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
    out: Tensor = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)
    return out


def compiled_attention(world: World) -> Callable[..., Tensor]:
    """FlexAttention with PyTorch's style of context parallelism, of `[1, heads, tokens, head_dim]` and a BlockMask."""
    module = Attention(None)
    style = _compat.context_parallel_style_of_torch(2)
    parallelize_module(module, world.mesh, style)

    def call(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
        out: Tensor = module(q, k, v, block_mask)
        return out

    return torch.compile(with_own_code(call), dynamic=False)


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


def positions_by(balancer: Any, problem: Problem) -> Tensor:
    """The tokens of this rank: its part of the permutation of one of PyTorch's load balancers,
    or of the sequence."""
    world = problem.world
    order = torch.arange(problem.total, device=world.device)
    if balancer is not None:
        order = _compat.indices_of_load_balancer(balancer)[0].to(world.device)
    return order[world.rank * problem.tokens :][: problem.tokens]


def flex_refusals(problem: Problem, case: Case) -> list[str]:
    """Why FlexAttention cannot run it."""
    return [NO_BACKWARD] if problem.world.kind == "cpu" and case.which == "fwdbwd" else []


def bytes_of_keys(problem: Problem) -> int:
    """The bytes of the key and the value of a token, or of their gradients."""
    settings = problem.settings
    return 2 * settings.nheads_kv * settings.head_dim * getattr(torch, settings.dtype).itemsize
