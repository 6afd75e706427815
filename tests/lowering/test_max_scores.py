"""Compiled FlexAttention that is asked for the largest score of each row."""

import pytest
import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, create_mask

from magi_compile.lowering.backend import make_backend
from magi_compile.lowering.options import LoweringOptions
from magi_compile.lowering.report import REPORT

BATCH, HEADS, HEADS_KV, SEQLEN = 2, 4, 2, 70
_options = flex._apply_kernel_options


def options_of_a_gpu(query, key, value, return_lse, kernel_options, return_aux=None):
    """PyTorch refuses the largest scores on a CPU here, in front of its operator."""
    without = None if return_aux is None else AuxRequest(lse=return_aux.lse)
    options = _options(query, key, value, return_lse, kernel_options, without)
    options["OUTPUT_MAX"] = return_aux is not None and return_aux.max_scores
    return options


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(flex, "_apply_kernel_options", options_of_a_gpu)


def after_gaps(b, h, q, kv):
    """Some rows see nothing."""
    return (q >= kv) & (q % 9 != 4)


def by_heads(b, h, q, kv):
    return after_gaps(b, h, q, kv) & (q - kv < 20 * (h + 1))


SCORE_MODS = {
    "none": None,
    "softcap": lambda score, *_: 1.5 * torch.tanh(score / 1.5),
    "bias": lambda score, b, h, q, kv: score + 0.1 * (kv - q) * (h + 1),
}


def tensors(device="cpu", dtype=torch.float32, head_dim=16):
    return [
        torch.randn(BATCH, n, SEQLEN, head_dim, device=device, dtype=dtype, requires_grad=True)
        for n in (HEADS, HEADS_KV, HEADS_KV)
    ]


def dense_max_scores(q, k, score_mod, mask_mod):
    scores = (q @ k.repeat_interleave(HEADS // HEADS_KV, 1).mT).detach() * 0.3
    sizes = (BATCH, HEADS, SEQLEN, SEQLEN)
    if score_mod is not None:
        grid = [torch.arange(size, device=q.device) for size in sizes]
        scores = score_mod(scores, *torch.meshgrid(*grid, indexing="ij"))
    return scores.masked_fill(~create_mask(mask_mod, *sizes, device=q.device), -torch.inf).amax(-1)


def check(score_mod, mask_mod, lse, inner, device="cpu", dtype=torch.float32, head_dim=16):
    def attend(q, k, v, mask):
        return flex.flex_attention(
            *(q, k, v, score_mod, mask, 0.3, True),
            return_aux=AuxRequest(lse=lse, max_scores=True),
        )

    given = tensors(device, dtype, head_dim)
    heads = HEADS if mask_mod is by_heads else None
    mask = create_block_mask(mask_mod, BATCH, heads, SEQLEN, SEQLEN, device=device)
    backend = make_backend(inner, LoweringOptions(strict=True))
    out, aux = torch.compile(attend, backend=backend, fullgraph=True)(*given, mask)
    (decision,) = REPORT.lowered
    exact = [x.detach().double() for x in given[:2]]
    expected = dense_max_scores(*exact, score_mod, mask_mod)
    assert (aux.max_scores.dtype, aux.max_scores.requires_grad) == (torch.float32, False)
    assert (aux.lse is not None) == lse
    tolerance = 1e-4 if device == "cpu" else 5e-3
    torch.testing.assert_close(aux.max_scores.double(), expected, atol=tolerance, rtol=tolerance)
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in given)
    return decision


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("mask_mod", [after_gaps, by_heads])
@pytest.mark.parametrize("name", SCORE_MODS)
def test_matches_dense(name, mask_mod, lse, as_on_a_gpu):
    assert check(SCORE_MODS[name], mask_mod, lse, "aot_eager").kernel == "cpu"


def test_inductor(as_on_a_gpu):
    assert check(None, after_gaps, True, "inductor").kernel == "cpu"


def test_calls_with_and_without_them_mix(as_on_a_gpu):
    def attend(q, k, v):
        _, aux = flex.flex_attention(
            q, k, v, enable_gqa=True, return_aux=AuxRequest(max_scores=True)
        )
        return flex.flex_attention(q, k, v, enable_gqa=True), aux.max_scores

    given = tensors()
    backend = make_backend("aot_eager", LoweringOptions(strict=True))
    out, largest = torch.compile(attend, backend=backend, fullgraph=True)(*given)
    q, k, v = given[0], *(x.repeat_interleave(HEADS // HEADS_KV, 1) for x in given[1:])
    scores = q @ k.mT * 16**-0.5
    torch.testing.assert_close(out, scores.softmax(-1) @ v, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(largest, scores.amax(-1).detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["none", "softcap"])
def test_on_a_gpu(name, head_dim):
    options = dict(device="cuda", dtype=torch.bfloat16, head_dim=head_dim)
    assert check(SCORE_MODS[name], after_gaps, True, "inductor", **options).kernel == "hopper"
