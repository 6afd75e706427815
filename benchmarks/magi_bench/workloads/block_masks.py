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
class DrawnBlocks:
    """Blocks of rows by blocks of keys; the query heads of a group share those of their key-value head."""

    visible: Tensor  # bool `[nheads_kv, num_q_blocks, num_k_blocks]`
    q_sizes: list[int]  # rows of each block of rows
    k_sizes: list[int]  # keys of each block of keys
    group: int  # query heads of one key-value head
    # whether no row sees a key behind it, in the blocks on the diagonal either; then blocks are uniform, and none
    # above the diagonal is visible
    is_causal: bool = False

    @property
    def seqlen(self) -> int:
        return sum(self.q_sizes)

    @property
    def is_uniform(self) -> bool:
        return len({*self.q_sizes, *self.k_sizes}) == 1

    def mask_mod(self, device: str) -> MaskMod:
        """For FlexAttention: looks up the blocks of a row and of a key."""
        visible, group, is_causal = self.visible.to(device), self.group, self.is_causal
        q_block, k_block = self.block_of_token(device)

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            is_listed = visible[h // group, q_block[q], k_block[kv]]
            return is_listed & (q >= kv) if is_causal else is_listed

        return mask_mod

    def to_dense(self, device: torch.device | str) -> Tensor:
        """The mask of all query heads: bool `[nheads_q, seqlen, seqlen]`."""
        q_block, k_block = self.block_of_token(device)
        heads = self.visible.to(device).repeat_interleave(self.group, 0)
        mask = heads[:, q_block][:, :, k_block]
        return mask.tril_() if self.is_causal else mask

    def block_of_token(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """The block of each row, and that of each key, int64 `[seqlen]`."""
        q_block, k_block = (
            torch.repeat_interleave(torch.tensor(sizes)).to(device)
            for sizes in (self.q_sizes, self.k_sizes)
        )
        return q_block, k_block

    def head_slices(self, kv_head: int) -> AttnSlices:
        """The slices of one head: `[seqlen, seqlen]`."""
        _, q_ranges, k_ranges, kinds = self._runs(self.visible[kv_head : kv_head + 1])
        return _slices(q_ranges, k_ranges, kinds, self.seqlen, self.seqlen)

    def stacked_slices(self) -> AttnSlices:
        """The slices of all heads: the rows and the keys of head h start at `h * seqlen`."""
        head, q_ranges, k_ranges, kinds = self._runs(self.visible)
        num_kv, seqlen = len(self.visible), self.seqlen
        rows = [
            q_ranges + ((head * self.group + member) * seqlen)[:, None]
            for member in range(self.group)
        ]
        keys = (k_ranges + (head * seqlen)[:, None]).repeat(self.group, 1)
        totals = num_kv * self.group * seqlen, num_kv * seqlen
        return _slices(torch.cat(rows), keys, kinds.repeat(self.group), *totals)

    def areas(self, block: int) -> Tensor:
        """Visible pairs in every `block x block` tile, as `derive.block_areas`, of all heads: `[heads, q, k]`."""
        rows, keys = (_overlaps(sizes, block) for sizes in (self.q_sizes, self.k_sizes))
        areas = rows @ self.visible.double() @ keys.T
        if self.is_causal:  # of the blocks on the diagonal, the pairs above it
            assert block % self.q_sizes[0] == 0
            sizes = torch.tensor(self.q_sizes, dtype=torch.float64)
            hidden = self.on_diagonal.double() * (sizes * (sizes - 1) / 2)
            areas -= torch.einsum("hi,ti,ui->htu", hidden, (rows > 0).double(), (keys > 0).double())
        return areas.long()

    @property
    def on_diagonal(self) -> Tensor:
        """The blocks on the diagonal that are visible: bool `[nheads_kv, num_q_blocks]`."""
        return self.visible.diagonal(dim1=1, dim2=2)

    def _runs(self, visible: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Neighbouring visible blocks of a row of blocks: head, row range, key range and type of each run. Under a
        causal mask those on the diagonal are runs of their own."""
        found = [
            self._whole_runs(visible.triu(1) | visible.tril(-1) if self.is_causal else visible)
        ]
        if self.is_causal:
            found.append(self._whole_runs(visible & torch.eye(visible.shape[1], dtype=torch.bool)))
        kinds = (
            torch.full((len(runs[0]),), int(kind), dtype=torch.int32)
            for runs, kind in zip(found, (MaskType.FULL, MaskType.CAUSAL), strict=False)
        )
        head, q_ranges, k_ranges = (torch.cat(x) for x in zip(*found, strict=True))
        return head, q_ranges, k_ranges, torch.cat(list(kinds))

    def _whole_runs(self, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        change = torch.nn.functional.pad(visible.to(torch.int8), (1, 1)).diff(dim=-1)
        head, q_block, first = (change > 0).nonzero().unbind(1)
        last = (change < 0).nonzero()[:, 2]
        q_starts, k_starts = (
            torch.tensor([0, *itertools.accumulate(sizes)])
            for sizes in (self.q_sizes, self.k_sizes)
        )
        q_ranges = torch.stack([q_starts[q_block], q_starts[q_block + 1]], 1)
        return head, q_ranges, torch.stack([k_starts[first], k_starts[last]], 1)


def draw(case: Case) -> DrawnBlocks:
    """Every row of blocks keeps the `density` of the blocks with the largest random scores, one at least; under a
    causal mask of those up to the diagonal, with that on it."""
    is_causal = case.mask == "causal_blocks"
    if is_causal or case.mask == "uniform_blocks":
        q_sizes = k_sizes = _uniform_sizes(case.seqlen, case.block)
    else:
        rng = random.Random(case.seed)
        q_sizes, k_sizes = (_variable_sizes(case.seqlen, case.block, rng) for _ in range(2))
    generator = torch.Generator().manual_seed(case.seed)
    scores = torch.rand(case.nheads_kv, len(q_sizes), len(k_sizes), generator=generator)
    group = case.nheads_q // case.nheads_kv
    if is_causal:
        block = torch.arange(len(k_sizes))
        scores = scores.tril().masked_fill(block[:, None] == block, 2.0)
        kept = (case.density * (block + 1)).round().clamp(min=1)
        rank = scores.argsort(2, descending=True).argsort(2)
        return DrawnBlocks(rank < kept[:, None], q_sizes, k_sizes, group, is_causal)
    kept_of_all = max(round(case.density * len(k_sizes)), 1)
    visible = torch.zeros_like(scores, dtype=torch.bool)
    visible.scatter_(2, scores.topk(kept_of_all, dim=2).indices, True)
    return DrawnBlocks(visible, q_sizes, k_sizes, group)


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


def _slices(
    q_ranges: Tensor, k_ranges: Tensor, kinds: Tensor, seqlen_q: int, seqlen_k: int
) -> AttnSlices:
    return AttnSlices.unchecked(q_ranges.int(), k_ranges.int(), kinds, seqlen_q, seqlen_k)
