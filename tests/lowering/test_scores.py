"""Compiled FlexAttention with any pointwise score_mod on a CPU, gradients of captured tensors included."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import magi_compile
from magi_compile.lowering.backend import make_backend
from magi_compile.lowering.options import LoweringOptions
from magi_compile.lowering.report import REPORT
from tests.score.score_mods import (
    BATCH,
    CASES,
    HEADS,
    SEQLEN,
    alibi,
    assert_as_good_as_plain,
    causal,
    dense,
    qkv,
    relative,
    results,
    scattered_by_head,
    window_by_head,
)

BY_NAME = {case.name: case for case in CASES}


def attend(q, k, v, mask, make, captures):
    return flex_attention(q, k, v, make(*captures), mask, enable_gqa=True, return_lse=True)


def compiled(function=attend, inner="aot_eager", **options):
    backend = make_backend(inner, LoweringOptions(strict=True, **options))
    return torch.compile(function, backend=backend, fullgraph=True)


def both_masks(mask_mod, heads=None):
    visible = create_mask(mask_mod, BATCH, HEADS, SEQLEN, SEQLEN, device="cpu")
    return create_block_mask(mask_mod, BATCH, heads, SEQLEN, SEQLEN, device="cpu"), visible


def check(name, mask_mod, inner="aot_eager", heads=None):
    case = BY_NAME[name]
    mask, visible = both_masks(mask_mod, heads)
    tensors, captures = qkv(), case.tensors()
    function = compiled(inner=inner)
    ours = results(lambda *x: function(*x, mask, case.make, captures), tensors, captures)
    assert_as_good_as_plain(ours, case.make, tensors, captures, visible)
    (decision,) = REPORT.lowered
    assert decision.kernel == "cpu"
    return decision


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_values_and_gradients(name):
    assert check(name, causal).score


def test_the_score_mod_is_shown():
    decision = check("computed_alibi", causal)
    assert decision.score == "score + (exp2((captures[0].float() - 3))[h] * (kv - q))"
    assert f", score {decision.score}" in str(decision)


@pytest.mark.parametrize("mask_mod", [window_by_head, scattered_by_head], ids=lambda f: f.__name__)
def test_heads_with_masks_of_their_own(mask_mod):
    decision = check("learned", mask_mod, heads=HEADS)
    assert decision.notes[-1] == "each head has a mask of its own"
    has_bits = any(note.startswith("by bit blocks") for note in decision.notes)
    assert has_bits == (mask_mod is scattered_by_head)


def test_inductor():
    check("learned", causal, inner="inductor")


def test_under_autocast():
    q, k, v = qkv()
    mask, visible = both_masks(causal)
    slopes = torch.rand(HEADS, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = compiled()(q, k, v, mask, alibi, [slopes])
    assert out.dtype == torch.bfloat16
    want, _ = dense(q, k, v, alibi(slopes), visible)
    torch.testing.assert_close(out.float(), want, atol=2e-2, rtol=2e-2)


def test_new_values_compile_nothing():
    """Of captured tensors, and of ints from their second value on."""
    mask, visible = both_masks(causal)

    def model(q, k, v, mask, bias, width):
        def score_mod(score, b, h, q, kv):
            return torch.where(q - kv < width, score + bias[h], score / width)

        return flex_attention(q, k, v, score_mod, mask, enable_gqa=True, return_lse=True)

    function = compiled(model, "eager")
    for seed, width in enumerate((5, 6, 9, 11)):
        bias = torch.randn(HEADS, generator=torch.Generator().manual_seed(seed))
        bias.requires_grad_()

        def make(bias, width=width):
            return lambda score, b, h, q, kv: torch.where(
                q - kv < width, score + bias[h.flatten()].view(h.shape), score / width
            )

        tensors = qkv()
        ours = results(lambda *x, n=width, y=bias: function(*x, mask, y, n), tensors, [bias])
        assert_as_good_as_plain(ours, make, tensors, [bias], visible)
    assert len(REPORT.lowered) == 2


@torch.no_grad()
def test_a_float_that_changes():
    """Dynamo makes a tensor of it from its second value on."""
    mask, visible = both_masks(causal)

    def slope(value):
        return lambda score, b, h, q, kv: (score - value * (q - kv)) / (2 * value + 1)

    function = compiled(lambda q, k, v, value: attend(q, k, v, mask, slope, [value]), "inductor")
    for value in (0.1, 0.2, 0.3, 0.7):
        q, k, v = qkv()
        out, lse = function(q, k, v, value)
        want, want_lse = dense(q, k, v, slope(value), visible)
        torch.testing.assert_close((out, lse), (want, want_lse), atol=1e-5, rtol=1e-5)
    assert "with x1 = value" in REPORT.lowered[-1].score


def test_a_module_with_parameters_in_a_checkpoint():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.randn(HEADS, 2 * SEQLEN + 1))

        def forward(self, q, k, v):
            mask, _ = masks
            return flex_attention(q, k, v, relative(self.bias), mask, enable_gqa=True)

    masks = both_masks(causal)
    layer, tensors = Layer(), qkv()

    def model(q, k, v):
        return checkpoint(layer, q, k, v, use_reentrant=False)

    out = compiled(model)(*tensors)
    found = torch.autograd.grad(out.square().sum(), (*tensors, layer.bias))
    want, _ = dense(*tensors, relative(layer.bias), masks[1])
    expected = torch.autograd.grad(want.square().sum(), (*tensors, layer.bias))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=2e-4)
    assert "bias" in REPORT.lowered[0].score


def test_explained():
    mask, _ = both_masks(causal)
    q, k, v = (x.detach() for x in qkv())

    def model(q, k, v):
        def score_mod(score, b, h, q, kv):
            return score + (kv - q) / (h + 1)

        return flex_attention(q, k, v, score_mod, mask, enable_gqa=True)

    explanation = magi_compile.explain(model, q, k, v)
    (call,) = explanation.calls
    assert call.density == pytest.approx((SEQLEN + 1) / 2 / SEQLEN)
    assert "score    score + ((kv - q) / (h + 1))" in str(explanation)


def test_a_kernel_says_why_captured_tensors_get_no_gradients(monkeypatch):
    from magi_compile.kernels.cpu.kernel import CpuKernel

    def score_refusals(self, problem, needs):
        return ["adds them up in any order"] if needs.wants_table_gradients else []

    monkeypatch.setattr(CpuKernel, "score_refusals", score_refusals)
    mask, _ = both_masks(causal)
    slopes = torch.rand(HEADS)
    compiled()(*qkv(), mask, alibi, [slopes])
    torch._dynamo.reset()
    with pytest.raises(Exception, match="cpu: adds them up in any order"):
        compiled()(*qkv(), mask, alibi, [slopes.requires_grad_()])


def test_a_kernel_without_score_mods_says_so():
    mask, _ = both_masks(causal)
    with pytest.raises(Exception, match="reference: has no score_mods but a scale and a soft-cap"):
        compiled(kernel="reference")(*qkv(), mask, alibi, [torch.rand(HEADS)])
