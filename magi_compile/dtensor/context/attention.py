"""Inside of a block of code every attention that a model calls runs over all ranks.

A torch function mode sees every attention that the model calls, in eager code and while Dynamo traces, where it becomes
our op in the graph; Dynamo's guards have the mode among them, so that what was compiled inside does not run outside,
nor the other way round. Modes are put aside in a backward and in the graphs of checkpoints, so `torch.nn.functional`,
FlexAttention and our own functions have a replacement for the length of the block as well. Attention that nobody knows
how to spread is an error: over a rank's own tokens alone it would be a wrong number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function

from magi_compile import _compat
from magi_compile.dtensor.call.scores import MaskOverRanks
from magi_compile.dtensor.sequence.sequence_plan import SequencePlan
from magi_compile.dtensor.sequence.spread_mask import (
    SpreadMask,
    SpreadSlices,
    attend_by,
    check_groups,
)
from magi_compile.lowering import regions
from magi_compile.masks import AttnSlices
from magi_compile.ops.attention import AttnOutput, flex_attention, flex_flash_attention
from magi_compile.ops.over_ranks import Replacements, replaced

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_FLEX = _compat.flex_operator()
_NO_SCORE_MOD = _compat.flex_identity()
_SDPA = F.scaled_dot_product_attention
# What attention over all ranks is made of.
_OF_CPUS = "_scaled_dot_product_flash_attention_for_cpu"
_OF_OURS = ("cp_attention", _OF_CPUS, f"{_OF_CPUS}_backward")
# What may be attention by another name: functions and custom ops, not the methods and functions of PyTorch that are
# written in C++.
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
            return _flex_flash_attention(self.plans, self.digests, *args, **kwargs)
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
    """True if `func` is a method of tensors that is written in Python."""
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


def _digests(plans: Sequence[SequencePlan]) -> Tensor | None:
    return torch.cat([plan.meta[:1] for plan in plans]) if plans else None


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
    """The operator that PyTorch's `flex_attention` calls; its lse and its largest scores are in base 2."""
    mask_mod = block_mask[-1]
    if isinstance(mask_mod, MaskOverRanks):  # is across ranks already, as a part of a graph
        given = (query, key, value, score_mod, block_mask, scale, kernel_options)
        return _FLEX(*given, *buffers)  # type: ignore[no-any-return]
    if not isinstance(mask_mod, SpreadMask):
        raise ValueError(_OTHER_MASK)
    if kernel_options.get("BACKEND", "AUTO") != "AUTO":
        raise NotImplementedError(
            "`kernel_options` must not ask for a BACKEND inside context_parallel, which runs its own kernels; remove it"
        )
    out, *rows = attend_by(
        *(mask_mod, around, query, key, value, scale, 0.0),
        None if score_mod is _NO_SCORE_MOD else score_mod,
        return_max_scores=bool(kernel_options.get("OUTPUT_MAX")),
    )
    in_base_2 = [x * (1 / math.log(2)) for x in rows if x is not None]
    # PyTorch reads the last one only where largest scores are asked for.
    return out, in_base_2[0], in_base_2[-1]


