"""The scores of a FlexAttention call: a scale and a soft-cap, which every kernel has, or a score program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from magi_compile import _compat
from magi_compile.kernels.scored import ScoreNeeds
from magi_compile.lowering.emit import Emitter, value_of
from magi_compile.lowering.flex_call import FlexCall, is_tensor
from magi_compile.ops.score_mod import ScoreMod, trace_score_mod
from magi_compile.score.program import ScoreProgram, UnsupportedScoreModError
from magi_compile.score.read import ARGUMENTS, ScoreRead, read_score_graph

NO_FACTORS = ScoreMod()


@dataclass(frozen=True)
class Scores:
    """The decision about the scores of a call.

    Attributes:
        factors: the scale and the soft-cap.
        read: the score program in place of these; None where they are all.
        wants_table_gradients: whether a captured tensor requires gradients.
        reasons: why neither is possible; empty where one is.
    """

    factors: ScoreMod = NO_FACTORS
    read: ScoreRead | None = None
    wants_table_gradients: bool = False
    reasons: tuple[str, ...] = ()

    @classmethod
    def of(cls, call: FlexCall) -> Scores:
        """Those of `call`."""
        try:
            return cls(trace_score_mod(call.score_mod, len(call.score_buffers)))
        except UnsupportedScoreModError:
            device = value_of(call.q).device
        captures = [value_of(buffer) for buffer in call.score_buffers]
        names = [_compat.source_name(x) for x in call.score_buffers if is_tensor(x)]
        try:
            read = read_score_graph(call.score_mod, captures, names, device)
            tensors = [x for x in captures if isinstance(x, torch.Tensor)]
            return cls(read=read, wants_table_gradients=any(x.requires_grad for x in tensors))
        except UnsupportedScoreModError as error:
            return cls(reasons=(str(error),))

    @property
    def program(self) -> ScoreProgram | None:
        return None if self.read is None else self.read.program

    @property
    def needs(self) -> ScoreNeeds | None:
        """The score program that a kernel has to run beside a scale and a soft-cap; None where these are all."""
        if self.read is None:
            return None
        program, dtypes, ranks = self.read.program, tuple(self.read.dtypes), tuple(self.read.ranks)
        return ScoreNeeds(program, dtypes, ranks, self.wants_table_gradients)

    def emit(self, emit: Emitter, call: FlexCall) -> tuple[list[Node], list[Any]]:
        """The tensors and the ints of the program: captured, or computed of nothing else in front of the call, where
        autograd sees it."""
        assert self.read is not None
        placeholders = call.score_mod.graph.find_nodes(op="placeholder")[len(ARGUMENTS) :]
        known: dict[Node, Any] = dict(zip(placeholders, call.score_buffers, strict=True))

        def emitted(node: Node) -> Any:
            if node not in known:
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), emitted)
                target: Any = node.target
                if node.op == "call_method":
                    target = getattr(torch.Tensor, target)
                known[node] = emit.call(target, *args, **kwargs)
            return known[node]

        return [emitted(node) for node in self.read.tables], [known[x] for x in self.read.symbols]
