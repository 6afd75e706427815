"""A step of a small Llama whose tokens are spread over ranks: ours, and PyTorch's context parallelism.

A step spreads a batch of new packed causal documents, with or without a window, runs forward, loss and backward, and
adds the gradients up over ranks. Ours plans the batch's mask in it, or on a thread while the step before runs;
PyTorch's BlockMask is made before and not counted. Weights are the same on all ranks, and nothing is sharded but
tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import cache, cached_property
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import BlockMask

from magi_bench.arguments import Settings
from magi_bench.cases import Case
from magi_bench.clock import Prefetched, Ready
from magi_bench.contenders.base import Contender, compiled
from magi_bench.contenders.flex import no_backward
from magi_bench.gate import Check, Truth
from magi_bench.workloads.llama import (
    IGNORED,
    Llama,
    Pack,
    build,
    causal_in,
    document_of,
    pack,
    steps,
    truth_of,
)
from magi_bench.world import World
from magi_compile import _compat
from magi_compile.dtensor import SequencePlan, context_parallel, plan, plan_ahead
from magi_compile.masks.block_mask import one_block_mask

#: Masks of a model on packed causal documents: how many tokens before itself a token sees at most; None for all.
MASKS: dict[str, int | None] = {"document_causal": None, "sliding_window_causal": 1024}


class Problem:
    """The model's weights and batches, the same for every contender and on every rank."""

    def __init__(self, settings: Settings, world: World, mask: str, tokens: int):
        self.settings, self.world = settings, world
        self.total, self.window = tokens * world.size, MASKS[mask]

    def build(self) -> Llama:
        """The model, the same from every call."""
        return build(self.settings, self.settings.train_layers, self.world.device)

    def batch(self, turn: int) -> Pack:
        """The documents of a turn."""
        return pack(self.settings, self.total, turn, self.world.device, self.settings.lengths)

    @cached_property
    def truth(self) -> Truth:
        """Loss and gradients of the first step, of which each rank runs whole documents."""
        return truth_of(self.build(), self.batch(0), self.window, self.world)


class Spread(NamedTuple):
    """A rank's part of a batch: `[1, S / ranks]` tokens and targets, a mask for FlexAttention,
    positions of the tokens."""

    tokens: Tensor
    targets: Tensor
    mask: BlockMask
    positions: Tensor


class Training(Contender):
    """A way to spread the model's tokens, so many on a rank; named as the contender that runs attention alone."""

    def __init__(self, problem: Problem):
        self.problem, self.world = problem, problem.world

    def changed(self, model: Llama) -> Llama:
        """The model with what its attention needs to run over ranks."""
        return model

    def mask(self, batch: Pack) -> Any:
        """This rank's mask, where it is made in front of the step."""
        return None

    @abstractmethod
    def spread(self, batch: Pack, mask: Any) -> AbstractContextManager[Spread]:
        """A context around forward and backward."""

    def prepare(self, problem: Problem, case: Case) -> Ready:
        """Steps return the loss of all ranks."""
        model = self.changed(problem.build())
        loss_of = compiled(Llama.forward)

        def make(turn: int) -> tuple[Pack, Any]:
            batch = problem.batch(turn)
            return batch, self.mask(batch)

        @contextmanager
        def around(made: tuple[Pack, Any]) -> Iterator[Sequence[Any]]:
            batch, count = made[0], (made[0].targets != IGNORED).sum()
            with self.spread(*made) as part:
                yield part.tokens, part.targets, batch.document, part.mask, part.positions, count

        return steps(model, loss_of, Prefetched(make), case.which, around, self.world)

    def check(self, problem: Problem, case: Case, results: Sequence[Tensor]) -> Check:
        return problem.truth.check(results, problem.total)


class MagiTraining(Training):
    name = "magi"
    label = "magi_compile.dtensor.context_parallel"
    is_ours = True

    @contextmanager
    def spread(self, batch: Pack, mask: Any) -> Iterator[Spread]:
        made = self.plan(batch, mask)
        tokens = made.shard(batch.tokens, 1)
        targets = made.shard(batch.targets, 1, padding=IGNORED)
        with context_parallel(self.world.mesh, mask=made):
            yield Spread(tokens, targets, made.block_mask, made.positions)

    def plan(self, batch: Pack, mask: Any) -> SequencePlan:
        """The plan of a batch, made now."""
        return plan(self.mask_mod(batch), self.world.mesh, seqlen=self.problem.total)

    def mask_mod(self, batch: Pack) -> Any:
        """Of documents on the CPU, as a data loader has them: planning waits for no GPU."""
        return causal_in(document_of(batch.lengths), self.problem.window)


class ComingPlan:
    """A batch that the loader has ready, and its plan once somebody has asked for it."""

    def __init__(self, submit: Callable[[], Future[SequencePlan]]):
        self.submit = cache(submit)
        self.following: ComingPlan | None = None
        self.has_begun = False


class MagiAheadTraining(MagiTraining):
    """The plan of the next batch is made on a thread while this one runs."""

    name = "magi-ahead"
    label = "the same, planned ahead on a thread"
    _last: ComingPlan | None = None

    def mask(self, batch: Pack) -> ComingPlan:
        mask_mod = self.mask_mod(batch)
        coming = ComingPlan(
            lambda: plan_ahead(mask_mod, self.world.mesh, seqlen=self.problem.total)
        )
        if self._last is None or self._last.has_begun:
            coming.submit()  # by a step that is over
        else:
            self._last.following = coming
        self._last = coming
        return coming

    def plan(self, batch: Pack, mask: ComingPlan) -> SequencePlan:
        mask.has_begun = True
        made = mask.submit().result()
        if mask.following is not None:
            mask.following.submit()
        return made


class TorchTraining(Training):
    name = "torch-head-tail"
    label = "PyTorch's context parallelism, head-tail balancer"

    def __init__(self, problem: Problem):
        super().__init__(problem)
        arguments = problem.total, self.world.size, self.world.kind
        self._balancer = _compat.load_balancer_of_torch("HeadTail", *arguments)

    def supports(self, problem: Problem, case: Case) -> list[str]:
        return no_backward(case, self.world.kind)

    def mask(self, batch: Pack) -> BlockMask:
        """By eager code: PyTorch compiles this for minutes (docs/benchmark.md, Across ranks)."""
        world, total = self.world, self.problem.total
        # PyTorch's function reads the mask_mod and the lengths alone, so the blocks of the whole mask are not computed.
        mask_mod = causal_in(batch.document, self.problem.window)
        whole = one_block_mask(mask_mod, 1, total, total, world.device)
        made: BlockMask = _compat.block_mask_of_torch_rank(world.mesh, whole, self._balancer)
        return made

    def changed(self, model: Llama) -> Llama:
        style = _compat.context_parallel_style_of_torch()
        parallelize_module(model, self.world.mesh, {"blocks.*.attention": style})
        return model

    @contextmanager
    def spread(self, batch: Pack, mask: BlockMask | None) -> Iterator[Spread]:
        world = self.world
        order = _compat.indices_of_load_balancer(self._balancer)[0].to(world.device)
        mine = order.chunk(world.size)[world.rank]
        assert mask is not None
        yield Spread(batch.tokens[:, mine], batch.targets[:, mine], mask, mine)


#: In the order of reports.
TRAININGS: tuple[type[Training], ...] = (MagiTraining, MagiAheadTraining, TorchTraining)
