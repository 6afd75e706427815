"""`context_parallel`, PyTorch's contract for any mask, and the same for tensors outside of a block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from magi_compile.dtensor.context.attention import spread_attention
from magi_compile.dtensor.context.tokens import (
    local_shards,
    owner_of,
    require_together,
    sequences_of,
)
from magi_compile.dtensor.planning.rank_plan import ContextParallelOptions
from magi_compile.dtensor.sequence.make_plan import DEFAULTS, Mask, group_of, plan
from magi_compile.dtensor.sequence.sequence_plan import SequencePlan
from magi_compile.ops.validation import check_list

#: A mask or a plan; several for layers that differ, as a list or by name.
MasksOrPlans: TypeAlias = (
    Mask | SequencePlan | Sequence[Mask | SequencePlan] | Mapping[str, Mask | SequencePlan]
)


@contextmanager
def context_parallel(
    mesh: DeviceMesh | dist.ProcessGroup,
    *,
    mask: MasksOrPlans = None,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Iterable[Tensor] | None = None,
    buffer_padding: Sequence[float] | None = None,
    options: ContextParallelOptions = DEFAULTS,
) -> Iterator[Any]:
    """Spreads attention over ranks: inside the block, attention of this rank's tokens covers the whole sequence.

    The contract is that of `torch.distributed.tensor.experimental.context_parallel`, for any mask. Inside,
    `flex_attention` (PyTorch's and `magi_compile`'s) and `scaled_dot_product_attention` take `[B, H, seqlen_local, D]`,
    `flex_flash_attention` takes `[seqlen_local, H, D]`, in eager code and under torch.compile with any backend. Call
    the compiled function inside the block, and run the backward inside too, since checkpointed layers run again in it.
    Any other attention raises. All ranks do everything together.

    Args:
        mesh: the ranks: a mesh of one dimension or a process group.
        mask: the mask of the whole sequence, as in `plan`, or a plan; None is causal. A BlockMask describes this rank's
            tokens inside the block, as `buffers` do, so the model keeps using it. For layers with different masks, a
            list or dict of masks, or of plans from `plan(masks=...)`; for cross attention also the plans of the
            sequence that the keys are.
        buffers: tensors over the whole sequence, such as tokens, positions and shifted labels; not parameters. Inside
            they hold this rank's tokens, in new memory. Afterwards they are restored, also after an exception. Where
            queries and keys are two sequences, the length of a buffer says which one it covers.
        buffer_seq_dims: the dimension of the sequence in each of `buffers`.
        no_restore_buffers: those of `buffers` that keep this rank's tokens.
        buffer_padding: what padding holds in each of `buffers` (the ignore_index for labels); required where
            `plan(...).has_padding`.
        options: how to spread.

    Yields:
        The `SequencePlan`, or a list or dict of them like `mask`. Its `block_mask` and `slices` serve models that do
        not hold the BlockMask that was passed.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: buffers do not fit the mask, or each other; what `plan` raises.
    """
    buffers = () if buffers is None else buffers
    buffer_seq_dims = () if buffer_seq_dims is None else buffer_seq_dims
    check_list("buffers", buffers)
    check_list("buffer_seq_dims", buffer_seq_dims)
    if (
        not isinstance(no_restore_buffers, (Iterable, type(None)))
        or isinstance(no_restore_buffers, Tensor)
        or hasattr(no_restore_buffers, "kv_num_blocks")
    ):
        raise TypeError(
            f"`no_restore_buffers` must be a list or a set, got {type(no_restore_buffers).__name__}"
        )
    buffers, dims = list(buffers), list(buffer_seq_dims)
    if len(buffers) != len(dims):
        raise ValueError(
            f"`buffer_seq_dims` must have an entry for each of the {len(buffers)} buffers, got {len(dims)}"
        )
    kept = [] if no_restore_buffers is None else list(no_restore_buffers)
    if not all(any(x is buffer for buffer in buffers) for x in kept):
        raise ValueError(
            "`no_restore_buffers` must be a subset of `buffers`, got a tensor that is not among them"
        )
    for number, buffer in enumerate(buffers):
        _check_buffer(number, buffer, buffers[:number])
    _check_dims("buffer_seq_dims", dims, buffers)
    seqlen = buffers[0].shape[dims[0]] if buffers else None
    planned = _plan_of(mask, mesh, seqlen, options)
    plans = _listed(planned)
    shards = local_shards(plans, buffers, dims, buffer_padding, "buffer_padding")
    with ExitStack() as undo:
        with torch.no_grad():
            for buffer, local in zip(buffers, shards, strict=True):
                if not any(buffer is x for x in kept):
                    undo.callback(_put, buffer, buffer.detach())
                _put(buffer, local)
        for block_mask, of_mask in zip(_listed(mask), plans, strict=True):
            if hasattr(block_mask, "kv_num_blocks"):
                undo.callback(_become, block_mask, dict(vars(block_mask)))
                _become(block_mask, vars(of_mask.block_mask))
        undo.enter_context(spread_attention(plans))
        yield planned


def _check_dims(name: str, dims: Sequence[Any], buffers: Sequence[Any]) -> None:
    for number, (dim, buffer) in enumerate(zip(dims, buffers, strict=True)):
        if hasattr(buffer, "kv_num_blocks"):
            continue
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise TypeError(f"`{name}[{number}]` must be an int, got {dim!r}")
        if not -buffer.ndim <= dim < buffer.ndim:
            raise ValueError(
                f"`{name}[{number}]` must be in [{-buffer.ndim}, {buffer.ndim}), the dimensions of its "
                f"buffer, got {dim}"
            )


def _check_buffers(buffers: Any, *, may_be_masks: bool = True) -> None:
    """Checks the buffers of `context_parallel_shard` and `context_parallel_unshard`."""
    if not isinstance(buffers, Mapping):
        check_list("buffers", buffers)
    for name, x in buffers.items() if isinstance(buffers, Mapping) else enumerate(buffers):
        if not isinstance(x, Tensor) and not (may_be_masks and hasattr(x, "kv_num_blocks")):
            kinds = "a tensor or a BlockMask" if may_be_masks else "a tensor"
            raise TypeError(f"`buffers[{name!r}]` must be {kinds}, got {type(x).__name__}")


def _check_buffer(number: int, buffer: Any, others: Sequence[Tensor]) -> None:
    if not isinstance(buffer, Tensor):
        raise TypeError(f"`buffers[{number}]` must be a tensor, got {type(buffer).__name__}")
    if buffer.requires_grad:
        raise ValueError(
            f"`buffers[{number}]` must not require gradients, since it is changed in place; use "
            "SequencePlan.shard(x, dim)"
        )
    if buffer.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"`buffers[{number}]` must not be a tensor of torch.inference_mode outside of that mode, since it is "
            "changed in place; use its clone()"
        )
    if any(buffer is other for other in others):
        raise ValueError(
            f"`buffers[{number}]` must be a tensor that is not in `buffers` already; remove it"
        )


def _listed(given: Any) -> list[Any]:
    """The masks or plans of a list or dict of them, or the only one."""
    if isinstance(given, Mapping):
        return list(given.values())
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _plan_of(mask: Any, mesh: Any, seqlen: int | None, options: ContextParallelOptions) -> Any:
    """A SequencePlan, or several in a list or dict like `mask`."""
    masks = _listed(mask)
    if masks and all(isinstance(x, SequencePlan) for x in masks):
        name = group_of(mesh).group_name
        for x in masks:
            if x.group_name != name:
                raise ValueError(
                    f"`mesh` must have the ranks of the plan, group {x.group_name!r}, got {name!r}"
                )
        require_together(masks)
        return mask
    if any(isinstance(x, SequencePlan) for x in masks):
        raise TypeError("`mask` must hold only masks or only plans, got both")
    if all(hasattr(x, "seq_lengths") or hasattr(x, "seqlen_q") for x in masks):
        seqlen = None
    elif seqlen is None and any(x is None or callable(x) for x in masks):
        raise ValueError(
            "`buffers` must hold a tensor over the sequence where `mask` is None (causal) or a mask_mod, which have "
            "no length, got none; or pass plan(mask, mesh, seqlen=...) as `mask`"
        )
    if isinstance(mask, (list, tuple, Mapping)):
        return plan(masks=mask, mesh=mesh, seqlen=seqlen, options=options)
    return plan(mask, mesh, seqlen=seqlen, options=options)


def _put(buffer: Tensor, x: Tensor) -> None:
    with torch.no_grad():
        buffer.set_(x)  # type: ignore[call-overload]


def _become(thing: Any, attributes: Mapping[str, Any]) -> None:
    attributes = dict(attributes)
    vars(thing).clear()
    vars(thing).update(attributes)


def context_parallel_shard(
    mesh: DeviceMesh | dist.ProcessGroup,
    buffers: Any,
    seq_dims: Any,
    plan: SequencePlan | Sequence[SequencePlan] | Mapping[str, SequencePlan] | None = None,
    *,
    padding: Any = None,
) -> Any:
    """This rank's part of tensors over the whole sequence, and of the BlockMasks among them. Changes nothing in place.

    Args:
        mesh: the ranks, a mesh of one dimension or a process group.
        buffers: a list or a dict of tensors and BlockMasks.
        seq_dims: the dimension of the sequence for each; None for a BlockMask.
        plan: how to spread; for several BlockMasks, their plans in their order. None plans the BlockMasks among
            `buffers`.
        padding: what padding holds in each of `buffers`; required where the sequence is padded.

    Returns:
        A list or dict like `buffers`: tensors with `seqlen_local` entries along their dimension. A BlockMask becomes
            one for
        `flex_attention` inside `context_parallel(mesh, mask=plan)` or inside modules with the style `ContextParallel`.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: `seq_dims` or `padding` do not fit `buffers`; there is neither a plan nor a BlockMask, or another
            number of them.
    """
    _check_buffers(buffers)
    seq_dims = _of_buffers("seq_dims", seq_dims, buffers)
    if padding is not None:
        padding = _of_buffers("padding", padding, buffers)
    given, buffers = buffers, _listed(buffers)
    _check_dims("seq_dims", seq_dims, buffers)
    listed = _listed(plan)
    if plan is not None and (not listed or not all(isinstance(x, SequencePlan) for x in listed)):
        raise TypeError(
            f"`plan` must be a SequencePlan, or a list or dict of them, got {type(plan).__name__}"
        )
    masks = [i for i, x in enumerate(buffers) if hasattr(x, "kv_num_blocks")]
    if plan is None and not masks:
        raise ValueError(
            "`plan` must be given, because `buffers` holds no BlockMask to plan, got None"
        )
    plans = _listed(
        _plan_of([buffers[i] for i in masks] if plan is None else plan, mesh, None, DEFAULTS)
    )
    if masks and len(masks) != len(plans):
        raise ValueError(
            f"`plan` must have a plan for each of the {len(masks)} BlockMasks in `buffers`, in their "
            f"order, got {len(plans)}"
        )
    where = [i for i, x in enumerate(buffers) if not hasattr(x, "kv_num_blocks")]
    shards = local_shards(
        plans,
        [buffers[i] for i in where],
        [seq_dims[i] for i in where],
        None if padding is None else [padding[i] for i in where],
        "padding",
    )
    local: dict[int, Any] = dict(zip(where, shards, strict=True))
    if masks:
        local.update((i, x.block_mask) for i, x in zip(masks, plans, strict=True))
    return _like(given, [local[i] for i in range(len(buffers))])


def _like(given: Any, parts: list[Any]) -> Any:
    """A dict with the names of the buffers, if these were one."""
    return dict(zip(given, parts, strict=True)) if isinstance(given, Mapping) else parts


def _of_buffers(name: str, given: Any, buffers: Any) -> list[Any]:
    """The values of the argument `name` for each buffer, in their order: a list for a list, a dict of the same names
    for a dict."""
    if not isinstance(buffers, Mapping):
        check_list(name, given)
    if isinstance(buffers, Mapping):
        missing = [x for x in buffers if not isinstance(given, Mapping) or x not in given]
        if missing:
            raise ValueError(f"`{name}` must have an entry for each buffer, got none for {missing}")
        return [given[x] for x in buffers]
    if len(given) != len(buffers):
        raise ValueError(
            f"`{name}` must have an entry for each of the {len(buffers)} buffers, got {len(given)}"
        )
    return list(given)


def context_parallel_unshard(
    mesh: DeviceMesh | dist.ProcessGroup, buffers: Any, seq_dims: Any, plan: SequencePlan
) -> Any:
    """Tensors over the whole sequence, in its order, from every rank's part. All ranks call it together.
    Not differentiable.

    Args:
        mesh: the ranks, a mesh of one dimension or a process group.
        buffers: a list or a dict of tensors with `seqlen_local` entries along their dimension.
        seq_dims: the dimension of the sequence for each.
        plan: how they were spread.

    Returns:
        A list or dict like `buffers`: tensors with `total` entries along their dimension.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: `seq_dims` do not fit `buffers`, or a buffer does not fit the plan.
    """
    _check_buffers(buffers, may_be_masks=False)
    seq_dims = _of_buffers("seq_dims", seq_dims, buffers)
    given, buffers = buffers, _listed(buffers)
    if not isinstance(plan, SequencePlan):
        raise TypeError(f"`plan` must be a SequencePlan, got {type(plan).__name__}")
    _check_dims("seq_dims", seq_dims, buffers)
    sequences = sequences_of([_plan_of(plan, mesh, None, DEFAULTS)])
    owners = [
        owner_of(f"buffers[{number}]", x, dim, sequences, is_local=True)
        for number, (x, dim) in enumerate(zip(buffers, seq_dims, strict=True))
    ]
    wholes = [of.unshard(x, dim) for of, x, dim in zip(owners, buffers, seq_dims, strict=True)]
    return _like(given, wholes)
