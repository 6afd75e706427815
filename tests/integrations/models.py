"""Small random models of transformers, the inputs that they get, and what they make of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.masking_utils import create_masks_for_generate

SEQLEN, LAYERS, VOCABULARY = 192, 2, 128
LENGTHS = (100, 40, 52)  # of documents
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "initializer_range": 0.2,  # so that scores differ
    "use_cache": False,
}
# A window and, where the model mixes, full attention in the other layer.
MIXED = {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
MODERN_BERT = {"cls_token_id": None, "sep_token_id": None, "global_attn_every_n_layers": LAYERS}
LLAMA_4 = {
    "attention_chunk_size": 48,
    "intermediate_size_mlp": 128,
    "interleave_moe_layer_step": 4,
    "num_local_experts": 2,
}

MODELS = {
    "llama": lambda: (hf.LlamaForCausalLM, hf.LlamaConfig(**SIZES)),
    "qwen3": lambda: (
        hf.Qwen3ForCausalLM,
        hf.Qwen3Config(**SIZES, use_sliding_window=True, **MIXED),
    ),
    "mistral": lambda: (hf.MistralForCausalLM, hf.MistralConfig(**SIZES, sliding_window=40)),
    "gemma2": lambda: (hf.Gemma2ForCausalLM, hf.Gemma2Config(**SIZES, **MIXED)),
    "gemma3": lambda: (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig(**SIZES, **MIXED)),
    "gpt_oss": lambda: (hf.GptOssForCausalLM, hf.GptOssConfig(**SIZES, **MIXED, **EXPERTS)),
    "llama4": lambda: (hf.Llama4ForCausalLM, hf.Llama4TextConfig(**SIZES, **LLAMA_4)),
    "modernbert": lambda: (
        hf.ModernBertForMaskedLM,
        hf.ModernBertConfig(**SIZES, **MODERN_BERT, local_attention=32),
    ),
}
DECODERS = [name for name in MODELS if name != "modernbert"]


def make_model(name: str, implementation: str = "magi", **changes: Any) -> Any:
    torch.manual_seed(0)
    kind, config = MODELS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    model = kind._from_config(config, attn_implementation=implementation).eval()
    for key, parameter in model.named_parameters():
        if "sinks" in key:  # zero by default
            torch.nn.init.normal_(parameter)
    return model


def tokens(batch: int = 2, seqlen: int = SEQLEN) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, seqlen), generator=torch.Generator().manual_seed(1))


def positions(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """Positions of packed documents, `[1, tokens]`."""
    return torch.cat([torch.arange(length) for length in lengths])[None]


def cu_seq_lens(lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    """What `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` adds."""
    starts = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
    lists = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts.clone()}
    return {**lists, "max_length_q": max(lengths), "max_length_k": max(lengths)}


def padded(side: str) -> Tensor:
    mask = torch.ones(2, SEQLEN, dtype=torch.long)
    mask[1, slice(0, 50) if side == "left" else slice(150, None)] = 0
    return mask


def uncounted(kind: str) -> dict[str, Any]:
    """Positions that do not go up by one, of one document."""
    ones, count = torch.ones(2, SEQLEN, dtype=torch.long), torch.arange(SEQLEN).repeat(2, 1)
    hole = ones.clone()
    hole[:, 40:60] = 0
    place = hole.cumsum(1) - 1
    return {
        "hole": lambda: {"attention_mask": hole, "position_ids": place},
        # As `generate` numbers what is masked.
        "zeros": lambda: {"attention_mask": hole, "position_ids": place.masked_fill(hole == 0, 0)},
        "gap": lambda: {"attention_mask": ones, "position_ids": count + 9 * (count > 70)},
        "steps": lambda: {"attention_mask": ones, "position_ids": 2 * count},
        "repeats": lambda: {"attention_mask": ones, "position_ids": count // 2},
        "branches": lambda: {"use_cache": True, "position_ids": count - 30 * (count > 90)},
    }[kind]()


INPUTS = {
    "plain": dict,
    "packed": lambda: {"position_ids": positions().expand(2, -1)},
    "left_padded": lambda: {"attention_mask": padded("left")},
    "right_padded": lambda: {"attention_mask": padded("right")},
}


def inputs_of_eager(model: Any, name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """`inputs` for eager attention; gpt-oss makes masks without documents, so it is given masks with them."""
    if name != "gpt_oss" or "position_ids" not in inputs:
        return inputs
    embeds = torch.empty(*inputs["position_ids"].shape, 1)
    masks = create_masks_for_generate(model.config, embeds, None, None, **inputs)
    return {**inputs, "attention_mask": masks}


class Step(NamedTuple):
    """Of one training step: logits of tokens that are no padding, the loss, and all gradients by parameter."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def step(model: Any, inputs: dict[str, Any], forward: Any = None) -> Step:
    """A forward and a backward of `forward`, which is `model`, compiled or not."""
    mask = inputs.get("attention_mask")
    is_token = mask.bool() if isinstance(mask, Tensor) else torch.ones(2, SEQLEN, dtype=torch.bool)
    batch = tokens()
    call = model if forward is None else forward
    logits = call(input_ids=batch, **inputs).logits
    # What padding predicts is no label: eager attention averages over all values there, ours gives 0.
    counts = is_token[:, :-1] & is_token[:, 1:]
    loss = cross_entropy(logits[:, :-1][counts], batch[:, 1:][counts])
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Step(logits.detach()[is_token], loss.detach(), gradients)


def assert_same(ours: Step, eager: Step) -> None:
    torch.testing.assert_close(ours.logits, eager.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.loss, eager.loss, atol=1e-5, rtol=1e-5)
    assert ours.gradients.keys() == eager.gradients.keys()
    for name, wanted in eager.gradients.items():
        atol = 1e-4 * float(wanted.abs().max())
        torch.testing.assert_close(
            ours.gradients[name],
            wanted,
            atol=atol,
            rtol=1e-3,
            msg=lambda text, n=name: f"{n}: {text}",
        )
