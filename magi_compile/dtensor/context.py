"""Context parallelism for a model as it is: attention inside of a block of code runs over all ranks.

PyTorch's `torch.distributed.tensor.experimental.context_parallel`, for any mask. A torch function mode sees every attention that
the model calls, in eager code and while Dynamo traces, where it becomes our op in the graph; Dynamo's guards have the mode among
them, so that what was compiled inside does not run outside, nor the other way round. Modes are put aside in a backward and in the
graphs of checkpoints, so `torch.nn.functional` and FlexAttention have a replacement for the length of the block as well. Attention
that nobody knows how to spread is an error: over a rank's own tokens alone it would be a wrong number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode, handle_torch_function

from magi_compile import _compat
from magi_compile.dtensor.planning.rank_plan import ContextParallelOptions
from magi_compile.dtensor.sequence_plan import (
    DEFAULTS,
    SequencePlan,
    SpreadMask,
    SpreadSlices,
    group_of,
    plan,
)
from magi_compile.dtensor.spread_tokens import SpreadTokens
from magi_compile.lowering import regions
from magi_compile.masks import AttnSlices
from magi_compile.ops.attention import AttnOutput, flex_attention, flex_flash_attention
from magi_compile.ops.define import define
from magi_compile.ops.score_mod import trace_score_mod

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_FLEX = _compat.flex_operator()
_NO_SCORE_MOD = _compat.flex_identity()
_SDPA = F.scaled_dot_product_attention
# What attention over all ranks is made of.
_OF_CPUS = "_scaled_dot_product_flash_attention_for_cpu"
_OF_OURS = ("cp_attention", _OF_CPUS, f"{_OF_CPUS}_backward")
# What may be attention by another name: functions and custom ops, not the methods and functions of PyTorch that are written in C++.
_FUNCTIONS = (FunctionType, *_compat.types_of_ops())


class SpreadAttention(TorchFunctionMode):
    """Runs attention over all ranks by `plans`; none leave that to BlockMasks and slices, which know theirs."""

    def __init__(self, plans: Sequence[SequencePlan]):
        self.plans = plans
        self.digests = _digests(plans)
        super().__init__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _FLEX:
            return _flex_operator(self.digests, *args)
        if func is _SDPA:
            return _sdpa(self.plans, *args, **kwargs)
        if func is flex_flash_attention:
            return _flex_flash_attention(self, *args, **kwargs)
        if func is flex_attention:
            return _flex_attention(self.digests, *args, **kwargs)
        if func is Tensor.backward and not torch.compiler.is_compiling():
            with self:  # layers may run again
                return _backward(*args, **kwargs)
        if isinstance(func, _FUNCTIONS):
            if _is_method(func):
                # Written in Python: Dynamo can call it, but not trace what it does with `super()`.
                method: Any = func
                return getattr(args[0], method.__name__)(*args[1:], **kwargs)
            other = _other_attention(func)
            if other:
                raise NotImplementedError(_refusal(f"`{other}`"))
        return func(*args, **kwargs)


# Dynamo does not know the names of PyTorch's functions, which do not change.


@torch.compiler.assume_constant_result
def _is_method(func: Any) -> bool:
    """Whether `func` is a method of tensors that is written in Python."""
    return isinstance(func, FunctionType) and func.__module__ == "torch._tensor"


@torch.compiler.assume_constant_result
def _other_attention(func: Any) -> str:
    """The name of a function that is attention over what it is given; empty for others."""
    name = getattr(func, "__name__", "").split(".")[0]
    is_local = ("attention" in name or "_attn" in name) and name not in _OF_OURS
    return name if is_local else ""


def _backward(
    loss: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Sequence[Tensor] | None = None,
) -> None:
    """`Tensor.backward`, which no mode sees."""
    torch.autograd.backward(loss, gradient, retain_graph, create_graph, inputs=inputs)


def _refusal(what: str) -> str:
    return (
        f"{what} would see only this rank's tokens inside context_parallel; call flex_attention, "
        "scaled_dot_product_attention, magi_compile.flex_flash_attention or SequencePlan.attention"
    )


# Dynamo compares objects that it finds in two places once, when it traces. So that a graph does not go on with the mask of another plan,
# each place has a tensor of its own with the plan's digest, and an op holds them against each other when the graph runs.


def _digests(plans: Sequence[SequencePlan]) -> Tensor | None:
    return torch.cat([plan.meta[:1] for plan in plans]) if plans else None


def _plan_of_block(meta: Tensor, own: Tensor, around: Tensor) -> Tensor:
    if not bool((own == around).any()):
        raise ValueError(
            "attention inside context_parallel must have the mask of that context_parallel, got the `block_mask` or the `slices` "
            "of another plan; use those of `with context_parallel(...) as plan`"
        )
    return meta.clone()


_lib = torch.library.Library("magi", "FRAGMENT")
define(
    _lib,
    "plan_of_block(Tensor meta, Tensor own, Tensor around) -> Tensor",
    _plan_of_block,
    lambda meta, own, around: torch.empty_like(meta),
)


def _attend(
    mask: SpreadMask | SpreadSlices,
    around: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Attention by a mask and its plan, whose digest must be among those of the block `around`, if that has plans."""
    meta = mask.plan.meta
    if around is not None:
        meta = torch.ops.magi.plan_of_block(meta, mask.digest, around)
    return mask.plan.attend(q, k, v, meta, scale, softcap, True)


