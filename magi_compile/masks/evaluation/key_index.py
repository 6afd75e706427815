"""Indexes of values along kv, by which intervals of keys are found. Made once for a table, in O(keys) memory; on a GPU
nothing waits for the device.

Everything along kv is `[1 or batch, seqlen_k]`, intervals and what rows ask for are `[1 or batch, rows]`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Groups(NamedTuple):
    """The runs of equal values, sorted by value and then by place; all `[1 or batch, num_runs]`.

    Where there are fewer runs the last one is repeated. On a host num_runs is what the data need; on a GPU it is
    seqlen_k.
    """

    value: Tensor
    # Of a run; of the first one, it is the begin of the group of all keys of this value.
    begin: Tensor
    run_end: Tensor
    end: Tensor  # behind the last key of this value
    number: Tensor | None  # of the group; None: every run is one
    is_whole: Tensor | None  # this run and those of this value behind it are one; None: all are
    data: Tensor  # along kv
    run: Tensor  # of each key, `[1 or batch, seqlen_k]`, its number along the keys; or of each run how long it is
    order: Tensor  # which of the runs along the keys stands where

    @staticmethod
    def of(data: Tensor) -> Groups:
        value, begin, end, run = _runs(data)
        value, order = value.sort(dim=-1, stable=True)
        begin, end = begin.gather(-1, order), end.gather(-1, order)
        is_split = (value[:, 1:] == value[:, :-1]) & (begin[:, 1:] != begin[:, :-1])
        if is_readable(value) and not bool(is_split.any()):
            return Groups(value, begin, end, end, None, None, data, run, order)
        last = torch.searchsorted(value, value, right=True) - 1
        splits = torch.nn.functional.pad(is_split.cumsum(-1, dtype=torch.int32), (1, 0))
        is_whole = splits.gather(-1, last) == splits
        end_of_value = end.gather(-1, last)
        return Groups(value, begin, end, end_of_value, last, is_whole, data, run, order)

    def locate(self, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """Finds where the runs of a value begin among all, and whether there is one; None where there always is."""
        if self.number is None and _are_same(value, self.data):  # each key is in a run of its value
            places = torch.arange(self.order.shape[-1], device=value.device)
            place = torch.empty_like(self.order)
            place.scatter_(-1, self.order, places.expand(self.order.shape))
            if _is_of_one(self.data):
                total = self.data.shape[-1]
                return place[0].repeat_interleave(self.run, output_size=total)[None], None
            return gather(place, self.run - 1), None
        values, sought = _aligned(self.value, value)
        place = torch.searchsorted(values, sought).clamp(max=values.shape[-1] - 1)
        return place, gather(self.value, place) == sought

    def narrow(self, place: Tensor, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[lo, hi)` from the first to the last key of the group at `place` in it, and whether others lie between.

        Keys of other groups in `[lo, hi)` are such alone as lie between those of this one.
        """
        assert self.number is not None
        number = gather(self.number, place)
        # In order of their groups, and within a group along the keys.
        stride = self.data.shape[-1] + 1
        begins, ends = (self.number * stride + x for x in (self.begin, self.run_end))
        first = torch.searchsorted(*_aligned(ends, number * stride + lo), right=True)
        last = torch.searchsorted(*_aligned(begins, number * stride + hi)) - 1
        is_in = (lo < hi) & (first <= last)
        first, last = (torch.where(is_in, x, 0) for x in (first, last))
        begin, end = gather(self.begin, first), gather(self.run_end, last)
        is_split = is_in & (begin != gather(self.begin, last))
        lo = torch.where(is_in, torch.maximum(lo, begin), 0)
        return lo, torch.where(is_in, torch.minimum(hi, end), 0), is_split


class Stretches(NamedTuple):
    """The stretches in which values do not decrease."""

    number: Tensor  # of the stretch
    values: Tensor  # sorted, whatever the stretch
    place: Tensor  # never decreases: first the stretch, then how many values are smaller

    @staticmethod
    def of(data: Tensor) -> Stretches:
        data = data.contiguous()
        number = torch.zeros_like(data, dtype=torch.int64)
        torch.cumsum(data[:, 1:] < data[:, :-1], -1, out=number[:, 1:])
        values = data.sort(dim=-1).values
        place = number * (data.shape[-1] + 1) + torch.searchsorted(values, data)
        return Stretches(number, values, place)

    def is_one(self, lo: Tensor, hi: Tensor) -> Tensor:
        """True if the values never decrease in `[lo, hi)`, if it is not empty."""
        first, last = lo.clamp(max=self.number.shape[-1] - 1), (hi - 1).clamp(min=0)
        return gather(self.number, first) == gather(self.number, last)

    def bound_within(self, lo: Tensor, hi: Tensor, limit: Tensor) -> Tensor:
        """The first key of `[lo, hi)` whose value is above `limit`, or hi; the values never decrease there."""
        seqlen_k = self.number.shape[-1]
        num_below = torch.searchsorted(*_aligned(self.values, limit), right=True)
        stretch = gather(self.number, lo.clamp(max=seqlen_k - 1))
        bound = torch.searchsorted(*_aligned(self.place, stretch * (seqlen_k + 1) + num_below))
        return torch.minimum(torch.maximum(bound, lo), hi)


