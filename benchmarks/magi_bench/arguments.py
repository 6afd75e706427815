"""Types of the values of command-line options, and the options that commands share;
argparse prints the message."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from magi_bench.cases import parse_length
from magi_bench.clock import Rounds
from magi_bench.settings import Settings
from magi_bench.workloads.lengths import SAMPLERS
from magi_compile.masks.library import MASKS


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
    """Reads the head_dim of q and k, and of v: 128 for both, or 192:128; 0 for v says that it is the same."""
    dim, colon, dim_v = text.partition(":")
    return count(dim), count(dim_v) if colon else 0


#: Options that several commands have, by the names of their values.
OPTIONS: dict[str, dict[str, Any]] = {
    "tokens": {"nargs": "+", "type": length, "help": "of a sequence, one after another"},
    "masks": {"nargs": "+", "choices": MASKS, "metavar": "NAME"},
    "lengths": {"choices": SAMPLERS, "default": "seeds", "help": "of documents"},
    "heads": {"type": heads, "default": "32:8", "metavar": "Q:KV"},
    "head_dim": {"type": count, "default": 128},
    "vocab": {"type": count, "default": 32000, "help": "of models"},
    "dtype": {
        "choices": ("bfloat16", "float16", "float32"),
        "help": "by default bfloat16, on a CPU float32",
    },
    "passes": {"nargs": "+", "choices": ("fwd", "fwdbwd"), "default": ["fwd", "fwdbwd"]},
    "gate_tokens": {"type": length, "default": 8192, "help": "longest sequence checked"},
    "device": {"choices": ("cuda", "cpu"), "help": "by default cuda if there is one"},
    "rounds": {"type": count, "default": Rounds().count, "help": "of turns"},
    "turn_ms": {"type": positive, "default": Rounds().turn_ms, "help": "about, of a turn"},
    "seconds": {
        "type": positive,
        "default": float("inf"),
        "help": "begin nothing that would end later",
    },
    "seed": {"type": int, "default": 42},
    "quick": {"action": "store_true", "help": "small sizes: about a minute on a CPU"},
    "out": {"type": Path, "help": "where to write: adds .jsonl and .md"},
}
RUN = ("heads", "head_dim", "passes", "device", "rounds", "seconds", "quick", "out")


def add(parser: argparse.ArgumentParser, names: Iterable[str], **defaults: Any) -> None:
    """Adds those of `OPTIONS`, with other defaults where `defaults` has any."""
    for name in names:
        option = OPTIONS[name] | ({"default": defaults[name]} if name in defaults else {})
        parser.add_argument(f"--{name.replace('_', '-')}", **option)


def settings_of(args: argparse.Namespace, quick: Mapping[str, Any], **more: Any) -> Settings:
    """The settings of a command, `more` in place of what `args` has; with `--quick` the values of `quick` hold."""
    device = device_of(args.device)
    if args.quick:
        vars(args).update(quick)
    if args.out and not args.out.parent.is_dir():
        raise FileNotFoundError(f"`--out` must lie in a folder that exists, got {args.out}")
    return Settings.of(args, device=device, **more)


def device_of(asked: str | None) -> str:
    """The device of `--device`, by default "cuda" if there is a GPU; raises ValueError if there is none."""
    device = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("`--device cuda` needs a GPU, and PyTorch sees none")
    return device


def as_typed(command_line: Sequence[str], out: Path | None) -> list[str]:
    """A command without the folder of its output, which is the machine's own."""
    return [out.name if out and part == str(out) else part for part in command_line]


def say(line: str) -> None:
    """A line of progress."""
    print(line, flush=True)
