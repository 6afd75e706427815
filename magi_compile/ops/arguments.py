"""The arguments of the ops of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Numbering(NamedTuple):
    """The numbering of packed rows, for score programs and for tensors by entries of the batch.

    Attributes:
        batch: number of batch entries.
        nheads: of queries.
        seqlen_q: rows of a batch entry.
        seqlen_k: keys of a batch entry.
        by_head: whether each head is a batch entry of its own: packed rows have one head, and row r is of
            `r // seqlen_q`, which is `b * nheads + h`.
    """

    batch: int
    nheads: int
    seqlen_q: int
    seqlen_k: int
    by_head: int

    @classmethod
    def of(cls, numbering: Sequence[int] | None) -> Numbering:
        """The argument of an op by name; raises ValueError if it has not one number for each field."""
        if len(numbering or ()) != len(cls._fields):
            given = list(numbering or ())
            raise ValueError(f"`numbering` must be [{', '.join(cls._fields)}], got {given}")
        return cls(*(numbering or ()))


class AttentionOptions(NamedTuple):
    """The arguments of the ops behind their tensors, in the order of their schemas.

    Attributes:
        slices: q_ranges, k_ranges and mask_types, or nothing where the plan says all.
        plan: packed, or nothing where the op is to find it.
        softmax_scale: factor of the scores.
        softcap: 0.0 for none.
        kernel: its name; "" where the op is to choose.
        bits: the bit blocks of the slices.
        tables: the tensors that the score program captures.
        symbols: the ints that it captures.
        score: the text of the score program; "" for none.
        numbering: see `Numbering`; empty where neither a score program nor `by_entry` needs it.
        by_entry: whether out is `[batch, nheads, seqlen_q, head_dim_v]`; q, k and v are then like that, or packed.
        return_max_scores: whether the largest score of each row is asked for.
    """

    slices: Sequence[Tensor]
    plan: Sequence[Tensor]
    softmax_scale: float
    softcap: float
    kernel: str
    bits: Tensor | None = None
    tables: Sequence[Tensor] | None = None
    symbols: Sequence[int] = ()
    score: str = ""
    numbering: Sequence[int] = ()
    by_entry: bool = False
    return_max_scores: bool = False

    def short(self) -> tuple[Any, ...]:
        """These arguments without the last ones that say nothing: each costs time in every call."""
        return _short(self)


class AttentionBackwardOptions(NamedTuple):
    """The arguments of the backward behind its tensors, in the order of its schema; see `AttentionOptions`.

    Attributes:
        deterministic: whether results have to repeat bit for bit.
        wanted: the numbers of the captured tensors whose gradients are asked for.
    """

    slices: Sequence[Tensor]
    plan: Sequence[Tensor]
    softmax_scale: float
    softcap: float
    kernel: str
    deterministic: bool
    bits: Tensor | None = None
    tables: Sequence[Tensor] | None = None
    symbols: Sequence[int] = ()
    score: str = ""
    numbering: Sequence[int] = ()
    wanted: Sequence[int] = ()

    @property
    def of_forward(self) -> AttentionOptions:
        """The options of the forward that it belongs to, of packed tensors."""
        common = {x: getattr(self, x) for x in AttentionOptions._fields if x in self._fields}
        return AttentionOptions(**common)

    def short(self) -> tuple[Any, ...]:
        """As `AttentionOptions.short`."""
        return _short(self)


def _short(options: AttentionOptions | AttentionBackwardOptions) -> tuple[Any, ...]:
    return short(options, len(options) - len(options._field_defaults))


def short(arguments: Sequence[Any], least: int) -> tuple[Any, ...]:
    """`arguments` without the last ones that are None, False or empty, but the first `least`."""
    number = len(arguments)
    while number > least and _says_nothing(arguments[number - 1]):
        number -= 1
    return tuple(arguments[:number])


def _says_nothing(x: Any) -> bool:
    return x is None or x is False or (isinstance(x, (str, list, tuple)) and not x)
