"""The part of `magi_attention` beside keys: helpers of tensors and masks, and names that have no counterpart."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from magi_compile.integrations.flex_flash_attn import AttnMaskType, AttnRanges
from magi_compile.masks import AttnSlices, MaskType
from magi_compile.masks.arguments import is_int, read_window

# Parts of the names of MagiAttention's configs and algorithms, and the options that are in place of them.
OPTIONS = {
    "DispatchConfig": "`chunk_size` and `strategy`",
    "DispatchAlg": "`strategy`",
    "Overlap": "`degree` and `backward_degree`",
    "SelectAlg": "`strategy`",
    "GrpCollConfig": "`cost`, its rates; buffers have no sizes",
    "DistAttnConfig": "`chunk_size`, `strategy`, `degree`, `backward_degree` and `cost`",
}
# Its other public names, and what is written in place of them.
INSTEAD = {
    "AttnRange": "write a pair `(start, end)`",
    "DistAttnRuntimeDictManager": "a key is the plan itself, and nothing else keeps it",
    "GeneralAttnMaskType": "a type is a name, a number, an AttnMaskType, or a list of them",
    "clear_cache": "a key that the program drops is freed, but for the last one of each group",
    "dist_attn_runtime_dict_mgr": "a key is the plan itself, and nothing else keeps it",
    "magi_attn_flex_dispatch": "call `magi_attn_flex_key`, then `dispatch`",
    "magi_attn_varlen_dispatch": "call `magi_attn_varlen_key`, then `dispatch`",
    "roll_simple": "call `roll`",
}
Pair: TypeAlias = tuple[int, int]
Slice: TypeAlias = tuple[Pair, Pair, AttnMaskType]
Mask: TypeAlias = tuple[AttnRanges, AttnRanges, list[AttnMaskType]]


def require_self_attention(is_so: bool) -> None:
    """Raises NotImplementedError for cross attention, of which there are no keys."""
    if not is_so:
        raise NotImplementedError(
            "a key must be of self-attention, whose tokens may be permuted; for cross attention call "
            "magi_compile.dtensor.plan"
        )


def compute_pad_size(total_seqlen_q: int, cp_size: int, chunk_size: int) -> int:
    """Tokens up to the next multiple of `cp_size * chunk_size`."""
    return -total_seqlen_q % (cp_size * chunk_size)


def squash_batch_dim(x: Tensor) -> Tensor:
    """One sequence of all batch entries, `[batch, seqlen, ...]` -> `[batch * seqlen, ...]`."""
    return x.flatten(0, 1)


def pad_at_dim(
    x: Tensor, dim: int, pad_size: int, value: float = 0.0, side: str = "right"
) -> Tensor:
    """`x` with `pad_size` entries of `value` more along `dim`, at its end or (`side="left"`) at its beginning."""
    if side not in ("left", "right"):
        raise ValueError(f"`side` must be 'left' or 'right', got {side!r}")
    size = list(x.shape)
    size[dim] = _at_least_0("pad_size", pad_size)
    padding = x.new_full(size, value)
    return torch.cat([padding, x] if side == "left" else [x, padding], dim)


def unpad_at_dim(x: Tensor, dim: int, pad_size: int) -> Tensor:
    """A view of `x` without its last `pad_size` entries along `dim`."""
    size = x.shape[dim]
    if _at_least_0("pad_size", pad_size) > size:
        raise ValueError(f"`pad_size` must be at most the size of `x`, {size}, got {pad_size}")
    return x.narrow(dim, 0, size - pad_size)


def _at_least_0(name: str, given: int) -> int:
    if not is_int(given) or given < 0:
        raise ValueError(f"`{name}` must be an int of at least 0, got {given!r}")
    return given


def apply_padding(
    q_ranges: Any, k_ranges: Any, attn_mask_type: Sequence[Any], total_seqlen: int, pad_size: int
) -> tuple[AttnRanges, AttnRanges, list[Any]]:
    """The mask with a slice more, of `pad_size` rows from `total_seqlen` on, which see no key."""
    q_ranges, k_ranges = (
        AttnRanges.from_ranges(x.to_naive_ranges() if hasattr(x, "to_naive_ranges") else x)
        for x in (q_ranges, k_ranges)
    )
    q_ranges.append((total_seqlen, total_seqlen + _at_least_0("pad_size", pad_size)))
    k_ranges.append((0, 0))
    return q_ranges, k_ranges, [*attn_mask_type, AttnMaskType.FULL]


def infer_varlen_mask_from_batch(
    batch_size: int, seq_len: int, device: str | torch.device = "cuda"
) -> tuple[Tensor, Tensor]:
    """The borders of a batch whose entries have one length, for queries and keys: int32 `[batch_size + 1]`, twice."""
    borders = torch.arange(batch_size + 1, dtype=torch.int32, device=device) * seq_len
    return borders, borders


def infer_attn_mask_from_sliding_window(
    q_range: Any, k_range: Any, window_size: tuple[int, int]
) -> Mask:
    """The slices of one window `(left, right)`, where -1 is no limit. Ranges are pairs.

    The last row stands at the last key. Where there are more rows than keys, the first rows see nothing.
    """
    return _listed(_window(_pair(q_range), _pair(k_range), window_size))


def infer_attn_mask_from_cu_seqlens(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    global_window_size: int = 0,
) -> tuple[AttnRanges, AttnRanges, list[AttnMaskType], int, int]:
    """The slices of documents, and the numbers of rows and keys. Waits for the device of the borders.

    Beside a window each row sees the first `global_window_size` keys of its document too, but none to the right of the
    window. Raises ValueError for `causal` beside a window, whose right side says it, and NotImplementedError for such
    keys where queries and keys have borders of their own.
    """
    AttnSlices.from_cu_seqlens(cu_seqlens_q, cu_seqlens_k, causal=causal)  # checks them
    cu_q, cu_k = (torch.as_tensor(x, device="cpu").tolist() for x in (cu_seqlens_q, cu_seqlens_k))
    first = _at_least_0("global_window_size", global_window_size)
    has_window = tuple(window_size) != (-1, -1)
    if causal and has_window:
        raise ValueError(
            f"`causal` must be False beside a window, got {tuple(window_size)}; its right side is 0 in a causal mask"
        )
    if has_window and first and cu_q != cu_k:
        raise NotImplementedError(
            "`cu_seqlens_k` must be `cu_seqlens_q` where `global_window_size` is not 0; give "
            "magi_compile.flex_attention a mask_mod"
        )
    kind = AttnMaskType.CAUSAL if causal else AttnMaskType.FULL
    found: list[Slice] = []
    for q, k in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        found += _window(q, k, window_size, first) if has_window else [(q, k, kind)]
    return *_listed(found), cu_q[-1], cu_k[-1]


def _window(q: Pair, k: Pair, window: tuple[int, int], first: int = 0) -> list[Slice]:
    """The slices of a window in a document, of which `first` keys are seen from behind the window too."""
    left, right = read_window(window)
    keys = k[1] - k[0]
    rows, first = min(q[1] - q[0], keys), min(first, keys)
    wide, narrow = (
        AttnSlices.sliding_window(rows, keys, x) for x in ((None, right), (left, right))
    )
    row, key = q[1] - rows, k[0]
    found: list[Slice] = []
    for slices in (wide.restrict_k(0, first), narrow.restrict_k(first, keys)):
        for (q_begin, q_end), (k_begin, k_end), kind in slices:
            name = MaskType(kind).name.replace("_", "")
            where = (q_begin + row, q_end + row), (k_begin + key, k_end + key)
            found.append((*where, AttnMaskType[name]))
    return found


def _pair(given: Any) -> Pair:
    start, end = (given.start, given.end) if hasattr(given, "start") else given
    return start, end


def _listed(slices: list[Slice]) -> Mask:
    q_ranges = AttnRanges.from_ranges(x[0] for x in slices)
    k_ranges = AttnRanges.from_ranges(x[1] for x in slices)
    return q_ranges, k_ranges, [x[2] for x in slices]
