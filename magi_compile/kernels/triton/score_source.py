"""Triton code of a score program: its ATen operations, each as an expression of Triton's.

Three functions, of blocks of scores `[rows, cols]` and of indices that fit them: `scores` gives the new scores,
`slopes` the gradients of the old ones, `add_gradients` adds those of the look-ups to fp32 totals. Every look-up stays
inside its tensor: what is out of bounds reads 0 at hidden pairs, and is an error at visible ones where Triton checks
assertions (`TRITON_DEBUG=1`).
"""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from magi_compile.functions.names import INDICES
from magi_compile.functions.text import parameters
from magi_compile.kernels.triton.score_expressions import NoTritonCode, Operand, expression
from magi_compile.score.graphs import score_graphs
from magi_compile.score.program import Look, ScoreCall, ScoreProgram

SCORE_ARGUMENTS = ("score", *INDICES)


class ScoreFunctions(NamedTuple):
    """Triton functions of a program."""

    scores: Any = None
    slopes: Any = None
    add_gradients: Any = None


class KernelArguments(NamedTuple):
    """The arguments of the kernels for a score program; those of a call without one are None.

    Attributes:
        numbering: seqlen_q, seqlen_k and how many heads are batch entries.
        captured: the captured tensors, contiguous; the sizes of their dimensions, one behind the other; and the
            captured ints.
        functions: the generated ones.
        totals: the sums to which gradients of captured tensors are added, empty where none is wanted; None if of no
            tensor.
    """

    numbering: tuple[int, int, int] | None = None
    captured: tuple[tuple[Any, ...], tuple[int, ...], tuple[int, ...]] | None = None
    functions: ScoreFunctions = ScoreFunctions()
    totals: tuple[Tensor, ...] | None = None


def score_arguments(score: ScoreCall | None) -> KernelArguments:
    """The arguments for a program and its `sums`."""
    if score is None:
        return KernelArguments()
    program, tables, symbols, seqlen_q, seqlen_k, nheads, sums = score
    dtypes, ranks = tuple(x.dtype for x in tables), tuple(x.dim() for x in tables)
    functions = score_functions(program.text, dtypes, ranks, tuple(sums))
    sizes = tuple(size for table in tables for size in table.shape)
    # A tuple that would be empty has something in it that nobody reads.
    captured = (tuple(map(_as_memory, tables)) or (1,), sizes or (1,), tuple(symbols) or (1,))
    totals = None
    if sums:
        nothing = next(iter(sums.values())).new_empty(0)
        totals = tuple(sums.get(i, nothing) for i in range(len(tables)))
    return KernelArguments(
        (max(1, seqlen_q), max(1, seqlen_k), nheads), captured, functions, totals
    )


def _as_memory(table: Tensor) -> Tensor:
    table = table.detach().contiguous()
    return table.view(torch.uint8) if table.dtype == torch.bool else table


@lru_cache(maxsize=256)
def score_functions(
    text: str, dtypes: tuple[torch.dtype, ...], ranks: tuple[int, ...], wanted: tuple[int, ...]
) -> ScoreFunctions:
    """The functions of the program of this `text`, which Triton compiles into its kernels, for captured tensors of
    these `dtypes` and numbers of dimensions, of which those `wanted` get gradients; no `add_gradients` where there is
    none to add. Raises NoTritonCode where an operation is not written in Triton."""
    source = score_source(text, dtypes, ranks, wanted)
    name = f"<score program {abs(hash(source)):x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module: dict[str, Any] = {"__name__": __name__}
    exec(compile(source, name, "exec"), module)
    return ScoreFunctions(*(module.get(field) for field in ScoreFunctions._fields))


def score_source(
    text: str, dtypes: Sequence[torch.dtype], ranks: Sequence[int], wanted: Sequence[int]
) -> str:
    """The text of the functions."""
    program = ScoreProgram.parse(text)
    head = "import triton\nimport triton.language as tl\n\n\n"
    arguments = f"{', '.join(SCORE_ARGUMENTS)}, shown, captured"
    writer = _TritonWriter(program, dtypes, ranks)
    gradients = [look for look in program.looks if look.table in wanted]
    gradients = [look for look in gradients if look.derivative in program.functions]
    functions = [
        (f"scores({arguments})", [*writer.look_ups("score"), *writer.result("score")]),
        (f"slopes(g, {arguments})", [*writer.look_ups("d_score"), *writer.result("d_score")]),
    ]
    if gradients:
        added = [
            *writer.look_ups(*(look.derivative for look in gradients), taken=gradients),
            *(line for look in gradients for line in writer.gradient(look)),
        ]
        functions.append((f"add_gradients(totals, g, {arguments})", added))
    first = "    tables, sizes, symbols = captured\n"
    return head + "\n\n".join(
        f"@triton.jit\ndef {name}:\n{first}{''.join(lines)}" for name, lines in functions
    )


