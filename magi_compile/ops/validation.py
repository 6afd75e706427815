"""Checks of the arguments of the public attention functions. Each error names argument, expectation and value."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from magi_compile import _compat
from magi_compile.kernels.select import KERNELS
from magi_compile.masks import AttnSlices
from magi_compile.masks.arguments import check_flag

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_packed(q: Tensor, k: Tensor, v: Tensor, slices: AttnSlices) -> None:
    """The tensors of `flex_flash_attention`."""
    check_qkv(q, k, v)
    if not isinstance(slices, AttnSlices):
        raise TypeError(
            f"`slices` must be AttnSlices, got {type(slices).__name__}; make them with AttnSlices.from_lists(q_ranges, "
            "k_ranges, mask_types), AttnSlices.causal(total) or AttnSlices.from_cu_seqlens(cu_seqlens)"
        )
    if (slices.seqlen_q, slices.seqlen_k) != (q.shape[0], k.shape[0]):
        raise ValueError(
            f"`slices` must cover {shown(q.shape[0])} query rows and {shown(k.shape[0])} keys, "
            f"got {shown(slices.seqlen_q)} and {shown(slices.seqlen_k)}"
        )
    if slices.q_ranges.device != q.device:
        raise ValueError(
            f"`slices` must be on the device of `q`, {q.device}, got {slices.q_ranges.device}; "
            "move it with slices.to(device)"
        )


def check_qkv(q: Tensor, k: Tensor, v: Tensor, layout: str = "[total, nheads, head_dim]") -> None:
    """Checks that packed tensors fit together, but for the tokens of `q`."""
    tensors = {"q": q, "k": k, "v": v}
    _check_kinds(tensors, layout)
    _check_alike(tensors)
    _check_packed_shapes(q, k, v)


def check_op(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Checks that the packed tensors of an op, real ones or fakes, fit together."""
    if (
        q.ndim == k.ndim == v.ndim == 3
        and q.dtype == k.dtype == v.dtype
        and q.device == k.device == v.device
        and (heads := k.shape[1]) != 0
        and not q.shape[1] % heads
        and not _compat.differ_now(v.shape[1], heads)
        and not _compat.differ_now(v.shape[0], k.shape[0])
        and not _compat.differ_now(k.shape[2], q.shape[2])
    ):
        return
    tensors = {"q": q, "k": k, "v": v}
    for name, tensor in tensors.items():
        _check_dims(name, tensor, "[total, nheads, head_dim]")
    _check_alike(tensors)
    _check_packed_shapes(q, k, v)


def check_op_gradients(dout: Tensor, dlse: Tensor | None, q: Tensor, *saved: Tensor) -> None:
    """Checks that `q`, k and v fit together, and that results and their gradients have their shapes."""
    k, v, out, lse = saved
    check_op(q, k, v)
    total, nheads, _ = q.shape
    like_out, like_lse = (total, nheads, v.shape[2]), (nheads, total)
    for name, given, shape in (
        ("dout", dout, like_out),
        ("out", out, like_out),
        ("lse", lse, like_lse),
        ("dlse", dlse, like_lse),
    ):
        if given is not None and given.shape != shape:
            raise ValueError(f"`{name}` must have shape {shown(shape)}, got {shown(given.shape)}")


def check_padded(
    query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask | None, enable_gqa: bool
) -> None:
    """The tensors of `flex_attention`."""
    check_flag("enable_gqa", enable_gqa)
    tensors = {"query": query, "key": key, "value": value}
    _check_kinds(tensors, "[B, H, S, D]")
    _check_alike(tensors)
    check_padded_shapes(query, key, value)
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"`key` must have the heads of `query`, {shown(query.shape[1])}, got {shown(key.shape[1])}; "
            "set enable_gqa=True for grouped queries"
        )
    if block_mask is not None:
        _check_block_mask(block_mask, query, key)
    if key.shape[0] != query.shape[0] and (
        block_mask is None or block_mask.kv_num_blocks.shape[0] != query.shape[0]
    ):
        made_for = None if block_mask is None else shown(block_mask.kv_num_blocks.shape[0])
        raise ValueError(
            f"`block_mask` must be made for the batch size of `query`, {shown(query.shape[0])}, where "
            f"`key` has 1 entry for all, got {made_for}"
        )


