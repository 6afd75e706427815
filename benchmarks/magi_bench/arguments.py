"""The settings of a run, of any command; types of the values of options, and the options that commands share. argparse
prints messages."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from magi_bench.cases import Case, parse_length
from magi_bench.clock import Protocol, Rounds
from magi_bench.workloads.lengths import SAMPLERS
from magi_compile.masks.library import MASKS


@dataclass(frozen=True)
class Settings:
    """The settings of all cases of a run; a command uses what it has an option for, under the same name."""

    device: str  # "cuda" or "cpu"
    dtype: str = "bfloat16"  # of q, k and v, and of models
    tokens: tuple[int, ...] = ()  # of a sequence, across ranks of a rank; one after another
    nheads_q: int = 32  # query heads
    nheads_kv: int = 8  # key-value heads; divides nheads_q
    head_dim: int = 128  # of q, k and v
    lengths: str = "seeds"  # how documents are drawn
    masks: tuple[str, ...] = ()  # names in the library of masks
    passes: tuple[str, ...] = ("fwd", "fwdbwd")  # names in `cases.PASSES`
    contenders: tuple[str, ...] | None = None  # only these; None for all
    rounds: Rounds = field(default_factory=Rounds)  # how contenders take turns
    seconds: float = float("inf")  # begin nothing that would end later
    seed: int = 42  # of inputs, documents, masks and weights
    gate_tokens: int = 2048  # the longest sequence that results are checked at
    layers: tuple[int, ...] = (16,)  # `step`: attention calls of a graph of the group "layers"
    train_layers: int = 4  # of models
    vocab: int = 32000  # of models
    ffn_dim: int = 0  # of the hidden layer of an MLP; 0 for twice the width of the model
    rows: tuple[str, ...] = ()  # `step`: names of rows
    mods: tuple[str, ...] = ()  # names in `mods.MODS`
    kernels: tuple[str, ...] = ()  # `mods`: of ours, asked for by name, beside the default choice
    peers: tuple[str, ...] = ()  # `mods`: names in `contenders.PEERS`
    mask_in_graph: bool = False  # `mods`: whether every call makes its BlockMask, compiled
    model: bool = False  # `ranks`: steps of a Llama in place of attention alone
    local_kernels: tuple[str, ...] = ("ours",)  # `ranks`: names in `LOCAL_KERNELS`
    ulysses_degree: int = 0  # `ranks`: how many share heads in two dimensions; 0 chooses
    window: int = 0  # `ranks`: the ranks of a window of a double ring; 0 chooses
    samplers: tuple[str, ...] = ("seeds",)  # `ranks`: one after another, in place of `lengths`
    packs: int = 1  # `ranks`: of documents, for each mask that knows them, length and sampler
    exposed: bool = False  # `ranks`: whether ours and strategies are timed without moves, too
    frameworks: tuple[str, ...] = ()  # `doors`: names in `doors.FRAMEWORKS`
    attentions: tuple[str, ...] = ()  # `doors`: `attn_implementation` of transformers
    modes: tuple[str, ...] = ()  # `doors`: "eager", "compiled"
    cp_degrees: tuple[int, ...] = (1, 2, 4)  # `doors`: ranks of torchtitan's context parallelism
    protocol: Protocol = field(default_factory=Protocol)  # `kernel`, `sparse`: how a call is timed
    cell_limit: float = 120.0  # `kernel`, `sparse`: seconds after which a case is given up
    jobs: int = 1  # `kernel`, `sparse`: how many contenders prove themselves at a time

    @property
    def dim(self) -> int:
        """The width of a model's residual stream."""
        return self.nheads_q * self.head_dim

    def case(self, level: str, mask: str, seqlen: int, **more: Any) -> Case:
        """A case with the heads, dtype, documents and seed of the run."""
        sizes = (seqlen, self.nheads_q, self.nheads_kv, self.head_dim, self.dtype)
        return Case(level, mask, *sizes, **{"lengths": self.lengths, "seed": self.seed, **more})

    def asked(self) -> dict[str, Any]:
        """The settings that differ from the defaults, for the record."""
        kept = {x.name: getattr(self, x.name) for x in fields(self) if x.name != "protocol"}
        same = {x.name for x in fields(self) if x.default == kept.get(x.name)}
        return {name: x for name, x in kept.items() if name not in same and name != "rounds"} | {
            "rounds": self.rounds.count,
            "turn_ms": self.rounds.turn_ms,
        }


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


def number(what: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """The type of numbers that fit, which are `what` in messages."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not fits(value):
            raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")
        return value

    return parse


positive = number("a positive number", lambda x: x > 0)
share = number("a share of at most 1, above 0", lambda x: 0 < x <= 1)


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
    given = {x.name: getattr(args, x.name) for x in fields(Settings) if x.name in args} | more
    if isinstance(getattr(args, "heads", None), str):
        given["nheads_q"], given["nheads_kv"] = map(int, args.heads.split(":"))
    if "rounds" in args:
        given["rounds"] = Rounds(args.rounds, getattr(args, "turn_ms", Rounds.turn_ms))
    given["dtype"] = given.get("dtype") or ("float32" if device == "cpu" else "bfloat16")
    values: dict[str, Any] = {k: tuple(x) if isinstance(x, list) else x for k, x in given.items()}
    return Settings(**{**values, "device": device})


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
