"""magi::plan_lists: the block lists of a mask -> how a kernel walks them, packed; there are no slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from magi_compile import _compat
from magi_compile._checks import raise_pending
from magi_compile._kept import Made, Memo
from magi_compile.kernels.base import AttnProblem, CompiledKernel
from magi_compile.kernels.mapped import MappedKernel, block_map_of, fake_plan_of_lists
from magi_compile.kernels.plan import Plan, pack
from magi_compile.kernels.scored import ScoreNeeds
from magi_compile.kernels.select import select_for_lists
from magi_compile.masks.block_mask import reached_by, shows_everything
from magi_compile.masks.evaluation.block_lists import BlockLists
from magi_compile.ops.library import chosen_for
from magi_compile.ops.repeatable import define_repeatable, hand_over_to_launcher
from magi_compile.plan.block_map import ListShape

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_lib = torch.library.Library("magi", "FRAGMENT")


def shape_of_lists(
    lists: BlockLists, block_size: Sequence[int], batch: Any, seqlen_q: Any, seqlen_k: Any
) -> ListShape:
    """The sizes of a mask of `lists`, real or fake ones or nodes' values."""
    heads = max(int(num_blocks.shape[1]) for num_blocks, _ in lists.kinds)
    rows, keys = (int(size) for size in block_size)
    return ListShape(batch, heads, seqlen_q, seqlen_k, rows, keys)


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

    @property
    def lists(self) -> BlockLists:
        return BlockLists(*self.block_lists)

    @property
    def shape(self) -> ListShape:
        return shape_of_lists(self.lists, self.block_size, self.batch, self.seqlen_q, self.seqlen_k)

    def chosen(self) -> tuple[MappedKernel, AttnProblem]:
        """The kernel, and its problem."""
        device, heads = self.block_lists[0].device, tuple(self.heads)
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
    if call.block_lists[0].device.type == "cuda":
        hand_over_to_launcher()
    return pack(kernel.plan_lists(call.lists, call.shape, problem))


def _plan_lists_fake(*arguments: Any) -> list[Tensor]:
    call = _ListCall(*arguments)
    kernel, problem = call.chosen()
    made = fake_plan_of_lists(call.lists, call.shape, problem)
    if isinstance(kernel, CompiledKernel) and _compat.is_in_use(made[0].device):
        kernel.begin_plan(Plan(block_map=problem.block_map), problem)
    return made


define_repeatable(
    _lib,
    "plan_lists(Tensor[] block_lists, int[] block_size, SymInt batch, SymInt seqlen_q, SymInt seqlen_k, "
    "ScalarType dtype, int[] heads, float softcap, str kernel, bool has_score=False) -> Tensor[]",
    *(_plan_lists, _plan_lists_fake),
)

_plans: Memo[list[Tensor]] = Memo(64, lambda plan: plan)


def plan_of_block_mask(
    block_mask: BlockMask,
    sizes: tuple[int, int, int],
    problem: AttnProblem,
    score: ScoreNeeds | None,
) -> list[Tensor]:
    """The plan of an eager call whose mask block lists say alone, kept as long as the BlockMask stays as it is.

    Args:
        block_mask: made in any way.
        sizes: batch entries of the call, and queries and keys of one.
        problem: of the call, without a block map.
        score: the score program of the call.

    Returns:
        The packed plan; nothing where the mask_mod says more, or no kernel walks these lists.
    """
    device = block_mask.kv_num_blocks.device
    if device.type != "cuda" or max(block_mask.BLOCK_SIZE) >= _compat.LARGE_SPARSE_BLOCK_SIZE:
        return []
    block_size = [int(size) for size in block_mask.BLOCK_SIZE]
    given = [getattr(block_mask, name) for name in BlockLists._fields]
    lists = BlockLists(*given)
    shape = shape_of_lists(lists, block_size, *sizes)
    if shape.heads not in (1, problem.nheads_q):
        return []
    try:
        problem, selection = select_for_lists(problem, shape, score=score)
    except NotImplementedError:
        return []
    kernel = selection.kernel
    assert isinstance(kernel, MappedKernel)

    def make() -> Made:
        reached, plan = reached_by(block_mask), []
        if shows_everything(block_mask.mask_mod, device):
            plan = pack(kernel.plan_lists(lists, shape, problem))
        watched = [x for x in given if x is not None]
        if not reached.is_unchanged():
            return Made(plan, None)
        return Made(plan, watched, reached.is_unchanged)

    key = (kernel.name, kernel.plan_key(problem), sizes)
    return _plans.get((block_mask,), key, make, device, serves_capture=True)
