"""The functions of a score program as graphs of ATen's operators: traced once,
for every language that a kernel writes them in."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.fx import Graph

from magi_compile import _compat
from magi_compile.functions.names import INDICES
from magi_compile.functions.text import parameters
from magi_compile.score.program import ScoreProgram


class FunctionGraph(NamedTuple):
    """A function of a program: its operators, not to be changed, and the names of what it takes,
    in the order of placeholders."""

    graph: Graph
    names: list[str]


class ScoreGraphs:
    """The functions of one program, for captured tensors of these `dtypes`, each traced when it is first asked for."""

    def __init__(self, program: ScoreProgram, dtypes: Sequence[torch.dtype]):
        self._functions = program.functions
        self._mode = _compat.symbolic_fake_mode()
        kinds = {
            **dict.fromkeys(("score", "g"), torch.float32),
            **dict.fromkeys(INDICES, torch.int32),
            **{look.name: dtypes[look.table] for look in program.looks},
        }
        with self._mode:
            self._examples: dict[str, Any] = {
                name: torch.empty((), dtype=dtype, device="cpu") for name, dtype in kinds.items()
            }
        for name in (f"s{i}" for i in range(program.num_symbols)):
            self._examples[name] = _compat.symbolic_int(self._mode, name)
        self._known: dict[str, FunctionGraph] = {}

    def of(self, name: str) -> FunctionGraph:
        """The function `name`."""
        if name not in self._known:
            function = self._functions[name]
            names = parameters(function)
            traced = _compat.traced_to_aten(
                lambda *args: function(*args),
                [self._examples[each] for each in names],
                self._mode,
                decompose=True,
            )
            self._known[name] = FunctionGraph(traced.graph, names)
        return self._known[name]


@lru_cache(maxsize=256)
def score_graphs(program: ScoreProgram, dtypes: tuple[torch.dtype, ...]) -> ScoreGraphs:
    """The graphs of a program for captured tensors of these dtypes."""
    return ScoreGraphs(program, dtypes)
