"""Ranks that share heads: each gets the rows of all ranks of its group for its share of the heads, and the output goes
back.

magi::cp_share_heads      either way, differentiable: becomes, where it is called,
magi::cp_exchange_heads   the exchange, whose gradient is the way back

One call moves all tensors of a pass, so that ranks move the same in the same order, whichever gradients they need. What
comes first in a pass compares all ranks before, as attention does among those that have the same heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from magi_compile import _compat
from magi_compile.dtensor.call.execution import unpack
from magi_compile.dtensor.planning.rank_plan import PlanTensors
from magi_compile.dtensor.ranks.agreement import Agreement, require_agreement
from magi_compile.ops.define import define
from magi_compile.ops.validation import DTYPES, refuse_transforms

_lib = torch.library.Library("magi", "FRAGMENT")


class SharedHeads(NamedTuple):
    """The names of process groups, and the place of this rank."""

    group_name: str  # of the ranks that share heads
    everyone_name: str  # of all ranks that have tokens
    number: int  # of ranks that share heads
    rank: int  # this one among them

    def share(self, tensors: Sequence[Tensor], plan: PlanTensors, batch: int) -> list[Tensor]:
        """The rows of all ranks by this rank's share of the heads.

        Args:
            tensors: each `[rows, batch * heads, D]`, of this rank; its heads are a multiple of `number`.
            plan: the plan by which they are attended to; ranks that differ in it raise together.
            batch: entries of a batch among the heads.

        Returns:
            Each `[number * rows, batch * heads / number, D]`, rows in the order of ranks.
        """
        return self._call(tensors, plan, batch, False)

    def give_back(self, tensors: Sequence[Tensor], plan: PlanTensors, batch: int) -> list[Tensor]:
        """The inverse of `share`, with its arguments."""
        return self._call(tensors, plan, batch, True)

    def _call(
        self, tensors: Sequence[Tensor], plan: PlanTensors, batch: int, is_back: bool
    ) -> list[Tensor]:
        given = (batch, self.group_name, self.everyone_name, is_back, False)
        found: list[Tensor] = torch.ops.magi.cp_share_heads(list(tensors), *plan, *given)
        return found


def _exchange(
    tensors: list[Tensor],
    meta: Tensor,
    data: Tensor,
    batch: int,
    group_name: str,
    everyone_name: str,
    is_back: bool,
    is_backward: bool,
) -> list[Tensor]:
    if not is_back:
        _agree(tensors, meta, data, batch, everyone_name, is_backward=is_backward)
    group = _compat.resolve_process_group(group_name)
    return [_exchanged(x, batch, group, is_back=is_back) for x in tensors]


def _agree(
    tensors: Sequence[Tensor],
    meta: Tensor,
    data: Tensor,
    batch: int,
    everyone_name: str,
    *,
    is_backward: bool,
) -> None:
    everyone = _compat.resolve_process_group(everyone_name)
    first, last = tensors[0], tensors[-1]
    (rows, heads, values), (last_rows, last_heads, last_values) = first.shape, last.shape
    of_heads = (heads // batch, last_heads // batch, values, last_values)
    numbers = (everyone.size(), DTYPES.index(first.dtype), batch, *of_heads, rows, last_rows)
    # What else ranks must have in common, those that have the same heads compare.
    rest = {"collective": 0, "score": 0, "softmax_scale": 0.0, "softcap": 0.0}
    call = Agreement(unpack(meta, data).digest, *numbers, **rest)  # type: ignore[arg-type]
    where = (everyone.rank(), everyone, everyone_name, first.device)
    require_agreement(call, *where, is_backward=is_backward)


def _exchanged(x: Tensor, batch: int, group: dist.ProcessGroup, *, is_back: bool) -> Tensor:
    size, values = group.size(), x.shape[2]
    if is_back:
        heads = x.shape[1] // batch
        sent = x.unflatten(0, (size, -1))
    else:
        heads = x.shape[1] // (batch * size)
        sent = x.unflatten(1, (batch, size, heads)).permute(2, 0, 1, 3, 4)
    # As bytes, which every backend moves.
    sent = sent.contiguous().view(torch.uint8)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    received = received.view(x.dtype).view(size, -1, batch, heads, values)
    if is_back:
        found = received.permute(1, 2, 0, 3, 4).reshape(-1, batch * size * heads, values)
        return found.contiguous()  # with one head of each rank it is a view
    return received.view(-1, batch * heads, values)


def _fake(
    tensors: list[Tensor],
    meta: Tensor,
    data: Tensor,
    batch: int,
    group_name: str,
    everyone_name: str,
    is_back: bool,
    is_backward: bool,
) -> list[Tensor]:
    size, found = _compat.resolve_process_group(group_name).size(), []
    for x in tensors:
        rows, heads, values = x.shape
        shape = (rows // size, heads * size) if is_back else (rows * size, heads // size)
        found.append(x.new_empty(*shape, values))
    return found


_SCHEMA = (
    "(Tensor[] tensors, Tensor meta, Tensor data, SymInt batch, str group_name, str everyone_name, bool is_back, "
    "bool is_backward) -> Tensor[]"
)
define(_lib, f"cp_exchange_heads{_SCHEMA}", _exchange, _fake)


def _share_heads(tensors: list[Tensor], *rest: Any) -> list[Tensor]:
    refuse_transforms(*tensors)
    return torch.ops.magi.cp_exchange_heads(tensors, *rest)  # type: ignore[no-any-return]


_lib.define(f"cp_share_heads{_SCHEMA}", tags=(torch.Tag.pt2_compliant_tag,))
_lib.impl("cp_share_heads", _share_heads, "CompositeImplicitAutograd")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, meta, data, *ctx.rest, is_back, _ = inputs
    ctx.is_back = is_back
    ctx.save_for_backward(meta, data)
    ctx.like = [(x.shape, x.dtype, x.device) for x in output]


def _backward(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    # Even those that nobody needs here take part, because other ranks may need theirs.
    given = [
        torch.zeros(shape, dtype=dtype, device=device) if x is None else x
        for x, (shape, dtype, device) in zip(gradients, ctx.like, strict=True)
    ]
    found = torch.ops.magi.cp_exchange_heads(
        given, *ctx.saved_tensors, *ctx.rest, not ctx.is_back, True
    )
    return found, *[None] * 7


torch.library.register_autograd(
    "magi::cp_exchange_heads", _backward, setup_context=_setup_context, lib=_lib
)
