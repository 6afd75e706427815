"""What the values of command-line options must be, and what commands share of their use; argparse prints the message."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from magi_bench.workloads.cells import parse_length


def length(text: str) -> int:
    """A number of tokens, such as 8192 or 8K."""
    try:
        return parse_length(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(text: str) -> int:
    """A positive integer."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def positive(text: str) -> float:
    """A positive number."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return number


def share(text: str) -> float:
    """A number above 0 and up to 1."""
    number = positive(text)
    if number > 1:
        raise argparse.ArgumentTypeError(f"must be a share of at most 1, got {text!r}")
    return number


def heads(text: str) -> str:
    """Query heads and key-value heads, such as 64:8."""
    nheads_q, _, nheads_kv = text.partition(":")
    if not (nheads_q.isdigit() and nheads_kv.isdigit()) or not int(nheads_kv):
        raise argparse.ArgumentTypeError(f"heads must look like 64:8, got {text!r}")
    if int(nheads_q) % int(nheads_kv) or not int(nheads_q):
        raise argparse.ArgumentTypeError(f"heads must be Q:KV with Q a multiple of KV, got {text}")
    return f"{int(nheads_q)}:{int(nheads_kv)}"


def head_dims(text: str) -> tuple[int, int]:
    """Of q and k, and of v: 128 for both, or 192:128; 0 for v says that it is the same."""
    dim, colon, dim_v = text.partition(":")
    return count(dim), count(dim_v) if colon else 0


def device_of(asked: str | None) -> str:
    """What `--device` asks for, by default "cuda" if there is a GPU; raises ValueError if there is none."""
    device = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("`--device cuda` needs a GPU, and PyTorch sees none")
    return device


def check_out(out: Path | None) -> None:
    """Raises FileNotFoundError if `--out` lies in a folder that does not exist."""
    if out and not out.parent.is_dir():
        raise FileNotFoundError(f"`--out` must lie in a folder that exists, got {out}")


def as_typed(command_line: Sequence[str], out: Path | None) -> list[str]:
    """A command without the folder of its output, which is the machine's own."""
    return [out.name if out and part == str(out) else part for part in command_line]
