"""A step of a small Llama whose tokens are spread over ranks: ours, and PyTorch's context parallelism.

A step spreads a batch of new packed documents, runs forward, loss and backward, and adds the gradients up over ranks. Ours plans
the batch's mask in it; PyTorch's BlockMask is made before. Weights are the same on all ranks, and nothing is sharded but tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import BlockMask

from magi_bench.kernel.gate import Check
from magi_bench.own_code import with_own_code
from magi_bench.ranks.problem import Settings
from magi_bench.ranks.world import World
from magi_bench.step.checks import checked_parameters, truth_of_step
from magi_bench.step.clock import Ready
from magi_bench.step.contenders import NO_BACKWARD
from magi_bench.workloads import lengths
from magi_bench.workloads.llama import Llama, Shape
from magi_compile import _compat
from magi_compile.dtensor import context_parallel, plan
from magi_compile.masks.block_mask import one_block_mask

IGNORED = -1


class Batch(NamedTuple):
    """Packed documents, the same on all ranks: `[1, S]` tokens and targets, `[S]` documents, their lengths.

    `mask` is this rank's mask where it is made in front of the step.
    """

    tokens: Tensor
    targets: Tensor
    document: Tensor
    lengths: list[int]
    mask: BlockMask | None = None


class Spread(NamedTuple):
    """What a rank has of a batch: `[1, S / ranks]` tokens and targets, a mask for FlexAttention, positions of the tokens."""

    tokens: Tensor
    targets: Tensor
    mask: BlockMask
    positions: Tensor


class Training(ABC):
    """A way to spread the model's tokens.

    Args:
        settings: of the run.
        world: the ranks.
        tokens: of a rank.

    Attributes:
        name: as that of the contender that runs attention alone.
        label: in reports.
        is_ours: whether ratios are to its time.
    """

    name: str
    label: str
    is_ours = False

    def __init__(self, settings: Settings, world: World, tokens: int):
        self.settings, self.world, self.total = settings, world, tokens * world.size
        self._made: list[Batch] = []
        self._turn = 0

    def refusals(self, which: str) -> list[str]:
        """Every reason against it; empty if it runs."""
        return []

    def changed(self, model: Llama) -> Llama:
        """The model with what its attention needs to run over ranks."""
        return model

    @abstractmethod
    def spread(self, batch: Batch) -> Any:
        """A context around forward and backward; it gives this rank's `Spread`."""

    def prepare(self, which: str) -> Ready:
        """Loss without gradients, or a step; both return the loss of all ranks, and a step the gradients that are checked."""
        model = self.changed(build(self.settings, self.world))
        loss_of = torch.compile(with_own_code(Llama.forward), dynamic=False)
        self.renew(1)

        def loss_by(batch: Batch, part: Spread) -> Tensor:
            count = (batch.targets != IGNORED).sum()
            rest = part.tokens, part.targets, batch.document, part.mask, part.positions, count
            loss: Tensor = loss_of(model, *rest)
            return loss

        def forward() -> Sequence[Tensor]:
            batch = self._made.pop()
            with self.spread(batch) as part, torch.no_grad():
                return [self.world.total(loss_by(batch, part))]

        def step() -> Sequence[Tensor]:
            batch = self._made.pop()
            model.zero_grad()
            with self.spread(batch) as part:
                loss = loss_by(batch, part)
                loss.backward()
            for weight in model.parameters():
                assert weight.grad is not None
                self.world.total(weight.grad)
            gradients = [x.grad for x in checked_parameters(model) if x.grad is not None]
            return [self.world.total(loss.detach()), *gradients]

        return Ready(forward if which == "fwd" else step, self.renew)

    def check(self, results: Sequence[Tensor]) -> Check:
        """Holds the first batch's results to those of the model on one rank, without FlexAttention and torch.compile."""
        model = build(self.settings, self.world)
        batch = self.make(0)

        def run() -> list[Tensor]:
            loss = model(batch.tokens, batch.targets, batch.document, batch.lengths)
            return [loss.detach(), *torch.autograd.grad(loss, checked_parameters(model))]

        return truth_of_step(model, run).check(results, self.total)

    def renew(self, calls: int) -> None:
        """Makes the batches of so many calls to come."""
        self._made = [self.make(self._turn + i) for i in range(calls)][::-1]
        self._turn += calls

    def make(self, turn: int) -> Batch:
        """The batch of a turn."""
        settings, device = self.settings, self.world.device
        generator = torch.Generator().manual_seed(settings.seed + turn)
        tokens = torch.randint(settings.vocab, (1, self.total), generator=generator).to(device)
        counts = lengths.sample(settings.lengths, self.total, settings.seed + turn)
        document = documents_of(counts)
        is_followed = F.pad(document[1:] == document[:-1], (0, 1)).to(device)
        targets = torch.where(is_followed, tokens.roll(-1, 1), IGNORED)
        return Batch(tokens, targets, document.to(device), counts)


