"""What is written to inputs and outputs of a compiled attention between its forward and its backward."""

import contextlib

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from magi_compile.lowering.backend import make_backend
from tests.support.pairwise import pairwise

S = 40
WINDOW = torch.tensor([5, 20])
MASKS = {
    "all heads": (lambda b, h, q, kv: q >= kv, None),
    "by head": (lambda b, h, q, kv: (q >= kv) & (q - kv < WINDOW[h]), 2),
}


def relative(score, b, h, q, kv):
    return score + 0.01 * (q - kv)


@pytest.mark.parametrize(
    ("mask", "batch", "rows_first", "score_mod"),
    pairwise(MASKS, (1, 2), (False, True), (None, relative)),
    ids=lambda x: getattr(x, "__name__", None),
)
def test_inputs(mask, batch, rows_first, score_mod):
    """The gradients of the values at the call, or PyTorch's error."""
    torch._dynamo.reset()
    attend = torch.compile(flex_attention, backend=make_backend("aot_eager"))
    mask_mod, heads = MASKS[mask]
    block_mask = create_block_mask(mask_mod, None, heads, S, S, device="cpu")
    for written in range(3):
        inputs = []
        for x in torch.randn(3, batch, S, 2, 16):
            x = x.transpose(1, 2) if rows_first else x.transpose(1, 2).contiguous()
            inputs.append(x.detach().requires_grad_())
        want = torch.autograd.grad(attend(*inputs, score_mod, block_mask).sum(), inputs)
        out = attend(*inputs, score_mod, block_mask)
        with torch.no_grad():
            inputs[written].zero_()
        with noticed():
            got = torch.autograd.grad(out.sum(), inputs)
            torch.testing.assert_close(got, want)


@contextlib.contextmanager
def noticed():
    try:
        yield
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