class _TritonWriter:
    def __init__(self, program: ScoreProgram, dtypes: Sequence[torch.dtype], ranks: Sequence[int]):
        self.program, self.dtypes, self.ranks = program, dtypes, ranks
        self.first = [sum(ranks[:i]) for i in range(len(ranks))]  # among the sizes
        self.graphs = score_graphs(program, tuple(dtypes))
        self.count = 0

    def look_ups(self, *names: str, taken: Sequence[Look] = ()) -> list[str]:
        """Lines that load what these functions take, and all that is `taken`, and say from where."""
        needed = {look.name for look in taken}
        for name in names:
            if name in self.program.functions:
                needed |= set(parameters(self.program.functions[name]))
        for look in reversed(self.program.looks):
            if look.name in needed:
                for name in look.indices:
                    needed |= set(parameters(self.program.functions[name]))
        lines = [f"    s{i} = symbols[{i}]\n" for i in range(self.program.num_symbols)]
        for look in self.program.looks:
            if look.name not in needed:
                continue
            place, inside = "0", []
            for dim, name in enumerate(look.indices):
                result, body = self.body(name)
                size = f"sizes[{self.first[look.table] + dim}]"
                index = f"{look.name}_{dim}"
                lines += body
                lines.append(f"    {index} = ({result}).to(tl.int64)\n")
                lines.append(f"    {index} = tl.where({index} < 0, {index} + {size}, {index})\n")
                inside.append(f"({index} >= 0) & ({index} < {size})")
                place = f"({place} * {size} + {index})" if dim else index
            pointer = f"tables[{look.table}]"
            if not inside:
                lines.append(f"    {look.name} = tl.load({pointer})\n")
            else:
                lines.append(f"    {look.name}_in = {' & '.join(inside)}\n")
                lines.append(f"    {look.name}_at = {place}\n")
                lines.append(
                    f"    tl.device_assert({look.name}_in | (shown == 0), 'a score_mod looks up what "
                    "is out of bounds')\n"
                )
                lines.append(
                    f"    {look.name} = tl.load({pointer} + {look.name}_at, mask={look.name}_in, other=0)\n"
                )
            if self.dtypes[look.table] == torch.bool:
                lines.append(f"    {look.name} = {look.name} != 0\n")
        return lines

    def result(self, name: str) -> list[str]:
        """Lines that return the value of a function as a block in fp32; one that is not there is zero."""
        if name not in self.program.functions:
            return ["    return tl.zeros_like(score)\n"]
        result, lines = self.body(name)
        return [*lines, f"    return ({result}).to(tl.float32) + tl.zeros_like(score)\n"]

    def gradient(self, look: Look) -> list[str]:
        """Lines that add the gradients of a look-up to those of its tensor."""
        result, lines = self.body(look.derivative)
        value = f"({result}).to(tl.float32) + tl.zeros_like(score)"
        lines.append(f"    value = tl.where(shown, {value}, 0.0)\n")
        total = f"totals[{look.table}]"
        if not look.indices:
            added = f"{total}, tl.sum(tl.sum(value, 1), 0)"
            return [*lines, f"    tl.atomic_add({added}, sem='relaxed')\n"]
        at, inside = f"{look.name}_at", f"{look.name}_in"
        axis = self.constant_axis(look)
        if axis is not None:
            # Of one place along an axis there is one addition: fewer of them, and rounded less often.
            lines.append(f"    value = tl.sum(value, {axis}, keep_dims=True)\n")
            at, inside = (
                f"{at} + tl.zeros_like(value).to(tl.int64)",
                f"{inside} & (tl.zeros_like(value) == 0)",
            )
        else:
            at, inside = f"{at} + tl.zeros_like(score).to(tl.int64)", f"{inside} & shown"
        added = f"{total} + {at}, value, mask={inside}"
        return [*lines, f"    tl.atomic_add({added}, sem='relaxed')\n"]

    def constant_axis(self, look: Look) -> int | None:
        """Along which axis of a block, whose rows are queries, a look-up is the same."""
        names: set[str] = set()
        waiting = [look]
        while waiting:
            taken = [parameters(self.program.functions[f]) for f in waiting.pop().indices]
            names.update(*taken)
            waiting += [x for x in self.program.looks if any(x.name in found for found in taken)]
        if "score" in names:
            return None
        if "kv" not in names:
            return 1
        return 0 if not names & {"b", "h", "q"} else None

    def body(self, name: str) -> tuple[str, list[str]]:
        """The value of a function as an expression, behind these lines."""
        graph, names = self.graphs.of(name)
        known: dict[Node, str] = {}
        lines = []
        for node in graph.nodes:
            if node.op == "placeholder":
                known[node] = names[len(known)]
            elif node.op == "call_function":
                self.count += 1
                known[node] = f"x{self.count}"
                lines.append(f"    x{self.count} = {expression(node, known)}\n")
            elif node.op == "output":
                return Operand(node.args[0], known).in_dtype(None), lines
            else:
                raise NoTritonCode(f"`{node.op} {node.target}` is not written in Triton")
        raise AssertionError(graph)
