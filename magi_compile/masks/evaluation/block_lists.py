"""The block lists of a BlockMask: what they show, and whether they agree with the rows of its mask_mod.

All on the tensors' device; on a GPU nothing waits for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile._checks import MaskCheck, first_of, of_intervals
from magi_compile.masks.evaluation.row_intervals import RowIntervals

# What is checked, and what is found where it is not so: a kv block, a q block and a batch entry.
HOLDS_ALL = (
    of_intervals(
        "the block lists of `block_mask` must hold every block in which its mask_mod shows keys"
    ),
    "they leave out kv block {} of q block {} of batch entry {}",
)
IS_FULL = (
    "the full blocks of `block_mask` must be blocks in which its mask_mod hides no key",
    "it hides some in kv block {} of q block {} of batch entry {}",
)
OF_ONE_HEAD = (
    "the block lists of `block_mask` must be the same for all heads in a graph that was compiled for such lists",
    "they differ; compile it again, with the lists of each head",
)


class BlockLists(NamedTuple):
    """The kv blocks that each q block looks at, as in `BlockMask`: int32 tensors `[batch, nheads, q blocks]`
    (how many) and `[batch, nheads, q blocks, kv blocks]` (which ones)."""

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None = None
    full_kv_indices: Tensor | None = None

    @property
    def kinds(self) -> list[tuple[Tensor, Tensor]]:
        """The partial blocks, and the full ones where they are listed: how many, and which ones."""
        kinds = [(self.kv_num_blocks, self.kv_indices)]
        if self.full_kv_num_blocks is not None and self.full_kv_indices is not None:
            kinds.append((self.full_kv_num_blocks, self.full_kv_indices))
        return kinds

    def check_lengths(self, num_q: int) -> None:
        """Raises ValueError where there is no list for each of `num_q` q blocks."""
        for name, (num_blocks, _) in zip(("kv", "full_kv"), self.kinds, strict=False):
            if num_blocks.shape[-1] < num_q:
                raise ValueError(
                    f"`block_mask.{name}_num_blocks` must cover {num_q} q blocks, got {num_blocks.shape[-1]}"
                )

    def check_heads(self, heads: int) -> None:
        """Raises ValueError where there are no lists for each of `heads` with masks of their own; lists of one head
        serve all."""
        for num_blocks, _ in self.kinds:
            if heads > 1 and num_blocks.shape[1] not in (1, heads):
                raise ValueError(
                    f"`block_mask` must have lists of 1 or {heads} heads, got {num_blocks.shape[1]}"
                )

    def grids(self, num_q: int, num_k: int) -> tuple[Tensor, Tensor]:
        """The blocks that are listed as partial and as full: bool `[batch, nheads, num_q, num_k]`. What is listed out
        of that range is left out."""
        self.check_lengths(num_q)
        partial, *full = (_grid(kind, num_q, num_k) for kind in self.kinds)
        return partial, full[0] if full else torch.zeros_like(partial)

    def index_checks(self, num_q: int, num_k: int) -> list[MaskCheck]:
        """That every block they list is one of `num_q` times `num_k`, and that counts are those of indices."""
        self.check_lengths(num_q)
        checks = []
        for name, (num_blocks, indices) in zip(("kv", "full_kv"), self.kinds, strict=False):
            num_blocks, indices = num_blocks[..., :num_q], indices[..., :num_q, :]
            most = indices.shape[-1]
            is_wrong = (num_blocks < 0) | (num_blocks > most)
            wrong = _at_first(is_wrong, num_blocks)
            words = f"`block_mask.{name}_num_blocks` must be from 0 to {most}, the columns of its indices"
            checks.append(MaskCheck(~is_wrong.any(), words, "it holds {}", (wrong,)))
            number = torch.arange(most, device=indices.device)
            is_bad = (number < num_blocks[..., None]) & ((indices < 0) | (indices >= num_k))
            found = _at_first(is_bad, indices)
            message = f"`block_mask.{name}_indices` must be in [0, {num_k})"
            checks.append(MaskCheck(~is_bad.any(), message, "it holds {}", (found,)))
        return checks

    def checks(self, intervals: RowIntervals, rows: int, keys: int) -> list[MaskCheck]:
        """That FlexAttention, which reads the lists first, would compute what `intervals` say."""
        return self.checks_of(*visible_blocks(intervals, rows, keys))

    def checks_of(self, is_seen: Tensor, is_full: Tensor) -> list[MaskCheck]:
        """The same of what `visible_blocks` says. Lists of one head are those of all,
        as a mask of one head is that of all."""
        self.check_heads(is_seen.shape[1])
        partial, full = self.grids(*is_seen.shape[2:])
        return [
            _check((is_seen & ~(partial | full)).any(1), HOLDS_ALL),
            _check((full & ~is_full).any(1), IS_FULL),
        ]


def visible_blocks(intervals: RowIntervals, rows: int, keys: int) -> tuple[Tensor, Tensor]:
    """In which blocks of `rows` rows and `keys` keys some pair is visible, and in which all are: two bool tensors
    `[batch, heads, q blocks, kv blocks]`, of one head where all have the same mask. Blocks at the end may be smaller.
    """
    if intervals.by_keys:
        rows, keys = keys, rows
    lo, hi = intervals.lo.long(), intervals.hi.long()
    _, entries, seqlen_q = lo.shape
    num_q, num_k = -(-seqlen_q // rows), -(-intervals.seqlen_k // keys)
    q_block = torch.arange(seqlen_q, device=lo.device) // rows
    line = torch.arange(entries, device=lo.device)[:, None] * num_q + q_block

    def rows_per_block(first: Tensor, last: Tensor) -> Tensor:
        """In how many rows of its q block each kv block is in `[first, last)`."""
        change = torch.zeros(entries * num_q * (num_k + 1), dtype=torch.int32, device=lo.device)
        is_live = (first < last).to(torch.int32).flatten()
        for block, step in ((first, is_live), (last, -is_live)):
            place = line * (num_k + 1) + block.clamp(0, num_k)
            change.index_add_(0, place.flatten(), step)
        counts = change.view(entries, num_q, num_k + 1).cumsum(-1, dtype=torch.int32)
        return counts[..., :num_k]

    is_seen = rows_per_block(lo // keys, torch.where(lo < hi, (hi + keys - 1) // keys, 0)) > 0
    end = torch.where(hi == intervals.seqlen_k, num_k, hi // keys)
    begin = torch.arange(num_q, device=lo.device) * rows
    height = (seqlen_q - begin).clamp(max=rows)
    is_full = rows_per_block((lo + keys - 1) // keys, end) == height[:, None]
    if intervals.by_keys:
        is_seen, is_full = is_seen.mT, is_full.mT
    heads = intervals.heads.q
    return is_seen.unflatten(0, (-1, heads)), is_full.unflatten(0, (-1, heads))


def counts_and_order(flags: Tensor) -> tuple[Tensor, Tensor]:
    """The count of set `flags [..., n]`, int32 `[...]`, and int32 `[..., n]`: their numbers in increasing order,
    and behind them those of all others."""
    flags = flags.to(torch.int8).contiguous()
    order = flags.argsort(dim=-1, descending=True, stable=True)
    return flags.sum(-1, dtype=torch.int32), order.to(torch.int32)


def heads_that_differ(partial: Tensor, full: Tensor) -> Tensor:
    """The heads that list other blocks than the first one, bool `[batch, nheads]`, of both grids of `BlockLists`."""
    is_listed = partial | full
    return (is_listed != is_listed[:, :1]).flatten(2).any(2)


def broadcast(kind: tuple[Tensor, Tensor], num_q: int) -> tuple[Tensor, Tensor]:
    """The lists of the first `num_q` q blocks, `[batch, nheads, num_q]` and `[batch, nheads, num_q, columns]`, as
    views: counts or indices of one head or batch entry are those of all that the others have."""
    num_blocks, indices = kind[0][..., :num_q], kind[1][..., :num_q, :]
    shape = torch.broadcast_shapes(num_blocks.shape, indices.shape[:-1])
    return num_blocks.expand(shape), indices.expand(*shape, -1)


def _grid(kind: tuple[Tensor, Tensor], num_q: int, num_k: int) -> Tensor:
    num_blocks, indices = broadcast(kind, num_q)
    indices = indices.long()
    is_listed = torch.arange(indices.shape[-1], device=indices.device) < num_blocks[..., None]
    is_listed &= (indices >= 0) & (indices < num_k)
    grid = torch.zeros(*indices.shape[:-1], num_k + 1, dtype=torch.bool, device=indices.device)
    return grid.scatter(-1, torch.where(is_listed, indices, num_k), True)[..., :num_k]


def _at_first(flags: Tensor, values: Tensor) -> Tensor:
    """The first of `values` whose flag is set."""
    first = first_of(flags)
    return values.expand_as(flags).flatten().take(first) if flags.numel() else first


def _check(broken: Tensor, words: tuple[str, str]) -> MaskCheck:
    """A check that `broken [batch, q blocks, kv blocks]` is False everywhere."""
    first = first_of(broken)
    _, num_q, num_k = broken.shape
    place = (first % num_k, first // num_k % num_q, first // (num_k * num_q))
    return MaskCheck(~broken.any(), *words, place)
