"""`attn_implementation="magi"` on a GPU, in bfloat16."""

import pytest
import torch

pytest.importorskip("transformers")

import magi_compile.integrations.transformers  # noqa: F401
from magi_compile.lowering.report import REPORT
from tests.integrations.models import (
    INPUTS,
    make_model,
    positions,
    tokens,
)
from tests.support.waits import no_waits

pytestmark = pytest.mark.gpu
# Heads of 64, which the Hopper kernels have; ModernBERT divides its hidden size by the number of heads.
WIDE = {"head_dim": 64}
CHANGES = {"modernbert": {"hidden_size": 256, **WIDE}}


def on_a_gpu(inputs):
    return {name: x.cuda() for name, x in inputs.items()}


def gradients_and_logits(name, implementation, dtype, inputs, compiled=False):
    model = make_model(name, implementation, **CHANGES.get(name, WIDE)).to("cuda", dtype)
    forward = torch.compile(model, backend="magi", fullgraph=True) if compiled else model
    logits = forward(input_ids=tokens().cuda(), **inputs).logits
    mask = inputs.get("attention_mask", torch.ones(2, logits.shape[1], device="cuda")).bool()
    logits = logits[mask]
    logits.float().square().mean().backward()
    parameters = dict(model.named_parameters())
    return {"logits": logits.detach(), **{key: p.grad for key, p in parameters.items()}}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", ["packed", "left_padded"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "modernbert"])
def test_error_of_eager(name, kind, compiled):
    """At most twice the error of eager attention in bfloat16, for logits and all gradients."""
    inputs = on_a_gpu(INPUTS[kind]())
    exact = gradients_and_logits(name, "eager", torch.float32, inputs)
    theirs = gradients_and_logits(name, "eager", torch.bfloat16, inputs)
    ours = gradients_and_logits(name, "magi", torch.bfloat16, inputs, compiled)
    assert not REPORT.refused
    for key, wanted in exact.items():
        error, allowed = ((x[key].float() - wanted).norm() for x in (ours, theirs))
        assert float(error) <= 2 * float(allowed) + 1e-2 * float(wanted.norm()), key


def test_compiled_masks_wait_for_nothing():
    """A training step after the first one, with other documents."""
    model = make_model("gemma3", **WIDE).to("cuda", torch.bfloat16)
    forward = torch.compile(model, backend="magi", fullgraph=True)
    batch = tokens(1).cuda()
    layouts = [positions(lengths).cuda() for lengths in ((100, 92), (20, 172), (64, 128))]
    for place in layouts[:2]:
        forward(input_ids=batch, position_ids=place).logits.sum().backward()
    with no_waits():
        forward(input_ids=batch, position_ids=layouts[2]).logits.sum().backward()


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(name, cache):
    """Steps with a static cache are compiled by transformers itself."""
    model = make_model(name, use_cache=True, **WIDE).cuda()
    arguments = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    prompt = tokens(2, 60).cuda()
    ours = model.generate(prompt, cache_implementation=cache, **arguments)
    model.set_attn_implementation("eager")
    assert torch.equal(ours, model.generate(prompt, cache_implementation=cache, **arguments))
