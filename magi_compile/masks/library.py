"""The named masks: each as a mask_mod for FlexAttention and as slices, over documents packed one after the other.

Every function takes the document lengths first, so that one loop over `MASKS` makes them all but `tree`, which needs
more; masks that do not know documents use their sum. Numbers are ints, and lengths at least 1; others are a TypeError
or a ValueError. The slices come straight from the definitions, not from the mask_mods.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.masks.arguments import MAX_SEQLEN, check_device, is_int
from magi_compile.masks.slices import AttnSlice, AttnSlices, MaskType

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class NamedMask(NamedTuple):
    mask_mod: MaskMod
    slices: AttnSlices


class _Documents(NamedTuple):
    """Packed documents; `ids` and `starts` are int32 `[total]`, the document of a token and its first token."""

    bounds: list[int]
    ids: Tensor
    starts: Tensor

    @property
    def total(self) -> int:
        return self.bounds[-1]

    @property
    def spans(self) -> list[tuple[int, int]]:
        return list(itertools.pairwise(self.bounds))


def _documents(lengths: Sequence[int], device: torch.device | str) -> _Documents:
    lengths, device = _lengths(lengths), check_device(device)
    bounds = [0, *itertools.accumulate(lengths)]
    counts = torch.tensor(lengths, device="cpu")
    ids = torch.repeat_interleave(
        torch.arange(len(lengths), dtype=torch.int32, device="cpu"), counts
    )
    starts = torch.repeat_interleave(
        torch.tensor(bounds[:-1], dtype=torch.int32, device="cpu"), counts
    )
    return _Documents(bounds, ids.to(device), starts.to(device))


def _lengths(given: Sequence[int]) -> list[int]:
    lengths = _ints("lengths", given)
    if not lengths or min(lengths) < 1:
        raise ValueError(f"`lengths` must hold positive document lengths, got {lengths}")
    if sum(lengths) >= MAX_SEQLEN:
        raise ValueError(f"`lengths` must add up to less than 2**30 tokens, got {sum(lengths)}")
    return lengths


def _ints(name: str, given: Sequence[int]) -> list[int]:
    values = given.tolist() if isinstance(given, Tensor) else given
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise TypeError(f"`{name}` must be a list of ints, got {given!r}")
    found = [x.item() if isinstance(x, Tensor) else x for x in values]
    if not all(map(is_int, found)):
        raise TypeError(f"`{name}` must be a list of ints, got {found}")
    return [int(x) for x in found]


def _size(name: str, given: int, least: int, total: int) -> int:
    """A number of tokens; more than there are mean what `total` of them mean,
    and would not fit the dtype of an index."""
    if not is_int(given):
        raise TypeError(f"`{name}` must be an int, got {given!r}")
    if given < least:
        raise ValueError(f"`{name}` must be at least {least}, got {given}")
    return min(int(given), total)


def _slices(
    items: Sequence[tuple[tuple[int, int], tuple[int, int], MaskType]],
    total: int,
    device: torch.device | str,
) -> AttnSlices:
    live = [AttnSlice(*item) for item in items if all(begin < end for begin, end in item[:2])]
    return AttnSlices.from_slices(live, total, total).to(device)


def full(lengths: Sequence[int], *, device: torch.device | str = "cpu") -> NamedMask:
    """Every token sees every token."""

    def mask_mod(b, h, q, kv):
        return q >= 0

    return NamedMask(mask_mod, AttnSlices.full(sum(_lengths(lengths))).to(device))


def causal(lengths: Sequence[int], *, device: torch.device | str = "cpu") -> NamedMask:
    """Every token sees itself and all tokens before it."""

    def mask_mod(b, h, q, kv):
        return q >= kv

    return NamedMask(mask_mod, AttnSlices.causal(sum(_lengths(lengths))).to(device))


def document_full(lengths: Sequence[int], *, device: torch.device | str = "cpu") -> NamedMask:
    """Every token sees its document."""
    docs = _documents(lengths, device)
    ids = docs.ids

    def mask_mod(b, h, q, kv):
        return ids[q] == ids[kv]

    return NamedMask(mask_mod, AttnSlices.from_cu_seqlens(docs.bounds).to(device))


def document_causal(lengths: Sequence[int], *, device: torch.device | str = "cpu") -> NamedMask:
    """Every token sees itself and the tokens of its document before it."""
    docs = _documents(lengths, device)
    ids = docs.ids

    def mask_mod(b, h, q, kv):
        return (q >= kv) & (ids[q] == ids[kv])

    return NamedMask(mask_mod, AttnSlices.from_cu_seqlens(docs.bounds, causal=True).to(device))


def sliding_window_full(
    lengths: Sequence[int], *, window: int = 1024, device: torch.device | str = "cpu"
) -> NamedMask:
    """Every token sees `window` tokens on either side, 0 or more."""
    total = sum(_lengths(lengths))
    window = _size("window", window, 0, total)

    def mask_mod(b, h, q, kv):
        return (q - kv <= window) & (kv - q <= window)

    slices = AttnSlices.sliding_window(total, None, window=(window, window))
    return NamedMask(mask_mod, slices.to(device))


def sliding_window_causal(
    lengths: Sequence[int], *, window: int = 1024, device: torch.device | str = "cpu"
) -> NamedMask:
    """Every token sees itself and `window` tokens before it, 0 or more."""
    total = sum(_lengths(lengths))
    window = _size("window", window, 0, total)

    def mask_mod(b, h, q, kv):
        return (q >= kv) & (q - kv <= window)

    slices = AttnSlices.sliding_window(total, None, window=(window, 0))
    return NamedMask(mask_mod, slices.to(device))


def share_question(lengths: Sequence[int], *, device: torch.device | str = "cpu") -> NamedMask:
    """One question, the first document, and several answers: each answer sees the question and itself, causally."""
    docs = _documents(lengths, device)
    ids, question = docs.ids, docs.bounds[1]

    def mask_mod(b, h, q, kv):
        return (q >= kv) & ((ids[q] == ids[kv]) | (kv < question))

    first = docs.bounds[min(2, len(docs.spans))]
    items = [
        ((0, first), (0, first), MaskType.CAUSAL),
        ((first, docs.total), (0, question), MaskType.FULL),
        *((span, span, MaskType.CAUSAL) for span in docs.spans[2:]),
    ]
    return NamedMask(mask_mod, _slices(items, docs.total, device))


def global_sliding_window(
    lengths: Sequence[int], *, window: int = 1024, device: torch.device | str = "cpu"
) -> NamedMask:
    """The first `window` tokens see and are seen by all; the others see `window` tokens on either side."""
    total = sum(_lengths(lengths))
    window = _size("window", window, 0, total)

    def mask_mod(b, h, q, kv):
        return (q < window) | (kv < window) | ((q - kv <= window) & (kv - q <= window))

    band = AttnSlices.sliding_window(total - window, None, window=(window, window))
    items = [
        ((0, total), (0, window), MaskType.FULL),
        ((0, window), (window, total), MaskType.FULL),
    ]
    for (q_begin, q_end), (k_begin, k_end), mask_type in band:
        rows, keys = (q_begin + window, q_end + window), (k_begin + window, k_end + window)
        items.append((rows, keys, mask_type))
    return NamedMask(mask_mod, _slices(items, total, device))


def causal_blockwise(lengths: Sequence[int], *, device: torch.device | str = "cpu") -> NamedMask:
    """Documents are causal, and the last one also sees all the others."""
    docs = _documents(lengths, device)
    ids, last = docs.ids, docs.bounds[-2]

    def mask_mod(b, h, q, kv):
        return (q >= kv) & ((ids[q] == ids[kv]) | (q >= last))

    items = [(span, span, MaskType.CAUSAL) for span in docs.spans[:-1]]
    items.append((docs.spans[-1], (0, docs.total), MaskType.CAUSAL))
    return NamedMask(mask_mod, _slices(items, docs.total, device))


def prefix_lm_causal(
    lengths: Sequence[int], *, prefix: int | None = None, device: torch.device | str = "cpu"
) -> NamedMask:
    """Causal, but the first `prefix` tokens, by default the first document, see each other."""
    lengths = _lengths(lengths)
    total = sum(lengths)
    prefix = _size("prefix", lengths[0] if prefix is None else prefix, 0, total)

    def mask_mod(b, h, q, kv):
        return (q >= kv) | (kv < prefix)

    items = [
        ((0, prefix), (0, prefix), MaskType.FULL),
        ((prefix, total), (0, total), MaskType.CAUSAL),
    ]
    return NamedMask(mask_mod, _slices(items, total, device))


def prefix_lm_document(
    lengths: Sequence[int], *, prefix: int | None = None, device: torch.device | str = "cpu"
) -> NamedMask:
    """Documents are causal, but the first `prefix` tokens of each, by default half of the first, see each other."""
    docs = _documents(lengths, device)
    ids, starts = docs.ids, docs.starts
    size = (docs.bounds[1] + 1) // 2 if prefix is None else prefix
    size = _size("prefix", size, 0, docs.total)

    def mask_mod(b, h, q, kv):
        return (ids[q] == ids[kv]) & ((q >= kv) | (kv < starts[q] + size))

    items = []
    for begin, end in docs.spans:
        middle = min(begin + size, end)
        items.append(((begin, middle), (begin, middle), MaskType.FULL))
        items.append(((middle, end), (begin, end), MaskType.CAUSAL))
    return NamedMask(mask_mod, _slices(items, docs.total, device))


def block_causal_document(
    lengths: Sequence[int], *, block: int = 1024, device: torch.device | str = "cpu"
) -> NamedMask:
    """Documents are cut in blocks; every token sees its block and the blocks of its document before it."""
    docs = _documents(lengths, device)
    block = _size("block", block, 1, docs.total)
    ids, starts = docs.ids, docs.starts

    def mask_mod(b, h, q, kv):
        start = starts[q]
        return (ids[q] == ids[kv]) & ((q - start) // block >= (kv - start) // block)

    items = []
    for begin, end in docs.spans:
        for rows in range(begin, end, block):
            stop = min(rows + block, end)
            items.append(((rows, stop), (begin, stop), MaskType.FULL))
    return NamedMask(mask_mod, _slices(items, docs.total, device))


def block_diffusion(
    lengths: Sequence[int], *, block: int = 32, device: torch.device | str = "cpu"
) -> NamedMask:
    """Documents are a noisy copy, then the clean one, in blocks: a noisy block sees itself and the clean blocks before
    it, a clean one itself and those before it, as in block diffusion language models (arXiv 2503.09573)."""
    docs = _documents(lengths, device)
    block = _size("block", block, 1, docs.total)
    ids, starts = docs.ids, docs.starts
    middles = torch.tensor([begin + (end - begin) // 2 for begin, end in docs.spans], device="cpu")
    middle_of = middles.to(torch.int32).to(device)[ids.long()]

    def mask_mod(b, h, q, kv):
        start, middle = starts[q], middle_of[q]
        is_clean_q, is_clean_kv = q >= middle, kv >= middle
        block_q = torch.where(is_clean_q, q - middle, q - start) // block
        block_kv = torch.where(is_clean_kv, kv - middle, kv - start) // block
        clean = is_clean_kv & ((block_kv < block_q) | (is_clean_q & (block_kv == block_q)))
        noisy = ~is_clean_q & ~is_clean_kv & (block_kv == block_q)
        return (ids[q] == ids[kv]) & (clean | noisy)

    items = []
    for (begin, end), middle in zip(docs.spans, middles.tolist(), strict=True):
        for shift in range(0, end - middle, block):
            clean = (middle + shift, min(middle + shift + block, end))
            noisy = (begin + shift, min(begin + shift + block, middle))
            items.append((clean, (middle, clean[1]), MaskType.FULL))
            items.append((noisy, noisy, MaskType.FULL))
            items.append((noisy, (middle, clean[0]), MaskType.FULL))
    return NamedMask(mask_mod, _slices(items, docs.total, device))


def sliding_tiles(
    lengths: Sequence[int],
    *,
    tile: int = 384,
    width: int = 10,
    height: int = 6,
    device: torch.device | str = "cpu",
) -> NamedMask:
    """Documents are videos in tiles of `tile` tokens, `width` to a line and `height` lines to a frame of tiles: a tile
    sees those at most one away in each direction, three by three by three, as in sliding tile attention (arXiv
    2502.04507)."""
    docs = _documents(lengths, device)
    sizes = {"tile": tile, "width": width, "height": height}
    tile, width, height = (_size(name, x, 1, docs.total) for name, x in sizes.items())
    frame = min(width * height, docs.total)
    ids, starts = docs.ids, docs.starts

    def place(token):
        number = token // tile
        return number // frame, number // width % height, number % width

    def mask_mod(b, h, q, kv):
        first = starts[q]  # that of kv too, in one document
        time, line, column = zip(place(q - first), place(kv - first), strict=True)
        near = [(x - y).abs() <= 1 for x, y in (time, line, column)]
        return (ids[q] == ids[kv]) & near[0] & near[1] & near[2]

    items = []
    for begin, end in docs.spans:
        for first in range(begin, end, tile):
            rows = (first, min(first + tile, end))
            time, line, column = place(first - begin)
            columns = max(column - 1, 0), min(column + 2, width)
            for seen_time, seen_line in itertools.product((-1, 0, 1), repeat=2):
                if time + seen_time < 0 or not 0 <= line + seen_line < height:
                    continue
                in_line = ((time + seen_time) * height + line + seen_line) * width
                keys = (begin + (in_line + x) * tile for x in columns)
                items.append((rows, tuple(min(key, end) for key in keys), MaskType.FULL))
    return NamedMask(mask_mod, _slices(items, docs.total, device))


def tree(
    lengths: Sequence[int], parents: Sequence[int], *, device: torch.device | str = "cpu"
) -> NamedMask:
    """Documents are the nodes of trees: every token sees the documents above its own,
    and in its own itself and the tokens before it.

    Shared prefixes of a group of answers, turns that branch, or drafts of speculative decoding. However deep the trees
    are, at most two slices of each node say it, and the cost is that of the pairs that see each other. `mask_mod` needs
    one table entry a token.

    Args:
        lengths: tokens of each node, at least 1, in the order of the sequence.
        parents: the node above each node, -1 for a root. Depth first: the parent of a node is the node in front of it
            or one above that.
        device: of the table and the slices.

    Returns:
        The mask over the tokens of all nodes.

    Raises:
        ValueError: if `lengths` or `parents` are not as above.
    """
    docs = _documents(lengths, device)
    num_nodes, parents = len(docs.spans), _ints("parents", parents)
    if len(parents) != num_nodes:
        raise ValueError(
            f"`parents` must have one entry for each of the {num_nodes} nodes, got {len(parents)}"
        )
    ends = [docs.total] * num_nodes  # behind the last token below a node
    path: list[int] = []  # from the root to the node in front
    for node, ((begin, _), parent) in enumerate(zip(docs.spans, parents, strict=True)):
        while path and path[-1] != parent:
            ends[path.pop()] = begin
        if parent != -1 and not path:
            raise ValueError(
                f"`parents` must be depth first, with the node in front of node {node} or one above "
                f"that as its parent, or -1, got {parent}"
            )
        path.append(node)
    below = torch.tensor(ends, dtype=torch.int32, device="cpu")
    end_of = below.to(device)[docs.ids.long()]

    def mask_mod(b, h, q, kv):
        return (q >= kv) & (q < end_of[kv])

    # A node whose only child follows it is one with that child.
    is_first = below.diff(prepend=below.new_zeros(1)) != 0
    below = below[is_first]
    first = torch.tensor(docs.bounds[:-1], dtype=torch.int32, device="cpu")[is_first]
    last = torch.cat([first[1:], first.new_tensor([docs.total])])
    # Disjoint as they are made: to look for overlaps takes an entry for each node and each one above it.
    own, behind = torch.stack([first, last], 1), torch.stack([last, below], 1)
    rows, keys = torch.cat([own, behind]), torch.cat([own, own])
    types = first.new_tensor([MaskType.CAUSAL, MaskType.FULL]).repeat_interleave(len(own))
    slices = AttnSlices.unchecked(rows, keys, types, docs.total, docs.total)
    return NamedMask(mask_mod, slices.compact().to(device))


# Of lengths alone.
MASKS: dict[str, Callable[..., NamedMask]] = {
    build.__name__: build
    for build in (
        full,
        causal,
        document_full,
        document_causal,
        sliding_window_full,
        sliding_window_causal,
        share_question,
        global_sliding_window,
        causal_blockwise,
        prefix_lm_causal,
        prefix_lm_document,
        block_causal_document,
        block_diffusion,
        sliding_tiles,
    )
}
