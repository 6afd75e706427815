"""Attention sinks: the softmax of a row has one more score, whose value is 0."""

import pytest
import torch

import magi_compile
from magi_compile import AttnSlices
from magi_compile.ops.sinks import out_with_sinks

S, HEADS, KV_HEADS = 40, 4, 2
# Rows 12 to 20 see nothing.
SLICES = AttnSlices.from_lists([(0, 12), (20, S)], [(0, 12), (5, S)], [1, 1], S, S)


def tensors(dtype=torch.float64, sinks=(0.5, -2.0, 3.0, 0.0)):
    generator = torch.Generator().manual_seed(0)
    shapes = ((S, HEADS, 8), (S, KV_HEADS, 8), (S, KV_HEADS, 16))
    qkv = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    return [*qkv, torch.tensor(sinks, dtype=dtype)]


def dense(q, k, v, sinks):
    """In words of the definition: a column of sinks beside the scores."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~SLICES.to_dense(), -torch.inf)
    scores = torch.cat([scores, sinks[:, None, None].expand(-1, S, 1)], -1)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :-1], v)
    return out, scores.logsumexp(-1)


def gradients(attend, inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out, lse, *_ = attend(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    loss = (out * weights).sum() + (lse * lse.detach().sin()).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def flash(q, k, v, sinks):
    return magi_compile.flex_flash_attention(q, k, v, SLICES, sinks=sinks)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_out_lse_and_gradients(is_compiled):
    wanted = gradients(dense, tensors())
    attend = torch.compile(flash, backend="aot_eager", fullgraph=True) if is_compiled else flash
    given = gradients(attend, [x.float() for x in tensors()])
    for ours, exact in zip(given, wanted, strict=True):
        torch.testing.assert_close(ours, exact.float(), atol=2e-5, rtol=2e-5)


def test_rows_that_see_nothing_are_zero_and_finite():
    out, lse, _ = flash(*[x.float() for x in tensors()])
    assert (out[12:20] == 0).all()
    torch.testing.assert_close(lse[:, 12:20], tensors()[3].float()[:, None].expand(-1, 8))


def test_a_head_without_a_sink():
    """Its sink is -inf, also where rows see nothing."""
    q, k, v, sinks = [x.float() for x in tensors(sinks=(-torch.inf, 0.0, -torch.inf, 1.0))]
    out, lse, _ = flash(q, k, v, sinks)
    plain, plain_lse, _ = magi_compile.flex_flash_attention(q, k, v, SLICES)
    torch.testing.assert_close(out[:, ::2], plain[:, ::2])
    torch.testing.assert_close(lse[::2], plain_lse[::2])
    assert out.isfinite().all()


def test_dtypes_of_results():
    q, k, v, sinks = tensors()
    out, lse, _ = flash(*(x.bfloat16() for x in (q, k, v)), sinks.bfloat16())
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


def test_heads_first():
    out, lse = torch.randn(2, HEADS, S, 8), torch.randn(2, HEADS, S)
    sinks = torch.randn(HEADS)
    kept = out_with_sinks(out, lse, sinks, heads_first=True)
    for entry in range(2):
        rows_first = out[entry].transpose(0, 1)
        expected = out_with_sinks(rows_first, lse[entry], sinks, heads_first=False)
        torch.testing.assert_close(kept[entry].transpose(0, 1), expected)


@pytest.mark.parametrize(
    ("sinks", "error", "words"),
    [
        (0.0, TypeError, "`sinks` must be a tensor or None, got float"),
        (
            torch.zeros(HEADS, dtype=torch.int64),
            ValueError,
            "floating-point dtype, got torch.int64",
        ),
        (torch.zeros(HEADS, 1), ValueError, r"each head of `q`, \[4\], got shape \[4, 1\]"),
        (torch.zeros(HEADS, device="meta"), ValueError, "device of `q`, cpu, got meta"),
    ],
)
def test_wrong_sinks(sinks, error, words):
    q, k, v, _ = [x.float() for x in tensors()]
    with pytest.raises(error, match=words):
        flash(q, k, v, sinks)
