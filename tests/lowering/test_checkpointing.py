"""Activation checkpointing, full and selective, around lowered attention."""

from functools import partial

import pytest
import torch
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
    monkeypatch.setattr(type(kernel), "forward", lambda *a: runs.append(1) or forward(*a))

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
