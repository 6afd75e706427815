"""What is measured: rows of four groups, at every length, forward and forward with backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from magi_bench.step.clock import Rounds

#: Forward without gradients; forward and backward.
PASSES = ("fwd", "fwdbwd")


@dataclass(frozen=True)
class Row:
    """One way of calling attention.

    Attributes:
        name: in result files.
        group: a name in `GROUPS`.
        label: in reports.
        mask: who makes the mask: "pytorch" or "magi" (`create_block_mask`, outside of the graph and of the time), "graph"
            (PyTorch's `create_block_mask` inside of the compiled function), "at hand" (each contender's own form), or
            "measured" (making it is what is measured).
        is_new: other documents, and so another mask, in every call.
        mode: torch.compile's.
    """

    name: str
    group: str
    label: str
    mask: str
    is_new: bool = False
    mode: str | None = None


GROUPS = {
    "calls": "One attention a graph",
    "layers": "Many layers of attention in one graph, milliseconds a layer",
    "eager": "Eager calls, the mask at hand",
    "masks": "Making a BlockMask in eager code",
    "training": "A step of a small Llama: forward, loss, backward",
}
ROWS = (
    Row("outside", "calls", "BlockMask from PyTorch's create_block_mask", "pytorch"),
    Row("outside_magi", "calls", "BlockMask from magi_compile.create_block_mask", "magi"),
    Row("inside", "calls", "mask made in the graph", "graph"),
    Row("new_layout", "calls", "BlockMask from outside, another in every call", "pytorch", True),
    Row(
        "cuda_graphs",
        "calls",
        'BlockMask from outside, mode="reduce-overhead"',
        "pytorch",
        mode="reduce-overhead",
    ),
    Row("layers_outside", "layers", "BlockMask from outside", "pytorch"),
    Row("layers_inside", "layers", "mask made in the graph", "graph"),
    Row("eager", "eager", "packed tensors", "at hand"),
    Row("masks", "masks", "other documents in every call", "measured", True),
    Row(
        "training_inside",
        "training",
        "mask made in the graph, another in every step",
        "graph",
        True,
    ),
    Row(
        "training_outside",
        "training",
        "BlockMask from outside, another in every step",
        "pytorch",
        True,
    ),
)


@dataclass(frozen=True)
class Case:
    """A row at one length, for one pass.

    Attributes:
        row: how attention is called.
        tokens: queries and keys.
        layers: attention calls in one graph.
        which: a name in `PASSES`.
    """

    row: Row
    tokens: int
    layers: int
    which: str


@dataclass(frozen=True)
class Settings:
    """What holds for all cases of a run.

    Attributes:
        device: "cuda" or "cpu".
        dtype: of q, k and v, and of the model.
        tokens: lengths of the packed sequence.
        nheads_q: query heads.
        nheads_kv: key-value heads; divides nheads_q.
        head_dim: of q, k and v.
        layers: how many attention calls the graphs of the group "layers" have.
        train_layers: layers of the Llama.
        vocab: its tokens.
        rows: names of rows.
        passes: names in `PASSES`.
        contenders: only these; None for all.
        rounds: how contenders take turns.
        seconds: no case begins after so long, and none that is expected to end later.
        has_optimizer: whether a training step ends with one of AdamW.
        seed: of inputs and documents.
    """

    device: str
    dtype: str
    tokens: tuple[int, ...]
    nheads_q: int
    nheads_kv: int
    head_dim: int
    layers: tuple[int, ...] = (16,)
    train_layers: int = 4
    vocab: int = 32000
    rows: tuple[str, ...] = tuple(row.name for row in ROWS)
    passes: tuple[str, ...] = PASSES
    contenders: tuple[str, ...] | None = None
    rounds: Rounds = field(default_factory=Rounds)
    seconds: float = float("inf")
    has_optimizer: bool = False
    seed: int = 42


def cases(settings: Settings, tokens: int) -> Iterator[Case]:
    """All cases of one length, in the order in which they run."""
    for row in ROWS:
        if row.name not in settings.rows:
            continue
        depths = {"layers": settings.layers, "training": (settings.train_layers,)}
        for layers in depths.get(row.group, (1,)):
            for which in settings.passes if row.mask != "measured" else ("fwd",):
                yield Case(row, tokens, layers, which)