class Peaks(NamedTuple):
    """The largest value of each 1, 2, 4, ... keys, `[1 or batch, seqlen_k / 2**n]` each, rounded up."""

    levels: list[Tensor]

    @staticmethod
    def of(data: Tensor) -> Peaks:
        levels = [data]
        while (count := levels[-1].shape[-1]) > 1:
            least = torch.iinfo(data.dtype).min
            even = torch.nn.functional.pad(levels[-1], (0, count % 2), value=least)
            levels.append(even.unflatten(-1, (-1, 2)).amax(-1))
        return Peaks(levels)

    def first_above(self, lo: Tensor, limit: Tensor) -> Tensor:
        """The first key from lo on whose value is above `limit`, or seqlen_k."""
        place, top = torch.broadcast_tensors(lo.long(), limit)[0], len(self.levels) - 1
        depth = torch.full_like(place, -1)  # the level at which one was found
        for number, level in enumerate(self.levels):
            # Where the place is even, its values are those of its parent too.
            is_next = (depth < 0) & (place < level.shape[-1]) & (place % 2 == 1)
            if number == top:
                is_next = (depth < 0) & (place == 0)
            value = gather(level, place.clamp(max=level.shape[-1] - 1))
            depth = torch.where(is_next & (value > limit), number, depth)
            place = torch.where(depth < 0, (place + 1) // 2, place)
        for number in range(top - 1, -1, -1):
            level, is_above = self.levels[number], depth > number
            value = gather(level, (2 * place).clamp(max=level.shape[-1] - 1))
            below = 2 * place + (value <= limit)
            place = torch.where(is_above, below, place)
        return torch.where(depth < 0, self.levels[0].shape[-1], place)


class Marks(NamedTuple):
    """The keys for which a condition holds; all `[1 or batch, seqlen_k + 1]`."""

    after: Tensor  # the first such key from here on
    before: Tensor  # behind the last such key before here
    num_before: Tensor  # how many such keys are before here

    @staticmethod
    def of(is_key: Tensor) -> Marks:
        seqlen_k, pad = is_key.shape[-1], torch.nn.functional.pad
        position = torch.arange(seqlen_k, dtype=torch.int32, device=is_key.device)
        after = torch.where(is_key, position, seqlen_k).flip(-1).cummin(-1).values.flip(-1)
        before = torch.where(is_key, position + 1, 0).cummax(-1).values
        count = is_key.cumsum(-1, dtype=torch.int32)
        return Marks(pad(after, (0, 1), value=seqlen_k), pad(before, (1, 0)), pad(count, (1, 0)))

    def narrow(self, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[lo, hi)` from the first to the last such key in it, and whether others lie between."""
        begin, end = gather(self.after, lo), gather(self.before, hi)
        is_live = (lo < hi) & (begin < end)
        count = gather(self.num_before, hi) - gather(self.num_before, lo)
        is_split = is_live & (count != end - begin)
        return torch.where(is_live, begin, 0), torch.where(is_live, end, 0), is_split


def gather(table: Tensor, index: Tensor) -> Tensor:
    """`table [1 or batch, n]` at `index [1 or batch, rows]`, batch entry by batch entry."""
    if table.shape[0] == 1:
        return table[0].index_select(0, index.flatten()).view(index.shape)
    return table.gather(-1, index.long().expand(table.shape[0], -1))


def _are_same(one: Tensor, other: Tensor) -> bool:
    """True if two tensors are one piece of memory. Of fakes, which have none, nobody knows."""
    if type(one) is not Tensor or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return one.stride() == other.stride() and one.data_ptr() == other.data_ptr()


def _runs(data: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Maximal runs of equal values: value, begin, end, and `Groups.run`."""
    seqlen_k = data.shape[-1]
    starts = torch.ones_like(data, dtype=torch.bool)
    torch.ne(data[:, 1:], data[:, :-1], out=starts[:, 1:])
    if _is_of_one(data):  # takes half the time
        begin = starts[0].nonzero().flatten()
        end = torch.cat([begin[1:], begin.new_full((1,), seqlen_k)])
        value = data[0].index_select(0, begin)
        return value[None], begin.int()[None], end.int()[None], end - begin
    number = starts.cumsum(-1, dtype=torch.int32)
    last = number[:, -1:]
    room = int(last.max()) if is_readable(data) else seqlen_k
    wanted = torch.arange(1, room + 1, dtype=torch.int32, device=data.device)
    begin = torch.searchsorted(number, torch.minimum(wanted, last))
    follower = torch.nn.functional.pad(begin[:, 1:], (0, 1), value=seqlen_k)
    end = torch.where(follower > begin, follower, seqlen_k)
    return data.gather(-1, begin), begin.to(torch.int32), end.to(torch.int32), number


def _is_of_one(data: Tensor) -> bool:
    """True if all batch entries have the same values, which can be looked at for free."""
    return data.shape[0] == 1 and is_readable(data)


def is_readable(tensor: Tensor) -> bool:
    """True if values can be looked at for free: on the host, and not fake."""
    return tensor.device.type == "cpu" and type(tensor) is Tensor


def _aligned(values: Tensor, sought: Tensor) -> tuple[Tensor, Tensor]:
    """Operands for searchsorted: one dtype, and a row of `values` for each row of `sought`."""
    dtype = torch.promote_types(values.dtype, sought.dtype)
    values, sought = values.to(dtype), sought.to(dtype)
    if values.shape[0] == 1:
        return values[0], sought.contiguous()
    return values.contiguous(), sought.expand(values.shape[0], -1).contiguous()
