"""Models of Hugging Face's transformers, as they are: all of their attention runs on our kernel, and the numbers are
those of their eager attention. transformers 5.24 makes its masks outside of the graph, and layers of one kind share a
graph."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn.functional import cross_entropy

import magi_compile
from magi_compile.kernels.cpu import CpuKernel
from magi_compile.lowering.backend import make_backend
from magi_compile.lowering.report import REPORT

hf = pytest.importorskip("transformers")

SEQLEN, LAYERS = 192, 2
# The lowering in front of a compiler that is quick on a CPU.
QUICK = make_backend(inner="aot_eager")
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "use_cache": False,
}
MODELS = {
    "llama": lambda: (hf.LlamaForCausalLM, hf.LlamaConfig(**SIZES)),
    "windows": lambda: (hf.MistralForCausalLM, hf.MistralConfig(**SIZES, sliding_window=40)),
    "windows_and_softcap": lambda: (
        hf.Gemma2ForCausalLM,
        hf.Gemma2Config(**SIZES, sliding_window=40),
    ),
    "chunks": lambda: (
        hf.Llama4ForCausalLM,
        hf.Llama4TextConfig(
            **SIZES,
            intermediate_size_mlp=128,
            attention_chunk_size=48,
            num_local_experts=2,
            interleave_moe_layer_step=4,
        ),
    ),
    "encoder": lambda: (
        hf.ModernBertForMaskedLM,
        hf.ModernBertConfig(**SIZES, local_attention=32, global_attn_every_n_layers=LAYERS),
    ),
}


def packed():
    """Three sequences in a row; positions begin anew."""
    return {"position_ids": torch.cat([torch.arange(n) for n in (100, 40, 52)]).expand(2, -1)}


def padded(left: bool):
    mask = torch.ones(2, SEQLEN, dtype=torch.long)
    mask[1, slice(0, 50) if left else slice(150, None)] = 0
    return {"attention_mask": mask}


def loss_and_gradient(name, implementation, inputs, backend=None):
    torch.manual_seed(0)
    kind, config = MODELS[name]()
    model = kind._from_config(config, attn_implementation=implementation).eval()
    tokens = torch.randint(2, 128, (2, SEQLEN))
    forward = torch.compile(model, backend=backend) if backend else model
    logits = forward(input_ids=tokens, **inputs).logits
    is_token = inputs.get("attention_mask", torch.ones(2, SEQLEN)).bool()[:, :-1]
    loss = cross_entropy(logits[:, :-1][is_token], tokens[:, 1:][is_token])
    loss.backward()
    return [loss.detach(), model.get_input_embeddings().weight.grad]


@pytest.fixture
def forwards(monkeypatch):
    """One entry for each attention that our kernel has run."""
    runs = []
    forward = CpuKernel.forward
    monkeypatch.setattr(
        CpuKernel, "forward", lambda *args, **rest: runs.append(1) or forward(*args, **rest)
    )
    return runs


INPUTS = {"packed": packed(), "left": padded(True), "right": padded(False)}
# By default quickly: each kind of layers, and each kind of inputs.
RUNS = [
    *((name, "packed", QUICK) for name in ("windows_and_softcap", "chunks")),
    *[("llama", "left", QUICK), ("encoder", "right", QUICK)],
]
SLOW_RUNS = [
    *((name, "packed", "magi") for name in MODELS),
    *(("llama", kind, "magi") for kind in ("left", "right")),
    *(
        (name, kind, QUICK)
        for name in MODELS
        for kind in ("left", "right")
        if (name, kind, QUICK) not in RUNS
    ),
]


@pytest.mark.parametrize(
    ("name", "kind", "backend"),
    [*RUNS, *(pytest.param(*run, marks=pytest.mark.slow) for run in SLOW_RUNS)],
    ids=lambda x: x if isinstance(x, str) else "quick",
)
def test_compiled(name, kind, backend, forwards):
    inputs = INPUTS[kind]
    ours = loss_and_gradient(name, "flex_attention", inputs, backend)
    assert not REPORT.refused
    assert len(forwards) == LAYERS
    torch.testing.assert_close(ours, loss_and_gradient(name, "eager", inputs), atol=1e-5, rtol=1e-4)


def test_their_own_compiled_attention(forwards):
    """Without torch.compile around the model they compile flex_attention themselves."""
    with magi_compile.enabled():
        ours = loss_and_gradient("llama", "flex_attention", packed())
    assert not REPORT.refused
    assert len(forwards) == LAYERS
    expected = loss_and_gradient("llama", "eager", packed())
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("door", ["magi", pytest.param("enabled", marks=pytest.mark.slow)])
def test_gradient_checkpointing(door, forwards):
    """Each layer runs in a checkpoint of its own, and its attention is compiled inside it."""
    torch.manual_seed(0)
    kind, config = MODELS["llama"]()
    tokens = torch.randint(2, 128, (2, SEQLEN))

    def gradient(implementation, backend=None):
        torch.manual_seed(0)
        model = kind._from_config(config, attn_implementation=implementation).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        forward = torch.compile(model, backend=backend) if backend else model
        logits = forward(input_ids=tokens, **packed()).logits
        cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        return model.get_input_embeddings().weight.grad

    # What comes from Inductor's cache is not rewritten again.
    uncached = torch._inductor.config.patch(force_disable_caches=True)
    with uncached, magi_compile.enabled() if door == "enabled" else nullcontext():
        ours = gradient("flex_attention", QUICK if door == "magi" else None)
    assert not REPORT.refused
    assert len(forwards) == 2 * LAYERS  # once more in the backward
    torch.testing.assert_close(ours, gradient("eager"), atol=1e-5, rtol=1e-4)
