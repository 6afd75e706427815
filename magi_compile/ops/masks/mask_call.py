"""The common part of the ops that evaluate masks: their arguments, and the second opinion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_compile import _compat
from magi_compile._checks import MaskCheck, require
from magi_compile.kernels.select import MaskKernel, arch_of
from magi_compile.masks import AttnSlices, MaskProgram
from magi_compile.masks.evaluation.bit_blocks import Listed
from magi_compile.masks.evaluation.block_lists import BlockLists
from magi_compile.masks.evaluation.sizes import Heads, MaskSizes
from magi_compile.masks.evaluation.verify import check_bits, check_slices, is_verified, remember

Lists = tuple[Tensor, Tensor, Tensor]  # q_ranges, k_ranges, mask_types

ARGUMENTS = (
    "Tensor[] tables, SymInt[] symbols, str program, SymInt batch, SymInt seqlen_q, SymInt seqlen_k, SymInt capacity, "
    "Device device, Tensor[] block_lists, SymInt[] block_size, bool verify=False, int[] heads=[1, 1]"
)


class MaskCall(NamedTuple):
    """The arguments of such an op."""

    tables: Sequence[Tensor]  # that the program captures
    symbols: Sequence[int]  # likewise
    program: str  # the text of the mask program
    batch: int  # number of batch entries
    seqlen_q: int  # rows of each
    seqlen_k: int  # keys of each
    capacity: int  # room for slices of intervals
    device: torch.device  # where to compute
    block_lists: Sequence[Tensor]  # those of a BlockMask, or none
    block_size: Sequence[int]  # rows and keys of a block of these
    verify: bool = False  # each call asks for a second opinion
    # Of q and of keys, whose masks differ; 1 and 1 where all have the same mask.
    heads: Sequence[int] = (1, 1)

    @classmethod
    def of(cls, *arguments: object) -> MaskCall:
        """The call of an op; AOTInductor passes None for an empty list."""
        call = cls(*arguments)  # type: ignore[arg-type]
        return call._replace(tables=call.tables or [], symbols=call.symbols or [])

    @property
    def mask(self) -> MaskProgram:
        return MaskProgram.parse(self.program)

    @property
    def sizes(self) -> MaskSizes:
        return MaskSizes(self.batch, self.seqlen_q, self.seqlen_k, Heads(*self.heads))

    @property
    def lengths(self) -> dict[str, Any]:
        """The sizes by the names that functions have for them."""
        return self.sizes._asdict()

    @property
    def lists(self) -> BlockLists | None:
        return BlockLists(*self.block_lists) if self.block_lists else None

    def slices(self, lists: Lists, bits: Tensor | None = None) -> AttnSlices:
        """Slices of the mask."""
        q_ranges, k_ranges, mask_types = lists
        return AttnSlices.unchecked(q_ranges, k_ranges, mask_types, *self.sizes.totals, bits)

    def second_opinion(
        self,
        slices: AttnSlices,
        tables: Sequence[Tensor] | None = None,
        listed: Listed | None = None,
    ) -> list[MaskCheck]:
        """That slices show what the mask_mod shows, where a process has not looked yet, or a user asks for it. They are
        those of intervals, or with bits one for each block, and of what is `listed`; `tables` are what the
        program reads, by default the captured tensors."""
        if not self.verify and is_verified(self.known_as(slices)):
            return []
        mask, captured = self.mask, self.tables if tables is None else tables
        if slices.bits is not None:
            return check_bits(mask, captured, self.symbols, slices, self.sizes, listed)
        return check_slices(mask, captured, self.symbols, slices.lists, self.sizes)

    def looked_at(
        self,
        slices: AttnSlices,
        checks: Sequence[MaskCheck] = (),
        tables: Sequence[Tensor] | None = None,
        listed: Listed | None = None,
    ) -> Lists:
        """The lists of `slices`, after their `checks` and a second opinion: empty where a GPU will raise."""
        checks = [*checks, *self.second_opinion(slices, tables, listed)]
        require(checks)
        remember(self.known_as(slices))
        return _empty_where_broken(slices.lists, checks)

    def empty_lists(self, room: Any) -> Lists:
        """Tensors like the lists of `room` slices."""
        shapes = (room, 2), (room, 2), (room,)
        q_ranges, k_ranges, mask_types = (
            torch.empty(shape, dtype=torch.int32, device=self.device) for shape in shapes
        )
        return q_ranges, k_ranges, mask_types

    def begin(self, kernel_on: Callable[[tuple[int, int] | None], MaskKernel | None]) -> None:
        """Begins to compile the kernel that evaluates this mask of fake tensors, on a GPU that has one."""
        kernel = kernel_on(arch_of(self.device)) if _compat.is_in_use(self.device) else None
        given = self.batch, self.seqlen_q, self.seqlen_k
        batch, seqlen_q, seqlen_k = sizes = [_compat.size_at_hand(x) for x in given]
        symbols = [_compat.size_at_hand(x) for x in self.symbols]
        if (
            kernel is None
            or self.mask.by_keys
            or not all(type(x) is int for x in (*sizes, *symbols))
        ):
            return
        mode = _compat.static_fake_mode()
        # Whatever speaks against it, the call will say.
        with suppress(Exception), _compat.without_fake_tensors(), mode:
            tables = [_compat.without_symbols(x, mode) for x in self.tables]
            of_mask = MaskSizes(batch, seqlen_q, seqlen_k, Heads(*self.heads))
            has_lists = bool(self.block_lists)
            kernel.begin(self.mask, tables, symbols, of_mask, self.device, has_lists=has_lists)

    def known_as(self, slices: AttnSlices) -> str:
        return self.program if slices.bits is None else f"bits of {self.program}"


def _empty_where_broken(lists: Lists, checks: Sequence[MaskCheck]) -> Lists:
    """Slices, of which nothing remains where a check fails on a GPU: it raises later there, so no kernel may meet the
    nonsense that the data lead to."""
    if not checks or lists[0].device.type != "cuda":
        return lists
    holds = torch.stack([check.ok for check in checks]).all()
    q_ranges, k_ranges, mask_types = (x * holds for x in lists)
    return q_ranges, k_ranges, mask_types
