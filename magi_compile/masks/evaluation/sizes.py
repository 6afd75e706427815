"""The numbers of batch entries, heads, queries and keys of a mask, and their places in packed rows and keys."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from magi_compile.masks.arguments import MAX_SEQLEN
from magi_compile.masks.bits import BLOCK


class Heads(NamedTuple):
    """Whose masks they are: those of `q` heads, each of which is a batch entry of its own then, and reads one of `kv`
    heads; 1 and 1 where all heads have the same mask."""

    q: int = 1
    kv: int = 1

    @property
    def group(self) -> int:
        """The number of heads that read the same keys: those of entry n are keys of entry `n // group`."""
        return self.q // self.kv


ONE_MASK = Heads()  # of all heads


class MaskSizes(NamedTuple):
    """The numbers of values that b, q, kv and h take. Entry `b * heads.q + h` is head h of batch entry b.

    Attributes:
        batch: number of batch entries.
        seqlen_q: rows of each.
        seqlen_k: keys of each.
        heads: those with masks of their own.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: Heads = ONE_MASK

    @property
    def entries(self) -> int:
        """The number of entries with rows of their own."""
        return self.batch * self.heads.q

    def facing(self, by_keys: bool) -> MaskSizes:
        """Those of a mask as it is solved: with rows and keys exchanged where it is solved `by_keys`."""
        return self._replace(seqlen_q=self.seqlen_k, seqlen_k=self.seqlen_q) if by_keys else self

    @property
    def is_empty(self) -> bool:
        return 0 in (self.batch, self.seqlen_q, self.seqlen_k)

    @property
    def by_variable(self) -> dict[str, int]:
        return {"b": self.batch, "h": self.heads.q, "q": self.seqlen_q, "kv": self.seqlen_k}

    @property
    def totals(self) -> tuple[int, int]:
        """The numbers of rows and keys that the slices of all entries span, both below 2**30. Raises ValueError for
        more."""
        rows = self.entries * self.seqlen_q
        keys = self.batch * self.heads.kv * self.seqlen_k
        heads = " * heads" if self.heads != (1, 1) else ""
        for name, total in (("seqlen_q", rows), ("seqlen_k", keys)):
            if isinstance(total, int) and total >= MAX_SEQLEN:
                raise ValueError(f"`batch{heads} * {name}` must be below 2**30, got {total}")
        return rows, keys

    @property
    def blocks_q(self) -> int:
        """Of an entry, of `BLOCK` queries each."""
        return -(-self.seqlen_q // BLOCK)

    @property
    def blocks_k(self) -> int:
        return -(-self.seqlen_k // BLOCK)

    @property
    def num_blocks(self) -> int:
        return self.entries * self.blocks_q * self.blocks_k

    def place(self, number: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Batch entry, head, first query and first key of blocks, which are numbered in that order."""
        line, key = number // self.blocks_k, number % self.blocks_k
        entry, row = line // self.blocks_q, line % self.blocks_q
        return entry // self.heads.q, entry % self.heads.q, row * BLOCK, key * BLOCK
