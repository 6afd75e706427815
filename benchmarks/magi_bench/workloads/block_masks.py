"""Block-sparse masks, drawn for each key-value head: which blocks of keys a block of rows sees."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from magi_bench.cases import Case
from magi_compile.masks.library import MaskMod
from magi_compile.masks.slices import AttnSlices, MaskType


@dataclass(frozen=True)
class BlockMap:
    """Blocks of rows by blocks of keys; the query heads of a group share those of their key-value head.

    Attributes:
        visible: bool `[nheads_kv, num_q_blocks, num_k_blocks]`.
        q_sizes: rows of each block of rows.
        k_sizes: keys of each block of keys.
        group: query heads of one key-value head.
    """

    visible: Tensor
    q_sizes: list[int]
    k_sizes: list[int]
    group: int

    @property
    def seqlen(self) -> int:
        return sum(self.q_sizes)

    @property
    def is_uniform(self) -> bool:
        return len({*self.q_sizes, *self.k_sizes}) == 1

    def mask_mod(self, device: str) -> MaskMod:
        """For FlexAttention: looks up the blocks of a row and of a key."""
        visible, group = self.visible.to(device), self.group
        q_block, k_block = self._block_of_token(device)

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return visible[h // group, q_block[q], k_block[kv]]

        return mask_mod

    def to_dense(self, device: torch.device | str) -> Tensor:
        """The mask of all query heads: bool `[nheads_q, seqlen, seqlen]`."""
        q_block, k_block = self._block_of_token(device)
        heads = self.visible.to(device).repeat_interleave(self.group, 0)
        return heads[:, q_block][:, :, k_block]

    def _block_of_token(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        q_block, k_block = (
            torch.repeat_interleave(torch.tensor(sizes)).to(device)
            for sizes in (self.q_sizes, self.k_sizes)
        )
        return q_block, k_block

    def head_slices(self, kv_head: int) -> AttnSlices:
        """The slices of one head: `[seqlen, seqlen]`."""
        _, q_ranges, k_ranges = self._runs(self.visible[kv_head : kv_head + 1])
        return _full_slices(q_ranges, k_ranges, self.seqlen, self.seqlen)

    def stacked_slices(self) -> AttnSlices:
        """The slices of all heads: the rows and the keys of head h start at `h * seqlen`."""
        head, q_ranges, k_ranges = self._runs(self.visible)
        num_kv, seqlen = len(self.visible), self.seqlen
        rows = [
            q_ranges + ((head * self.group + member) * seqlen)[:, None]
            for member in range(self.group)
        ]
        keys = (k_ranges + (head * seqlen)[:, None]).repeat(self.group, 1)
        return _full_slices(torch.cat(rows), keys, num_kv * self.group * seqlen, num_kv * seqlen)

    def areas(self, block: int) -> Tensor:
        """Visible pairs in every `block x block` tile, as `derive.block_areas`, of all heads: `[heads, q, k]`."""
        rows, keys = (_overlaps(sizes, block) for sizes in (self.q_sizes, self.k_sizes))
        return (rows @ self.visible.double() @ keys.T).long()

    def _runs(self, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Neighbouring visible blocks of a row of blocks: head, row range and key range of each run."""
        change = torch.nn.functional.pad(visible.to(torch.int8), (1, 1)).diff(dim=-1)
        head, q_block, first = (change > 0).nonzero().unbind(1)
        last = (change < 0).nonzero()[:, 2]
        q_starts, k_starts = (
            torch.tensor([0, *itertools.accumulate(sizes)])
            for sizes in (self.q_sizes, self.k_sizes)
        )
        q_ranges = torch.stack([q_starts[q_block], q_starts[q_block + 1]], 1)
        return head, q_ranges, torch.stack([k_starts[first], k_starts[last]], 1)


def draw(case: Case) -> BlockMap:
    """Every row of blocks keeps the `density` of the blocks with the largest random scores, one at least."""
    if case.mask == "uniform_blocks":
        q_sizes = k_sizes = _uniform_sizes(case.seqlen, case.block)
    else:
        rng = random.Random(case.seed)
        q_sizes, k_sizes = (_variable_sizes(case.seqlen, case.block, rng) for _ in range(2))
    generator = torch.Generator().manual_seed(case.seed)
    scores = torch.rand(case.nheads_kv, len(q_sizes), len(k_sizes), generator=generator)
    kept = max(round(case.density * len(k_sizes)), 1)
    visible = torch.zeros_like(scores, dtype=torch.bool)
    visible.scatter_(2, scores.topk(kept, dim=2).indices, True)
    return BlockMap(visible, q_sizes, k_sizes, case.nheads_q // case.nheads_kv)


def _uniform_sizes(seqlen: int, block: int) -> list[int]:
    whole, rest = divmod(seqlen, block)
    return [block] * whole + [rest] * (rest > 0)


def _variable_sizes(seqlen: int, mean: int, rng: random.Random) -> list[int]:
    """At least half the mean each; what is left is cut at random places."""
    count = max(seqlen // mean, 1)
    least = min(mean // 2, seqlen // count)
    cuts = sorted(rng.randint(0, seqlen - least * count) for _ in range(count - 1))
    ends = [*cuts, seqlen - least * count]
    return [least + end - begin for begin, end in itertools.pairwise([0, *ends])]


def _overlaps(sizes: list[int], block: int) -> Tensor:
    """The number of tokens that each tile of `block` tokens shares with each block: fp64 `[tiles, blocks]`."""
    ends = torch.tensor(sizes).cumsum(0)
    tile = torch.arange(-(-sum(sizes) // block))[:, None] * block
    shared = torch.minimum(ends, tile + block) - torch.maximum(ends - torch.tensor(sizes), tile)
    return shared.clamp(min=0).double()


def _full_slices(q_ranges: Tensor, k_ranges: Tensor, seqlen_q: int, seqlen_k: int) -> AttnSlices:
    kinds = torch.full((len(q_ranges),), int(MaskType.FULL), dtype=torch.int32)
    return AttnSlices.unchecked(q_ranges.int(), k_ranges.int(), kinds, seqlen_q, seqlen_k)
