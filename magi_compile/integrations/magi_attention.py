"""The functions of SandAI's MagiAttention on this package: change the import, keep the program.

    from magi_compile.integrations.magi_attention import calc_attn, dispatch, magi_attn_flex_key, undispatch

Names, arguments, shapes and gradients are those that its documents show; MagiAttention itself is not needed. A key is a
`magi_compile.dtensor.SequencePlan`. docs/magi_attention.md has both APIs side by side.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import AuxRequest

from magi_compile import _compat
from magi_compile.dtensor import ContextParallelOptions, SequencePlan, plan
from magi_compile.dtensor.sequence.make_plan import group_of
from magi_compile.integrations.flex_flash_attn import AttnForwardMeta as AttnForwardMeta
from magi_compile.integrations.flex_flash_attn import AttnMaskType as AttnMaskType
from magi_compile.integrations.flex_flash_attn import AttnRanges as AttnRanges
from magi_compile.integrations.flex_flash_attn import check_scores, named, one_sink, slices_of
from magi_compile.integrations.flex_flash_attn import flex_flash_attn_func as flex_flash_attn_func
from magi_compile.integrations.magi_attention_helpers import (
    Dispatch,
    Undispatch,
    refuse_name,
    require_key,
    require_self_attention,
)
from magi_compile.integrations.magi_attention_helpers import apply_padding as apply_padding
from magi_compile.integrations.magi_attention_helpers import compute_pad_size as compute_pad_size
from magi_compile.integrations.magi_attention_helpers import (
    infer_attn_mask_from_cu_seqlens as infer_attn_mask_from_cu_seqlens,
)
from magi_compile.integrations.magi_attention_helpers import (
    infer_attn_mask_from_sliding_window as infer_attn_mask_from_sliding_window,
)
from magi_compile.integrations.magi_attention_helpers import (
    infer_varlen_mask_from_batch as infer_varlen_mask_from_batch,
)
from magi_compile.integrations.magi_attention_helpers import pad_at_dim as pad_at_dim
from magi_compile.integrations.magi_attention_helpers import squash_batch_dim as squash_batch_dim
from magi_compile.integrations.magi_attention_helpers import unpad_at_dim as unpad_at_dim
from magi_compile.masks import AttnSlices
from magi_compile.masks.arguments import check_count, check_flag, is_int

DistAttnRuntimeKey: TypeAlias = SequencePlan

_recent: dict[str, SequencePlan] = {}  # of each process group, by its name
_LENGTHS = {"seqlen_q": "total_seqlen_q", "seqlen_k": "total_seqlen_k"}


def __getattr__(name: str) -> Any:
    refuse_name(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@named(mask_types="attn_mask_type", mesh="cp_group_or_mesh", **_LENGTHS)
def magi_attn_flex_key(
    q_ranges: Any,
    k_ranges: Any,
    attn_mask_type: Any,
    total_seqlen_q: int,
    total_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int,
    cp_group_or_mesh: DeviceMesh | dist.ProcessGroup,
    dist_attn_config: ContextParallelOptions | None = None,
    is_same_source: bool = True,
    is_q_permutable: bool = True,
    is_k_permutable: bool = True,
    chunk_size: int | None = None,
) -> SequencePlan:
    """`magi_compile.dtensor.plan` by ranges; the same on every rank. Without communication.

    Ranges are pairs `[num_slices, 2]`; the type is one for all or one for each: a name, a number or an enum. Plans
    serve all heads and pad by themselves, so that `num_heads_*`, `head_dim` and `pad_size` do nothing. `chunk_size` is
    cut to an eighth of a rank's tokens. Raises TypeError or ValueError where arguments do not fit or slices overlap,
    and NotImplementedError for cross attention and meshes of two dimensions.
    """
    flags = [is_same_source, is_q_permutable, is_k_permutable]
    for name, flag in zip(
        ("is_same_source", "is_q_permutable", "is_k_permutable"), flags, strict=True
    ):
        check_flag(name, flag)
        require_self_attention(flag, f"`{name}` than True")
    slices = slices_of(q_ranges, k_ranges, attn_mask_type, total_seqlen_q, total_seqlen_k)
    require_self_attention(
        slices.seqlen_q == slices.seqlen_k, "`total_seqlen_k` than `total_seqlen_q`"
    )
    return _key(slices, cp_group_or_mesh, dist_attn_config, chunk_size)


@named(mesh="cp_group_or_mesh", window="window_size")
def magi_attn_varlen_key(
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int,
    cp_group_or_mesh: DeviceMesh | dist.ProcessGroup,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dist_attn_config: ContextParallelOptions | None = None,
    chunk_size: int | None = None,
) -> SequencePlan:
    """`magi_attn_flex_key` of documents: their borders `[num_documents + 1]`, and a window `(left, right)` of keys."""
    borders = cu_seqlens_q, cu_seqlens_k
    slices = AttnSlices.from_cu_seqlens(*borders, causal=causal, window=window_size)
    require_self_attention(slices.seqlen_q == slices.seqlen_k, "`cu_seqlens_k` than `cu_seqlens_q`")
    return _key(slices, cp_group_or_mesh, dist_attn_config, chunk_size)


@named(mask_types="attn_mask_type")
def make_flex_key_for_new_mask_after_dispatch(
    q_ranges: Any,
    k_ranges: Any,
    attn_mask_type: Any,
    key_for_dispatch: SequencePlan,
    num_heads_q: int | None = None,
    num_heads_kv: int | None = None,
    head_dim: int | None = None,
    dist_attn_config: ContextParallelOptions | None = None,
) -> SequencePlan:
    """The key of another mask for tokens that `key_for_dispatch` has placed. `plan(masks=...)` places them for all."""
    require_key("key_for_dispatch", key_for_dispatch)
    total = key_for_dispatch.total
    slices = slices_of(q_ranges, k_ranges, attn_mask_type, total, total)
    return _key(slices, key_for_dispatch, dist_attn_config)


@named(window="window_size")
def make_varlen_key_for_new_mask_after_dispatch(
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    key_for_dispatch: SequencePlan,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dist_attn_config: ContextParallelOptions | None = None,
) -> SequencePlan:
    """`make_flex_key_for_new_mask_after_dispatch` of documents."""
    require_key("key_for_dispatch", key_for_dispatch)
    borders = cu_seqlens_q, cu_seqlens_k
    slices = AttnSlices.from_cu_seqlens(*borders, causal=causal, window=window_size)
    return _key(slices, key_for_dispatch, dist_attn_config)


def _key(slices: AttnSlices, where: Any, given: Any, chunk_size: int | None = None) -> SequencePlan:
    """A plan on the ranks `where`, or of the tokens of the plan `where`."""
    if not isinstance(given, (ContextParallelOptions, type(None))):
        raise TypeError(
            f"`dist_attn_config` must be ContextParallelOptions, got {type(given).__name__}; it has `chunk_size` and "
            "`strategy` for dispatch_config, `degree` and `backward_degree` for overlap_config"
        )
    share = where.head_ranks if isinstance(where, SequencePlan) else 1
    options, tokens = given or ContextParallelOptions(head_ranks=share), None
    if isinstance(where, SequencePlan):
        where, tokens = _compat.resolve_process_group(where.group_name), where
    elif isinstance(where, DeviceMesh) and where.ndim > 1:
        raise NotImplementedError(
            f"`cp_group_or_mesh` must have one dimension, got {where.ndim}; pass a process group of all its ranks"
        )
    if chunk_size is not None:
        check_count("chunk_size", chunk_size, 1)
        if options.chunk_size not in (None, chunk_size):
            raise ValueError(
                f"`chunk_size` must be that of `dist_attn_config`, {options.chunk_size}, got {chunk_size}"
            )
        most = -(-slices.seqlen_q // (8 * group_of(where).size()))
        options = replace(options, chunk_size=min(chunk_size, most))
    key = plan(slices, where, options=options, permutation=tokens)
    _recent[key.group_name] = key
    return key


def get_most_recent_key(cp_group: dist.ProcessGroup) -> SequencePlan:
    """The last key that was made for a group; ValueError where there is none."""
    name = getattr(cp_group, "group_name", cp_group)
    if not isinstance(name, str) or name not in _recent:
        raise ValueError(f"`cp_group` must be a process group that has had a key, got {name!r}")
    return _recent[name]


def dispatch(x: Tensor, key: SequencePlan, pad_value: float = 0.0) -> Tensor:
    """This rank's tokens of `x`, `[total, ...]` -> `[seqlen_local, ...]`. All ranks call the backward together: the
    gradient of `x` is gathered from them, where `key.shard` leaves it this rank's part."""
    require_key("key", key)
    out: Tensor = Dispatch.apply(x, key, pad_value)
    return out


