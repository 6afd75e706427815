"""The arguments of the ops of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Numbering(NamedTuple):
    """The numbering of packed rows, for score programs and for tensors by entries of the batch."""

    batch: int  # number of batch entries
    nheads: int  # of queries
    seqlen_q: int  # rows of a batch entry
    seqlen_k: int  # keys of a batch entry
    by_head: int  # each head is a batch entry: packed rows have one head, row r is of `r // seqlen_q = b * nheads + h`

    @classmethod
    def of(cls, numbering: Sequence[int] | None) -> Numbering:
        """The argument of an op by name; raises ValueError if it has not one number for each field."""
        if len(numbering or ()) != len(cls._fields):
            given = list(numbering or ())
            raise ValueError(f"`numbering` must be [{', '.join(cls._fields)}], got {given}")
        return cls(*(numbering or ()))


class AttentionOptions(NamedTuple):
    """The arguments of the ops behind their tensors, in the order of the forward's schema, and the two of a backward
    alone."""

    slices: Sequence[
        Tensor
    ]  # q_ranges, k_ranges and mask_types, or nothing where the plan says all
    plan: Sequence[Tensor]  # packed, or nothing where the op is to find it
    softmax_scale: float
    softcap: float  # 0.0 for none
    kernel: str  # "" where the op is to choose
    bits: Tensor | None = None  # the bit blocks of the slices
    tables: Sequence[Tensor] | None = None  # that the score program captures
    symbols: Sequence[int] = ()  # likewise
    score: str = ""  # the text of the score program
    numbering: Sequence[
        int
    ] = ()  # see `Numbering`; empty where neither a score program nor `by_entry` needs it
    # Out is `[batch, nheads, seqlen_q, head_dim_v]`; q, k and v are then like that, or packed.
    by_entry: bool = False
    return_max_scores: bool = False
    deterministic: bool = False  # results have to repeat bit for bit
    wanted: Sequence[int] = ()  # the numbers of the captured tensors whose gradients are asked for

    @classmethod
    def of_backward(cls, *given: Any) -> AttentionOptions:
        """The arguments of a backward of packed tensors: `deterministic` behind the kernel, and `wanted` in the place
        of `by_entry`."""
        options = cls(*given[:5], *given[6:])
        wanted: Any = options.by_entry
        return options._replace(by_entry=False, deterministic=given[5], wanted=wanted or ())

    def short(self) -> tuple[Any, ...]:
        """Those of a forward, without the last ones that say nothing: each costs time in every call."""
        return short(self[:12], 5)

    def short_of_backward(self) -> tuple[Any, ...]:
        """Those of a backward, likewise."""
        return short((*self[:5], self.deterministic, *self[5:10], self.wanted), 6)


def short(arguments: Sequence[Any], least: int) -> tuple[Any, ...]:
    """`arguments` without the last ones that are None, False or empty, but the first `least`."""
    number = len(arguments)
    while number > least and _says_nothing(arguments[number - 1]):
        number -= 1
    return tuple(arguments[:number])


def _says_nothing(x: Any) -> bool:
    return x is None or x is False or (isinstance(x, (str, list, tuple)) and not x)
