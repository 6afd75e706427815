"""MaskProgram: a whole mask as one string, and what it needs to be evaluated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from magi_compile.masks.arithmetic import NARROW
from magi_compile.masks.expr import TRUE, Expr, ExprError, parse
from magi_compile.masks.key_sets import MAX_INTERVALS, KeySet, Refusal
from magi_compile.masks.repeats import least_piece, unroll
from magi_compile.masks.slices import MAX_SEQLEN
from magi_compile.masks.solve import UnsupportedMaskError, solve

_UNSAFE_IN_NAME = re.compile(r"[^\w.\[\]]+")


@dataclass(frozen=True)
class MaskProgram:
    """A mask as an expression of b, q, kv, of captured tensors `t0, t1, ...` and captured ints `s0, s1, ...`.

    `str(program)` and `MaskProgram.parse` are inverse; tensors that have names carry them as a comment:

        (q >= kv) & (t0[q] == t0[kv])  # t0: document_ids

    Attributes:
        expr: the mask.
        names: what the user calls the captured tensors, for messages; may be shorter than `num_tables`.
    """

    expr: Expr
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = tuple(_UNSAFE_IN_NAME.sub("_", name) for name in self.names)
        object.__setattr__(self, "names", names)

    def __str__(self) -> str:
        if not self.names:
            return str(self.expr)
        names = ", ".join(f"t{i}: {name}" for i, name in enumerate(self.names))
        return f"{self.expr}  # {names}"

    @staticmethod
    @lru_cache(maxsize=1024)
    def parse(text: str) -> MaskProgram:
        """Reads what `str(program)` wrote.

        Raises:
            ExprError: `text` is not a mask program.
        """
        body, has_names, comment = text.partition("#")
        names: list[str] = []
        for item in comment.split(",") if has_names else ():
            label, _, name = item.strip().partition(": ")
            if label != f"t{len(names)}" or not name:
                raise ExprError(f"not a list of names: {comment.strip()!r}")
            names.append(name)
        return MaskProgram(parse(body), tuple(names))

    @cached_property
    def num_tables(self) -> int:
        """How many captured tensors it takes: one more than the highest number in it."""
        return self._highest("table") + 1

    @cached_property
    def num_symbols(self) -> int:
        """How many captured ints it takes."""
        return self._highest("symbol") + 1

    def _highest(self, op: str) -> int:
        return max((node.args[0] for node in self.expr.walk() if node.op == op), default=-1)

    @cached_property
    def solved(self) -> KeySet:
        """The keys of a row, as expressions, in lanes that may repeat along the keys.

        Raises:
            UnsupportedMaskError: with all reasons.
        """
        try:
            return solve(self.expr)
        except UnsupportedMaskError as error:
            raise UnsupportedMaskError(
                [self.describe(reason) for reason in error.reasons]
            ) from None

    def keys(self, seqlen_k: int, symbols: Sequence[int] = ()) -> KeySet:
        """The key intervals of a row, as expressions.

        Args:
            seqlen_k: number of keys of a batch entry.
            symbols: the captured ints.

        Raises:
            UnsupportedMaskError: with all reasons.
            ValueError: a captured int by which keys repeat is not positive, or one that divides is zero.
        """
        if not self.repeats:
            return self.solved
        try:
            return unroll(self.solved, seqlen_k, tuple(symbols))
        except Refusal as refusal:
            raise UnsupportedMaskError([self.describe(str(refusal))]) from None

    @cached_property
    def repeats(self) -> bool:
        """Whether the number of intervals depends on that of keys. Raises as `solved` does."""
        return any(lane.repeats for lane in self.solved.lanes)

    def max_intervals(
        self, seqlen_k: int | None = None, symbols: Sequence[int] | None = None
    ) -> int:
        """How many key intervals a row may see; known without data. Raises as `keys` does.

        Args:
            seqlen_k: number of keys of a batch entry, None: not known yet.
            symbols: the captured ints, None: not known yet.
        """
        if not self.repeats:
            return len(self.solved.lanes)
        if seqlen_k is None or (symbols is None and self.num_symbols):
            return MAX_INTERVALS
        return len(self.keys(seqlen_k, symbols or ()).lanes)

    def least_piece(
        self, seqlen_k: int | None = None, symbols: Sequence[int] | None = None
    ) -> int | None:
        """How many keys lie in the shortest pieces of which a row may see several, where the mask repeats along the keys by
        `kv % length`; None where it does not, or where that is not known. The arguments are those of `max_intervals`."""
        if not self.repeats or (symbols is None and self.num_symbols):
            return None
        return least_piece(self.solved, seqlen_k or MAX_SEQLEN, tuple(symbols or ()))

    def table_reasons(self, tables: Sequence[Tensor]) -> list[str]:
        """Every reason why it can not look up `tables`, as far as their shapes and dtypes tell."""
        reasons = []
        for node in self.expr.walk():
            if node.op != "table":
                reasons += self._wrap_reasons(node, tables)
                continue
            tensor, text, count = tables[node.args[0]], self.describe(node), len(node.args) - 1
            if tensor.dim() != count:
                shape = list(tensor.shape)
                reasons.append(f"`{text}` uses {count} indices for a tensor of shape {shape}")
            if tensor.is_floating_point() or tensor.is_complex():
                reasons.append(f"`{text}` is {tensor.dtype}; masks are computed with integers")
        return reasons

    def _wrap_reasons(self, node: Expr, tables: Sequence[Tensor]) -> list[str]:
        """Why PyTorch would compute `node` modulo a power of two, which this program does not."""
        narrow = [
            child
            for child in node.children
            if child.op == "table" and tables[child.args[0]].dtype in NARROW
        ]
        others = [child for child in node.children if child not in narrow]
        if not narrow or any(other.op not in ("int", "bool") for other in others):
            return []
        dtype = tables[narrow[0].args[0]].dtype
        limits = torch.iinfo(dtype)
        is_cut = any(not limits.min <= other.args[0] <= limits.max for other in others)
        if not is_cut and node.op not in ("add", "sub", "mul", "neg", "abs"):
            return []
        return [
            f"`{self.describe(node)}` may wrap around in {dtype}; "
            "convert the captured tensor to torch.int32 before"
        ]

    @property
    def is_always_true(self) -> bool:
        """Whether every row sees every key, whatever the data."""
        return self.expr == TRUE

    def describe(self, text: Expr | str) -> str:
        """A part of the mask, or a text about it, with the captured tensors under the user's names."""

        def name(match: re.Match[str]) -> str:
            index = int(match[1])
            return self.names[index] if index < len(self.names) else match[0]

        return re.sub(r"\bt(\d+)\b", name, str(text))