def undispatch(x: Tensor, key: SequencePlan, is_partial_grad: bool = False) -> Tensor:
    """The whole sequence of all ranks' tokens, `[seqlen_local, ...]` -> `[total, ...]`; all call it together. The
    gradient of `x` is this rank's rows of that of the result, which ranks that compute the same loss have in common;
    with `is_partial_grad` it is summed over them before."""
    require_key("key", key)
    check_flag("is_partial_grad", is_partial_grad)
    out: Tensor = Undispatch.apply(x, key, is_partial_grad)
    return out


def calc_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key: SequencePlan,
    sink: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    return_max_logits: bool = False,
) -> tuple[Tensor, AttnForwardMeta]:
    """`key.attention` of `[seqlen_local, heads, head_dim]`, with arguments and results as in `flex_flash_attn_func`.
    All ranks call it together. The gradient of `sink` is this rank's part: sum it over them."""
    require_key("key", key)
    check_scores(softmax_scale, softcap, return_max_logits)
    out, rows = key.attention(
        *(q, k, v),
        scale=softmax_scale,
        softcap=float(softcap),
        sinks=one_sink(sink),
        return_aux=AuxRequest(lse=True, max_scores=return_max_logits),
    )
    assert rows.lse is not None
    largest = None
    if rows.max_scores is not None:
        ops = torch.ops._c10d_functional  # which compiled code takes
        largest = ops.wait_tensor(ops.all_reduce(rows.max_scores.amax(1), "max", key.group_name))
    return out, AttnForwardMeta(rows.lse.mT, largest)


def get_position_ids(key: SequencePlan) -> Tensor:
    """int64 `[seqlen_local]`: the place of each token in the sequence, 0 for padding."""
    require_key("key", key)
    return key.positions


def roll(x: Tensor, shift: int, dim: int, key: SequencePlan) -> Tensor:
    """This rank's part of `torch.roll` along the whole sequence, without its padding; differentiable."""
    require_key("key", key)
    if not is_int(shift):
        raise TypeError(f"`shift` must be an int, got {shift!r}")
    return key.roll(x, shift, dim)
