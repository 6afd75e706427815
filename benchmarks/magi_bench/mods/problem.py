"""q, k and v of a length, a mod there, and what attention with it is in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_bench.contenders.base import Layout
from magi_bench.gate import RESULTS, Check, weigh
from magi_bench.mods.mod import BLOCK, Made, Mod, Place, ScoreMod
from magi_bench.settings import Settings
from magi_bench.workloads import workload
from magi_bench.workloads.workload import Inputs

MIN_TOKENS = 256  # so that a neighbourhood fits on the canvas


@lru_cache(maxsize=2)
def inputs_of(settings: Settings, tokens: int) -> Inputs:
    """The same q, k, v and dout for all mods and contenders."""
    case = settings.case("kernel", "full", tokens)
    return workload.build(case, settings.device).inputs(settings.device)


class Leaves(NamedTuple):
    """The tensors of a call, with or without gradients, and the gradient of its out; attention's
    `[1, heads, tokens, head_dim]`."""

    q: Tensor  # queries
    k: Tensor  # keys
    v: Tensor  # values
    learned: list[Tensor]  # tensors that the score_mod captures
    dout: Tensor  # the gradient of out

    @property
    def differentiable(self) -> list[Tensor]:
        """Whose gradients a backward gives, in the order of results."""
        return [self.q, self.k, self.v, *self.learned]


class Problem:
    """A mod at a length; `gate` is the same at a shorter one, which results are held to, by default this one."""

    def __init__(self, settings: Settings, mod: Mod, tokens: int, gate: Problem | None = None):
        self.settings, self.mod, self.tokens, self.gate = settings, mod, tokens, gate or self
        # By pass, how wrong FlexAttention is, where it is right.
        self.yardstick: dict[str, Check] = {}
        # A compiled function of each contender and pass, which both lengths have.
        self.compiled: dict[Any, Any] = {} if gate is None else gate.compiled

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the results."""
        return (*RESULTS, *(f"gradient of {name}" for name in self.made.learned))

    @cached_property
    def made(self) -> Made:
        """The mod, with a BlockMask by PyTorch."""
        settings = self.settings
        place = Place(self.tokens, settings.nheads_q, settings.device, settings.seed)
        return self.mod.build(place)

    def leaves(self, needs_grad: bool, dtype: torch.dtype | None = None) -> Leaves:
        """Fresh ones. With a `dtype`, all floats have it; else learned tensors are fp32."""
        *qkv, dout = (Layout.HEADS_FIRST.of(x) for x in inputs_of(self.settings, self.tokens))

        def leaf(x: Tensor) -> Tensor:
            return x.detach().to(dtype or x.dtype).requires_grad_(needs_grad)

        q, k, v = map(leaf, qkv)
        learned = [leaf(x) for x in self.made.learned.values()]
        return Leaves(q, k, v, learned, dout.to(dtype or dout.dtype))

    @cached_property
    def exact(self) -> list[Tensor]:
        """Out, dq, dk, dv and the gradients of learned tensors, in fp64; all but the last ones packed."""
        return self._dense(torch.float64)

    @cached_property
    def plain(self) -> list[Tensor]:
        """The same by plain PyTorch in the dtype of q, but for scores, which FlexAttention has in fp32."""
        return self._dense(None)

    def _dense(self, dtype: torch.dtype | None) -> list[Tensor]:
        """One query head after the other."""
        q, k, v, learned, dout = leaves = self.leaves(True, dtype)
        group = self.settings.nheads_q // self.settings.nheads_kv
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty_like(q)
        gradients = [torch.zeros_like(x, dtype=wide) for x in leaves.differentiable]
        score_mod = self.made.score_mod(learned)
        for head in range(self.settings.nheads_q):
            mine, theirs = (0, head), (0, head // group)
            places = [mine, theirs, theirs]
            tensors = zip((q, k, v), places, strict=True)
            parts = [x[at].detach().requires_grad_() for x, at in tensors]
            found = self._dense_head(head, parts, score_mod)
            out[mine] = found.detach()
            of_head = torch.autograd.grad(found, [*parts, *learned], dout[mine])
            for total, place, part in zip(gradients[:3], places, of_head[:3], strict=True):
                total[place] += part
            for total, part in zip(gradients[3:], of_head[3:], strict=True):
                total += part
        rounded = [
            x.to(like.dtype) for x, like in zip(gradients, leaves.differentiable, strict=True)
        ]
        return results_of(out, rounded)

    def _dense_head(self, head: int, qkv: Sequence[Tensor], score_mod: ScoreMod | None) -> Tensor:
        """One head, of q, k and v `[tokens, head_dim]`. Masks and scores are those of tensors that have all pairs."""
        q, k, v = qkv
        device = self.settings.device
        index = torch.arange(self.tokens, dtype=torch.int32, device=device)
        entry, number = (torch.tensor(x, dtype=torch.int32, device=device) for x in (0, head))
        place = entry, number, index[:, None], index
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = q.to(wide) @ k.to(wide).mT * q.shape[-1] ** -0.5
        if score_mod is not None:
            scores = score_mod(scores, *place)
        block_mask, visible = self.made.block_mask, None
        if block_mask is not None:
            visible = block_mask.mask_mod(*place) & self._listed(head)
        return weigh(scores, visible, v)

    def _listed(self, head: int) -> Tensor:
        """Bool `[tokens, tokens]`: the pairs in blocks that the lists name."""
        assert self.made.block_mask is not None
        blocks = self.made.block_mask.to_dense()[0]
        blocks = blocks[head if len(blocks) > 1 else 0].bool()
        pairs = blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return pairs[: self.tokens, : self.tokens]


def results_of(out: Tensor, gradients: Sequence[Tensor]) -> list[Tensor]:
    """The results of a call, in the order of `Problem.names`, as `Problem.exact` has it."""
    packed = [Layout.HEADS_FIRST.to_packed(x.detach()) for x in (out, *gradients[:3])]
    return [*packed, *gradients[3:]]
