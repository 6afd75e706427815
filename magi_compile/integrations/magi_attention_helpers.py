"""The part of `magi_attention` beside keys: helpers of tensors and masks, and names that have no counterpart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from magi_compile.dtensor import SequencePlan
from magi_compile.dtensor.sequence.spread_tokens import check_padding
from magi_compile.integrations.flex_flash_attn import AttnMaskType, AttnRanges, named
from magi_compile.masks import AttnSlices, MaskType
from magi_compile.masks.arguments import check_device, is_int, read_window

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


def refuse_name(name: str) -> None:
    """Raises ImportError, with what is written in its place, for a public name that has no counterpart."""
    if name in INSTEAD:
        raise ImportError(f"`{name}` of MagiAttention has no counterpart: {INSTEAD[name]}")
    for part, ours in OPTIONS.items():
        if part in name:
            raise ImportError(
                f"`{name}` of MagiAttention has no counterpart; pass ContextParallelOptions of "
                f"magi_compile.dtensor as `dist_attn_config`: {ours}"
            )


def require_self_attention(is_so: bool, names: str) -> None:
    """Raises NotImplementedError for cross attention, of which there are no keys; `names` are the arguments that say
    it."""
    if not is_so:
        raise NotImplementedError(
            f"a key must be of self-attention, whose tokens may be permuted, got other {names}; for cross attention "
            "call magi_compile.dtensor.plan"
        )


def require_key(name: str, key: Any) -> None:
    if not isinstance(key, SequencePlan):
        raise TypeError(
            f"`{name}` must be a key, as magi_attn_flex_key makes it, got {type(key).__name__}"
        )


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, key: SequencePlan, padding: float) -> Tensor:
        ctx.key = key
        if isinstance(x, Tensor):
            check_padding("pad_value", padding, x.dtype)
        return key.shard(x, 0, padding=padding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.key.unshard(gradient, 0), None, None


class Undispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, key: SequencePlan, is_partial: bool) -> Tensor:
        ctx.key, ctx.is_partial = key, is_partial
        return key.unshard(x, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        whole = ctx.key.sum(gradient) if ctx.is_partial else gradient
        return ctx.key.shard(whole, 0), None, None


def compute_pad_size(total_seqlen_q: int, cp_size: int, chunk_size: int) -> int:
    """Tokens up to the next multiple of `cp_size * chunk_size`."""
    multiple = _count("cp_size", cp_size, 1) * _count("chunk_size", chunk_size, 1)
    return -_count("total_seqlen_q", total_seqlen_q) % multiple


def squash_batch_dim(x: Tensor) -> Tensor:
    """One sequence of all batch entries, `[batch, seqlen, ...]` -> `[batch * seqlen, ...]`."""
    _check_tensor(x, 2)
    return x.flatten(0, 1)


def _check_tensor(x: Any, least: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"`x` must be a tensor, got {type(x).__name__}")
    if x.ndim < least:
        raise ValueError(f"`x` must have at least {least} dimensions, got shape {list(x.shape)}")


def _check_dim(x: Any, dim: Any) -> None:
    _check_tensor(x, 1)
    if not is_int(dim):
        raise TypeError(f"`dim` must be an int, got {dim!r}")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"`dim` must be in [{-x.ndim}, {x.ndim}), got {dim}")


def pad_at_dim(
    x: Tensor, dim: int, pad_size: int, value: float = 0.0, side: str = "right"
) -> Tensor:
    """`x` with `pad_size` entries of `value` more along `dim`, at its end or (`side="left"`) at its beginning."""
    if side not in ("left", "right"):
        raise ValueError(f"`side` must be 'left' or 'right', got {side!r}")
    _check_dim(x, dim)
    value = check_padding("value", value, x.dtype)
    size = list(x.shape)
    size[dim] = _count("pad_size", pad_size)
    padding = x.new_full(size, value)
    return torch.cat([padding, x] if side == "left" else [x, padding], dim)


def unpad_at_dim(x: Tensor, dim: int, pad_size: int) -> Tensor:
    """A view of `x` without its last `pad_size` entries along `dim`."""
    _check_dim(x, dim)
    size = x.shape[dim]
    if _count("pad_size", pad_size) > size:
        raise ValueError(f"`pad_size` must be at most the size of `x`, {size}, got {pad_size}")
    return x.narrow(dim, 0, size - pad_size)


def _count(name: str, given: Any, least: int = 0) -> int:
    if isinstance(given, Tensor) and given.ndim == 0:  # as the last one of borders
        given = given.item()
    if not is_int(given) or not least <= given < 1 << 63:
        raise ValueError(f"`{name}` must be an int of at least {least}, got {given!r}")
    return int(given)


def apply_padding(
    q_ranges: Any, k_ranges: Any, attn_mask_type: Sequence[Any], total_seqlen: int, pad_size: int
) -> tuple[AttnRanges, AttnRanges, list[Any]]:
    """The mask with a slice more, of `pad_size` rows from `total_seqlen` on, which see no key."""
    total_seqlen = _count("total_seqlen", total_seqlen)
    with named(ranges="q_ranges"):
        q_ranges = _ranges(q_ranges)
    with named(ranges="k_ranges"):
        k_ranges = _ranges(k_ranges)
    if not isinstance(attn_mask_type, Iterable) or isinstance(attn_mask_type, (str, bytes)):
        raise TypeError(f"`attn_mask_type` must be a list, got {type(attn_mask_type).__name__}")
    q_ranges.append((total_seqlen, total_seqlen + _count("pad_size", pad_size)))
    k_ranges.append((0, 0))
    return q_ranges, k_ranges, [*attn_mask_type, AttnMaskType.FULL]


def _ranges(given: Any) -> AttnRanges:
    return AttnRanges.from_ranges(
        given.to_naive_ranges() if hasattr(given, "to_naive_ranges") else given
    )


def infer_varlen_mask_from_batch(
    batch_size: int, seq_len: int, device: str | torch.device = "cuda"
) -> tuple[Tensor, Tensor]:
    """The borders of a batch whose entries have one length, for queries and keys: int32 `[batch_size + 1]`, twice."""
    batch_size, seq_len = _count("batch_size", batch_size), _count("seq_len", seq_len)
    device = check_device(device)
    borders = torch.arange(batch_size + 1, dtype=torch.int32, device=device) * seq_len
    return borders, borders


def infer_attn_mask_from_sliding_window(
    q_range: Any, k_range: Any, window_size: tuple[int, int]
) -> Mask:
    """The slices of one window `(left, right)`, where -1 is no limit. Ranges are pairs.

    The last row stands at the last key. Where there are more rows than keys, the first rows see nothing.
    """
    with named(window="window_size"):
        window = read_window(window_size)
    return _listed(_window(_pair("q_range", q_range), _pair("k_range", k_range), window))


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
    with named(window="window_size"):
        window = read_window(window_size)
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    cu_q, cu_k = (torch.as_tensor(x, device="cpu").tolist() for x in (cu_seqlens_q, cu_seqlens_k))
    first = _count("global_window_size", global_window_size)
    has_window = window != (None, None)
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
        found += _window(q, k, window, first) if has_window else [(q, k, kind)]
    return *_listed(found), cu_q[-1], cu_k[-1]


def _window(q: Pair, k: Pair, window: tuple[int | None, int | None], first: int = 0) -> list[Slice]:
    """The slices of a window in a document, of which `first` keys are seen from behind the window too."""
    left, right = window
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


def _pair(name: str, given: Any) -> Pair:
    pair = (given.start, given.end) if hasattr(given, "start") else given
    is_pair = isinstance(pair, Sequence) and len(pair) == 2 and all(map(is_int, pair))
    if not is_pair or not 0 <= pair[0] <= pair[1]:
        raise ValueError(f"`{name}` must be (start, end), 0 <= start <= end, got {given!r}")
    return int(pair[0]), int(pair[1])


def _listed(slices: list[Slice]) -> Mask:
    q_ranges = AttnRanges.from_ranges(x[0] for x in slices)
    k_ranges = AttnRanges.from_ranges(x[1] for x in slices)
    return q_ranges, k_ranges, [x[2] for x in slices]
