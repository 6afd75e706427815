"""Activation checkpointing, full and selective, around lowered attention."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from magi_compile.kernels.select import load
from magi_compile.lowering.backend import make_backend

from .conftest import BATCH, Attention, assert_same, block_mask, document_causal, documents


def save_attention(ctx, op, *args, **kwargs):
    saved = op is torch.ops.magi.ffa_fwd.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


CONTEXTS = {
    "none": None,
    "full": {},
    "selective": {"context_fn": partial(create_selective_checkpoint_contexts, save_attention)},
}


def gradients(kind, monkeypatch):
    """The gradient of the input through three layers, and how often the forward kernel ran."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(Attention() for _ in range(3))
    mask = block_mask(document_causal(documents(96, 3)), 96)
    x = torch.randn(BATCH, 96, 32, requires_grad=True)
    runs = []
    kernel = load("cpu")
    forward = type(kernel).forward
    monkeypatch.setattr(
        type(kernel), "forward", lambda *a, **rest: runs.append(1) or forward(*a, **rest)
    )

    def layer_output(layer, x, mask):
        return x + layer(x, mask)[0].relu()

    def model(x, mask):
        for layer in layers:
            if CONTEXTS[kind] is None:
                x = layer_output(layer, x, mask)
            else:
                x = checkpoint(layer_output, layer, x, mask, use_reentrant=False, **CONTEXTS[kind])
        return x.square().sum()

    torch.compile(model, backend=make_backend("aot_eager"), fullgraph=True)(x, mask).backward()
    monkeypatch.undo()
    return x.grad, len(runs)


@pytest.mark.parametrize(("kind", "runs"), [("none", 3), ("full", 6), ("selective", 3)])
def test_checkpointing(kind, runs, monkeypatch):
    expected, _ = gradients("none", monkeypatch)
    grad, forward_runs = gradients(kind, monkeypatch)
    assert_same(grad, expected)
    assert forward_runs == runs


@pytest.mark.parametrize("context", ["full", "selective"])
def test_checkpoint_around_what_is_compiled_inside_it(context):
    """The rewrite runs inside the checkpoint then; it must leave no trace among the saved tensors."""
    mask = block_mask(document_causal(documents(96, 3)), 96)
    x = torch.randn(BATCH, 96, 32, requires_grad=True)
    layer = Attention()

    def twice(x):
        return layer(layer(x, mask)[0], mask)[0]

    compiled = torch.compile(twice, backend=make_backend("aot_eager"), fullgraph=True)
    out = checkpoint(compiled, x, use_reentrant=False, **CONTEXTS[context])
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    (expected,) = torch.autograd.grad(compiled(x).square().sum(), x)
    assert_same(grad, expected)


def test_a_call_on_the_output_of_another_one_knows_of_gradients():
    """Under the rewrite nothing needs gradients; what a call reads off the outputs of another one still says it."""

    def attention_of_attention(x, mask):
        x = flex_attention(x, x, x, block_mask=mask)
        return flex_attention(x, x, x, not_pointwise, mask)

    def not_pointwise(score, b, h, q, kv):
        return score + torch.stack([q, kv]).sum()

    causal = block_mask(lambda b, h, q, kv: q >= kv, 96)
    compiled = torch.compile(attention_of_attention, backend=make_backend("eager"))
    x = torch.randn(BATCH, 2, 96, 16, requires_grad=True)
    with pytest.raises(Exception, match=r"kept on FlexAttention[\s\S]*score_mod"):
        compiled(x, causal)


POLICY_BEFORE_ANYTHING_ELSE = """
from functools import partial

import magi_compile
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import (
    CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
)

magi_compile.ops  # defines the op
contexts = partial(create_selective_checkpoint_contexts, [torch.ops.magi.ffa_fwd.default])


def attend(x):
    return flex_attention(x.sin(), x, x)


def saved(x):
    return checkpoint(attend, x, use_reentrant=False, context_fn=contexts)


def gradient(function):
    x = torch.linspace(-1, 1, 2 * 64 * 16).view(1, 2, 64, 16).requires_grad_()
    backend = magi_compile.make_backend("aot_eager")
    torch.compile(function, backend=backend, fullgraph=True)(x).square().sum().backward()
    return x.grad


torch.testing.assert_close(gradient(saved), gradient(attend))
"""


def test_a_policy_names_the_op_in_a_fresh_process():
    subprocess.run([sys.executable, "-c", POLICY_BEFORE_ANYTHING_ELSE], check=True)
