"""magi::plan_lists: the block lists of a mask, and the key intervals that each query sees besides, or a table of its
blocks -> how a kernel walks them, packed; there are no slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from magi_compile import _compat
from magi_compile._checks import raise_pending
from magi_compile._kept import Made, Memo
from magi_compile.kernels.base import AttnProblem, CompiledKernel
from magi_compile.kernels.heuristics import MIN_TOKENS_OF_BLOCK
from magi_compile.kernels.mapped import MappedKernel, block_map_of, fake_plan_of_lists
from magi_compile.kernels.plan import Plan, pack
from magi_compile.kernels.scored import ScoreNeeds
from magi_compile.kernels.select import select_for_lists
from magi_compile.masks.block_mask import beside_lists, reached_by, table_beside_lists
from magi_compile.masks.evaluation.block_lists import BlockLists
from magi_compile.masks.evaluation.block_table import BlockTable
from magi_compile.masks.evaluation.sizes import Heads
from magi_compile.ops.library import chosen_for
from magi_compile.ops.masks.mask_intervals import packed_intervals
from magi_compile.ops.repeatable import define_repeatable, hand_over_to_launcher
from magi_compile.plan.block_map import CELL, ListShape

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_lib = torch.library.Library("magi", "FRAGMENT")


def shape_of_lists(
    lists: BlockLists | None,
    block_size: Sequence[int],
    sizes: Sequence[Any],
    intervals: int = 0,
    table: Sequence[Any] | None = None,
) -> ListShape:
    """The sizes of a mask of `lists` of some heads, real or fake ones or nodes' values, with blocks of `block_size`
    queries and keys, or of a `table` alone: the sizes of `BlockTable.listed`. `sizes` are batch entries, and queries
    and keys of one; a query sees at most so many `intervals` besides, 0 if the lists say all. Lists of blocks that are
    no multiples of 64 become a table."""
    heads = [1 if table is None else int(table[1])]
    if lists is not None:
        heads += [int(num_blocks.shape[1]) for num_blocks, _ in lists.kinds]
    batch, seqlen_q, seqlen_k = sizes
    rows, keys = (int(size) for size in (block_size or _NO_BLOCKS))
    shape = ListShape(batch, max(heads), seqlen_q, seqlen_k, rows, keys, intervals)
    if table is not None:
        return shape._replace(table_q=table[2], table_k=table[3])
    if rows % CELL or keys % CELL:
        return shape._replace(table_q=shape.num_q, table_k=shape.num_k)
    return shape


_NO_BLOCKS = 128, 128  # any


def has_table_of(table: Sequence[Any], block_size: Sequence[int], sizes: Sequence[Any]) -> bool:
    """True if a table of blocks is the way of a mask: beside it there are no lists of blocks that are no multiples of
    64, and its own are not so small that bit blocks need less memory. Arguments as of `shape_of_lists`."""
    return not any(size % CELL for size in block_size) and not any(
        isinstance(count, int) and isinstance(length, int) and count * MIN_TOKENS_OF_BLOCK > length
        for count, length in zip(table[2:], sizes[1:], strict=True)
    )


class _ListCall(NamedTuple):
    """The arguments of the op."""

    block_lists: Sequence[Tensor]
    block_size: Sequence[int]
    batch: Any
    seqlen_q: Any
    seqlen_k: Any
    dtype: torch.dtype
    heads: Sequence[int]
    softcap: float
    kernel: str
    has_score: bool = False
    intervals: Tensor | None = None
    table: Sequence[Tensor] | None = None

    @property
    def lists(self) -> BlockLists | None:
        return BlockLists(*self.block_lists) if self.block_lists else None

    @property
    def block_table(self) -> BlockTable | None:
        return BlockTable(*self.table) if self.table else None

    @property
    def given(self) -> Tensor:
        """Some tensor."""
        return (self.block_lists or self.table)[0]  # type: ignore[index]

    @property
    def shape(self) -> ListShape:
        sizes = self.batch, self.seqlen_q, self.seqlen_k
        count = 0 if self.intervals is None else int(self.intervals.shape[1])
        table = self.table[0].shape if self.table else None
        return shape_of_lists(self.lists, self.block_size, sizes, count, table)

    def chosen(self) -> tuple[MappedKernel, AttnProblem]:
        """The kernel, and its problem."""
        device, heads = self.given.device, tuple(self.heads)
        kernel, problem = chosen_for(
            *(device, self.dtype, heads, 1.0, self.softcap, self.kernel or None),  # type: ignore[arg-type]
            has_score=self.has_score,
            block_map=block_map_of(self.shape),
        )
        assert isinstance(kernel, MappedKernel)
        return kernel, problem


def _plan_lists(*arguments: Any) -> list[Tensor]:
    raise_pending()
    call = _ListCall(*arguments)
    kernel, problem = call.chosen()
    if call.given.device.type == "cuda":
        hand_over_to_launcher()
    given = call.intervals, call.block_table
    return pack(kernel.plan_lists(call.lists, call.shape, problem, *given))


def _plan_lists_fake(*arguments: Any) -> list[Tensor]:
    call = _ListCall(*arguments)
    kernel, problem = call.chosen()
    made = fake_plan_of_lists(call.given, call.shape, problem)
    if isinstance(kernel, CompiledKernel) and _compat.is_in_use(made[0].device):
        kernel.begin_plan(Plan(block_map=problem.block_map), problem)
    return made


define_repeatable(
    _lib,
    "plan_lists(Tensor[] block_lists, int[] block_size, SymInt batch, SymInt seqlen_q, SymInt seqlen_k, "
    "ScalarType dtype, int[] heads, float softcap, str kernel, bool has_score=False, "
    "Tensor? intervals=None, Tensor[]? table=None) -> Tensor[]",
    *(_plan_lists, _plan_lists_fake),
    dispatch_key="BackendSelect",  # PyTorch does not look for one in `table`
)

_plans: Memo[list[Tensor]] = Memo(64, lambda plan: plan)


def plan_of_block_mask(
    block_mask: BlockMask,
    sizes: tuple[int, int, int],
    problem: AttnProblem,
    score: ScoreNeeds | None,
) -> list[Tensor]:
    """The packed plan of an eager call whose mask block lists say alone, kept as long as the BlockMask stays as it is;
    nothing where the mask_mod says more, or no kernel walks these lists. `sizes` are batch entries of the call, and
    queries and keys of one; `problem` has no block map."""
    device = block_mask.kv_num_blocks.device
    if device.type != "cuda" or max(block_mask.BLOCK_SIZE) >= _compat.LARGE_SPARSE_BLOCK_SIZE:
        return []
    given = [getattr(block_mask, name) for name in BlockLists._fields]
    watched = [x for x in given if x is not None]

    def make() -> Made:
        reached = reached_by(block_mask)
        plan = _planned(block_mask, BlockLists(*given), sizes, problem, score)
        if not reached.is_unchanged():
            return Made(plan, None)
        return Made(plan, watched, reached.is_unchanged)

    key = (problem, score and score.program.text, sizes)
    return _plans.get((block_mask,), key, make, device, serves_capture=True)


def _planned(
    block_mask: BlockMask,
    lists: BlockLists,
    sizes: tuple[int, int, int],
    problem: AttnProblem,
    score: ScoreNeeds | None,
) -> list[Tensor]:
    """`plan_of_block_mask` of its lists, made now."""
    heads, table = Heads(problem.nheads_q, problem.nheads_kv), None
    if of_table := table_beside_lists(block_mask, sizes, heads):
        table, found = of_table
    else:
        found = beside_lists(block_mask, sizes)
        if found is None:
            return []
    count = 0 if found is None else found.num_intervals
    intervals = packed_intervals(found, count) if found is not None and count > 0 else None
    of_blocks = None
    if table is not None:
        of_blocks = table.listed.shape
        if not has_table_of(of_blocks, block_mask.BLOCK_SIZE, sizes):
            return []
    shape = shape_of_lists(lists, block_mask.BLOCK_SIZE, sizes, count, of_blocks)
    if shape.heads not in (1, problem.nheads_q):
        return []
    try:
        problem, selection = select_for_lists(problem, shape, score=score)
    except NotImplementedError:
        return []
    kernel = selection.kernel
    assert isinstance(kernel, MappedKernel)
    return pack(kernel.plan_lists(lists, shape, problem, intervals, table))
