"""No batch entries, no rows, no keys, no documents: results of these shapes, rows that see nothing,
gradients of zero."""

import itertools

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

from magi_compile import AttnSlices, flex_attention, flex_flash_attention

SIZES = [(0, 64, 64), (2, 0, 64), (2, 64, 0), (2, 0, 0), (0, 0, 0)]
MASKS = ["none", "made in the graph", "given"]
BY_INDUCTOR = [((2, 64, 0), "made in the graph"), ((2, 0, 64), "none"), ((0, 64, 64), "given")]


def causal(b, h, q, kv):
    return q >= kv


def check(out, lse, inputs):
    """`lse` may be None: PyTorch's function returns no empty one."""
    assert not out.any()
    assert lse is None or (lse == -torch.inf).all()
    for grad, x in zip(torch.autograd.grad(out.sum(), inputs), inputs, strict=True):
        assert grad.shape == x.shape
        assert not grad.any()


@pytest.mark.parametrize("kernel", [None, "reference"])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize(("total_q", "total_k"), [(0, 0), (0, 5), (5, 0), (5, 5)])
def test_packed(total_q, total_k, softcap, kernel):
    shapes = [(total_q, 4, 16), (total_k, 2, 16), (total_k, 2, 8)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    masks = [AttnSlices.from_lists([], [], [], total_q, total_k)]
    if 0 in (total_q, total_k):
        masks.append(AttnSlices.full(total_q, total_k))
    if total_q == total_k == 0:
        masks.append(AttnSlices.from_cu_seqlens([0], causal=True))
    for slices in masks:
        out, lse, _ = flex_flash_attention(*inputs, slices, softcap=softcap, kernel=kernel)
        assert (out.shape, lse.shape) == ((total_q, 4, 8), (4, total_q))
        check(out, lse, inputs)


@pytest.mark.parametrize(
    ("sizes", "mask", "backend"),
    [
        *itertools.product(SIZES, MASKS, [None, "aot_eager"]),
        *(
            pytest.param(*x, "magi", marks=() if x in BY_INDUCTOR else pytest.mark.slow)
            for x in itertools.product(SIZES, MASKS)
        ),
    ],
    ids=str,
)
def test_padded(sizes, mask, backend):
    from magi_compile.lowering.backend import make_backend

    batch, seqlen_q, seqlen_k = sizes
    has_block_mask = mask == "given" or (backend is None and mask != "none")
    if has_block_mask and 0 in (seqlen_q, seqlen_k):
        pytest.skip("PyTorch makes no BlockMask without rows or keys")
    sizes = (None, None, seqlen_q, seqlen_k)
    given = create_block_mask(causal, *sizes, device="cpu") if has_block_mask else None
    shapes = [(batch, 4, seqlen_q, 16), (batch, 2, seqlen_k, 16), (batch, 2, seqlen_k, 8)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    function = torch_flex_attention if backend else flex_attention

    def attend(q, k, v):
        block_mask = given
        if mask == "made in the graph" and backend:
            block_mask = create_block_mask(causal, *sizes, device="cpu")
        return function(q, k, v, block_mask=block_mask, enable_gqa=True, return_lse=True)

    if backend:
        torch._dynamo.reset()
        backend = make_backend(backend) if backend != "magi" else backend
        attend = torch.compile(attend, backend=backend, fullgraph=True)
    out, lse, *_ = attend(*inputs)
    assert out.shape == (batch, 4, seqlen_q, 8)
    check(out, lse, inputs)