# What a model may call. Dynamo traces these; it does not guard the identity of objects, so nothing here asks for that.


def _flex_operator(
    around: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: Mapping[str, Any],
    *buffers: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator that PyTorch's `flex_attention` calls; its lse is in base 2."""
    mask_mod = block_mask[-1]
    if not isinstance(mask_mod, SpreadMask):
        raise ValueError(_OTHER_MASK)
    if kernel_options.get("BACKEND", "AUTO") != "AUTO":
        raise NotImplementedError(
            "`kernel_options` must not ask for a BACKEND inside context_parallel, which runs its own kernels; remove it"
        )
    if kernel_options.get("OUTPUT_MAX"):
        raise NotImplementedError(
            "`return_aux` must not ask for max_scores, which the kernels do not return; ask for lse"
        )
    softcap = 0.0
    if score_mod is not _NO_SCORE_MOD:
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                "`score_mod` must be None in compiled code inside context_parallel; for a scale or a soft-cap call "
                "SequencePlan.attention(q, k, v, scale=..., softcap=...)"
            )
        score = trace_score_mod(score_mod)
        scale, softcap = scale * score.scale, score.softcap
    out, lse = _attend(mask_mod, around, query, key, value, scale, softcap)
    return out, lse * (1 / math.log(2)), lse


_OTHER_MASK = (
    "`block_mask` must be the one that context_parallel was given as `mask`, or the `block_mask` of its plan "
    "(`with context_parallel(mesh, mask=...) as plan`): it stands for the whole sequence; one that is made for the tokens of a "
    "rank, or none, would be another mask"
)


def _flex_attention(
    around: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """`magi_compile.flex_attention` in eager code."""
    from torch.nn.attention.flex_attention import AuxOutput

    if block_mask is None or not isinstance(block_mask.mask_mod, SpreadMask):
        raise ValueError(_OTHER_MASK)
    _check_groups(query, key, enable_gqa)
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError(
            "`return_aux` must not ask for max_scores, which the kernels do not return; ask for lse"
        )
    score = trace_score_mod(score_mod)
    scale = score.scale * (query.shape[-1] ** -0.5 if scale is None else scale)
    out, lse = _attend(block_mask.mask_mod, around, query, key, value, scale, score.softcap)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)
    return (out, lse) if return_lse else out


def _flex_flash_attention(
    block: SpreadAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: AttnSlices,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    kernel: str | None = None,
) -> AttnOutput:
    if kernel is not None:
        raise NotImplementedError(
            f"`kernel` must be None inside context_parallel, which chooses it, got {kernel!r}"
        )
    if isinstance(slices, SpreadSlices):
        mask = slices
    elif torch.compiler.is_compiling() or (planned := _alike_of(slices, block.plans)) is None:
        raise ValueError(
            "`slices` must be plan.slices inside `with context_parallel(mesh, mask=...) as plan` (in eager code also the slices that "
            "were given as its `mask`), got others"
        )
    else:
        mask = planned.slices
    out, lse = _attend(mask, block.digests, q, k, v, softmax_scale, softcap)
    return AttnOutput(out, lse)


