"""Tensors, documents and masks of one length, and the results that all contenders are held to."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from magi_bench.gate import exact_and_plain
from magi_bench.own_code import compiled
from magi_bench.settings import Settings
from magi_bench.workloads import lengths, workload
from magi_bench.workloads.llama import Pack, causal_within, document_of, pack
from magi_bench.workloads.workload import Inputs, Workload
from magi_compile.masks import create_block_mask

SAMPLER = "short"


class Way(NamedTuple):
    """A way of calling attention, a row of the table of `step`."""

    name: str  # on the command line and in result files
    group: str  # a name in `suite.GROUPS`
    label: str  # in reports
    # Who makes the mask: "pytorch" or "magi" (`create_block_mask`, outside of the graph and of the time), "graph"
    # (PyTorch's `create_block_mask` inside of the compiled function), or "at hand" (each contender's own form).
    mask: str
    is_new: bool = False  # other documents, and so another mask, in every call
    mode: str | None = None  # torch.compile's


MAKERS: dict[str, Callable[..., BlockMask]] = {
    "pytorch": causal_within,
    "magi": partial(causal_within, create=create_block_mask),
}


class Problem:
    """Attention of packed causal documents. Turn 0 has the documents of rows that always see the same ones."""

    def __init__(self, settings: Settings, tokens: int, ways: Mapping[str, Way]):
        self.settings, self.tokens, self.ways = settings, tokens, ways
        self._compiled: dict[Hashable, Any] = {}
        self._results: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self.inputs = lru_cache(None)(self._inputs)
        self.block_mask = lru_cache(None)(self.new_block_mask)

    def workload(self, layer: int = 0) -> Workload:
        """As kernels of magi-bench get it; every layer has q, k and v of its own, and all have one mask."""
        settings = self.settings
        case = settings.case("kernel", "document_causal", self.tokens, lengths=SAMPLER)
        made = workload.build(case, settings.device)
        return replace(made, case=replace(case, seed=settings.seed + layer))

    def _inputs(self, layer: int) -> Inputs:
        return self.workload(layer).inputs(self.settings.device)

    def lengths(self, turn: int) -> list[int]:
        """The lengths of the documents of a turn."""
        return lengths.sample(SAMPLER, self.tokens, self.settings.seed + turn)

    def document(self, turn: int) -> Tensor:
        """Int `[tokens]`: the document of each token."""
        return document_of(self.lengths(turn)).to(self.settings.device)

    def pack(self, turn: int) -> Pack:
        """The tokens of a step."""
        return pack(self.settings, self.tokens, turn, self.settings.device, SAMPLER)

    def new_block_mask(self, turn: int, maker: str = "pytorch") -> BlockMask:
        """The mask of a turn, made by one of `MAKERS`; `block_mask` keeps it."""
        return MAKERS[maker](self.document(turn))

    def reference(self, layer: int) -> tuple[list[Tensor], list[Tensor]]:
        """Out, dq, dk and dv of turn 0, packed: in fp64, and by plain PyTorch in `dtype`; document by document."""
        if layer not in self._results:
            inputs, begin = self.inputs(layer), 0
            parts = []
            for length in self.lengths(0):
                case = replace(self.workload().case, mask="causal", lengths="whole", seqlen=length)
                rows = slice(begin, begin + length)
                document = Inputs(*(x[rows] for x in inputs))
                parts.append(exact_and_plain(workload.build(case), document))
                begin += length
            exact, plain = (
                [torch.cat(x) for x in zip(*side, strict=True)] for side in zip(*parts, strict=True)
            )
            self._results[layer] = exact, plain
        return self._results[layer]

    def compiled(self, key: Hashable, function: Callable[..., Any], **options: Any) -> Any:
        """`torch.compile(function)`, one for each key, with code of its own for Dynamo to guard."""
        if key not in self._compiled:
            self._compiled[key] = compiled(function, **options)
        return self._compiled[key]
