"""What the values of command-line options must be; argparse prints the message."""

from __future__ import annotations

import argparse

from magi_compile.bench.workloads.cells import parse_length


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
