"""ScoreProgram: a score_mod as one string, with its derivatives,
for kernels that run it on tiles or generate code from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from magi_compile.functions.text import functions, parameters

_END_OF_LINE = ";; "
_UNSAFE = re.compile(r"[#`;\s]+")
_LOOK = re.compile(r"l(\d+)_t(\d+)")
_SYMBOL = re.compile(r"s(\d+)")


class UnsupportedScoreModError(NotImplementedError):
    """A score_mod is not what can be lowered; the message says why."""


class Look(NamedTuple):
    """A value that a score_mod looks up in a captured tensor: `t0[q, h]`, or `t0` itself where that is a number.

    Attributes:
        name: `l0_t2`, the first one, of the tensor `t2`.
        table: the number of the tensor.
        indices: the names of the functions that say where, one for each of its dimensions.
    """

    name: str
    table: int
    indices: tuple[str, ...]

    @property
    def derivative(self) -> str:
        """The name of the function that gives the gradient of the value."""
        return f"d_{self.name}"


@dataclass(frozen=True)
class ScoreProgram:
    """A score_mod as functions of numbers: of `score`, `b`, `h`, `q`, `kv`, captured ints `s0, s1, ...` and values
    `l0_t0, l1_t2, ...` that it looks up in captured tensors `t0, t1, ...`. All are PyTorch's operations on tensors of
    no dimensions; `score` is fp32 and the indices are int32.

        score + slopes[h] * (kv - q);; def score(score, q, kv, l0_t0):;;     x5 = torch.ops.aten.sub.Tensor(kv, q);; ...

    `score` is the new score. `l0_t0_1` is the index of the first look-up in the second dimension of `t0`; it may depend
    on look-ups of lower numbers. `d_score` and `d_l0_t0` are the gradients of the score and of the look-up, of the same
    and of `g`, the gradient of the new score; one that is always zero has no function. All is one line, because
    Inductor writes the arguments of an op into a comment of the code that it makes.

    Attributes:
        title: the score_mod for readers.
        code: the functions, see `functions/text.py`.
    """

    title: str
    code: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", _UNSAFE.sub(" ", self.title).strip())

    def __str__(self) -> str:
        return self.title

    @property
    def text(self) -> str:
        """All of it, for `parse`."""
        return _END_OF_LINE.join((self.title, *self.code.splitlines()))

    @staticmethod
    @lru_cache(maxsize=1024)
    def parse(text: str) -> ScoreProgram:
        """Reads the `text` of a program. Raises ValueError where it is none."""
        title, *lines = text.split(_END_OF_LINE)
        program = ScoreProgram(title, "".join(f"{line}\n" for line in lines))
        if not any(line.startswith("def score(") for line in lines):
            raise ValueError(f"`program` must have a function `score`, got {text!r}")
        return program

    @cached_property
    def functions(self) -> Mapping[str, Callable[..., Any]]:
        """The functions of `code`, by name."""
        return functions(self.code)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the arguments of its functions."""
        return frozenset(name for f in self.functions.values() for name in parameters(f))

    @cached_property
    def looks(self) -> tuple[Look, ...]:
        """The look-ups, each behind those that its indices depend on."""
        found = sorted(
            (int(match[1]), int(match[2])) for match in map(_LOOK.fullmatch, self.names) if match
        )
        looks = []
        for number, table in found:
            name = f"l{number}_t{table}"
            count = sum(f.startswith(f"{name}_") for f in self.functions)
            looks.append(Look(name, table, tuple(f"{name}_{dim}" for dim in range(count))))
        return tuple(looks)

    @cached_property
    def differentiable_tables(self) -> tuple[int, ...]:
        """The numbers of the captured tensors that may have gradients other than zero."""
        return tuple(
            sorted({look.table for look in self.looks if look.derivative in self.functions})
        )

    @cached_property
    def num_symbols(self) -> int:
        """The number of captured ints that it takes."""
        return max((int(m[1]) for m in map(_SYMBOL.fullmatch, self.names) if m), default=-1) + 1


class ScoreCall(NamedTuple):
    """A score program with what it is run on, as kernels take it.

    Attributes:
        program: what becomes of the scores.
        tables: the captured tensors, in the order of their numbers.
        symbols: the captured ints.
        seqlen_q: rows of a batch entry: row r of the packed queries is query `r % seqlen_q`.
        seqlen_k: keys of a batch entry.
        nheads: 1 where the heads of the packed tensors are those of the score_mod; else how many heads of queries there
            are, each of which is a batch entry of its own: `r // seqlen_q` is `b * nheads + h`.
        sums: zeros of the shapes of captured tensors, by their numbers, to which a backward adds their gradients: fp32
            or wider.
    """

    program: ScoreProgram
    tables: Sequence[Tensor]
    symbols: Sequence[int]
    seqlen_q: int
    seqlen_k: int
    nheads: int = 1
    sums: Mapping[int, Tensor] = {}

    def entry(self, row: Any) -> tuple[Any, Any, Any]:
        """Batch entry, head among those that are batch entries, and query of packed rows."""
        entry = row // self.seqlen_q
        return entry // self.nheads, entry % self.nheads, row % self.seqlen_q
