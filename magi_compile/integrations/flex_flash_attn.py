"""The part of `magi_attention` that needs no ranks: `flex_flash_attn_func`, ranges, and types of slices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_compile._kept import Made, Memo
from magi_compile.masks import AttnSlices, MaskType
from magi_compile.masks.arguments import check_flag
from magi_compile.ops.attention import flex_flash_attention
from magi_compile.ops.validation import check_number


class AttnMaskType(Enum):
    """The type of a slice, as `MaskType`, whose numbers and names serve as well."""

    FULL = "full"
    CAUSAL = "causal"
    BICAUSAL = "bi_causal"
    INVCAUSAL = "inv_causal"


class AttnRanges(list[tuple[int, int]]):
    """Half-open ranges of rows or keys. A list of pairs serves as well."""

    @classmethod
    def from_ranges(cls, ranges: Iterable[Sequence[int]]) -> AttnRanges:
        """The ranges of a list of pairs."""
        try:
            return cls((start, end) for start, end in ranges)
        except (TypeError, ValueError):
            raise TypeError(
                f"`ranges` must be a list of pairs (start, end), got {ranges!r}"
            ) from None


@contextmanager
def named(**theirs: str) -> Iterator[None]:
    """Errors inside call our arguments, the keywords, by the names that they have in MagiAttention."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        message = str(error)
        for ours, name in theirs.items():
            message = message.replace(f"`{ours}`", f"`{name}`").replace(f"`{ours}[", f"`{name}[")
        error.args = (message,)
        raise


# They choose among MagiAttention's kernels, and kernels here choose by the problem.
_TUNING = {
    *("q_block_size", "k_block_size", "ref_block_size", "max_seqlen_q", "sm_margin", "sparse_load"),
    *("disable_fwd_atomic_reduction", "disable_bwd_dkv_atomic_reduction", "auto_range_merge"),
    *("swap_ab", "pack_gqa", "cat_gqa", "swap_bwd_qk_loop", "index_attn"),
}
_INSTEAD = {
    "deterministic": "call torch.use_deterministic_algorithms(True)",
    "index_attn_indices": "give magi_compile.flex_attention a mask_mod that looks them up",
    "sink_layout": "sinks are of a head ('sh')",
}


class AttnForwardMeta(NamedTuple):
    """Results beside the output: the log-sum-exp, fp32 `[tokens, heads]`, and where it was asked for the largest score
    of each head, fp32 `[heads]`, over all ranks."""

    lse: Tensor
    max_logits: Tensor | None


def flex_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ranges: Any,
    k_ranges: Any,
    attn_type_map: Any = None,
    *,
    sink: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    return_max_logits: bool = False,
    **tuning: Any,
) -> tuple[Tensor, AttnForwardMeta]:
    """`magi_compile.flex_flash_attention` of `[tokens, heads, head_dim]`, by int32 `[num_slices, 2]` ranges of rows and
    keys and int32 `[num_slices]` types (None: full), or lists of them. On a GPU new tensors wait to be checked.

    `sink` is `[num_sinks, heads]`, scores that join each softmax. `tuning` chooses among MagiAttention's kernels, and
    does nothing. Returns the output in the dtype of q, and an `AttnForwardMeta`. Raises TypeError or ValueError where
    arguments do not fit or slices overlap, and NotImplementedError for what has no counterpart.
    """
    for name, value in tuning.items():
        if name not in _TUNING and name not in _INSTEAD:
            raise TypeError(f"flex_flash_attn_func has no argument `{name}`")
        if name in _INSTEAD and value not in (None, False, "sh"):
            raise NotImplementedError(f"`{name}` must be left out, got {value!r}; {_INSTEAD[name]}")
    check_scores(softmax_scale, softcap, return_max_logits)
    for name, x in {"q": q, "k": k}.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"`{name}` must be a tensor, got {type(x).__name__}")
        if x.ndim != 3:
            raise ValueError(
                f"`{name}` must be [tokens, heads, head_dim], got shape {list(x.shape)}"
            )
    lengths = q.shape[0], k.shape[0]
    out, lse, scores = flex_flash_attention(
        *(q, k, v, _slices_of_call(q_ranges, k_ranges, attn_type_map, lengths, q.device)),
        softmax_scale=softmax_scale,
        softcap=float(softcap),
        sinks=one_sink(sink),
        return_max_scores=return_max_logits,
    )
    return out, AttnForwardMeta(lse.mT, None if scores is None else scores.amax(1))


