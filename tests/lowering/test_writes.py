"""What is written to inputs and outputs of a compiled attention between its forward and its backward, and to what masks
read between two attentions."""

import contextlib
import operator

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

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


def within(window):
    def mask_mod(b, h, q, kv):
        return (q - kv).abs() < window[0]

    return create_block_mask(mask_mod, None, None, S, S, device="cpu")


def by_lists(counts):
    indices = torch.arange(4).expand(1, 1, 4, 4).int().contiguous()
    return BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=10, seq_lengths=(S, S))


def set_items(x):
    x[:] = x * 3


WRITES = {
    "method": lambda x: x.mul_(3),
    "operator": lambda x: operator.imul(x, 3),
    "items": set_items,
    "a view": lambda x: x.view(-1).mul_(3),
    "out": lambda x: torch.mul(x, 3, out=x),
    "another tensor": lambda x: torch.ones_like(x).mul_(3),
}


@pytest.mark.parametrize("made", [within, by_lists], ids=lambda x: x.__name__)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("is_local", [False, True], ids=["argument", "local"])
def test_between_two_attentions(made, write, is_local):
    """The second one has the mask of its own time; where nothing wrote to it, both share one."""
    torch._dynamo.reset()
    graphs = []

    def attend_twice(q, k, v, given):
        x = given.clone() if is_local else given
        first = flex_attention(q, k, v, block_mask=made(x))
        WRITES[write](x)
        return first, flex_attention(q, k, v, block_mask=made(x))

    def inner(gm, example_inputs):
        graphs.append(gm)
        return gm

    given = torch.tensor([4]) if made is within else torch.ones(1, 1, 4, dtype=torch.int32)
    qkv = torch.randn(3, 1, 2, S, 16)
    got = torch.compile(attend_twice, backend=make_backend(inner))(*qkv, given.clone())
    if made is within:
        distance = (torch.arange(S)[:, None] - torch.arange(S)).abs()
        masks = [distance < 4, distance < (4 if write == "another tensor" else 12)]
    else:
        keys = (
            torch.arange(S) < torch.tensor([10, 10 if write == "another tensor" else 30])[:, None]
        )
        masks = [x.expand(S, S) for x in keys]
    for x, mask in zip(got, masks, strict=True):
        torch.testing.assert_close(x, scaled_dot_product_attention(*qkv, attn_mask=mask))
    (graph,) = graphs
    of_masks = [
        node
        for node in graph.graph.nodes
        if str(node.target).startswith(("magi.mask_slices", "magi.mask_bits"))
    ]
    # Lists that the graph makes are nodes of their own each time.
    is_shared = write == "another tensor" and made is within
    assert len(of_masks) == (1 if is_shared else 2)


def test_inplace_by_its_place():
    """PyTorch's functions take `inplace` by its place as well."""
    torch._dynamo.reset()

    def attend_twice(q, k, v, x):
        first = flex_attention(q, k, v, block_mask=within(x))
        torch.nn.functional.hardtanh(x, 12.0, 13.0, True)
        return first, flex_attention(q, k, v, block_mask=within(x))

    qkv, distance = torch.randn(3, 1, 2, S, 16), (torch.arange(S)[:, None] - torch.arange(S)).abs()
    attend = torch.compile(attend_twice, backend=make_backend("aot_eager"))
    for x, width in zip(attend(*qkv, torch.tensor([4.0])), (4, 12), strict=True):
        torch.testing.assert_close(
            x, scaled_dot_product_attention(*qkv, attn_mask=distance < width)
        )