def _sdpa(
    plans: Sequence[SequencePlan],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if not plans:
        raise NotImplementedError(_refusal("`scaled_dot_product_attention` without a plan"))
    if attn_mask is not None:
        raise ValueError(
            "`attn_mask` must be None inside context_parallel, whose `mask` covers the whole sequence; for masks other than causal "
            "and full ones call flex_attention or SequencePlan.attention"
        )
    if dropout_p != 0.0:
        raise NotImplementedError(f"`dropout_p` must be 0.0, got {dropout_p}")
    fitting = [x for x in plans if (x.is_causal if is_causal else x.is_full)]
    if not fitting and is_causal:
        raise ValueError(
            "`is_causal` must be False: the mask of context_parallel is not causal over the whole sequence; call flex_attention or "
            "SequencePlan.attention with that mask"
        )
    if not fitting:
        raise ValueError(
            "`is_causal` must be True, or the mask of context_parallel full: without it attention covers all tokens, and that mask "
            "does not; for other masks call flex_attention or SequencePlan.attention"
        )
    if query.ndim != 4:
        raise ValueError(
            f"`query` must be [B, H, seqlen_local, D] inside context_parallel, got shape {list(query.shape)}"
        )
    _check_groups(query, key, enable_gqa)
    return _of_lengths(fitting, query, key).attention(query, key, value, scale=scale)


def _of_lengths(plans: Sequence[SequencePlan], query: Tensor, key: Tensor) -> SequencePlan:
    """Of several plans, which may be of other keys, the one that these tensors can only be meant for."""
    if not any(x.is_cross for x in plans):
        return plans[-1]
    if len(plans) > 1:
        lengths = query.shape[2], key.shape[2]
        plans = [x for x in plans if (x.seqlen_local, x.keys.seqlen_local) == lengths]
    if len(plans) != 1:
        raise ValueError(
            f"`key` must have a length that says which of the masks is meant, got {key.shape[2]} for {query.shape[2]} queries, which "
            f"{len(plans)} of them have; call flex_attention with the mask itself, or SequencePlan.attention"
        )
    return plans[0]


def _check_groups(query: Tensor, key: Tensor, enable_gqa: bool) -> None:
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"`key` must have the heads of `query`, {query.shape[1]}, got {key.shape[1]}; "
            "set enable_gqa=True for grouped queries"
        )


_alike: WeakKeyDictionary[AttnSlices, tuple[Sequence[SequencePlan], SequencePlan | None]] = (
    WeakKeyDictionary()
)


def _alike_of(slices: AttnSlices, plans: Sequence[SequencePlan]) -> SequencePlan | None:
    """The plan that `slices` are the mask of, asked once for both."""
    if not isinstance(slices, AttnSlices):
        return None
    known = _alike.get(slices)
    if known is None or known[0] is not plans:
        key = slices.content_key()
        found = [planned for planned in plans if planned.slices.content_key() == key]
        # Of masks over other keys that look alike none is meant more than another.
        is_one = len(found) == 1 or (bool(found) and not any(x.is_cross for x in found))
        known = _alike[slices] = (plans, found[0] if is_one else None)
    return known[1]


# The doors


@contextmanager
def spread_attention(plans: Sequence[SequencePlan]) -> Iterator[None]:
    """Attention in eager and compiled code that is called in here runs over all ranks."""

    digests = _digests(plans)

    # Where the mode is not: in layers that run again in a backward, and in what Dynamo makes a graph of its own, as checkpoints.
    def flex_operator(*args: Any) -> Any:
        if _compat.has_torch_function_mode():
            return _FLEX(*args)
        return _flex_operator(digests, *args)

    def sdpa(*args: Any, **kwargs: Any) -> Tensor:
        if _compat.has_torch_function_mode():
            return handle_torch_function(_SDPA, (), *args, **kwargs)
        return _sdpa(plans, *args, **kwargs)

    regions.watch()
    with _compat.attention_replaced(flex_operator, sdpa), SpreadAttention(plans):
        yield


