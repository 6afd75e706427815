"""The output has its dimensions in memory in the order of q, as FlexAttention's own does, whatever the order is."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

import magi_compile
from magi_compile.lowering.backend import make_backend
from magi_compile.lowering.flex import lower_flex_attention

SIZES = (2, 4, 48, 16)  # B, H, S, D
# Each two dimensions are neighbours in either order, and each dimension is the first, the second, the third and the
# last.
PERMUTATIONS = [
    *[(0, 1, 2, 3), (1, 3, 0, 2), (2, 0, 3, 1), (3, 2, 1, 0)],
    *[(0, 2, 1, 3), (1, 0, 3, 2), (2, 3, 0, 1), (3, 1, 2, 0)],
]


def query(order):
    """A q whose dimensions lie in memory in this order."""
    dense = torch.randn([SIZES[dim] for dim in order])
    return dense.permute(sorted(range(4), key=lambda dim: order[dim])).requires_grad_()


def others():
    return [torch.randn(2, 2, 48, size, requires_grad=True) for size in (16, 8)]


def promised(q, k, v):
    """What FlexAttention gives, and its strides."""
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    found = []

    def keep(gm, example_inputs):
        outputs = gm.graph.output_node().args[0]
        found.extend(x.meta["example_value"].stride() for x in outputs)
        return gm.forward

    torch._dynamo.reset()

    def attend(q, k, v):
        return torch_flex_attention(q, k, v, enable_gqa=True, return_lse=True)

    with torch.no_grad():
        tensors = (x.detach() for x in (q, k, v))  # stock FlexAttention takes no others on a CPU
        torch.compile(attend, backend=keep, fullgraph=True)(*tensors)
    return exact, found


@pytest.mark.parametrize("order", PERMUTATIONS, ids=str)
def test_eager(order):
    q, (k, v) = query(order), others()
    expected, strides = promised(q, k, v)
    out, lse = magi_compile.flex_attention(q, k, v, enable_gqa=True, return_lse=True)
    assert [out.stride(), lse.stride()] == strides
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("order", PERMUTATIONS, ids=str)
def test_compiled_with_a_view_behind(order):
    """A view of all dimensions but the last as one, in the order in which they lie in memory."""
    q, (k, v) = query(order), others()
    expected, strides = promised(q, k, v)
    in_memory = [dim for dim in order if dim != 3]

    def attend(q, k, v):
        out, lse = torch_flex_attention(q, k, v, enable_gqa=True, return_lse=True)
        return out, lse, out.permute(*in_memory, 3).view(-1, 8), lse.view(-1)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=make_backend("aot_eager"), fullgraph=True)
    out, lse, flat, _ = compiled(q, k, v)
    assert [out.stride(), lse.stride()] == strides
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    ours = torch.autograd.grad(flat.sin().sum(), (q, k, v))
    grads = torch.autograd.grad(expected.sin().sum(), (q, k, v))
    torch.testing.assert_close(ours, grads, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "order",
    [
        *[(0, 2, 1, 3), (2, 0, 1, 3)],
        *(pytest.param(x, marks=pytest.mark.slow) for x in ((0, 1, 2, 3), (1, 2, 0, 3))),
    ],
    ids=str,
)
def test_inductor_with_a_view_behind(order):
    q, (k, v) = query(order), others()
    expected, strides = promised(q, k, v)
    in_memory = [dim for dim in order if dim != 3]

    def attend(q, k, v):
        out = torch_flex_attention(q, k, v, enable_gqa=True)
        return out, out.permute(*in_memory, 3).view(-1, 8) + 1

    torch._dynamo.reset()
    out, flat = torch.compile(attend, backend="magi", fullgraph=True)(q, k, v)
    assert out.stride() == strides[0]
    expected_flat = expected.permute(*in_memory, 3).reshape(-1, 8) + 1
    torch.testing.assert_close(flat, expected_flat, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_values_that_are_a_view_of_the_keys():
    """As in multi-head latent attention, after a call with other strides: PyTorch's compiler has then sizes of what the
    values are a view of, and fails on a guard for them."""
    attend = torch.compile(
        lambda *x: torch_flex_attention(*x), backend=make_backend("aot_eager"), fullgraph=True
    )
    parts = torch.randn(2, 90, 96).chunk(3, -1)
    attend(*(x.unflatten(-1, (4, -1)).transpose(1, 2) for x in parts))
    q, k = torch.randn(2, 2, 4, 90, 16)
    q, k = q.clone(), k.clone()
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, k[..., :8])
    torch.testing.assert_close(attend(q, k, k[..., :8]), wanted)


def test_a_compiler_with_a_fake_mode_of_its_own():
    """Around Inductor, and so around the lowering, whose graph has Dynamo's."""

    def backend(gm, example_inputs):
        with FakeTensorMode():
            lower_flex_attention(gm)
        return gm.forward

    q, (k, v) = query((1, 3, 0, 2)), others()
    expected, strides = promised(q, k, v)
    torch._dynamo.reset()
    with torch.no_grad():
        attend = torch.compile(torch_flex_attention, backend=backend, fullgraph=True)
        out = attend(*(x.detach() for x in (q, k, v)), enable_gqa=True)
    assert out.stride() == strides[0]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
