"""A case: one point of the benchmark's grid, without the contender."""

from __future__ import annotations

from dataclasses import dataclass

PASS_TITLES = {"fwd": "Forward", "bwd": "Backward", "fwdbwd": "Forward and backward"}
PASSES = tuple(PASS_TITLES)
#: FLOPs of a backward over those of a forward, as benchmarks count them.
BACKWARD = 2.5


@dataclass(frozen=True)
class Case:
    """A mask, a length, heads and a pass to measure. Everything random in it follows from `seed`."""

    # the command that measures it; for what kernels take also in other commands "kernel", masks that all heads share,
    # or "sparse", block masks of each key-value head
    level: str
    # a name in `workload.MASKS`; elsewhere what is called: a row of `step`, a mod, a mask of ranks, a framework
    mask: str
    seqlen: int  # queries and keys; across ranks those of a rank
    nheads_q: int  # query heads
    nheads_kv: int  # key-value heads; divides nheads_q
    head_dim: int  # of q and k
    dtype: str = "bfloat16"  # "bfloat16", "float16" or "float32"
    lengths: str = "seeds"  # how documents are drawn, a name in `lengths.SAMPLERS`
    block: int = 0  # tokens of a block of a sparse mask; the mean where sizes vary. 0 for others
    density: float = 1.0  # the share of blocks that a row of a sparse mask keeps. 1.0 for others
    seed: int = 42  # of documents, masks and inputs
    head_dim_v: int = 0  # of v; 0 for that of q and k
    # the pass, where contenders are prepared for one; "" where they run all of them
    which: str = ""
    layers: int = 1  # attentions in one graph, or layers of a model
    ranks: int = 1  # over which the sequence is spread
    mode: str = ""  # of a framework's model: "eager" or "compiled"

    @property
    def heads(self) -> str:
        return f"{self.nheads_q}:{self.nheads_kv}"

    @property
    def head_dims(self) -> tuple[int, int]:
        """The head_dim of q and k, and of v."""
        return self.head_dim, self.head_dim_v or self.head_dim

    @property
    def head_dims_label(self) -> str:
        """128 as text, or 192:128 where that of v is another."""
        return ":".join(dict.fromkeys(map(str, self.head_dims)))

    @property
    def mask_label(self) -> str:
        """The mask in words, with what tells sparse ones apart."""
        words = self.mask.replace("_", " ")
        return words if self.level != "sparse" else f"{words} {self.block}, {self.density:.0%}"

    @property
    def key(self) -> str:
        """The same for equal cases only; what `--resume` goes by."""
        sparse = [f"b{self.block}", f"p{self.density:g}"] if self.level == "sparse" else []
        parts = [self.level, self.mask, *sparse, self.lengths, f"s{self.seqlen}", self.heads]
        more = [f"x{self.layers}"] * (self.layers > 1) + [f"ranks{self.ranks}"] * (self.ranks > 1)
        more += [x for x in (self.mode, self.which) if x]
        return "/".join([*parts, f"d{self.head_dims_label}", self.dtype, f"seed{self.seed}", *more])


def parse_length(text: str) -> int:
    """`"8192"`, `"8K"` or `"1M"`, for 2**10 or 2**20, as a number of tokens; a ValueError if it is none or not
    positive."""
    factor = {"K": 1024, "M": 1024**2}.get(text[-1:].upper(), 1)
    digits = text[:-1] if factor > 1 else text
    if not digits.isdigit() or int(digits) == 0:
        raise ValueError(
            f"`seqlen` must be a number of tokens such as 8192, 8K or 1M, got {text!r}"
        )
    return int(digits) * factor


def format_length(seqlen: int) -> str:
    """8192 as "8K"."""
    for factor, suffix in ((1024**2, "M"), (1024, "K")):
        if seqlen % factor == 0 and seqlen:
            return f"{seqlen // factor}{suffix}"
    return str(seqlen)