@contextmanager
def context_parallel(
    mesh: DeviceMesh | dist.ProcessGroup,
    *,
    mask: Any = None,
    buffers: Sequence[Tensor] = (),
    buffer_seq_dims: Sequence[int] = (),
    no_restore_buffers: Iterable[Tensor] | None = None,
    buffer_padding: Sequence[float] | None = None,
    options: ContextParallelOptions = DEFAULTS,
) -> Iterator[Any]:
    """Spreads attention over ranks: inside the block, attention of this rank's tokens covers the whole sequence.

    The contract is that of `torch.distributed.tensor.experimental.context_parallel`, for any mask. Inside,
    `flex_attention` (PyTorch's and `magi_compile`'s) and `scaled_dot_product_attention` take `[B, H, seqlen_local, D]`,
    `flex_flash_attention` takes `[seqlen_local, H, D]`, in eager code and under torch.compile with any backend. Call the compiled
    function inside the block, and run the backward inside too, since checkpointed layers run again in it. Any other attention
    raises. All ranks do everything together.

    Args:
        mesh: the ranks: a mesh of one dimension or a process group.
        mask: the mask of the whole sequence, as in `plan`, or a plan; None is causal. A BlockMask describes this rank's tokens inside
            the block, as `buffers` do, so the model keeps using it. For layers with different masks, a list or dict of masks, or of
            plans from `plan(masks=...)`; for cross attention also the plans of the sequence that the keys are.
        buffers: tensors over the whole sequence, such as tokens, positions and shifted labels; not parameters. Inside they hold this
            rank's tokens, in new memory. Afterwards they are restored, also after an exception. Where queries and keys are two sequences,
            the length of a buffer says which one it covers.
        buffer_seq_dims: the dimension of the sequence in each of `buffers`.
        no_restore_buffers: those of `buffers` that keep this rank's tokens.
        buffer_padding: what padding holds in each of `buffers` (the ignore_index for labels); required where
            `plan(...).has_padding`.
        options: how to spread.

    Yields:
        The `SequencePlan`, or a list or dict of them like `mask`. Its `block_mask` and `slices` serve models that do not hold the
        BlockMask that was passed.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: buffers do not fit the mask, or each other; what `plan` raises.
    """
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
    seqlen = None
    if buffers and -buffers[0].ndim <= dims[0] < buffers[0].ndim:
        seqlen = buffers[0].shape[dims[0]]
    planned = _plan_of(mask, mesh, seqlen, options)
    plans = _listed(planned)
    shards = _shards(plans, buffers, dims, buffer_padding, "buffer_padding")
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


