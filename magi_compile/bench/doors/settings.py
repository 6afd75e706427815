"""What a run is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

from magi_compile.bench.step.clock import Rounds

#: `attn_implementation` of transformers.
ATTENTIONS = (
    "magi",
    "flex_attention",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
)
MODES = ("eager", "compiled")
FRAMEWORKS = ("transformers", "torchtitan")


@dataclass(frozen=True)
class Settings:
    """What holds for all cases of a run. The model has the shape of Llama 3 8B but for what is here.

    Attributes:
        device: "cuda" or "cpu".
        dtype: of weights and activations.
        tokens: of a packed sequence, one length after another.
        layers: of the model.
        nheads_q: query heads.
        nheads_kv: key-value heads; divides nheads_q.
        head_dim: of q, k and v.
        ffn_dim: of the hidden layer of an MLP.
        vocab: tokens; 128256 in Llama 3.
        frameworks: names in `FRAMEWORKS`.
        attentions: names in `ATTENTIONS`.
        modes: names in `MODES`.
        lengths: how documents are drawn.
        cuda_graphs: whether torchtitan records them where it can, which is its default.
        gate_tokens: of the small input.
        rounds: how often.
        seconds: begin nothing that would end later.
        seed: of weights, tokens and documents.
    """

    device: str
    dtype: str
    tokens: tuple[int, ...]
    layers: int
    nheads_q: int
    nheads_kv: int
    head_dim: int
    ffn_dim: int
    vocab: int
    frameworks: tuple[str, ...] = FRAMEWORKS
    attentions: tuple[str, ...] = ATTENTIONS
    modes: tuple[str, ...] = MODES
    lengths: str = "seeds"
    cuda_graphs: bool = True
    gate_tokens: int = 512
    rounds: Rounds = field(default_factory=Rounds)
    seconds: float = float("inf")
    seed: int = 42

    @property
    def dim(self) -> int:
        """Of the residual stream."""
        return self.nheads_q * self.head_dim
