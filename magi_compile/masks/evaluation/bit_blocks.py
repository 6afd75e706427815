"""Any mask as slices with bit blocks: the mask_mod itself, evaluated block by block.

A block of 128 queries and 128 keys in which everything is visible is a slice without bits, one in which nothing is, an
empty slice; all others have bits. Of everything there is one for each block, so shapes depend on shapes alone, and on a
GPU nothing waits. Memory grows with the number of blocks and with the bits of those that need them; at no time with the
score matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile._checks import MaskCheck, MaskDataError, first_of, require
from magi_compile.functions.guards import Broken, is_of_data
from magi_compile.functions.text import on_grids
from magi_compile.masks.bits import BLOCK, FIRST_BITS, WORDS, pack
from magi_compile.masks.evaluation.block_lists import (
    IS_FULL,
    OF_ONE_HEAD,
    BlockLists,
    heads_that_differ,
)
from magi_compile.masks.evaluation.sizes import MaskSizes
from magi_compile.masks.slices import AttnSlices

MAX_BLOCKS, MAX_BLOCKS_ON_GPU = 256, 1024  # evaluated at a time: 4M and 16M pairs

MaskMod = Callable[..., Tensor]


class Listed(NamedTuple):
    """The listed blocks of a BlockMask: what is visible is shown by its mask_mod and lies in one of them.

    Attributes:
        partial: bool `[batch or 1, nheads or 1, q blocks, kv blocks]`, those that may be visible.
        full: the same of those in which everything is.
        rows: queries of a block.
        keys: keys of a block.
    """

    partial: Tensor
    full: Tensor
    rows: int
    keys: int

    @classmethod
    def of(cls, lists: BlockLists, rows: int, keys: int, sizes: MaskSizes) -> Listed:
        """Those of the mask of `sizes`, in blocks of `rows` queries and `keys` keys.

        The lists are of 1 or all batch entries and heads; if the mask is one of all heads, so must the lists be.
        Raises MaskDataError, on a GPU later, for a block that the mask does not have, and where heads have other
        lists.
        """
        num_q, num_k = -(-sizes.seqlen_q // rows), -(-sizes.seqlen_k // keys)
        checks = lists.index_checks(num_q, num_k)
        listed = cls(*lists.grids(num_q, num_k), rows, keys)
        if sizes.heads.q == 1 and listed.partial.shape[1] > 1:
            checks.append(MaskCheck(~listed.head_differs.any(), *OF_ONE_HEAD, ()))
        require(checks)
        return listed

    @property
    def differ_by_head(self) -> bool:
        """True if lists differ between heads. Waits for the device if that is a GPU."""
        return bool(self.head_differs.any())

    @property
    def head_differs(self) -> Tensor:
        """True for heads that see other blocks than the first one, bool `[batch or 1, nheads or 1]`."""
        return heads_that_differ(self.partial, self.full)

    def of_pairs(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """True if the pairs of blocks `[n, BLOCK]` of queries and keys lie in partial and in full blocks."""
        b, h = (
            x.clamp(max=size - 1)[:, None, None]
            for x, size in zip((b, h), self.partial.shape, strict=False)
        )
        row, key = q[:, :, None] // self.rows, kv[:, None, :] // self.keys
        return self.partial[b, h, row, key], self.full[b, h, row, key]


def slices_with_bits(
    mask_mod: MaskMod, sizes: MaskSizes, listed: Listed | None, device: torch.device
) -> AttnSlices:
    """The slices of a mask: row q of the n-th (batch entry, head) is row `n * seqlen_q + q`, keys likewise with the
    heads of keys.

    There are `sizes.num_blocks` of them, and one bit block more than that. The memory of blocks without bits is never
    touched: on a CPU it costs addresses alone. `listed` are the block lists beside the mask_mod, or None. Raises
    MaskDataError, on a GPU later, where the mask_mod looks up what a captured tensor does not have, divides by zero,
    or hides keys in a full block.
    """
    count = sizes.num_blocks
    bits = torch.empty(count + 1, BLOCK, WORDS, dtype=torch.int32, device=device)
    mask_types = torch.zeros(count, dtype=torch.int32, device=device)
    is_empty = torch.ones(count, dtype=torch.bool, device=device)
    num_bits = torch.zeros((), dtype=torch.int64, device=device)
    faults = _Faults(device)
    for numbers in _candidates(sizes, listed, device):
        pairs = _Pairs.of(sizes, numbers)
        shown, is_inside = _evaluate(mask_mod, pairs, faults), pairs.is_inside
        if listed is not None:
            in_partial, in_full = listed.of_pairs(*pairs[:4])
            faults.add_disputes(in_full & is_inside & ~shown, pairs, listed)
            shown &= in_partial | in_full
        num_shown = shown.sum((1, 2), dtype=torch.int32)
        has_bits = (num_shown > 0) & (num_shown < is_inside.sum((1, 2), dtype=torch.int32))
        place = num_bits + has_bits.cumsum(0) - 1
        bits[torch.where(has_bits, place, count)] = pack(shown)
        mask_types[numbers] = torch.where(has_bits, FIRST_BITS + place, 0).to(torch.int32)
        is_empty[numbers] = num_shown == 0
        num_bits = num_bits + has_bits.sum()
    require(faults.checks)
    q_ranges, k_ranges = (torch.where(is_empty[:, None], 0, x) for x in _ranges(sizes, device))
    return AttnSlices.unchecked(q_ranges, k_ranges, mask_types, *sizes.totals, bits)


def without_padding(slices: AttnSlices) -> AttnSlices:
    """`slices_with_bits` in no more memory than they need. Waits for the device if that is a GPU."""
    slices = slices.compact()
    assert slices.bits is not None
    count = int((slices.mask_types >= FIRST_BITS).sum())
    bits = slices.bits[:count].clone()
    return AttnSlices.unchecked(*slices.lists, slices.seqlen_q, slices.seqlen_k, bits)


def visible_blocks(
    mask_mod: MaskMod, sizes: MaskSizes, rows: int, keys: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """In which blocks of `rows` rows and `keys` keys some pair is visible, and in which all are: bool
    `[batch, nheads, q blocks, kv blocks]`. Blocks at the end may be smaller."""
    num_q, num_k = -(-sizes.seqlen_q // rows), -(-sizes.seqlen_k // keys)
    shape = (sizes.batch, sizes.heads.q, num_q, num_k)
    counts = torch.zeros(shape, dtype=torch.int64, device=device)
    faults = _Faults(device)
    for numbers in _candidates(sizes, None, device):
        shown = _evaluate(mask_mod, _Pairs.of(sizes, numbers), faults)
        which, q, kv = shown.nonzero().unbind(1)
        b, h, row, key = (x[which] for x in sizes.place(numbers))
        place = (b, h, (row + q) // rows, (key + kv) // keys)
        counts.index_put_(place, torch.ones_like(which), accumulate=True)
    require(faults.checks)
    height, width = (
        (size - torch.arange(num, device=device) * step).clamp(max=step)
        for size, num, step in ((sizes.seqlen_q, num_q, rows), (sizes.seqlen_k, num_k, keys))
    )
    return counts > 0, counts == height[:, None] * width


def _candidates(sizes: MaskSizes, listed: Listed | None, device: torch.device) -> Iterator[Tensor]:
    """The blocks in which something may be visible, some at a time."""
    numbers = torch.arange(sizes.num_blocks, device=device)
    if listed is not None and device.type == "cpu":
        numbers = numbers[_are_listed(sizes, listed)]
    return filter(len, numbers.split(MAX_BLOCKS if device.type == "cpu" else MAX_BLOCKS_ON_GPU))


def _are_listed(sizes: MaskSizes, listed: Listed) -> Tensor:
    """The blocks that have a part in any list, bool `[num_blocks]`."""
    is_listed = (listed.partial | listed.full)[:, : sizes.heads.q]
    is_listed = is_listed.expand(sizes.batch, sizes.heads.q, -1, -1)
    is_candidate = torch.zeros(sizes.num_blocks, dtype=torch.bool, device="cpu")
    b, h, q, kv = is_listed.nonzero().unbind(1)
    height, width = min(listed.rows, sizes.seqlen_q), min(listed.keys, sizes.seqlen_k)
    for row in range(-(-height // BLOCK) + 1):
        for key in range(-(-width // BLOCK) + 1):
            q_block = (q * listed.rows // BLOCK + row).clamp(max=sizes.blocks_q - 1)
            k_block = (kv * listed.keys // BLOCK + key).clamp(max=sizes.blocks_k - 1)
            line = (b * sizes.heads.q + h) * sizes.blocks_q + q_block
            is_candidate[line * sizes.blocks_k + k_block] = True
    return is_candidate


class _Pairs(NamedTuple):
    """The pairs of some blocks: batch entry and head `[n]`, queries and keys `[n, BLOCK]`, and which pairs exist."""

    b: Tensor
    h: Tensor
    q: Tensor
    kv: Tensor
    is_inside: Tensor

    @classmethod
    def of(cls, sizes: MaskSizes, numbers: Tensor) -> _Pairs:
        b, h, row, key = sizes.place(numbers)
        step = torch.arange(BLOCK, device=numbers.device)
        q, kv = row[:, None] + step, key[:, None] + step
        is_inside = (q < sizes.seqlen_q)[:, :, None] & (kv < sizes.seqlen_k)[:, None, :]
        q, kv = q.clamp(max=sizes.seqlen_q - 1), kv.clamp(max=sizes.seqlen_k - 1)
        return cls(b, h, q, kv, is_inside)


def _evaluate(mask_mod: MaskMod, pairs: _Pairs, faults: _Faults) -> Tensor:
    """The visible pairs, bool `[n, BLOCK, BLOCK]`: where the mask_mod gives True, or a number that is not 0, as
    FlexAttention's kernels read it."""
    try:
        given, broken = on_grids(mask_mod, *pairs[:4], getattr(mask_mod, "names", None))
    except (IndexError, RuntimeError) as error:
        if not is_of_data(error):
            raise
        message = "the mask_mod must have a value for each query and key, but it raises"
        raise MaskDataError(f"{message} {error}") from error
    faults.add_look_ups(broken, pairs)
    return (given != 0) & pairs.is_inside


class _First(NamedTuple):
    """The first pair at which something is not as it must be."""

    is_there: Tensor
    values: tuple[Tensor, ...]

    @classmethod
    def none(cls, device: torch.device) -> _First:
        zero = torch.zeros((), dtype=torch.int64, device=device)
        return cls(zero.bool(), (zero, zero, zero))

    def or_else(
        self, broken: Tensor, of_pair: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
    ) -> _First:
        """This one, or else the first of `broken [n, BLOCK, BLOCK]`, with what `of_pair` says of its grid,
        row and key."""
        first = first_of(broken)
        found = of_pair(first // BLOCK**2, first // BLOCK % BLOCK, first % BLOCK)
        values = (torch.where(self.is_there, x, y) for x, y in zip(self.values, found, strict=True))
        return _First(self.is_there | broken.any(), tuple(values))

    def check(self, words: tuple[str, str]) -> MaskCheck:
        return MaskCheck(~self.is_there, *words, self.values)


class _Faults:
    """The faults in all blocks: by words, the first pair."""

    def __init__(self, device: torch.device):
        self.device = device
        self.found: dict[tuple[str, str], _First] = {}

    def add(
        self,
        words: tuple[str, str],
        broken: Tensor,
        of_pair: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]],
    ) -> None:
        known = self.found.get(words) or _First.none(self.device)
        self.found[words] = known.or_else(broken, of_pair)

    def add_look_ups(self, broken: list[Broken], pairs: _Pairs) -> None:
        for what, where, value in broken:

            def of_pair(
                n: Tensor, row: Tensor, key: Tensor, value: Tensor = value
            ) -> tuple[Tensor, ...]:
                return value[n, row, key], pairs.q[n, row], pairs.kv[n, key]

            self.add(what.words_at_pair, where, of_pair)

    def add_disputes(self, broken: Tensor, pairs: _Pairs, listed: Listed) -> None:
        """Adds the pairs in full blocks that the mask hides."""
        self.add(
            IS_FULL,
            broken,
            lambda n, row, key: (
                pairs.kv[n, key] // listed.keys,
                pairs.q[n, row] // listed.rows,
                pairs.b[n],
            ),
        )

    @property
    def checks(self) -> list[MaskCheck]:
        return [first.check(words) for words, first in self.found.items()]


def _ranges(sizes: MaskSizes, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows and keys of all blocks, int32 `[num_blocks, 2]` each."""
    b, h, row, key = sizes.place(torch.arange(sizes.num_blocks, device=device))
    entry_q = b * sizes.heads.q + h
    entry_k = entry_q // sizes.heads.group
    ranges = []
    for entry, first, seqlen in ((entry_q, row, sizes.seqlen_q), (entry_k, key, sizes.seqlen_k)):
        end = (first + BLOCK).clamp(max=seqlen)
        ranges.append((torch.stack([first, end], -1) + (entry * seqlen)[:, None]).to(torch.int32))
    return ranges[0], ranges[1]