def check_padded_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Checks that the sizes of the tensors of `flex_attention` fit together. A traced graph guards these sizes."""
    differ = _compat.differ
    batch = query.shape[0]
    if differ(key.shape[0], batch) and differ(key.shape[0], 1):
        wanted = f"{shown(batch)}, or 1" if differ(batch, 1) else "1"
        raise ValueError(
            f"`key` must have the batch size of `query`, {wanted}, got {shown(key.shape[0])}"
        )
    if differ(value.shape[0], key.shape[0]):
        raise ValueError(
            f"`value` must have the batch size of `key`, {shown(key.shape[0])}, got {shown(value.shape[0])}"
        )
    _check_heads("query", query, "key", key)
    if differ(value.shape[1], key.shape[1]) or differ(value.shape[2], key.shape[2]):
        raise ValueError(
            f"`value` must have the heads and length of `key`, {shown(key.shape[1:3])}, got {shown(value.shape[1:3])}"
        )


def check_block_lists(lists: Sequence[Tensor], query: Tensor) -> None:
    """Checks that the block lists of a BlockMask, `[B or 1, H or 1, ...]`, serve all of the batch entries and heads of
    `query`."""
    for found in lists:
        for dim, what in enumerate(("batch size", "heads")):
            size, wanted = found.shape[dim], query.shape[dim]
            if _compat.differ(size, wanted) and _compat.differ(size, 1):
                raise ValueError(
                    f"`block_mask` must have {what} 1 or {shown(wanted)}, got {shown(size)}"
                )


def check_options(
    scale_name: str, scale: float | None, softcap: float = 0.0, kernel: str | None = None
) -> None:
    """Checks the arguments that are not tensors. `scale_name` is the caller's name of the scale."""
    for name, number in ((scale_name, scale), ("softcap", softcap)):
        if number is None and name == scale_name:
            continue
        check_number(name, number, may_be_negative=name == scale_name)
    if not isinstance(kernel, (str, type(None))):
        raise TypeError(f"`kernel` must be a name or None, got {kernel!r}")
    if kernel is not None and kernel not in KERNELS:
        raise ValueError(f"`kernel` must be one of {', '.join(KERNELS)}, got {kernel!r}")


def refuse_transforms(*tensors: Tensor) -> None:
    """Raises where a transform of torch.func follows one of `tensors`:
    an op without a rule for it would drop what it adds."""
    if _compat.has_tangents(tensors):
        raise NotImplementedError(
            "attention has no forward-mode derivatives (torch.func.jvp, jacfwd, linearize, "
            "torch.autograd.forward_ad); use backward, or torch.autograd.grad"
        )
    if _compat.is_transformed(tensors):
        raise NotImplementedError(
            "attention has no rules for the transforms of torch.func (grad, vjp, jacrev, vmap); use "
            "torch.autograd.grad for gradients, and in place of vmap make the mapped dimension part of the batch"
        )


def check_number(name: str, given: Any, *, may_be_negative: bool = False) -> None:
    if isinstance(given, bool) or not isinstance(given, (numbers.Real, torch.SymFloat)):
        raise TypeError(f"`{name}` must be a number, got {given!r}")
    if isinstance(given, int) and abs(given) > sys.float_info.max:
        raise ValueError(f"`{name}` must fit in a float, got an int of {given.bit_length()} bits")
    number: Any = given
    if not -math.inf < number < math.inf:  # of a SymFloat too
        raise ValueError(f"`{name}` must be finite, got {given}")
    if number < 0 and not may_be_negative:
        raise ValueError(f"`{name}` must not be negative, got {given}")


def check_mapping(name: str, given: Any) -> None:
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"`{name}` must be a dict or None, got {given!r}")


def check_list(name: str, given: Any) -> None:
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise TypeError(f"`{name}` must be a list, got {type(given).__name__}")


def shown(sizes: Any) -> Any:
    """A size, or a list of several, as messages print it: of a symbolic one the number at hand."""
    if isinstance(sizes, (tuple, list)):
        return [_compat.size_at_hand(size) for size in sizes]
    return _compat.size_at_hand(sizes)


