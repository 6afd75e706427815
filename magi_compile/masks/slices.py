"""AttnSlices: the one representation of what may attend to what.

A slice is a rectangle of the score matrix, `[q_start, q_end) x [k_start, k_end)`, with up to two of its
corners cut off along the diagonal:

    FULL        CAUSAL      INV_CAUSAL  BI_CAUSAL
    # # # #     # # . .     # # # #     # # . .
    # # # #     # # # .     . # # #     . # # .
    # # # #     # # # #     . . # #     . . # #
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from magi_compile import _compat
from magi_compile.masks.arguments import (
    MAX_SEQLEN,
    check_device,
    check_flag,
    check_range,
    int32_on_host,
    is_int,
    read_cu_seqlens,
    read_window,
)
from magi_compile.masks.bits import FIRST_BITS, unpack
from magi_compile.masks.geometry import Rects
from magi_compile.masks.normal_form import find_overlap, normal_form


class MaskType(IntEnum):
    """The corners of a slice that are cut off. Bit 0: the right edge moves with the row; bit 1: the left edge."""

    FULL = 0
    CAUSAL = 1
    INV_CAUSAL = 2
    BI_CAUSAL = 3


class AttnSlice(NamedTuple):
    """One slice. Row q of it sees the keys `[lo, hi)`:

    lo = k_start + (q - q_start if INV_CAUSAL or BI_CAUSAL else 0)       (aligned top-left)
    hi = k_end - (q_end - 1 - q if CAUSAL or BI_CAUSAL else 0)           (aligned bottom-right)
    """

    q_range: tuple[int, int]
    k_range: tuple[int, int]
    mask_type: MaskType


@dataclass(frozen=True, eq=False)
class AttnSlices:
    """A list of slices over `seqlen_q` query rows and `seqlen_k` keys; their areas never overlap.

    The constructor checks shapes and, by `validate`, values: on a GPU it waits for the device. Where values cannot be
    looked at (inside torch.compile, of fake tensors, while a CUDA graph is captured) it leaves them to
    `flex_flash_attention`, which then checks them on the device in each call, without a wait.

    Attributes:
        q_ranges: int32 `[num_slices, 2]`, half-open row ranges.
        k_ranges: int32 `[num_slices, 2]`, half-open key ranges, on the same device.
        mask_types: int32 `[num_slices]`, values of `MaskType`.
        seqlen_q: number of query rows.
        seqlen_k: number of keys.
        is_checked: whether the values were right when these slices were made.
        versions: how often each of the three tensors had been written to then; None inside torch.compile.
        bits: the blocks of slices whose type is above those of `MaskType`, see `masks/bits.py`; None where there are
            none, as in all lists that a user makes.

    Slices may be written to. What PyTorch counts as a write, eager code checks in the next call, on a GPU with a wait.
    Other writes (`.data`, tensors of `torch.inference_mode`), and those in front of a compiled function, are seen on
    CPUs alone, and there only beyond the bounds.

    A slice with an empty range sees nothing; lists of a fixed capacity are padded with such slices.
    """

    q_ranges: Tensor
    k_ranges: Tensor
    mask_types: Tensor
    seqlen_q: int
    seqlen_k: int
    is_checked: bool = field(init=False, repr=False, default=False)
    bits: Tensor | None = field(init=False, repr=False, default=None)
    versions: tuple[int, ...] | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        num_slices = self.q_ranges.shape[0] if _is_table(self.q_ranges) else "num_slices"
        for name, shape in (
            ("q_ranges", (num_slices, 2)),
            ("k_ranges", (num_slices, 2)),
            ("mask_types", (num_slices,)),
        ):
            tensor = getattr(self, name)
            if not isinstance(tensor, Tensor):
                raise TypeError(f"`{name}` must be a tensor, got {type(tensor).__name__}")
            if tensor.dtype != torch.int32:
                raise TypeError(f"`{name}` must have dtype torch.int32, got {tensor.dtype}")
            if tuple(tensor.shape) != shape:
                expected = ", ".join(map(str, shape))
                raise ValueError(f"`{name}` must have shape [{expected}], got {list(tensor.shape)}")
            if tensor.device != self.q_ranges.device:
                raise ValueError(
                    f"`{name}` must be on the device of `q_ranges` ({self.q_ranges.device}), got {tensor.device}"
                )
        for name in ("seqlen_q", "seqlen_k"):
            value = getattr(self, name)
            if not isinstance(value, (int, torch.SymInt)) and is_int(value):
                value = int(value)  # of NumPy's
                object.__setattr__(self, name, value)
            if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
                raise TypeError(f"`{name}` must be an int, got {type(value).__name__}")
            if isinstance(value, int) and not 0 <= value < MAX_SEQLEN:
                raise ValueError(f"`{name}` must be in [0, 2**30), got {value}")
        if not torch.compiler.is_compiling():
            for name in ("q_ranges", "k_ranges", "mask_types"):
                object.__setattr__(self, name, _lasting(getattr(self, name)))
        if _has_values(self.q_ranges):
            self.validate()
            object.__setattr__(self, "is_checked", True)
            object.__setattr__(self, "versions", _versions(*self.lists))

    # Constructors

    @classmethod
    def unchecked(
        cls,
        q_ranges: Tensor,
        k_ranges: Tensor,
        mask_types: Tensor,
        seqlen_q: int,
        seqlen_k: int,
        bits: Tensor | None = None,
    ) -> AttnSlices:
        """Makes slices of tensors that are known to be right: checks nothing, and waits for no device."""
        slices = object.__new__(cls)
        values: dict[str, Any] = dict(
            q_ranges=q_ranges,
            k_ranges=k_ranges,
            mask_types=mask_types,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            is_checked=True,
        )
        if bits is not None:
            values["bits"] = bits
        # Dynamo of PyTorch 2.11 cannot follow the other way, which is quicker.
        if torch.compiler.is_compiling():
            for name, value in values.items():
                object.__setattr__(slices, name, value)
        else:
            if q_ranges.is_inference() or k_ranges.is_inference() or mask_types.is_inference():
                lasting = (_lasting(q_ranges), _lasting(k_ranges), _lasting(mask_types))
                values.update(zip(("q_ranges", "k_ranges", "mask_types"), lasting, strict=True))
            lists = (values["q_ranges"], values["k_ranges"], values["mask_types"])
            slices.__dict__.update(values, versions=_versions(*lists))
        return slices

    @classmethod
    def of_rects(cls, rects: Rects, seqlen_q: int, seqlen_k: int) -> AttnSlices:
        """Makes slices of trimmed, straight rects, in normal form, on the CPU. Waits for the device of the rects."""
        return cls._from_rects(normal_form(rects.cpu()), seqlen_q, seqlen_k)

    @classmethod
    def from_lists(
        cls,
        q_ranges: Sequence[Sequence[int]] | Tensor,
        k_ranges: Sequence[Sequence[int]] | Tensor,
        mask_types: Sequence[int] | Tensor,
        seqlen_q: int | None = None,
        seqlen_k: int | None = None,
        device: torch.device | str | None = None,
    ) -> AttnSlices:
        """Slices from lists or integer tensors, with every check.

        Args:
            q_ranges: `[num_slices, 2]`, half-open row ranges.
            k_ranges: `[num_slices, 2]`, half-open key ranges.
            mask_types: `[num_slices]`, values of `MaskType`.
            seqlen_q: number of query rows; by default the largest row end.
            seqlen_k: number of keys; by default the largest key end.
            device: where the result lives; by default where `q_ranges` lives.

        Returns:
            The slices.

        Raises:
            TypeError: a wrong dtype.
            ValueError: a wrong shape, a range out of bounds, an unknown type, or two slices that overlap.
        """
        if device is None and isinstance(q_ranges, Tensor):
            device = q_ranges.device
        tensors = (
            int32_on_host("q_ranges", q_ranges, 2),
            int32_on_host("k_ranges", k_ranges, 2),
            int32_on_host("mask_types", mask_types),
        )
        if seqlen_q is None:
            seqlen_q = int(tensors[0].max()) if tensors[0].numel() else 0
        if seqlen_k is None:
            seqlen_k = int(tensors[1].max()) if tensors[1].numel() else 0
        slices = cls(*tensors, seqlen_q, seqlen_k)
        return slices.to(device) if device is not None else slices

    @classmethod
    def from_slices(
        cls, slices: Iterable[AttnSlice], seqlen_q: int | None = None, seqlen_k: int | None = None
    ) -> AttnSlices:
        """Slices on the host.

        Args:
            slices: `AttnSlice` items, or tuples of a range of rows, a range of keys and a MaskType.
            seqlen_q: rows of the mask; None for the last row of a slice.
            seqlen_k: keys of the mask; None for the last key of a slice.

        Returns:
            The slices in this order.

        Raises:
            TypeError: `slices` is no list, or an entry has no MaskType.
            ValueError: an entry is no slice, or a range does not lie in the mask.
        """
        if not isinstance(slices, Iterable):
            raise TypeError(f"`slices` must be a list of AttnSlice, got {slices!r}")
        q_ranges, k_ranges, mask_types = [], [], []
        for item in slices:
            if not isinstance(item, Sequence) or len(item) != 3:
                raise ValueError(f"`slices` must hold (q_range, k_range, mask_type), got {item!r}")
            if not is_int(item[2]):
                raise TypeError(f"`slices` must have a MaskType in each, got {item[2]!r}")
            q_range, k_range, mask_type = item
            q_ranges.append(q_range)
            k_ranges.append(k_range)
            mask_types.append(int(mask_type))
        return cls.from_lists(q_ranges, k_ranges, mask_types, seqlen_q, seqlen_k)

    @classmethod
    def full(cls, seqlen_q: int, seqlen_k: int | None = None) -> AttnSlices:
        """Every row sees every key."""
        return cls.sliding_window(seqlen_q, seqlen_k, window=(None, None))

    @classmethod
    def causal(cls, seqlen_q: int, seqlen_k: int | None = None) -> AttnSlices:
        """Causal, aligned bottom-right: the last row sees every key."""
        return cls.sliding_window(seqlen_q, seqlen_k, window=(None, 0))

    @classmethod
    def sliding_window(
        cls, seqlen_q: int, seqlen_k: int | None, window: tuple[int | None, int | None]
    ) -> AttnSlices:
        """One document in which a row sees a window of keys.

        Args:
            seqlen_q: rows.
            seqlen_k: keys; None for as many.
            window: keys to the left and to the right of a row's own, aligned bottom-right; None or -1 for all.

        Returns:
            The mask.

        Raises:
            ValueError: a length or a side of the window is no int, or out of range.
        """
        for name, seqlen in (("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
            may_be_none = name == "seqlen_k"
            is_length = is_int(seqlen) and 0 <= seqlen < MAX_SEQLEN  # type: ignore[operator]
            if not (is_length or (may_be_none and seqlen is None)):
                raise ValueError(f"`{name}` must be an int in [0, 2**30), got {seqlen!r}")
        cu_seqlens_q = torch.tensor([0, seqlen_q], device="cpu")
        cu_seqlens_k = None if seqlen_k is None else torch.tensor([0, seqlen_k], device="cpu")
        return cls.from_cu_seqlens(cu_seqlens_q, cu_seqlens_k, window=window)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens_q: Tensor | Sequence[int],
        cu_seqlens_k: Tensor | Sequence[int] | None = None,
        *,
        causal: bool = False,
        window: tuple[int | None, int | None] = (None, None),
    ) -> AttnSlices:
        """Packed documents: row i of a document sees the keys `i + shift - left` to `i + shift + right`.

        `shift = len_k - len_q` aligns windows at the bottom-right, as FlashAttention does. Computed on the
        host; the result goes to the device of `cu_seqlens_q`.

        Args:
            cu_seqlens_q: integers `[num_docs + 1]`, from 0, never decreasing.
            cu_seqlens_k: the same for the keys; by default `cu_seqlens_q`.
            causal: no row sees keys to its right, whatever the window.
            window: `(left, right)`; None or -1 means no limit on that side.

        Returns:
            The slices, in normal form.
        """
        check_flag("causal", causal)
        cu_q = read_cu_seqlens("cu_seqlens_q", cu_seqlens_q)
        cu_k = cu_q if cu_seqlens_k is None else read_cu_seqlens("cu_seqlens_k", cu_seqlens_k)
        if cu_q.shape != cu_k.shape:
            raise ValueError(
                f"`cu_seqlens_k` must have the length of `cu_seqlens_q` ({len(cu_q)}), got {len(cu_k)}"
            )
        left, right = read_window(window)
        if causal:
            right = 0 if right is None else min(right, 0)
        q_begin, q_end, k_begin, k_end = cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:]
        diagonal = k_end - (q_end - q_begin)  # the key of the first row
        docs = Rects.rectangles(q_begin, q_end, k_begin, k_end)
        if left is not None:
            docs = docs._replace(diag_lo=diagonal - q_begin - left)
        if right is not None:
            docs = docs._replace(diag_hi=diagonal - q_begin + right + 1)
        normal = normal_form(docs.trimmed().straight())
        slices = cls._from_rects(normal, int(cu_q[-1]), int(cu_k[-1]))
        device = cu_seqlens_q.device if isinstance(cu_seqlens_q, Tensor) else None
        return slices.to(device) if device is not None else slices

    @classmethod
    def from_dense(cls, mask: Tensor) -> AttnSlices:
        """Slices of a dense mask.

        Args:
            mask: bool, `[seqlen_q, seqlen_k]`, True where a row sees a key.

        Returns:
            The slices in normal form, on its device.

        Raises:
            TypeError: `mask` is no tensor of bools.
            ValueError: it has other than two dimensions.
        """
        if not isinstance(mask, Tensor):
            raise TypeError(f"`mask` must be a tensor, got {type(mask).__name__}")
        if mask.dtype != torch.bool:
            raise TypeError(f"`mask` must have dtype torch.bool, got {mask.dtype}")
        if mask.dim() != 2:
            raise ValueError(f"`mask` must have shape [seqlen_q, seqlen_k], got {list(mask.shape)}")
        host = mask.cpu()
        padded = torch.nn.functional.pad(host.to(torch.int8), (1, 1))
        change = padded.diff(dim=1)
        row, lo = (change > 0).nonzero().unbind(1)
        hi = (change < 0).nonzero()[:, 1]
        normal = normal_form(Rects.rectangles(row, row + 1, lo, hi))
        slices = cls._from_rects(normal, mask.shape[0], mask.shape[1])
        return slices.to(mask.device)

    @classmethod
    def _from_rects(cls, straight: Rects, seqlen_q: int, seqlen_k: int) -> AttnSlices:
        """The slices of trimmed, straight rects, which are kept with them."""
        slices = cls.unchecked(*straight.to_ranges(), seqlen_q, seqlen_k)
        slices._keep_rects(straight)
        return slices

    def _keep_rects(self, rects: Rects | None) -> None:
        """Keeps the rects of these slices, if there are some and writes to the lists are counted."""
        if rects is not None and not torch.compiler.is_compiling() and self.versions is not None:
            _rects_of[self] = (self.versions, rects)

    def _kept_rects(self) -> Rects | None:
        """The rects that were kept, if nobody has written to the lists since."""
        if torch.compiler.is_compiling() or (kept := _rects_of.get(self)) is None:
            return None
        versions, rects = kept
        return rects if versions == _versions(*self.lists) else None

    def untrimmed_rects(self) -> Rects:
        """The slices as rects on their device; at least one, to gather from."""
        lists = self.lists
        if self.mask_types.numel() == 0:  # `len` would fix the number of slices of a traced list
            lists = lists[0].new_zeros(1, 2), lists[1].new_zeros(1, 2), lists[2].new_zeros(1)
        return Rects.from_ranges(*lists)

    def rects(self) -> Rects:
        """The slices as trimmed, straight rects on the CPU, where they are cut, merged and counted."""
        if self.bits is not None:
            raise ValueError(
                "slices must have no bit blocks where they are cut, merged or compared, got "
                f"{len(self.bits)}; `to_dense` and `area` take them"
            )
        self.check_writes()
        kept = self._kept_rects()
        return self._rects() if kept is None else kept

    def _rects(self) -> Rects:
        return Rects.from_ranges(*(x.cpu() for x in self.lists)).trimmed()

    @property
    def lists(self) -> tuple[Tensor, Tensor, Tensor]:
        """`q_ranges`, `k_ranges` and `mask_types`."""
        return self.q_ranges, self.k_ranges, self.mask_types

    def tensors(self) -> list[Tensor]:
        """All that it is made of."""
        return [*self.lists, *([] if self.bits is None else [self.bits])]

    # Checks

    def validate(self) -> None:
        """Checks the values: bounds, types, and that no two slices overlap.

        Runs on the host (slices on a GPU are copied). The overlap check cuts the slices into strips of common
        rows and compares neighbours: O(n log n) for n slices after the cuts.

        Raises:
            ValueError: names the argument, the offending slice and its value.
        """
        self.check_bounds()
        # Bit blocks, which only the package makes, are no rects.
        overlap = None if self.bits is not None else find_overlap(self._rects())
        if overlap is not None:
            first, second = (f"{i}: {_describe(self[i])}" for i in overlap)
            raise ValueError(f"slices must not overlap, but these two do: {first} and {second}")

    def check_bounds(self) -> None:
        """The part of `validate` that keeps kernels in the memory of q, k and v: bounds and types, O(n)."""
        for name, seqlen_name in (("q_ranges", "seqlen_q"), ("k_ranges", "seqlen_k")):
            ranges, seqlen = getattr(self, name).cpu(), getattr(self, seqlen_name)
            begin, end = ranges.unbind(1)
            bad = (begin < 0) | (begin > end) | (end > seqlen)
            if bool(bad.any()):
                index = int(bad.nonzero()[0])
                raise ValueError(
                    f"`{name}[{index}]` must satisfy 0 <= start <= end <= {seqlen_name} = {seqlen}, "
                    f"got {ranges[index].tolist()}"
                )
        types = self.mask_types.cpu()
        end_of_bits = FIRST_BITS + (0 if self.bits is None else len(self.bits))
        bad = (types < 0) | ((types > 3) & (types < FIRST_BITS)) | (types >= end_of_bits)
        if bool(bad.any()):
            index = int(bad.nonzero()[0])
            raise ValueError(
                f"`mask_types[{index}]` must be a MaskType (0, 1, 2 or 3), got {int(types[index])}"
            )

    def check_writes(self) -> None:
        """Checks the values again if somebody has written to them since they were checked, in a way that PyTorch
        counts: not through `.data`, nor to tensors of `torch.inference_mode`. Waits for the device if so, and the
        slices are on a GPU.

        Raises:
            ValueError: as `validate`.
        """
        if self.versions is None or self.versions == (found := _versions(*self.lists)):
            return
        if _has_values(self.q_ranges):
            self.validate()
            object.__setattr__(self, "versions", found)

    def compact(self) -> AttnSlices:
        """The same slices without the empty ones. Waits for the device if the slices are on a GPU."""
        return self._where(self._live(), self.bits)

    def _where(self, is_kept: Tensor, bits: Tensor | None) -> AttnSlices:
        """Those of the slices that are kept, with these bit blocks."""
        return self._with_lists(
            self.q_ranges[is_kept], self.k_ranges[is_kept], self.mask_types[is_kept], bits
        )

    def _live(self) -> Tensor:
        q_begin, q_end = self.q_ranges.unbind(1)
        k_begin, k_end = self.k_ranges.unbind(1)
        return (q_begin < q_end) & (k_begin < k_end)

    # Views

    @property
    def device(self) -> torch.device:
        return self.q_ranges.device

    def to(self, device: torch.device | str) -> AttnSlices:
        """The same slices on `device`."""
        if not torch.compiler.is_compiling():
            device = check_device(device)
        bits = None if self.bits is None else self.bits.to(device)
        lists = (self.q_ranges.to(device), self.k_ranges.to(device), self.mask_types.to(device))
        slices = self._with_lists(*lists, bits)
        slices._keep_rects(self._kept_rects())
        return slices

    def _with_lists(
        self, q_ranges: Tensor, k_ranges: Tensor, mask_types: Tensor, bits: Tensor | None
    ) -> AttnSlices:
        """The same slices in other tensors, checked if these are."""
        self.check_writes()
        lists = (q_ranges, k_ranges, mask_types, self.seqlen_q, self.seqlen_k)
        return AttnSlices.unchecked(*lists, bits) if self.is_checked else AttnSlices(*lists)

    def __len__(self) -> int:
        """Number of slices, padding included."""
        return self.q_ranges.shape[0]

    def __getitem__(self, index: int) -> AttnSlice:
        q_begin, q_end = self.q_ranges[index].tolist()
        k_begin, k_end = self.k_ranges[index].tolist()
        return AttnSlice((q_begin, q_end), (k_begin, k_end), MaskType(int(self.mask_types[index])))

    def __iter__(self) -> Iterator[AttnSlice]:
        lists = (self.q_ranges.tolist(), self.k_ranges.tolist(), self.mask_types.tolist())
        for q_range, k_range, mask_type in zip(*lists, strict=True):
            yield AttnSlice(tuple(q_range), tuple(k_range), MaskType(mask_type))

    def __repr__(self) -> str:
        count = f"{len(self)} slice{'' if len(self) == 1 else 's'}"
        return f"AttnSlices({count}, seqlen_q={self.seqlen_q}, seqlen_k={self.seqlen_k}, device='{self.device}')"

    def area(self) -> int:
        """The number of visible (row, key) pairs; exact. Waits for the device if the slices are on a GPU."""
        if self.bits is not None:
            is_bits = self.mask_types >= FIRST_BITS
            return self._where(~is_bits, None).area() + int(
                unpack(self.bits[self._blocks(is_bits)]).sum()
            )
        return int(self.rects().area().sum())

    def to_dense(self) -> Tensor:
        """The mask as bool `[seqlen_q, seqlen_k]`, on the slices' device. For tests and small masks."""
        if self.bits is not None:
            is_bits = self.mask_types >= FIRST_BITS
            dense = self._where(~is_bits, None).to_dense()
            ranges = torch.cat([self.q_ranges, self.k_ranges], 1)[is_bits].tolist()
            shown = unpack(self.bits[self._blocks(is_bits)])
            for (begin, end, first, last), block in zip(ranges, shown, strict=True):
                dense[begin:end, first:last] = block[: end - begin, : last - first]
            return dense
        # Each row of each slice leaves +1 where its keys begin and -1 behind their end.
        row, lo, hi = self.untrimmed_rects().trimmed().by_row()
        sees = torch.ones_like(row, dtype=torch.int8)
        edges = torch.zeros(self.seqlen_q, self.seqlen_k + 1, dtype=torch.int8, device=self.device)
        edges.index_put_((row, lo), sees, accumulate=True)
        edges.index_put_((row, hi), -sees, accumulate=True)
        return edges.cumsum(1, dtype=torch.int8)[:, :-1] > 0

    def _blocks(self, is_bits: Tensor) -> Tensor:
        """The numbers of the bit blocks of these slices."""
        return (self.mask_types[is_bits] - FIRST_BITS).long()

    # Operations. All of them run on the host: slices on a GPU are copied, the results go back.

    def restrict_q(self, begin: int, end: int) -> AttnSlices:
        """The mask without the other rows, exactly.

        Args:
            begin: the first row that stays.
            end: the first row behind these.

        Returns:
            Slices in the same coordinates; empty ones are dropped.

        Raises:
            TypeError: a bound is no int.
            ValueError: the range does not lie in the rows.
        """
        check_range(begin, end, "seqlen_q", self.seqlen_q)
        return self._with_rects(self.rects().clipped(begin, end).live())

    def restrict_k(self, begin: int, end: int) -> AttnSlices:
        """The mask without the other keys, exactly.

        A slice with moving edges becomes up to three: where the clip binds, the edge stands still.

        Args:
            begin: the first key that stays.
            end: the first key behind these.

        Returns:
            Slices in the same coordinates; empty ones are dropped.

        Raises:
            TypeError: a bound is no int.
            ValueError: the range does not lie in the keys.
        """
        check_range(begin, end, "seqlen_k", self.seqlen_k)
        return self._with_rects(self.rects().clipped_to_columns(begin, end).straight().live())

    def normalize(self) -> AttnSlices:
        """The same mask in normal form: adjacent slices merged, empty ones dropped, sorted by (row, key).

        It depends on the mask alone: equal masks have equal normal forms, however they were cut in slices.
        """
        return self._with_rects(normal_form(self.rects()))

    def content_key(self) -> Hashable:
        """A hashable value, equal for equal masks."""
        normal = self.normalize()
        table = torch.cat([normal.q_ranges, normal.k_ranges, normal.mask_types[:, None]], 1)
        return self.seqlen_q, self.seqlen_k, tuple(table.flatten().tolist())

    def _with_rects(self, straight: Rects) -> AttnSlices:
        slices = self._from_rects(straight, self.seqlen_q, self.seqlen_k)
        return slices if self.device.type == "cpu" else slices.to(self.device)


# The trimmed, straight rects on the CPU that slices were made of, with the versions of the lists at that time.
_rects_of: WeakKeyDictionary[AttnSlices, tuple[tuple[int, ...], Rects]] = WeakKeyDictionary()


def _lasting(x: Tensor) -> Tensor:
    """`x`, or a copy of a tensor of inference mode, which no backward could use."""
    if not x.is_inference():
        return x
    with torch.inference_mode(False):
        return x.clone()


def _versions(*lists: Tensor) -> tuple[int, ...]:
    return tuple([_compat.version_of(x) for x in lists])


def _has_values(tensor: Tensor) -> bool:
    """True if the values of `tensor` can be looked at."""
    if torch.compiler.is_compiling() or tensor.is_meta or _compat.is_traced(tensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _describe(item: AttnSlice) -> str:
    (q_begin, q_end), (k_begin, k_end), mask_type = item
    return f"[{q_begin}, {q_end}) x [{k_begin}, {k_end}) {mask_type.name}"


def _is_table(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0
