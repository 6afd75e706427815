"""Score programs in the Hopper kernels on a GPU, in compiled FlexAttention calls, against dense attention in fp64."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import magi_compile
from magi_compile.lowering.backend import make_backend
from magi_compile.lowering.options import LoweringOptions
from magi_compile.lowering.report import lowering_report
from tests.score.score_mods import (
    BATCH,
    CASES,
    HEADS,
    HEADS_KV,
    SEQLEN,
    assert_as_good_as_plain,
    causal,
    results,
    scattered,
    window_by_head,
)
from tests.support.deterministic import deterministic_algorithms

pytestmark = pytest.mark.gpu
LEARNED = [case for case in CASES if any(x.is_floating_point() for x in case.captures)]
MASKS = {"causal": causal, "scattered": scattered, "window_by_head": window_by_head}


def check(case, mask_mod, head_dim, dtype, learns=False):
    heads = HEADS if mask_mod is window_by_head else None
    visible = create_mask(mask_mod, None, HEADS, SEQLEN, SEQLEN, device="cpu")
    mask = create_block_mask(mask_mod, BATCH, heads, SEQLEN, SEQLEN, device="cuda")
    generator = torch.Generator().manual_seed(3)
    tensors = [
        torch.randn(BATCH, heads, SEQLEN, head_dim, generator=generator).to(dtype).requires_grad_()
        for heads in (HEADS, HEADS_KV, HEADS_KV)
    ]
    captures = [x.requires_grad_(learns and x.requires_grad) for x in case.tensors(dtype)]
    torch._dynamo.reset()

    @torch.compile(
        backend=make_backend("aot_eager", LoweringOptions(strict=True, kernel="hopper")),
        fullgraph=True,
    )
    def attend(q, k, v, captures):
        score_mod = case.make(*captures)
        return flex_attention(q, k, v, score_mod, mask, enable_gqa=True, return_lse=True)

    def on_gpu(*qkv):
        moved = [x.cuda() for x in captures]
        return [x.cpu() for x in attend(*(x.cuda() for x in qkv), moved)]

    ours = results(on_gpu, tensors, captures)
    assert_as_good_as_plain(ours, case.make, tensors, captures, visible)
    assert lowering_report().lowered[-1].kernel == "hopper"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_programs(case, head_dim, dtype):
    check(case, causal, head_dim, dtype)


@pytest.mark.parametrize("learns", [False, True], ids=["given", "learned"])
@pytest.mark.parametrize("head_dim", [32, 80])
@pytest.mark.parametrize("case", LEARNED, ids=lambda case: case.name)
def test_head_dimensions_in_between(case, head_dim, learns):
    check(case, scattered, head_dim, torch.bfloat16, learns)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [96, 128])
@pytest.mark.parametrize("name", ["alibi", "relative", "square"])
def test_masks(name, mask, head_dim):
    (case,) = (case for case in CASES if case.name == name)
    check(case, MASKS[mask], head_dim, torch.bfloat16)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", LEARNED, ids=lambda case: case.name)
def test_gradients_of_captured_tensors(case, dtype, head_dim):
    check(case, causal, head_dim, dtype, learns=True)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [96, 192, 256])
@pytest.mark.parametrize("name", ["relative", "documents", "learned"])
def test_gradients_of_captured_tensors_under_masks(name, head_dim, mask):
    (case,) = (case for case in CASES if case.name == name)
    check(case, MASKS[mask], head_dim, torch.bfloat16, learns=True)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_of_many_tiles(head_dim):
    """Every thread block of a GPU adds to the same numbers."""
    seqlen, heads = 3000, 8
    bias = torch.randn(heads, seqlen, device="cuda", requires_grad=True)
    generator = torch.Generator("cuda").manual_seed(3)
    q, k, v, dout = (
        torch.randn(1, heads, seqlen, head_dim, generator=generator, device="cuda").bfloat16()
        for _ in range(4)
    )
    mask = create_block_mask(causal, None, None, seqlen, seqlen, device="cuda")
    torch._dynamo.reset()

    @torch.compile(
        backend=make_backend("aot_eager", LoweringOptions(strict=True, kernel="hopper")),
        fullgraph=True,
    )
    def attend(q, k, v, bias):
        return flex_attention(q, k, v, lambda score, b, h, q, kv: score + bias[h, q - kv], mask)

    (found,) = torch.autograd.grad(attend(q, k, v, bias), bias, dout)
    rows = torch.arange(seqlen, device="cuda")
    distance = rows[:, None] - rows
    for head in range(heads):
        own = bias[head].detach().double().requires_grad_()
        scores = q[0, head].double() @ k[0, head].double().mT * head_dim**-0.5
        scores = (scores + own[distance]).masked_fill(distance < 0, -torch.inf)
        exact = scores.softmax(-1) @ v[0, head].double()
        (wanted,) = torch.autograd.grad(exact, own, dout[0, head].double())
        # delta is made of an output in bf16.
        assert (found[head] - wanted).abs().max() < 2e-2 * wanted.abs().max()


def test_under_the_flag_a_learned_bias_stays_on_flex_attention():
    bias = torch.randn(HEADS, device="cuda", requires_grad=True)
    x = torch.randn(1, HEADS, 256, 64, device="cuda", dtype=torch.bfloat16)
    torch._dynamo.reset()

    @torch.compile(backend="magi", fullgraph=True)
    def attend(x):
        return flex_attention(x, x, x, lambda score, b, h, q, kv: score + bias[h])

    with deterministic_algorithms():
        attend(x)
    assert "with atomics" in str(lowering_report().refused[-1].reasons)


def test_eager_gradients_of_a_learned_bias():
    bias = torch.randn(HEADS, device="cuda", requires_grad=True)
    x = torch.randn(1, HEADS, 256, 64, device="cuda", dtype=torch.bfloat16)

    def score_mod(score, b, h, q, kv):
        return score + bias[h] * q

    out = magi_compile.flex_attention(x, x, x, score_mod)
    (found,) = torch.autograd.grad(out.float().square().sum(), bias)
    q = torch.arange(256, device="cuda")[:, None]
    scores = x.double() @ x.double().mT / 8 + bias.double()[:, None, None] * q
    exact = scores.softmax(-1) @ x.double()
    (wanted,) = torch.autograd.grad(exact.square().sum(), bias)
    assert (found - wanted).abs().max() < 1e-2 * x.double().square().sum()
