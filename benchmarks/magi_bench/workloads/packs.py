"""Packed documents for models: tokens, what follows each, and the document of each."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from magi_bench.settings import Settings
from magi_bench.workloads import lengths

IGNORED = -1


class Pack(NamedTuple):
    """`[1, S]` tokens and targets, `IGNORED` behind a document's last token; `[S]` the document of each;
    their lengths."""

    tokens: Tensor
    targets: Tensor
    document: Tensor
    lengths: list[int]


def pack(
    settings: Settings, total: int, turn: int, device: torch.device | str, sampler: str
) -> Pack:
    """The pack of a turn, the same for everybody."""
    generator = torch.Generator().manual_seed(settings.seed + turn)
    tokens = torch.randint(settings.vocab, (1, total), generator=generator).to(device)
    counts = lengths.sample(sampler, total, settings.seed + turn)
    document = document_of(counts).to(device)
    is_followed = F.pad(document[1:] == document[:-1], (0, 1))
    return Pack(tokens, torch.where(is_followed, tokens.roll(-1, 1), IGNORED), document, counts)


def document_of(counts: list[int]) -> Tensor:
    """Int64 `[S]` on the CPU: the document of each token, of so many tokens each."""
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