def check_scores(softmax_scale: float | None, softcap: float, return_max_logits: bool) -> None:
    if softmax_scale is not None:
        check_number("softmax_scale", softmax_scale, may_be_negative=True)
    check_number("softcap", softcap)
    check_flag("return_max_logits", return_max_logits)


def one_sink(sink: Tensor | None) -> Tensor | None:
    """For each head the score that counts as much as all of its sinks."""
    if not isinstance(sink, (Tensor, type(None))):
        raise TypeError(f"`sink` must be a tensor or None, got {type(sink).__name__}")
    if sink is not None and sink.ndim != 2:
        raise ValueError(f"`sink` must be [num_sinks, heads], got shape {list(sink.shape)}")
    return None if sink is None else sink.logsumexp(0)


_TYPES = {kind.name.replace("_", ""): kind for kind in MaskType}


def slices_of(q_ranges: Any, k_ranges: Any, types: Any, seqlen_q: int, seqlen_k: int) -> AttnSlices:
    """Slices on the CPU. Ranges are `[num_slices, 2]`: a list of pairs, MagiAttention's own ranges, or an integer
    tensor. There is a type for each slice, or one for all: a number, a name, an enum of MagiAttention's or ours.

    Raises TypeError for a wrong dtype, and ValueError for a range out of bounds, an unknown type, or slices that
    overlap; errors call the types `mask_types`.
    """
    q_ranges, k_ranges = (
        x.to_naive_ranges() if hasattr(x, "to_naive_ranges") else x for x in (q_ranges, k_ranges)
    )
    if isinstance(types, (str, int, Enum)):
        types = [_type_of(types)] * (len(q_ranges) if hasattr(q_ranges, "__len__") else 1)
    elif not isinstance(types, Iterable):
        raise TypeError(f"`mask_types` must be a type or a list of types, got {types!r}")
    kinds = types if isinstance(types, Tensor) else [_type_of(x) for x in types]
    return AttnSlices.from_lists(q_ranges, k_ranges, kinds, seqlen_q, seqlen_k, "cpu")


def _type_of(given: Any) -> int:
    name = given if isinstance(given, str) else getattr(given, "name", None)
    kind = given if name is None else _TYPES.get(name.upper().replace("_", ""))
    if kind not in list(MaskType):
        raise ValueError(
            f"`mask_types` must be full, causal, inv_causal, bi_causal or a number from 0 to 3, got {given!r}"
        )
    return int(kind)  # type: ignore[arg-type]


_made: Memo[AttnSlices] = Memo(64, lambda x: x.lists)


def _slices_of_call(
    q_ranges: Any, k_ranges: Any, types: Any, lengths: tuple[int, int], device: torch.device
) -> AttnSlices:
    """`slices_of` on `device`, where None as `types` is full. Those of tensors are kept as long as these do not change:
    on a GPU, to check them waits."""
    given = [q_ranges, k_ranges, *([] if types is None else [types])]
    if not all(isinstance(x, Tensor) for x in given):
        with named(mask_types="attn_type_map"):
            slices = slices_of(q_ranges, k_ranges, 0 if types is None else types, *lengths)
        return slices.to(device)

    def make() -> AttnSlices:
        kinds = torch.zeros_like(q_ranges[:, 0]) if types is None else types.clone()
        return AttnSlices(q_ranges.clone(), k_ranges.clone(), kinds, *lengths)

    if torch.compiler.is_compiling():
        return make()
    with named(mask_types="attn_type_map"):
        return _made.get(given, lengths, lambda: Made(make()), device, serves_capture=True)