def _check_buffer(number: int, buffer: Any, others: Sequence[Tensor]) -> None:
    if not isinstance(buffer, Tensor):
        raise TypeError(f"`buffers[{number}]` must be a tensor, got {type(buffer).__name__}")
    if buffer.requires_grad:
        raise ValueError(
            f"`buffers[{number}]` must not require gradients, since it is changed in place; use SequencePlan.shard(x, dim)"
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
        _require_together(masks)
        return mask
    if any(isinstance(x, SequencePlan) for x in masks):
        raise TypeError("`mask` must hold only masks or only plans, got both")
    if all(hasattr(x, "seq_lengths") or hasattr(x, "seqlen_q") for x in masks):
        seqlen = None
    if isinstance(mask, (list, tuple, Mapping)):
        return plan(masks=mask, mesh=mesh, seqlen=seqlen, options=options)
    return plan(mask, mesh, seqlen=seqlen, options=options)


def _require_together(plans: Sequence[SequencePlan]) -> None:
    """Plans hold the same tokens, or one holds as its keys what another one holds."""
    reached, others = [plans[0], plans[0].keys], list(plans[1:])
    while others:
        near = [x for x in others if _among(x, reached) or _among(x.keys, reached)]
        if not near:
            raise ValueError(
                "`mask` must have plans that hold the same tokens, got others; make them together: plan(masks=[...], mesh=mesh), or with "
                "`keys`, where the keys of one are the tokens of another"
            )
        others = [x for x in others if x not in near]
        reached += [tokens for x in near for tokens in (x, x.keys)]


def _among(tokens: SpreadTokens, others: Sequence[SpreadTokens]) -> bool:
    return any(tokens is x or tokens.has_the_tokens_of(x) for x in others)


def _sequences(plans: Sequence[SequencePlan]) -> list[SpreadTokens]:
    """Queries and keys of all plans, each sequence once."""
    found: list[SpreadTokens] = []
    for planned in plans:
        for tokens in (planned, planned.keys):
            if not _among(tokens, found):
                found.append(tokens)
    return found


def _owner(
    name: str, x: Tensor, dim: int, sequences: Sequence[SpreadTokens], *, is_local: bool = False
) -> SpreadTokens:
    """The sequence of which `x` has the tokens along `dim`, by its length, of the whole or of one rank."""
    if len(sequences) == 1 or not isinstance(x, Tensor) or not -x.ndim <= dim < x.ndim:
        return sequences[0]  # which says what is wrong
    lengths = [s.seqlen_local if is_local else s.total for s in sequences]
    fitting = [s for s, n in zip(sequences, lengths, strict=True) if n == x.shape[dim]]
    if not fitting:
        raise ValueError(
            f"`{name}` must have as many tokens in dimension {dim} as queries or keys, {' or '.join(map(str, sorted(set(lengths))))}, "
            f"got {x.shape[dim]}"
        )
    if len(fitting) > 1:
        call = "unshard" if is_local else "shard"
        raise ValueError(
            f"`{name}` must have a length that says whether it is of queries or of keys, got {x.shape[dim]} in dimension {dim}, which both "
            f"have; take SequencePlan.{call}(x, dim) for queries and SequencePlan.keys.{call}(x, dim) for keys in its place"
        )
    return fitting[0]


def _shards(
    plans: Sequence[SequencePlan],
    tensors: Sequence[Tensor],
    dims: Sequence[int],
    padding: Sequence[float] | None,
    padding_name: str,
) -> list[Tensor]:
    sequences = _sequences(plans)
    owners = [
        _owner(f"buffers[{number}]", x, dim, sequences)
        for number, (x, dim) in enumerate(zip(tensors, dims, strict=True))
    ]
    for of in owners:
        if padding is None and of.has_padding:
            raise ValueError(
                f"`{padding_name}` must say what padding holds in each of `buffers` (the ignore_index for labels), because {of.total} "
                f"tokens are padded to {of.seqlen_local} on each of {of.cp_size} ranks"
            )
    if padding is not None and len(padding) != len(tensors):
        raise ValueError(
            f"`{padding_name}` must have an entry for each of the {len(tensors)} buffers, got {len(padding)}"
        )
    shards = []
    for number, (of, x, dim) in enumerate(zip(owners, tensors, dims, strict=True)):
        try:
            shards.append(of.shard(x, dim, padding=padding[number] if padding else 0))
        except ValueError as error:
            raise ValueError(f"`buffers[{number}]` does not fit: {error}") from error
    return shards


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
        plan: how to spread; for several BlockMasks, their plans in their order. None plans the BlockMasks among `buffers`.
        padding: what padding holds in each of `buffers`; required where the sequence is padded.

    Returns:
        A list or dict like `buffers`: tensors with `seqlen_local` entries along their dimension. A BlockMask becomes one for
        `flex_attention` inside `context_parallel(mesh, mask=plan)` or inside modules with the style `ContextParallel`.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: `seq_dims` or `padding` do not fit `buffers`; there is neither a plan nor a BlockMask, or another number of them.
    """
    if isinstance(buffers, Mapping):
        dims, fill = (
            None if x is None else [x[name] for name in buffers] for x in (seq_dims, padding)
        )
        parts = context_parallel_shard(mesh, list(buffers.values()), dims, plan, padding=fill)
        return dict(zip(buffers, parts, strict=True))
    if len(buffers) != len(seq_dims):
        raise ValueError(
            f"`seq_dims` must have an entry for each of the {len(buffers)} buffers, got {len(seq_dims)}"
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
            f"`plan` must have a plan for each of the {len(masks)} BlockMasks in `buffers`, in their order, got {len(plans)}"
        )
    where = [i for i, x in enumerate(buffers) if not hasattr(x, "kv_num_blocks")]
    shards = _shards(
        plans,
        [buffers[i] for i in where],
        [seq_dims[i] for i in where],
        None if padding is None else [padding[i] for i in where],
        "padding",
    )
    local: dict[int, Any] = dict(zip(where, shards, strict=True))
    if masks:
        local.update((i, x.block_mask) for i, x in zip(masks, plans, strict=True))
    return [local[i] for i in range(len(buffers))]


def context_parallel_unshard(
    mesh: DeviceMesh | dist.ProcessGroup,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    plan: SequencePlan,
) -> list[Tensor]:
    """Tensors over the whole sequence, in its order, from every rank's part. All ranks call it together. Not differentiable.

    Args:
        mesh: the ranks, a mesh of one dimension or a process group.
        buffers: tensors with `seqlen_local` entries along their dimension.
        seq_dims: the dimension of the sequence for each.
        plan: how they were spread.

    Returns:
        Tensors with `total` entries along their dimension.
    """
    if not isinstance(plan, SequencePlan):
        raise TypeError(f"`plan` must be a SequencePlan, got {type(plan).__name__}")
    if len(buffers) != len(seq_dims):
        raise ValueError(
            f"`seq_dims` must have an entry for each of the {len(buffers)} buffers, got {len(seq_dims)}"
        )
    sequences = _sequences([_plan_of(plan, mesh, None, DEFAULTS)])
    owners = [
        _owner(f"buffers[{number}]", x, dim, sequences, is_local=True)
        for number, (x, dim) in enumerate(zip(buffers, seq_dims, strict=True))
    ]
    return [of.unshard(x, dim) for of, x, dim in zip(owners, buffers, seq_dims, strict=True)]
