"""Who takes part: ours, PyTorch's own context parallelism, the strategies of the field, and a rank that has nobody
beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import BlockMask

from magi_bench.cases import Case
from magi_bench.contenders.flex import BLOCK, make_block_mask
from magi_bench.own_code import with_own_code
from magi_bench.ranks.base import RanksContender, Spread, bytes_of_keys, flex_refusals, kernel_on
from magi_bench.ranks.problem import Problem
from magi_bench.ranks.strategies.contenders import STRATEGIES, UlyssesFlex
from magi_bench.workloads.llama import Attention
from magi_bench.world import World
from magi_compile import _compat
from magi_compile.dtensor import ContextParallelOptions, plan


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


#: In the order in which they run and of reports: those that compile for long come last.
CONTENDERS: tuple[type[RanksContender], ...] = (
    Magi,
    MagiWaits,
    MagiOneStage,
    OneRank,
    *STRATEGIES,
    UlyssesFlex,
    HeadTail,
    RoundRobin,
    PerDocument,
    TorchContextParallel,
)


def compiled_attention(world: World) -> Callable[..., Tensor]:
    """FlexAttention with PyTorch's style of context parallelism, of `[1, heads, tokens, head_dim]` and a BlockMask."""
    module = Attention(None)
    style = _compat.context_parallel_style_of_torch(2)
    parallelize_module(module, world.mesh, style)

    def call(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
        out: Tensor = module(q, k, v, block_mask)
        return out

    return torch.compile(with_own_code(call), dynamic=False)


def positions_by(balancer: Any, problem: Problem) -> Tensor:
    """The tokens of this rank: its part of the permutation of one of PyTorch's load balancers,
    or of the sequence."""
    world = problem.world
    order = torch.arange(problem.total, device=world.device)
    if balancer is not None:
        order = _compat.indices_of_load_balancer(balancer)[0].to(world.device)
    return order[world.rank * problem.tokens :][: problem.tokens]