def _check_kinds(tensors: dict[str, Any], layout: str) -> None:
    """That they are tensors, of a kind and a dtype that attention takes."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"`{name}` must be a tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.is_nested:
            raise ValueError(f"`{name}` must be a dense tensor, got {_kind_of(tensor)}")
        _check_dims(name, tensor, layout)
        if tensor.dtype not in DTYPES:
            raise ValueError(f"`{name}` must be float32, bfloat16 or float16, got {tensor.dtype}")
    if not torch.compiler.is_compiling():  # there the op asks
        refuse_transforms(*tensors.values())


def _check_dims(name: str, tensor: Tensor, layout: str) -> None:
    if tensor.ndim != layout.count(",") + 1:
        raise ValueError(f"`{name}` must be {layout}, got shape {shown(tensor.shape)}")


def _check_alike(tensors: dict[str, Tensor]) -> None:
    """Dtype and device, which the first tensor sets."""
    (first_name, first), *_ = tensors.items()
    for name, tensor in tensors.items():
        if tensor.dtype != first.dtype:
            raise ValueError(
                f"`{name}` must have the dtype of `{first_name}`, {first.dtype}, got {tensor.dtype}"
            )
        if tensor.device != first.device:
            raise ValueError(
                f"`{name}` must be on the device of `{first_name}`, {first.device}, got {tensor.device}"
            )


def _kind_of(tensor: Tensor) -> str:
    return "a nested tensor" if tensor.is_nested else f"one of layout {tensor.layout}"


def _check_packed_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    _check_heads("q", q, "k", k)
    if _compat.differ_now(v.shape[0], k.shape[0]) or _compat.differ_now(v.shape[1], k.shape[1]):
        raise ValueError(
            f"`v` must have the tokens and heads of `k`, {shown(k.shape[:2])}, got {shown(v.shape[:2])}"
        )


def _check_heads(q_name: str, q: Tensor, k_name: str, k: Tensor) -> None:
    """Both layouts have the heads in dimension 1."""
    if q.shape[-1] == 0:
        raise ValueError(f"`{q_name}` must have a head_dim of at least 1, got 0")
    if _compat.differ(k.shape[-1], q.shape[-1]):
        raise ValueError(
            f"`{k_name}` must have the head_dim of `{q_name}`, {shown(q.shape[-1])}, got {shown(k.shape[-1])}"
        )
    if k.shape[1] == 0:
        raise ValueError(f"`{k_name}` must have at least 1 head, got 0")
    if q.shape[1] == 0:
        raise ValueError(f"`{q_name}` must have at least 1 head, got 0")
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"`{q_name}` must have a multiple of the heads of `{k_name}`, {shown(k.shape[1])}, "
            f"got {shown(q.shape[1])} heads"
        )


def _check_block_mask(block_mask: BlockMask, query: Tensor, key: Tensor) -> None:
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            f"`block_mask` must be a BlockMask, got {type(block_mask).__name__}; make one with "
            "magi_compile.create_block_mask, or give slices to flex_flash_attention"
        )
    lengths = tuple(block_mask.seq_lengths)
    if lengths != (query.shape[2], key.shape[2]):
        raise ValueError(
            f"`block_mask` must be made for {shown(query.shape[2])} queries and {shown(key.shape[2])} keys, "
            f"got {shown(lengths)}"
        )
    check_block_lists([block_mask.kv_num_blocks], query)
    if block_mask.kv_num_blocks.device != query.device:
        raise ValueError(
            f"`block_mask` must be on the device of `query`, {query.device}, got {block_mask.kv_num_blocks.device}"
        )


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """q, k and v in the dtype of autocast, where it is on:
    as FlexAttention and `scaled_dot_product_attention` take them."""
    kinds = {x.device.type for x in tensors if isinstance(x, Tensor)} - {"meta"}
    if len(kinds) != 1 or not torch.is_autocast_enabled(*kinds):
        return tensors
    dtype = torch.get_autocast_dtype(*kinds)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype in DTYPES else x for x in tensors)
