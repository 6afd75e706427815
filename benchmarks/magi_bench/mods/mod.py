"""A mod: a mask_mod or a score_mod as models have them, at any length, and what comes with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from magi_bench.workloads import lengths
from magi_bench.workloads.llama import document_of

#: Of queries and keys: those of a BlockMask.
BLOCK = 128
SAMPLER = "short"
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Place:
    """The sizes and the device that a mod is made for. Everything random is the same for equal places."""

    seqlen: int  # queries, and keys
    nheads: int  # of queries
    device: str  # of all tensors
    seed: int  # of documents, tables and biases

    def generator(self) -> torch.Generator:
        """On the CPU, so that all devices draw the same."""
        return torch.Generator().manual_seed(self.seed)

    def chance(self, share: float, *sizes: int) -> Tensor:
        """Bool of these sizes, on the CPU: a share of it is True."""
        return torch.rand(sizes, generator=self.generator()) < share

    def normal(self, *sizes: int, scale: float = 1.0) -> Tensor:
        """fp32 of these sizes, on the device."""
        return (torch.randn(sizes, generator=self.generator()) * scale).to(self.device)

    def documents(self) -> Tensor:
        """Int `[seqlen]` on the CPU: the document of each token, in order."""
        return document_of(lengths.sample(SAMPLER, self.seqlen, self.seed))

    def block_mask(self, mask_mod: MaskMod, is_by_head: bool = False) -> BlockMask:
        """By PyTorch, in eager code."""
        nheads, seqlen = self.nheads if is_by_head else None, self.seqlen
        return create_block_mask(mask_mod, None, nheads, seqlen, seqlen, self.device, BLOCK)


class Made(NamedTuple):
    """A mod at a place."""

    block_mask: Any  # of the mask, or its mask_mod; None shows everything
    # makes the score_mod of the tensors of `learned`; None where there is none
    score_mod_of: Callable[..., ScoreMod] | None = None
    # fp32 tensors that the score_mod captures and whose gradients are wanted, by their names
    learned: dict[str, Tensor] = {}  # noqa: RUF012  (never written to)

    def score_mod(self, learned: Sequence[Tensor]) -> ScoreMod | None:
        """With these in place of the tensors of `learned`."""
        return self.score_mod_of(*learned) if self.score_mod_of else None


@dataclass(frozen=True)
class Mod:
    """One entry of the catalogue, named after the function that builds it: a mask_mod, a BlockMask, or `Made`."""

    name: str  # on the command line and in results
    kind: str  # "mask" or "score"
    of_place: Callable[[Place], Any]

    @classmethod
    def of(cls, kind: str, build: Callable[[Place], Any]) -> Mod:
        return cls(build.__name__, kind, build)

    def build(self, place: Place) -> Made:
        """The mod at a place, with a BlockMask."""
        result = self.of_place(place)
        made = result if isinstance(result, Made) else Made(result)
        if made.block_mask is None or isinstance(made.block_mask, BlockMask):
            return made
        return made._replace(block_mask=place.block_mask(made.block_mask))

    @property
    def facts(self) -> dict[str, str]:
        """The fields of a row that describe it."""
        return {"about": (self.of_place.__doc__ or "").strip().split("\n")[0], "of": self.kind}