_OTHER_MASK = (
    "`block_mask` must be the one that context_parallel was given as `mask`, or the `block_mask` of its plan (`with "
    "context_parallel(mesh, mask=...) as plan`): it stands for the whole sequence; one that is made for the tokens of "
    "a rank, or none, would be another mask"
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
    if block_mask is None or not isinstance(block_mask.mask_mod, SpreadMask):
        raise ValueError(_OTHER_MASK)
    arguments = (query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse)
    return block_mask.mask_mod.flex_attention(
        *arguments, kernel_options, return_aux=return_aux, around=around
    )


def _flex_flash_attention(
    plans: Sequence[SequencePlan],
    around: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: AttnSlices,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    kernel: str | None = None,
    return_max_scores: bool = False,
) -> AttnOutput:
    if kernel is not None:
        raise NotImplementedError(
            f"`kernel` must be None inside context_parallel, which chooses it, got {kernel!r}"
        )
    if isinstance(slices, SpreadSlices):
        mask = slices
    elif torch.compiler.is_compiling() or (planned := _alike_of(slices, plans)) is None:
        raise ValueError(
            "`slices` must be plan.slices inside `with context_parallel(mesh, mask=...) as plan` (in eager code also "
            "the slices that were given as its `mask`), got others"
        )
    else:
        mask = planned.slices
    given = (mask, around, q, k, v, softmax_scale, softcap)
    return attend_by(*given, return_max_scores=return_max_scores)


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
            "`attn_mask` must be None inside context_parallel, whose `mask` covers the whole sequence; for masks "
            "other than causal and full ones call flex_attention or SequencePlan.attention"
        )
    if dropout_p != 0.0:
        raise NotImplementedError(
            f"`dropout_p` must be 0.0, got {dropout_p}: attention inside context_parallel has no dropout"
        )
    fitting = [x for x in plans if (x.is_causal if is_causal else x.is_full)]
    if not fitting and is_causal:
        raise ValueError(
            "`is_causal` must be False: the mask of context_parallel is not causal over the whole sequence; call "
            "flex_attention or SequencePlan.attention with that mask"
        )
    if not fitting:
        raise ValueError(
            "`is_causal` must be True, or the mask of context_parallel full: without it attention covers all tokens, "
            "and that mask does not; for other masks call flex_attention or SequencePlan.attention"
        )
    if query.ndim != 4:
        raise ValueError(
            f"`query` must be [B, H, seqlen_local, D] inside context_parallel, got shape {list(query.shape)}"
        )
    check_groups(query, key, enable_gqa)
    return _of_lengths(fitting, query, key).attention(query, key, value, scale=scale)


def _of_lengths(plans: Sequence[SequencePlan], query: Tensor, key: Tensor) -> SequencePlan:
    """Picks, of several plans, the only one with the lengths of these tensors."""
    if not any(x.is_cross for x in plans):
        return plans[-1]
    if len(plans) > 1:
        lengths = query.shape[2], key.shape[2]
        plans = [x for x in plans if (x.seqlen_local, x.keys.seqlen_local) == lengths]
    if len(plans) != 1:
        raise ValueError(
            f"`key` must have a length that says which of the masks is meant, got {key.shape[2]} for "
            f"{query.shape[2]} queries, which "
            f"{len(plans)} of them have; call flex_attention with the mask itself, or SequencePlan.attention"
        )
    return plans[0]


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
        exact = [planned for planned in plans if planned.is_exact]
        found = [planned for planned in exact if planned.slices.content_key() == key]
        # Of masks over other keys that look alike none is meant more than another.
        is_one = len(found) == 1 or (bool(found) and not any(x.is_cross for x in found))
        known = _alike[slices] = (plans, found[0] if is_one else None)
    return known[1]


@contextmanager
def spread_attention(plans: Sequence[SequencePlan]) -> Iterator[None]:
    """Attention in eager and compiled code that is called in here runs over all ranks."""

    with _compat.outside_of_modes():
        digests, mode = _digests(plans), SpreadAttention(plans)

    # Where the mode is not: in layers that run again in a backward, and in what Dynamo makes a graph of its own, as
    # checkpoints.
    def flex_operator(*args: Any) -> Any:
        if _compat.has_torch_function_mode():
            return _FLEX(*args)
        return _flex_operator(digests, *args)

    def sdpa(*args: Any, **kwargs: Any) -> Tensor:
        if _compat.has_torch_function_mode():
            return handle_torch_function(_SDPA, (), *args, **kwargs)
        return _sdpa(plans, *args, **kwargs)

    regions.watch()

    our_flash = partial(_flex_flash_attention, plans, digests)
    ours = replaced(Replacements(partial(_flex_attention, digests), our_flash))
    with _compat.attention_replaced(flex_operator, sdpa), ours, mode:
        yield
