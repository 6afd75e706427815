"""What a call finds in the mode that it is made in, when the same mask was first seen in another."""

import contextlib

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import magi_compile
from magi_compile import AttnSlices

S = 48
PLACES = torch.arange(S)
VISIBLE = (PLACES[:, None] >= PLACES) & (PLACES[:, None] // 17 == PLACES // 17)


def save_nothing(ctx, op, *args, **kwargs):
    return torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


def save_all(ctx, op, *args, **kwargs):
    return torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE


def checkpointed(**options):
    return lambda attend, *x: checkpoint(attend, *x, **options)


def selective(policy):
    contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
    return checkpointed(use_reentrant=False, context_fn=contexts)


def within(context):
    def call(attend, *x):
        with context():
            return attend(*x)

    return call


MODES = {
    "inference_mode": within(torch.inference_mode),
    "no_grad": within(torch.no_grad),
    "grad": within(torch.enable_grad),
    "autocast": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "checkpoint": checkpointed(use_reentrant=False),
    "reentrant": checkpointed(use_reentrant=True),
    "selective, nothing saved": selective(save_nothing),
    "selective, all saved": selective(save_all),
    "offloaded": within(torch.autograd.graph.save_on_cpu),
    "counted": within(lambda: FlopCounterMode(display=False)),
}
LATER = ("grad", "checkpoint", "reentrant", "selective, all saved", "offloaded")


def new_mask():
    document = PLACES // 17
    same = lambda b, h, q, kv: (document[q] == document[kv]) & (q >= kv)  # noqa: E731
    return create_block_mask(same, None, None, S, S, device="cpu")


def eager():
    mask = new_mask()
    return lambda q, k, v: magi_compile.flex_attention(q, k, v, block_mask=mask)


def eager_with_score_mod():
    mask = new_mask()
    number = float(torch.rand(()))  # another program each time
    score_mod = lambda score, b, h, q, kv: score + number * (q - q + kv - kv)  # noqa: E731
    return lambda q, k, v: magi_compile.flex_attention(q, k, v, score_mod, mask)


def packed():
    slices = AttnSlices.from_cu_seqlens([0, 17, 34, S], causal=True)

    def attend(q, k, v):
        rows = (x[0].transpose(0, 1) for x in (q, k, v))
        return magi_compile.flex_flash_attention(*rows, slices).out.transpose(0, 1)[None]

    return attend


def compiled():
    mask = new_mask()
    backend = magi_compile.make_backend("aot_eager")
    attend = torch.compile(
        lambda q, k, v, mask: flex_attention(q, k, v, block_mask=mask), backend=backend
    )
    return lambda q, k, v: attend(q, k, v, mask)


DOORS = [eager, eager_with_score_mod, packed, compiled]


@pytest.mark.parametrize("door", DOORS, ids=lambda x: x.__name__)
@pytest.mark.parametrize("first", MODES)
def test_orders(door, first):
    """Gradients are those of dense attention in every later mode, whatever mode came first."""
    if door is compiled and first == "counted":
        pytest.skip("Dynamo compiles nothing within a dispatch mode")
    torch._dynamo.reset()
    attend = door()
    for name in (first, *(LATER if door is not compiled else LATER[:2])):
        q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, S, 16).unbind())
        scores = (q @ k.mT / 4).masked_fill(~VISIBLE, -torch.inf)
        want = scores.softmax(-1) @ v
        out = MODES[name](attend, q, k, v)
        tolerance = (
            {"atol": 0.03, "rtol": 0.03} if name == "autocast" else {"atol": 1e-4, "rtol": 1e-4}
        )
        torch.testing.assert_close(out, want.to(out.dtype), **tolerance)
        if name in LATER or out.requires_grad:
            out.float().square().sum().backward()
            grads = [x.grad for x in (q, k, v)]
            expected = torch.autograd.grad(want.square().sum(), (q, k, v))
            torch.testing.assert_close(
                grads, list(expected), **{x: 4 * y for x, y in tolerance.items()}
            )


@pytest.mark.parametrize("made_in", [torch.inference_mode, contextlib.nullcontext])
def test_what_is_made_in_a_mode_serves_outside(made_in):
    """Masks and slices of a user's, made in a mode of evaluation."""
    with made_in():
        ours = magi_compile.create_block_mask(
            lambda b, h, q, kv: q >= kv, None, None, S, S, device="cpu"
        )
        theirs = new_mask()
        slices = AttnSlices.causal(S)
    x = torch.randn(1, 2, S, 16, requires_grad=True)
    for mask in (ours, theirs):
        magi_compile.flex_attention(x, x, x, block_mask=mask).square().sum().backward()
    rows = x[0].transpose(0, 1)
    magi_compile.flex_flash_attention(rows, rows, rows, slices).out.square().sum().backward()
    assert x.grad.isfinite().all()
