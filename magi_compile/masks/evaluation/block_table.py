"""The block table of a mask_mod that looks up the block of a query and the block of a key together:
`listed[h, q_block[q], k_block[kv]]`.

All on the tensors' device; on a GPU nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile._checks import MaskCheck
from magi_compile.masks.evaluation.evaluate import Evaluation, with_columns
from magi_compile.masks.evaluation.ranges import expect_ranges
from magi_compile.masks.evaluation.row_intervals import check_arguments
from magi_compile.masks.evaluation.sizes import ONE_MASK, MaskSizes
from magi_compile.masks.program.program import BlockLookUp, MaskProgram


class BlockTable(NamedTuple):
    """The blocks of keys that blocks of queries see, where these begin and end anywhere.

    Attributes:
        listed: bool `[batch or 1, heads or 1, blocks of queries, blocks of keys]`.
        of_queries: int32 `[batch, seqlen_q]`, the block of each query.
        of_keys: int32 `[batch, seqlen_k]`, the block of each key.
    """

    listed: Tensor
    of_queries: Tensor
    of_keys: Tensor

    def density(self) -> float:
        """The share of pairs that are seen. Waits for a GPU."""
        num_q, num_k = self.listed.shape[2:]
        listed = self.listed.expand(len(self.of_queries), -1, -1, -1).double()
        rows, keys = (
            torch.nn.functional.one_hot(blocks.long(), count).double().mean(1)
            for blocks, count in ((self.of_queries, num_q), (self.of_keys, num_k))
        )
        return float(torch.einsum("bq,bhqk,bk->bh", rows, listed, keys).mean())


def shape_of_table(found: BlockLookUp, captured: Sequence[int], sizes: MaskSizes) -> list[int]:
    """The sizes of `listed` that a captured tensor of the sizes `captured` gives: batch entries and heads with blocks
    of their own, blocks of queries, blocks of keys. `sizes` are of the mask, with all heads."""
    batch = sizes.batch if "b" in found.variables else 1
    heads = sizes.heads.q if "h" in found.variables else 1
    return [batch, heads, captured[found.q_dim], captured[found.k_dim]]


def block_table(
    program: MaskProgram,
    tables: Sequence[Tensor],
    symbols: Sequence[int],
    sizes: MaskSizes,
    device: torch.device,
) -> tuple[BlockTable, list[MaskCheck]]:
    """The look-up of a mask program that has a `block_look_up`, evaluated, and what that relies on in the data.

    `tables` are the captured tensors, on `device` (scalars may be elsewhere), and `sizes` those of the mask, with all
    heads. Raises TypeError where the captured tensor that is looked up is not bool, or an index no integer, and
    ValueError for too few tables or symbols, or a table with the wrong device or shape.
    """
    found = program.block_look_up
    assert found is not None
    look_up = found.look_up
    check_arguments(program, tables, symbols, device)
    captured = tables[look_up.args[0]]
    if captured.dtype != torch.bool:
        text = program.describe(look_up)
        raise TypeError(f"`{text}` must be bool where it is a truth value, got {captured.dtype}")
    alone = replace(program, expr=found.marked)
    of_all = with_columns(program, tables, symbols, sizes, device)
    one = Evaluation(alone, of_all, symbols, sizes._replace(heads=ONE_MASK), device)
    expect_ranges(one)
    batch = sizes.batch

    def of_tokens(dim: int, length: int) -> Tensor:
        return one.index(look_up, dim).to(torch.int32).expand(batch, length).contiguous()

    of_queries = of_tokens(found.q_dim, sizes.seqlen_q)
    of_keys = of_tokens(found.k_dim, sizes.seqlen_k)
    listed, checks = captured.movedim((found.q_dim, found.k_dim), (-2, -1)), one.checks
    others = [x for x in range(captured.dim()) if x not in (found.q_dim, found.k_dim)]
    if not others:
        return BlockTable(listed[None, None], of_queries, of_keys), checks
    all_heads = Evaluation(alone, of_all, symbols, sizes, device)
    entries, heads, *_ = shape_of_table(found, captured.shape, sizes)
    places = [
        all_heads.index(look_up, dim).expand(sizes.entries, 1).view(batch, sizes.heads.q)
        for dim in others
    ]
    listed = listed[tuple(x[:entries, :heads].long() for x in places)]
    return BlockTable(listed, of_queries, of_keys), [*checks, *all_heads.checks]
