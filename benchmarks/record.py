"""What the results of every benchmark say of themselves, and the two files they are."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from magi_compile.bench import provenance

PEERS = ("triton", "flash-attn-4", "nvidia-cutlass-dsl", "nvidia-cudnn-frontend")


def context(**more: Any) -> dict[str, Any]:
    """The machine, its software, the command, and `more`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return provenance.describe(device, _command()) | _versions() | more


def write(output: Path | None, context: dict[str, Any], rows: list[dict], markdown: str) -> None:
    """`output` with .json and .md behind it; nothing where there is none."""
    if output is None:
        return
    record = {"context": context, "rows": rows}
    Path(f"{output}.json").write_text(json.dumps(record, indent=1) + "\n")
    Path(f"{output}.md").write_text(markdown)


def heads_argument(text: str) -> tuple[int, int]:
    """`64:8`: query heads, key-value heads."""
    nheads_q, _, nheads_kv = text.partition(":")
    return int(nheads_q), int(nheads_kv)


def _command() -> list[str]:
    """As it was typed, but for the folder of `--output`, which is nobody's but the machine's."""
    command = ["python", *sys.argv]
    for at, argument in enumerate(command[:-1]):
        if argument == "--output":
            command[at + 1] = f"benchmarks/results/{Path(command[at + 1]).name}"
    return command


def _versions() -> dict[str, str]:
    found = {}
    for name in PEERS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
