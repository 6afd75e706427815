"""Tensors, documents and masks of one length, and the results that all contenders are held to."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from magi_bench.kernel.gate import exact_and_plain
from magi_bench.own_code import with_own_code
from magi_bench.step.cases import Settings
from magi_bench.workloads import lengths, workload
from magi_bench.workloads.cells import Cell
from magi_bench.workloads.llama import causal_within
from magi_bench.workloads.workload import Inputs, Workload
from magi_compile.masks import create_block_mask

SAMPLER = "short"


def causal_within_by_magi(document: Tensor) -> BlockMask:
    """What `causal_within` makes, by our `create_block_mask`."""

    def document_causal(b, h, q, kv):
        return (document[q] == document[kv]) & (q >= kv)

    seqlen = len(document)
    return create_block_mask(document_causal, None, None, seqlen, seqlen, document.device)


MAKERS = {"pytorch": causal_within, "magi": causal_within_by_magi}


class Problem:
    """Attention of packed causal documents. Turn 0 has the documents of rows that always see the same ones."""

    def __init__(self, settings: Settings, tokens: int):
        self.settings, self.tokens = settings, tokens
        self._compiled: dict[Hashable, Any] = {}
        self._results: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self.inputs = lru_cache(None)(self._inputs)
        self.block_mask = lru_cache(None)(self.new_block_mask)

    def workload(self, layer: int = 0) -> Workload:
        """As kernels of magi-bench get it; every layer has q, k and v of its own, and all have one mask."""
        settings = self.settings
        cell = Cell(
            "kernel",
            "document_causal",
            self.tokens,
            settings.nheads_q,
            settings.nheads_kv,
            settings.head_dim,
            settings.dtype,
            SAMPLER,
            seed=settings.seed,
        )
        made = workload.build(cell, settings.device)
        return replace(made, cell=replace(cell, seed=settings.seed + layer))

    def _inputs(self, layer: int) -> Inputs:
        return self.workload(layer).inputs(self.settings.device)

    def lengths(self, turn: int) -> list[int]:
        """Of the documents of a turn."""
        return lengths.sample(SAMPLER, self.tokens, self.settings.seed + turn)

    def document(self, turn: int) -> Tensor:
        """Int `[tokens]`: the document of each token."""
        counts = self.lengths(turn)
        document = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        return document.to(self.settings.device)

    def new_block_mask(self, turn: int, maker: str = "pytorch") -> BlockMask:
        """The mask of a turn, made by one of `MAKERS`; `block_mask` keeps it."""
        return MAKERS[maker](self.document(turn))

    def reference(self, layer: int) -> tuple[list[Tensor], list[Tensor]]:
        """Out, dq, dk and dv of turn 0, packed: in fp64, and by plain PyTorch in `dtype`; document by document."""
        if layer not in self._results:
            inputs, begin = self.inputs(layer), 0
            parts = []
            for length in self.lengths(0):
                cell = replace(self.workload().cell, mask="causal", lengths="whole", seqlen=length)
                rows = slice(begin, begin + length)
                document = Inputs(*(x[rows] for x in inputs))
                parts.append(exact_and_plain(workload.build(cell), document))
                begin += length
            exact, plain = (
                [torch.cat(x) for x in zip(*side, strict=True)] for side in zip(*parts, strict=True)
            )
            self._results[layer] = exact, plain
        return self._results[layer]

    def forget_reference(self) -> None:
        """Gives the memory of `reference` back."""
        self._results.clear()

    def compiled(self, key: Hashable, function: Callable[..., Any], **options: Any) -> Any:
        """`torch.compile(function)`, one for each key, with code of its own for Dynamo to guard."""
        if key not in self._compiled:
            self._compiled[key] = torch.compile(with_own_code(function), dynamic=False, **options)
        return self._compiled[key]
