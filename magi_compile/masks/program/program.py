"""MaskProgram: a whole mask as one string, and what it needs to be evaluated."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from magi_compile.functions.text import functions, parameters
from magi_compile.masks.arguments import MAX_SEQLEN
from magi_compile.masks.errors import UnsupportedMaskError
from magi_compile.masks.expr.expr import (
    TRUE,
    Expr,
    ExprError,
    build,
    exchanged,
    unsupported,
    without_marks,
)
from magi_compile.masks.expr.parse import parse
from magi_compile.masks.solver.key_sets import MAX_INTERVALS, KeySet, Refusal
from magi_compile.masks.solver.periodic import least_period, unroll
from magi_compile.masks.solver.solve import solve

_UNSAFE_IN_NAME = re.compile(r"[#`;\s]+|,\s*(?=t\d+: )")
_END_OF_LINE = ";; "
_TABLE = re.compile(r"t\d+")
# In place of an expression, where there is none: the function of this name says all.
_BY_CODE = "mask"
_BY_KEYS = "of each key: "  # in front of an expression that is solved for q


def _within_64_bits(keys: KeySet) -> KeySet:
    """Raises UnsupportedMaskError where a tensor is compared with a number that 64 bits do not hold; for keys and rows,
    which are small, the end of the 64 bits serves as well."""
    for expr in (expr for lane in keys.lanes for expr in (lane.lo, lane.hi, lane.keys)):
        large = [
            n.args[0] for n in expr.walk() if n.op == "int" and not -(2**63) <= n.args[0] < 2**63
        ]
        if large and any(node.op == "table" for node in expr.walk()):
            raise UnsupportedMaskError(
                [f"a tensor is compared with {large[0]}, which 64 bits do not hold"]
            )
    return keys


class BlockLookUp(NamedTuple):
    """The look-up of a mask of blocks, `t0[h, t1[q], t2[kv]]`, and what is said beside it.

    Attributes:
        look_up: of a captured tensor, at one index of a query, one of a key, and others of neither.
        q_dim: the dimension that has the index of a query.
        k_dim: that of a key.
        beside: the rest of the mask, which has intervals that all heads share.
        marked: the look-up with the marks of what has to fit its dtype.
    """

    look_up: Expr
    q_dim: int
    k_dim: int
    beside: MaskProgram
    marked: Expr

    @property
    def variables(self) -> frozenset[str]:
        """The variables of the indices that are neither of a query nor of a key, which may be b and h."""
        others = [
            index
            for dim, index in enumerate(self.look_up.args[1:])
            if dim not in (self.q_dim, self.k_dim)
        ]
        return frozenset().union(*(index.variables for index in others))


def _conjuncts(expr: Expr) -> list[Expr]:
    if expr.op != "and":
        return [expr]
    return [part for child in expr.children for part in _conjuncts(child)]


@dataclass(frozen=True)
class MaskProgram:
    """A mask as an expression of b, q, kv, of tensors `t0, t1, ...` and captured ints `s0, s1, ...`.

    `program.text` and `MaskProgram.parse` are inverse. Tensors that have names carry them as a comment, behind which
    Python functions may stand: of the tensors that are not captured but computed, and of the mask_mod itself. All is
    one line, because Inductor writes the arguments of an op into a comment of the code that it makes:

        (t1[q] == t1[kv]) & (q >= kv)  # t0: docs, t1: docs.squeeze(0);; def t1(t0):;;     return t0.squeeze(0)

    Attributes:
        expr: the mask.
        names: what the user calls the tensors, for messages; may be shorter than `num_tables`.
        code: the functions, see `functions/text.py`.
        by_keys: whether it is solved for q: which rows see a key, and not which keys a row sees.
    """

    expr: Expr
    names: tuple[str, ...] = ()
    code: str = ""
    by_keys: bool = False

    def __post_init__(self) -> None:
        names = tuple(_UNSAFE_IN_NAME.sub(" ", name).strip() for name in self.names)
        object.__setattr__(self, "names", names)

    def __str__(self) -> str:
        """For readers: the expression and the names."""
        if self.expr.reasons:
            return self._headline("mask_mod(b, h, q, kv)")
        return self._headline(str(without_marks(self.expr)))

    @cached_property
    def text(self) -> str:
        """All of it, for `parse`."""
        expr = _BY_CODE if self.expr.reasons else str(self.expr)
        expr = f"{_BY_KEYS}{expr}" if self.by_keys else expr
        return _END_OF_LINE.join((self._headline(expr), *self.code.splitlines()))

    def _headline(self, text: str) -> str:
        if not self.names:
            return text
        names = ", ".join(f"t{i}: {name}" for i, name in enumerate(self.names))
        return f"{text}  # {names}"

    @staticmethod
    @lru_cache(maxsize=1024)
    def parse(text: str) -> MaskProgram:
        """Reads a program's `text`. Raises ExprError where it is none."""
        headline, *lines = text.split(_END_OF_LINE)
        body, has_names, comment = headline.partition("#")
        names: list[str] = []
        for item in re.split(r", (?=t\d+: )", comment.strip()) if has_names else ():
            label, _, name = item.strip().partition(": ")
            if label != f"t{len(names)}" or not name:
                raise ExprError(f"not a list of names: {comment.strip()!r}")
            names.append(name)
        by_keys, body = body.startswith(_BY_KEYS), body.removeprefix(_BY_KEYS)
        is_by_code = body.strip() == _BY_CODE
        expr = unsupported("it was no expression") if is_by_code else parse(body)
        code = "".join(f"{line}\n" for line in lines)
        return MaskProgram(expr, tuple(names), code, by_keys)

    @cached_property
    def functions(self) -> Mapping[str, Callable[..., Any]]:
        """The functions of `code`, by name."""
        return functions(self.code)

    @cached_property
    def columns(self) -> dict[int, Callable[..., Any]]:
        """The functions that compute tensors, by the numbers of these; higher than those of all captured tensors."""
        found = {int(name[1:]): f for name, f in self.functions.items() if _TABLE.fullmatch(name)}
        return dict(sorted(found.items()))

    @property
    def is_verifiable(self) -> bool:
        """True if the mask_mod itself is among the functions, for `masks/evaluation/verify.py` and `bit_blocks.py`."""
        return "mask" in self.functions

    def looks_at(self, index: str) -> bool:
        """True if the mask_mod, which is among the functions, looks at the index "b" or "h"."""
        return index in parameters(self.functions["mask"])

    @cached_property
    def differs_by_head(self) -> bool:
        """True if its key intervals, if it has some, depend on the head."""
        return "h" in self.expr.variables

    def require_one_mask(self) -> None:
        """Raises UnsupportedMaskError, with all reasons, where it has no key intervals that all heads share."""
        reasons = [*self.refusals]
        if self.differs_by_head:
            reasons.insert(
                0, "the mask depends on the head (h), and one mask for all heads is needed"
            )
        if reasons:
            raise UnsupportedMaskError(reasons)

    @cached_property
    def refusals(self) -> tuple[str, ...]:
        """Every reason why intervals, of each head if it depends on that, cannot express it; empty where they can."""
        try:
            _ = self.solved
        except UnsupportedMaskError as error:
            return tuple(error.reasons)
        return ()

    @cached_property
    def reads_tensors(self) -> bool:
        """True if it depends on captured tensors."""
        used = self.expr.tables
        if used - set(self.columns):
            return True
        read = self.functions.values() if self.expr.reasons else self.columns.values()
        names = (name for function in read for name in parameters(function))
        return any(_TABLE.fullmatch(name) for name in names)

    @cached_property
    def num_captures(self) -> int:
        """The number of captured tensors that it takes: one more than the highest number of one that its values depend
        on."""
        used = self.expr.tables
        for function in self.columns.values():
            used |= {int(name[1:]) for name in parameters(function) if _TABLE.fullmatch(name)}
        return max(used - set(self.columns), default=-1) + 1

    @cached_property
    def num_symbols(self) -> int:
        """The number of captured ints that it takes."""
        return max((n.args[0] for n in self.expr.walk() if n.op == "symbol"), default=-1) + 1

    @cached_property
    def block_look_up(self) -> BlockLookUp | None:
        """The look-up of the block of a query and that of a key together in a captured tensor, if the mask is one, and
        intervals beside it; None for other masks."""
        if self.expr.reasons or self.by_keys:
            return None
        parts = _conjuncts(self.expr)
        together = [x for x in parts if x.op == "table" and {"q", "kv"} <= x.variables]
        if len(together) != 1:
            return None
        (look_up,) = together
        if look_up.args[0] in self.columns:  # no captured tensor, so that its shape needs a run
            return None
        dims = {"q": [], "kv": []}  # type: dict[str, list[int]]
        for dim, index in enumerate(look_up.args[1:]):
            for name in dims.keys() & index.variables:
                dims[name].append(dim)
                if index.variables - {"b", name}:
                    return None
        if any(len(found) != 1 for found in dims.values()):
            return None
        rest = TRUE
        for part in parts:
            rest = rest if part is look_up else build("and", rest, part)
        lines = self.code.splitlines(keepends=True)
        begin = next((i for i, x in enumerate(lines) if x.startswith("def mask(")), len(lines))
        end = next(
            (i for i, x in enumerate(lines) if i > begin and x.startswith("def ")), len(lines)
        )
        code = "".join(lines[:begin] + lines[end:])
        beside = replace(self, expr=rest, code=code)
        if beside.refusals or beside.differs_by_head:
            return None
        (q_dim,), (k_dim,) = dims["q"], dims["kv"]
        return BlockLookUp(without_marks(look_up), q_dim, k_dim, beside, look_up)

    # Rows and keys

    @cached_property
    def facing(self) -> Expr:
        """The mask as it is solved, for kv: with rows and keys exchanged where it is solved for q."""
        return exchanged(self.expr) if self.by_keys else self.expr

    @cached_property
    def ways(self) -> tuple[MaskProgram, ...]:
        """The same mask by rows and by keys, as far as intervals can express it, the one that takes less order of its
        data for granted first; `self` where they can in neither way.

        The rows that see a key are one interval where the keys that a row sees are many: in trees, whose tables say
        for each key up to which row it is seen.
        """
        if self.expr.reasons or not self.reads_tensors:
            return (self,)
        by_rows, by_keys = (replace(self, by_keys=by_keys) for by_keys in (False, True))
        if by_keys.refusals or by_keys.repeats:
            return (by_rows,)
        if by_rows.refusals:
            return (by_keys,)
        both = (by_rows, by_keys)
        return both if by_rows.num_orders <= by_keys.num_orders else both[::-1]

    @cached_property
    def num_orders(self) -> int:
        """In how many expressions it takes some order of the data for granted. Raises as `solved` does."""
        keys = self.solved
        promises = {*keys.required}.union(*(x.grouped + x.ordered for x in keys.lanes))
        held = {promise.holds for promise in promises}
        return len([x for x in held if x.op in ("is_sorted", "is_grouped")])

    @cached_property
    def solved(self) -> KeySet:
        """The keys of a row, as expressions, in lanes that may repeat along the keys; the rows of a key `by_keys`.
        Raises UnsupportedMaskError with all reasons."""
        try:
            return _within_64_bits(solve(without_marks(self.facing)))
        except UnsupportedMaskError as error:
            raise UnsupportedMaskError(
                [self.describe(reason) for reason in error.reasons]
            ) from None

    def keys(self, seqlen_k: int, symbols: Sequence[int] = ()) -> KeySet:
        """The key intervals of a row, as expressions, in lanes none of which repeats; `by_keys` the intervals of rows
        of a key. Raises UnsupportedMaskError with all reasons, and ValueError where a captured int by which keys
        repeat is not positive, or one that divides is zero."""
        if not self.repeats:
            return self.solved
        try:
            return unroll(self.solved, seqlen_k, tuple(symbols))
        except Refusal as refusal:
            raise UnsupportedMaskError([self.describe(str(refusal))]) from None

    @cached_property
    def repeats(self) -> bool:
        """True if the number of intervals depends on that of keys. Raises as `solved` does."""
        return any(lane.repeats for lane in self.solved.lanes)

    def max_intervals(
        self, seqlen_k: int | None = None, symbols: Sequence[int] | None = None
    ) -> int:
        """The largest number of key intervals that a row may see, without data; where the mask repeats along keys
        whose number is not known yet, or by captured ints that are not, `MAX_INTERVALS`. Raises as `keys` does."""
        if not self.repeats:
            return len(self.solved.lanes)
        if seqlen_k is None or (symbols is None and self.num_symbols):
            return MAX_INTERVALS
        return len(self.keys(seqlen_k, symbols or ()).lanes)

    def least_period(
        self, seqlen_k: int | None = None, symbols: Sequence[int] | None = None
    ) -> int | None:
        """The number of keys in the shortest periods of which a row may see several, where the mask repeats along the
        keys by `kv % length`; None where it does not, or where that is not known. The arguments are those of
        `max_intervals`."""
        if not self.repeats or (symbols is None and self.num_symbols):
            return None
        return least_period(self.solved, seqlen_k or MAX_SEQLEN, tuple(symbols or ()))

    @property
    def is_always_true(self) -> bool:
        """True if every row sees every key, whatever the data."""
        return self.expr == TRUE

    def describe(self, text: Expr | str) -> str:
        """A part of the mask as it is solved, or a text about it, with the captured tensors under the user's names."""
        found = self._described.get(text)
        if found is None:
            found = self._described[text] = self._describe(text)
        return found

    @cached_property
    def _described(self) -> dict[Expr | str, str]:
        return {}

    def _describe(self, text: Expr | str) -> str:
        def name(match: re.Match[str]) -> str:
            index = int(match[1])
            return self.names[index] if index < len(self.names) else match[0]

        if self.by_keys and isinstance(text, Expr):
            text = exchanged(text)
        return re.sub(r"\bt(\d+)\b", name, str(text))
