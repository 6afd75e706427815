"""What the results of every benchmark say of themselves, and the two files they are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from magi_bench.results import provenance
from magi_bench.results.rows import write_record as write

__all__ = ["context", "write"]


def context(**more: Any) -> dict[str, Any]:
    """The machine, its software, the command, and `more`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return provenance.describe(device, _command()) | provenance.versions() | more


def _command() -> list[str]:
    """As it was typed, but for the folder of `--output`, which is nobody's but the machine's."""
    command = ["python", *sys.argv]
    for at, argument in enumerate(command[:-1]):
        if argument == "--output":
            command[at + 1] = f"benchmarks/results/{Path(command[at + 1]).name}"
    return command
