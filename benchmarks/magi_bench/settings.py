"""The settings of a run, of any command."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from typing import Any

from magi_bench.cases import Case
from magi_bench.clock import Rounds
from magi_bench.timing import Protocol


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
    exposed: bool = False  # `ranks`: whether strategies are timed without moves, too
    frameworks: tuple[str, ...] = ()  # `doors`: names in `doors.FRAMEWORKS`
    attentions: tuple[str, ...] = ()  # `doors`: `attn_implementation` of transformers
    modes: tuple[str, ...] = ()  # `doors`: "eager", "compiled"
    cp_degrees: tuple[int, ...] = (1, 2, 4)  # `doors`: ranks of torchtitan's context parallelism
    cuda_graphs: bool = True  # `doors`: whether torchtitan records them, which is its default
    protocol: Protocol = field(default_factory=Protocol)  # `kernel`, `sparse`: how a call is timed
    cell_limit: float = 120.0  # `kernel`, `sparse`: seconds after which a case is given up
    jobs: int = 1  # `kernel`, `sparse`: how many contenders prove themselves at a time

    @classmethod
    def of(cls, args: argparse.Namespace, **more: Any) -> Settings:
        """Reads the options of a command, and `more` in their place."""
        given = {x.name: getattr(args, x.name) for x in fields(cls) if hasattr(args, x.name)} | more
        if isinstance(getattr(args, "heads", None), str):
            given["nheads_q"], given["nheads_kv"] = map(int, args.heads.split(":"))
        if "rounds" in args:
            given["rounds"] = Rounds(args.rounds, getattr(args, "turn_ms", Rounds().turn_ms))
        given["dtype"] = given.get("dtype") or (
            "float32" if given["device"] == "cpu" else "bfloat16"
        )
        values: dict[str, Any] = {
            k: tuple(x) if isinstance(x, list) else x for k, x in given.items()
        }
        return cls(**values)

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
