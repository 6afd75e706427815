"""Who takes part: ours, PyTorch's own context parallelism, the strategies of the field, and a rank that has nobody
beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from magi_bench.cases import Case
from magi_bench.contenders.flex import BLOCK, make_block_mask
from magi_bench.ranks import base
from magi_bench.ranks.problem import Problem
from magi_bench.ranks.strategies.contenders import STRATEGIES, UlyssesFlex
from magi_compile import _compat
from magi_compile.dtensor import ContextParallelOptions, plan


class Magi(base.RanksContender):
    name = "magi"
    label = "magi_compile.dtensor.plan"
    is_ours = True
    options = ContextParallelOptions()

    def spread(self, problem: Problem) -> base.Spread:
        made = plan(problem.workload.slices, problem.world.mesh, options=self.options)
        told = made.explain()
        received, sent = (x[problem.world.rank] for x in (told.received_rows, told.sent_rows))
        row = base.bytes_of_keys(problem)
        # Keys and values come again in a backward, and gradients of those that were sent come home.
        moved = (received * row, (received + sent) * row)
        return base.Spread(made.positions, made.attention, moved, "plan")


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


class OneRank(base.RanksContender):
    """The yardstick: no other rank, no communication; FLOP/s are what to compare, not times."""

    name = "one-rank"
    label = "our kernel, one rank, its tokens alone"
    is_alone = True

    def spread(self, problem: Problem) -> base.Spread:
        heads = problem.settings.nheads_q, problem.settings.nheads_kv
        attend = base.kernel_on(problem.workload, problem.world, heads)
        positions = torch.arange(problem.total, device=problem.world.device)
        return base.Spread(positions, attend, (0, 0), "shapes")


class TorchContextParallel(base.RanksContender):
    """FlexAttention over gathered keys and values, as PyTorch's style of context parallelism has it,
    in one compiled graph."""

    name = "torch"
    label = "PyTorch's context parallelism, FlexAttention"
    balancer = ""  # PyTorch's name of the one that places tokens; none leaves them in order

    def supports(self, problem: Problem, case: Case) -> list[str]:
        return base.flex_refusals(problem.world, case)

    def spread(self, problem: Problem) -> base.Spread:
        world, block_mask = problem.world, make_block_mask(problem.workload, problem.world.device)
        balancer = self.load_balancer(problem, block_mask)
        positions = positions_by(balancer, problem)
        local = _compat.block_mask_of_torch_rank(world.mesh, block_mask, balancer)
        attend = base.flex_on(world, local, over_ranks=True)
        row, others = base.bytes_of_keys(problem), problem.total - problem.tokens
        # A reduce-scatter brings a rank as many rows as it has, from each of the others.
        return base.Spread(positions, attend, (others * row, others * row), "shapes")

    def load_balancer(self, problem: Problem, block_mask: BlockMask) -> Any:
        """PyTorch's load balancer, or None."""
        world = problem.world
        arguments: dict[str, tuple[Any, ...]] = {
            "HeadTail": (problem.total, world.size, world.kind),
            "PTRR": (block_mask, world.size),
            "PerDocumentHeadTail": ([problem.workload.documents], world.size, world.kind),
        }
        if not self.balancer:
            return None
        return _compat.load_balancer_of_torch(self.balancer, *arguments[self.balancer])


class HeadTail(TorchContextParallel):
    name = "torch-head-tail"
    label = "PyTorch's, head-tail balancer"
    balancer = "HeadTail"


class PerDocument(TorchContextParallel):
    name = "torch-documents"
    label = "PyTorch's, head-tail balancer of each document"
    balancer = "PerDocumentHeadTail"

    def supports(self, problem: Problem, case: Case) -> list[str]:
        part, documents = 2 * problem.world.size, problem.workload.documents
        reasons, odd = super().supports(problem, case), [x for x in documents if x % part]
        if odd:
            text = f"takes documents of a multiple of {part} tokens, {len(odd)} of {len(documents)} are not"
            reasons.append(text)
        return reasons


class RoundRobin(TorchContextParallel):
    name = "torch-ptrr"
    label = "PyTorch's, round-robin balancer"
    balancer = "PTRR"

    def supports(self, problem: Problem, case: Case) -> list[str]:
        reasons, rows = super().supports(problem, case), problem.total // BLOCK
        if rows % problem.world.size:
            reasons.append(f"takes blocks of {BLOCK} rows that ranks divide, got {rows}")
        return reasons


#: In the order in which they run and of reports: those that compile for long come last.
CONTENDERS: tuple[type[base.RanksContender], ...] = (
    *(Magi, MagiWaits, MagiOneStage, OneRank),
    *STRATEGIES,
    *(UlyssesFlex, HeadTail, RoundRobin, PerDocument, TorchContextParallel),
)


def positions_by(balancer: Any, problem: Problem) -> Tensor:
    """The tokens of this rank: its part of the permutation of one of PyTorch's load balancers,
    or of the sequence."""
    world = problem.world
    order = torch.arange(problem.total, device=world.device)
    if balancer is not None:
        order = _compat.indices_of_load_balancer(balancer)[0].to(world.device)
    return order[world.rank * problem.tokens :][: problem.tokens]