class MagiTraining(Training):
    name = "magi"
    label = "magi_compile.dtensor.context_parallel"
    is_ours = True

    @contextmanager
    def spread(self, batch: Batch) -> Iterator[Spread]:
        # Of documents on the CPU, as a data loader has them: planning waits for no GPU.
        mask_mod = causal_in(documents_of(batch.lengths))
        made = plan(mask_mod, self.world.mesh, seqlen=self.total)
        tokens = made.shard(batch.tokens, 1)
        targets = made.shard(batch.targets, 1, padding=IGNORED)
        with context_parallel(self.world.mesh, mask=made):
            yield Spread(tokens, targets, made.block_mask, made.positions)


class TorchTraining(Training):
    name = "torch-head-tail"
    label = "PyTorch's context parallelism, head-tail balancer"

    def __init__(self, settings: Settings, world: World, tokens: int):
        super().__init__(settings, world, tokens)
        arguments = self.total, world.size, world.kind
        self._balancer = _compat.load_balancer_of_torch("HeadTail", *arguments)

    def refusals(self, which: str) -> list[str]:
        return [NO_BACKWARD] if self.world.kind == "cpu" and which == "fwdbwd" else []

    def make(self, turn: int) -> Batch:
        """The batch with its mask, which eager code makes more slowly than the compiled code that PyTorch would run."""
        batch, world = super().make(turn), self.world
        # PyTorch's function reads the mask_mod and the lengths alone, so the blocks of the whole mask are not computed.
        whole = one_block_mask(causal_in(batch.document), 1, self.total, self.total, world.device)
        mask = _compat.block_mask_of_torch_rank(world.mesh, whole, self._balancer)
        return batch._replace(mask=mask)

    def changed(self, model: Llama) -> Llama:
        style = _compat.context_parallel_style_of_torch(2)
        parallelize_module(model, self.world.mesh, {"blocks.*.attention": style})
        return model

    @contextmanager
    def spread(self, batch: Batch) -> Iterator[Spread]:
        world = self.world
        order = _compat.indices_of_load_balancer(self._balancer)[0].to(world.device)
        mine = order.chunk(world.size)[world.rank]
        assert batch.mask is not None
        yield Spread(batch.tokens[:, mine], batch.targets[:, mine], batch.mask, mine)


#: In the order of reports.
TRAININGS: tuple[type[Training], ...] = (MagiTraining, TorchTraining)


def documents_of(counts: list[int]) -> Tensor:
    """Which document each token belongs to, int64 `[S]`, on the CPU."""
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


def causal_in(document: Tensor) -> Any:
    """The mask_mod of causal documents."""

    def mask_mod(b, h, q, kv):
        return (document[q] == document[kv]) & (q >= kv)

    return mask_mod


def build(settings: Settings, world: World) -> Llama:
    """The model, the same from every call and on every rank."""
    dim = settings.nheads_q * settings.head_dim
    shape = Shape(
        settings.layers, dim, 2 * dim, settings.nheads_q, settings.nheads_kv, settings.vocab
    )
    torch.manual_seed(settings.seed)
    with torch.device(world.device):
        model = Llama(shape)
    return model.to(getattr(torch, settings.dtype))
