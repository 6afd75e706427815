"""A Llama of Hugging Face transformers on packed documents, with random weights, and any of its attentions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import magi_compile.integrations.transformers  # noqa: F401  (registers "magi")
from magi_bench.arguments import Settings
from magi_bench.workloads import lengths

VERSION = transformers.__version__
IGNORED = -100

Inputs = dict[str, Any]


def build(settings: Settings) -> nn.Module:
    """The model with `attn_implementation="eager"`, on the device."""
    config = transformers.LlamaConfig(
        vocab_size=settings.vocab,
        hidden_size=settings.dim,
        intermediate_size=settings.ffn_dim,
        num_hidden_layers=settings.train_layers,
        num_attention_heads=settings.nheads_q,
        num_key_value_heads=settings.nheads_kv,
        head_dim=settings.head_dim,
        max_position_embeddings=max(*settings.tokens, settings.gate_tokens),
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        use_cache=False,
    )
    torch.manual_seed(settings.seed)
    with torch.device(settings.device):
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager")
    return model.to(getattr(torch, settings.dtype)).train()


def with_attention(model: nn.Module, name: str) -> nn.Module:
    """A model that shares all weights with `model`, with another `attn_implementation`; an ImportError if its package
    is missing."""
    shared = copy.deepcopy(model, {id(x): x for x in model.parameters()})
    shared.set_attn_implementation(name)  # type: ignore[operator]
    return shared


def make_inputs(settings: Settings, tokens: int, turn: int) -> Inputs:
    """A pack of documents: tokens, positions that begin anew in each document, and labels."""
    generator = torch.Generator().manual_seed(settings.seed + turn)
    ids = torch.randint(settings.vocab, (1, tokens), generator=generator)
    counts = lengths.sample(settings.lengths, tokens, settings.seed + turn)
    positions = torch.cat([torch.arange(count) for count in counts])[None]
    labels = ids.masked_fill(positions == 0, IGNORED)  # transformers shifts them
    tensors = {"input_ids": ids, "position_ids": positions, "labels": labels}
    return {name: x.to(settings.device) for name, x in tensors.items()}


def step(model: nn.Module, call: Callable[..., Any], inputs: Inputs) -> list[Tensor]:
    """Forward, loss and backward; the loss, and the gradients of the first and the last query projection."""
    model.zero_grad()
    loss = call(**inputs, use_cache=False).loss
    loss.backward()
    gradients = [x.grad for x in checked_parameters(model)]
    assert all(x is not None for x in gradients)
    return [loss.detach(), *(x.clone() for x in gradients if x is not None)]


def checked_parameters(model: nn.Module) -> Sequence[nn.Parameter]:
    """Whose gradients are compared."""
    layers: Any = model.model.layers  # type: ignore[union-attr]
    return [layers[at].self_attn.q_proj.weight for at in (0, -1)]
