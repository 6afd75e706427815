"""Blocks of keys that the data choose: those with the highest scores, for each block of queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from magi_compile.functions.record import check_takes
from magi_compile.masks.arguments import check_count, check_flag
from magi_compile.masks.evaluation.block_lists import BlockLists

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Scores = Callable[[Tensor, Tensor], Tensor]
_HEADS, _BY = ("each", "group", "all"), ("mean", "first")


def select_blocks(
    q: Tensor,
    k: Tensor,
    topk: int,
    block_size: int | tuple[int, int] = 64,
    *,
    causal: bool = False,
    init_blocks: int = 0,
    local_blocks: int = 0,
    heads: Literal["each", "group", "all"] = "each",
    by: Literal["mean", "first"] | Scores = "mean",
) -> BlockMask:
    """The `topk` blocks of keys with the highest scores, for each block of queries, as a BlockMask.

    `flex_attention(q, k, v, block_mask=select_blocks(q, k, 16))` is attention to the chosen blocks. Shapes depend on
    shapes alone and nothing waits for the device, so other data compile nothing. The choice has no gradient.

    With `causal` a query sees no key behind its own position, in the block on the diagonal either: the mask_mod says
    that. But the choice is one for a block of queries. By "mean" it depends on all
    of these, so what a query gets depends on the queries behind it in its block. It depends on nothing behind it with
    `by="first"`, `local_blocks` of at least 1 and blocks of as many queries as keys.
    A block of more queries than keys may choose only blocks behind some of its queries: these see nothing and get 0.

    Args:
        q: queries `[batch, nheads_q, seqlen_q, head_dim]`, of any dtype.
        k: keys `[batch, nheads_kv, seqlen_k, head_dim]`.
        topk: blocks of keys for each block of queries, among them those of `init_blocks` and `local_blocks`. A block of
            queries that may see fewer has all of these.
        block_size: queries and keys of a block, one number or two; the last blocks may be smaller.
        causal: choose blocks that begin at or before the last query of a block, and hide later keys in them. Query i is
            at the position of key i.
        init_blocks: the first blocks of keys, which are always chosen.
        local_blocks: the blocks of keys around that of the last query, which are always chosen: that block and those
            before it, or without `causal` as many on both sides, the odd one before it.
        heads: whose scores choose. "each": a head's own; "group": the sum of those of the heads that read the same
            keys; "all": the sum of those of all heads, so that one list serves all.
        by: the scores. "mean": of the mean query of a block with the mean key of a block; "first": of its first query
            with the mean key; or a function of q and k that returns them, `[batch, nheads_q, blocks of queries, blocks
            of keys]`. A block whose score is -inf is chosen only as one of `init_blocks` or `local_blocks`.

    Returns:
        The BlockMask, for as many batch entries as q has, and for nheads_q heads or for all. Its lists have the highest
        score first.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a number is too small, `topk` has no room for `init_blocks` and `local_blocks`, q and k do not fit
            together, or `by` returns another shape.
    """
    from torch.nn.attention.flex_attention import BlockMask

    rows, keys = _check_numbers(topk, block_size, init_blocks, local_blocks)
    _check_tensors(q, k)
    check_flag("causal", causal)
    if heads not in _HEADS:
        raise ValueError(f"`heads` must be one of {_HEADS}, got {heads!r}")
    blocks = _BlockSizes(rows, keys, q.shape[2], k.shape[2])
    with torch.no_grad():
        scores = _of_heads(_scores(q, k, blocks, by), k.shape[1], heads)
        is_chosen, chosen = _choose(scores, blocks, topk, causal, init_blocks, local_blocks)
    if heads == "group":
        group = q.shape[1] // k.shape[1]
        is_chosen, chosen = (x.repeat_interleave(group, 1) for x in (is_chosen, chosen))
    kinds, mask_mod = [(is_chosen, chosen)], None
    if causal:
        kinds = _partial_and_full(is_chosen, chosen, blocks)
        mask_mod = _causal
    lists = BlockLists(*(x for kind in kinds for x in _as_list(*kind, blocks)))
    return BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=(rows, keys), mask_mod=mask_mod, seq_lengths=blocks[2:]
    )


class _BlockSizes(NamedTuple):
    """The blocks of queries and of keys: how many of them are in one, and in all."""

    rows: int
    keys: int
    seqlen_q: int
    seqlen_k: int

    @property
    def num_q(self) -> int:
        return -(-self.seqlen_q // self.rows)

    @property
    def num_k(self) -> int:
        return -(-self.seqlen_k // self.keys)

    def first_rows(self, device: torch.device) -> Tensor:
        """`[num_q, 1]`, beside blocks of keys in the last dimension."""
        return torch.arange(self.num_q, device=device)[:, None] * self.rows


def _check_tensors(q: Tensor, k: Tensor) -> None:
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, Tensor):
            raise TypeError(f"`{name}` must be a tensor, got {type(x).__name__}")
        if x.dim() != 4 or 0 in x.shape:
            shape = "[batch, nheads, seqlen, head_dim] without zeros"
            raise ValueError(f"`{name}` must have shape {shape}, got {list(x.shape)}")
    batch, nheads, _, head_dim = q.shape
    if k.shape[0] != batch or k.shape[3] != head_dim or nheads % k.shape[1]:
        raise ValueError(
            f"`k` must have q's batch size {batch} and head_dim {head_dim}, and a number of heads that divides "
            f"{nheads}, got {list(k.shape)}"
        )


def _check_numbers(
    topk: int, block_size: int | tuple[int, int], init_blocks: int, local_blocks: int
) -> tuple[int, int]:
    """Returns the queries and keys of a block."""
    sizes = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    if len(sizes) != 2:
        raise ValueError(f"`block_size` must be one number or two, got {block_size!r}")
    for size in sizes:
        check_count("block_size", size, 1)
    check_count("topk", topk, 1)
    check_count("init_blocks", init_blocks, 0)
    check_count("local_blocks", local_blocks, 0)
    if topk < init_blocks + local_blocks:
        raise ValueError(
            f"`topk` must have room for `init_blocks` and `local_blocks`, {init_blocks} + {local_blocks}, got {topk}"
        )
    return sizes


def _scores(q: Tensor, k: Tensor, blocks: _BlockSizes, by: str | Scores) -> Tensor:
    """Those of blocks of queries with blocks of keys, fp32 `[batch, nheads_q, num_q, num_k]`."""
    if callable(by):
        check_takes(by, ("q", "k"), "by")
        scores = by(q, k)
        shape = (*q.shape[:2], blocks.num_q, blocks.num_k)
        if not isinstance(scores, Tensor):
            raise TypeError(f"`by` must return a tensor, got {type(scores).__name__}")
        if scores.shape != shape:
            raise ValueError(
                f"`by` must return scores of shape {list(shape)}, got {list(scores.shape)}"
            )
        return scores.float()
    if by not in _BY:
        raise ValueError(f"`by` must be one of {_BY} or a function of q and k, got {by!r}")
    queries = q[:, :, :: blocks.rows].float() if by == "first" else _means(q, blocks.rows)
    by_group = queries.unflatten(1, (k.shape[1], -1))
    return (by_group @ _means(k, blocks.keys)[:, :, None].mT).flatten(1, 2)


def _means(x: Tensor, size: int) -> Tensor:
    """Those of blocks of `size` rows, the last one of fewer: fp32 `[batch, nheads, blocks, head_dim]`."""
    seqlen = x.shape[2]
    blocks = pad(x, (0, 0, 0, -seqlen % size)).unflatten(2, (-1, size))
    first = torch.arange(blocks.shape[2], device=x.device) * size
    return blocks.sum(3, dtype=torch.float32) / (seqlen - first).clamp(max=size)[:, None]


def _of_heads(scores: Tensor, nheads_kv: int, heads: str) -> Tensor:
    """The scores that choose, of as many heads as choose."""
    if heads == "group":
        return scores.unflatten(1, (nheads_kv, -1)).sum(2)
    return scores.sum(1, keepdim=True) if heads == "all" else scores


def _choose(
    scores: Tensor,
    blocks: _BlockSizes,
    topk: int,
    causal: bool,
    init_blocks: int,
    local_blocks: int,
) -> tuple[Tensor, Tensor]:
    """Blocks of keys in the order of their scores, `[batch, heads, num_q, at most topk]`, and which of them are chosen:
    those in front."""
    block = torch.arange(blocks.num_k, device=scores.device)
    last = blocks.first_rows(scores.device) + blocks.rows - 1
    own = last.clamp(max=min(blocks.seqlen_q, blocks.seqlen_k) - 1) // blocks.keys
    after = 0 if causal else (local_blocks - 1) // 2
    is_local = (block <= own + after) & (block > own + after - local_blocks)
    scores = scores.masked_fill(is_local | (block < init_blocks), torch.inf)
    if causal:
        scores = scores.masked_fill(block > own, -torch.inf)
    values, chosen = scores.topk(min(topk, blocks.num_k))
    return values != -torch.inf, chosen


def _partial_and_full(
    is_chosen: Tensor, chosen: Tensor, blocks: _BlockSizes
) -> list[tuple[Tensor, Tensor]]:
    """The chosen blocks of both kinds under a causal mask, of each kind as those of `_choose`. Blocks that are cut off
    by the end are partial, as PyTorch's are."""
    first = blocks.first_rows(chosen.device)
    is_full = (chosen + 1) * blocks.keys <= (first + 1).clamp(max=blocks.seqlen_k)
    is_full &= is_chosen & (first + blocks.rows <= blocks.seqlen_q)
    kinds = []
    for is_listed in (is_chosen & ~is_full, is_full):
        order = is_listed.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        kinds.append((is_listed, chosen.gather(-1, order)))
    return kinds


def _as_list(is_listed: Tensor, indices: Tensor, blocks: _BlockSizes) -> tuple[Tensor, Tensor]:
    """The counts and the indices of a grid, with room for all blocks."""
    indices = pad(indices.to(torch.int32), (0, blocks.num_k - indices.shape[-1]))
    return is_listed.sum(-1, dtype=torch.int32), indices


def _causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv
