"""Entries: batch entries and heads among the heads of packed tensors, each with rows of its own.

A call's rows hold all heads and, behind one another, all entries of a batch: `[rows, batch * nheads, head_dim]`. Where
batch entries or heads have masks of their own, and where a score program tells batch entries apart, each has rows of
its own in a kernel: `[entries * rows, nheads, head_dim]`.

Rows of keys travel with all heads and all batch entries, unless these have masks of their own: then those of one entry
lie behind those of another, `[batch * rows, nheads, head_dim]`, before they travel, and each goes where its own entry
needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.dtensor.planning.cover import ONE_ENTRY, Entries
from magi_compile.masks.slices import AttnSlices


class Packing(NamedTuple):
    """The entries of a call, and how many of its heads each has."""

    batch: int = 1  # batch entries that are entries; 1 where they stay among the heads
    nheads: int = 1  # heads of queries that are entries, of each of these; 1 likewise
    nheads_kv: int = 1  # the same of keys
    by_head: bool = False  # heads are entries
    entries: Entries = ONE_ENTRY  # those of the masks
    first_head: int = 0  # of the masks, that the first entry is

    @classmethod
    def of(
        cls,
        entries: Entries,
        batch: int,
        heads: tuple[int, int],
        share: Sequence[int],
        *,
        has_score: bool,
    ) -> Packing:
        """The entries of a call; `PLAIN` where nothing is packed anew.

        `entries` are those of the masks; a call has `batch` entries among its heads, each with such `heads` of queries
        and of keys. `share` are the numbers of the first batch entry and of the first head among those of all ranks,
        and how many of both all have; empty where this rank has all. A score program tells batch entries apart.

        Raises ValueError if the masks are of another number of batch entries or heads.
        """
        if not has_score and entries.number == 1:
            return PLAIN
        first_entry, first_head, all_entries, all_heads = share or (0, 0, batch, heads[0])
        for what, have, begin, number, end in (
            ("batch entries", entries.batch, first_entry, batch, all_entries),
            ("heads", entries.heads, first_head, heads[0], all_heads),
        ):
            if have > 1 and end != have:
                raise ValueError(
                    f"`q` must have the {have} {what} that have masks of their own, got {end}; where "
                    "ranks share them, pass DTensors, which say whose they are"
                )
            if not 0 <= begin <= end - number:
                raise ValueError(
                    f"`share` must place the {number} {what} of `q` among the {end} of all ranks, got {begin} as the "
                    "first"
                )
        if entries.heads > 1:
            return cls(batch, *heads, True, entries, first_head)
        if entries.batch > 1 or (has_score and batch > 1):
            return cls(batch, entries=entries)
        return PLAIN

    @property
    def queries(self) -> int:
        """The number of entries with rows of queries."""
        return self.batch * self.nheads

    @property
    def keys(self) -> int:
        """The number of entries with keys."""
        return self.batch * self.nheads_kv

    @property
    def apart(self) -> int:
        """The number of entries whose rows of keys travel apart: batch entries with masks of their own, otherwise 1."""
        return self.batch if self.entries.batch > 1 else 1

    @property
    def keys_together(self) -> int:
        """The number of entries among the heads of keys that have travelled."""
        return self.keys // self.apart

    def slices(self, slices: AttnSlices, entry: Tensor | None) -> AttnSlices:
        """The slices of all entries, from those of the masks over what travels, and of which heads they are."""
        if not self.by_head and self.apart > 1:  # rows and keys are those of all entries already
            return slices
        h = torch.zeros_like(slices.mask_types) if entry is None else entry
        rows, lists = slices.seqlen_q // self.apart, list(slices.lists)
        if self.apart > 1:
            b = lists[0][:, 0].div(rows, rounding_mode="floor")
            first_key = torch.zeros_like(b)
        else:  # all batch entries have the same masks
            b = torch.arange(self.batch, device=h.device).repeat_interleave(len(h))
            h, *lists = (torch.cat([x] * self.batch) for x in (h, *lists))
            first_key = b * (self.nheads_kv * slices.seqlen_k)
        h = h - self.first_head
        first_row = (b * (self.nheads - (self.apart > 1)) + h) * rows
        of_keys = h.div(self.nheads // self.nheads_kv, rounding_mode="floor")
        first_key = first_key + of_keys * slices.seqlen_k
        firsts = (x.int()[:, None] for x in (first_row, first_key))
        lists[:2] = (x + first for x, first in zip(lists, firsts, strict=False))
        is_here = (h >= 0) & (h < self.nheads)
        totals = self.queries * rows, self.keys_together * slices.seqlen_k
        q_ranges, k_ranges, mask_types = (x[is_here] for x in lists)
        return AttnSlices.unchecked(q_ranges, k_ranges, mask_types, *totals, slices.bits)


PLAIN = Packing()


def packed(x: Tensor, entries: int) -> Tensor:
    """`[rows, entries * nheads, ...]` as `[entries * rows, nheads, ...]`."""
    return x.unflatten(1, (entries, x.shape[1] // entries)).transpose(0, 1).flatten(0, 1)


def unpacked(x: Tensor, entries: int) -> Tensor:
    """The inverse of `packed`."""
    return x.unflatten(0, (entries, x.shape[0] // entries)).transpose(0, 1).flatten(1, 2)


def unpacked_rows(x: Tensor, entries: int) -> Tensor:
    """Numbers of rows, `[nheads, entries * rows]`, as `[entries * nheads, rows]`."""
    return unpacked(x.t(), entries).t().contiguous()


def packed_rows(x: Tensor, entries: int) -> Tensor:
    """The inverse of `unpacked_rows`."""
    return packed(x.t(), entries).t().contiguous()
