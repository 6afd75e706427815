"""The lowering in training and inference: values, gradients, recompilations, layouts."""

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, flex_attention, or_masks

from magi_compile.lowering.backend import make_backend
from magi_compile.lowering.options import LoweringOptions
from magi_compile.lowering.report import REPORT

from .conftest import (
    BATCH,
    Attention,
    assert_same,
    block_mask,
    document_causal,
    documents,
    values_and_grads,
)


def num_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def run(model, compiled, seqlen, count, seed):
    x = torch.randn(BATCH, seqlen, 32, generator=torch.Generator().manual_seed(seed))
    mask_mod = document_causal(documents(seqlen, count, seed))
    ours = values_and_grads(model, *compiled(x, block_mask(mask_mod, seqlen)))
    assert_same(ours, values_and_grads(model, *model.dense(x, mask_mod)))


def test_training_matches_dense(backend):
    model = Attention()
    run(model, torch.compile(model, backend=backend, fullgraph=True), 192, 5, 0)
    assert [decision.kernel for decision in REPORT.decisions] == ["cpu"]


def test_new_documents_do_not_recompile(backend):
    model = Attention()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for seed, count in enumerate((3, 7, 1, 40)):
        run(model, compiled, 192, count, seed)
    assert num_graphs() == 1


def test_dynamic_lengths_share_one_graph():
    model = Attention()
    compiled = torch.compile(model, backend=make_backend("aot_eager"), fullgraph=True, dynamic=True)
    for seed, seqlen in enumerate((192, 320, 129, 256)):
        run(model, compiled, seqlen, 5, seed)
    assert num_graphs() == 1


def test_dynamic_lengths_of_a_mask_that_repeats():
    """How many intervals a row sees is known when the graph runs."""
    model = Attention()
    compiled = torch.compile(model, backend=make_backend("aot_eager"), fullgraph=True, dynamic=True)
    for seqlen in (192, 320, 130):
        x, mask_mod = torch.randn(BATCH, seqlen, 32), noised_and_clean(seqlen // 2)
        ours = values_and_grads(model, *compiled(x, block_mask(mask_mod, seqlen)))
        assert_same(ours, values_and_grads(model, *model.dense(x, mask_mod)))
    assert num_graphs() == 1


def test_dynamic_lengths_of_a_mask_that_writes():
    """Its graph without writes serves every length."""
    model = Attention()
    compiled = torch.compile(model, backend=make_backend("aot_eager"), fullgraph=True, dynamic=True)
    for seed, seqlen in enumerate((192, 320, 130)):
        x, mask_mod = torch.randn(BATCH, seqlen, 32), counted(documents(seqlen, 5, seed))
        ours = values_and_grads(model, *compiled(x, block_mask(mask_mod, seqlen)))
        assert_same(ours, values_and_grads(model, *model.dense(x, mask_mod)))
    assert num_graphs() == 1
    assert not REPORT.refused


def test_inductor_trains_like_dense():
    model = Attention()
    compiled = torch.compile(model, backend="magi", fullgraph=True)
    for seed, count in enumerate((3, 9)):
        run(model, compiled, 192, count, seed)
    assert num_graphs() == 1


def test_inductor_with_dynamic_lengths():
    model = Attention()
    compiled = torch.compile(model, backend="magi", fullgraph=True, dynamic=True)
    for seed, seqlen in enumerate((192, 320)):
        run(model, compiled, seqlen, 5, seed)
    assert num_graphs() == 1


def window(b, h, q, kv):
    return (q >= kv) & (q - kv <= 31)


def prefix(b, h, q, kv):
    return kv < 40


def noised_and_clean(n):
    """Blocks of 16 twice, as block diffusion models are trained."""

    def mask_mod(b, h, q, kv):
        row, key = q % n // 16, kv % n // 16
        same = (row == key) & ((q < n) == (kv < n))
        return same | ((row > key) & (kv >= n))

    return mask_mod


def counted(document):
    def mask_mod(b, h, q, kv):
        number = document[b, q] + 0 * kv
        number += document.shape[1]
        number -= document[b, kv] + document.shape[1]
        number *= 2
        return (number == 0) & (q >= kv)

    return mask_mod


def batchified(b, h, q, kv):
    return (q // 40 == kv // 40) & (kv % 40 <= q % 40)


class Sink:
    def __init__(self, size):
        self.size = size

    def __call__(self, b, h, q, kv):
        return kv < self.size


@pytest.mark.parametrize(
    "mask_mod",
    [
        *(window, or_masks(window, prefix), and_masks(prefix, window), or_masks(Sink(4), window)),
        *(batchified, noised_and_clean(80)),
    ],
    ids=["window", "or_masks", "and_masks", "callable", "batchified", "noised_and_clean"],
)
def test_masks_without_data(backend, mask_mod):
    model = Attention()
    x = torch.randn(BATCH, 160, 32)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    ours = values_and_grads(model, *compiled(x, block_mask(mask_mod, 160)))
    assert_same(ours, values_and_grads(model, *model.dense(x, mask_mod)))
    assert len(REPORT.lowered) == 1


def test_no_block_mask_is_full_attention(backend):
    model = Attention()
    x = torch.randn(BATCH, 80, 32)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    ours = values_and_grads(model, *compiled(x, None))
    assert_same(ours, values_and_grads(model, *model.dense(x, lambda b, h, q, kv: q >= 0)))


def test_rows_that_see_nothing(backend):
    lengths = torch.tensor([100, 17])

    def padded(b, h, q, kv):
        return (q >= kv) & (kv < lengths[b]) & (q < lengths[b])

    model = Attention()
    x = torch.randn(BATCH, 128, 32)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    out, lse = compiled(x, block_mask(padded, 128))
    assert torch.isneginf(lse[1, :, 17:]).all()
    with torch.no_grad():
        assert_same([out, lse], list(model.dense(x, padded)))


def test_softcap_and_scale(backend):
    def softcap(score, b, h, q, kv):
        return 5.0 * torch.tanh(score / 5.0)

    model = Attention(softcap)
    x = torch.randn(BATCH, 96, 32)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    ours = values_and_grads(model, *compiled(x, block_mask(window, 96)))
    assert_same(ours, values_and_grads(model, *model.dense(x, window, softcap=5.0)))
    assert len(REPORT.lowered) == 1


def test_inference_matches_training(backend):
    model = Attention()
    x = torch.randn(BATCH, 96, 32)
    mask = block_mask(window, 96)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        out, lse = compiled(x, mask)
    assert not out.requires_grad
    assert_same([out, lse], list(compiled(x, mask)))


def test_autocast_computes_in_its_dtype(backend):
    def attend(x, mask):
        with torch.autocast("cpu", torch.bfloat16):
            return flex_attention(x, x, x, block_mask=mask)

    x = torch.randn(BATCH, 2, 96, 16)
    out = torch.compile(attend, backend=backend, fullgraph=True)(x, block_mask(window, 96))
    assert out.dtype == torch.bfloat16
    expected = attend(x, block_mask(window, 96))
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_output_keeps_the_layout_of_the_query(backend, layout):
    x = torch.randn(BATCH, 96, 2, 16).transpose(1, 2)
    x = x.contiguous() if layout == "BHSD" else x
    mask = block_mask(window, 96)
    ours = torch.compile(flex_attention, backend=backend, fullgraph=True)(x, x, x, block_mask=mask)
    stock = torch.compile(flex_attention, backend="eager", fullgraph=True)(x, x, x, block_mask=mask)
    assert ours.stride() == stock.stride()


@pytest.mark.parametrize(
    ("read", "is_copied"),
    [
        (lambda y: y.transpose(1, 2).reshape(BATCH, 96, -1), False),
        (lambda y: y.transpose(-2, 1).flatten(2), False),
        (lambda y: y.permute(0, 2, 1, 3).contiguous(), False),
        (lambda y: y.permute((0, 2, 1, 3)).reshape(BATCH, 96, -1), False),
        (lambda y: y.transpose(1, 3).reshape(BATCH, 16, -1), True),
        (lambda y: y.permute(0, 2, 3, 1).contiguous(), True),
        (lambda y: y.transpose(1, 2) * 2, True),
        (lambda y: (y.transpose(1, 2).flatten(2), y), True),
        (lambda y: y.view(BATCH, -1), True),
    ],
    ids=[
        "reshape",
        "flatten",
        "permute",
        "tuple",
        "other_dims",
        "other_order",
        "strided",
        "twice",
        "view",
    ],
)
def test_no_copy_where_heads_are_brought_together_again(read, is_copied):
    """The kernel's output is in that order; only what may see the layout of the query gets it."""
    graphs = []

    def keep(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    def attend(x, mask):
        return read(flex_attention(x, x, x, block_mask=mask))

    x, mask = torch.randn(BATCH, 2, 96, 16), block_mask(window, 96)
    ours = torch.compile(attend, backend=make_backend(keep), fullgraph=True)(x, mask)
    expected = torch.compile(attend, backend="eager", fullgraph=True)(x, mask)
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-4)
    (graph,) = graphs
    assert any(node.target is torch.clone for node in graph.graph.nodes) == is_copied
    if isinstance(ours, torch.Tensor):
        assert ours.stride() == expected.stride()


def test_dynamic_heads_become_guards():
    """Of inputs whose every size is dynamic, kernels are still made for fixed heads, and masks for any length."""
    compiled = torch.compile(flex_attention, backend=make_backend("eager"), dynamic=True)
    for seqlen, head_dim in ((96, 16), (160, 16), (160, 24)):
        x = torch.randn(BATCH, 2, seqlen, head_dim)
        dense = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        torch.testing.assert_close(compiled(x, x, x), dense, atol=2e-5, rtol=2e-4)
    assert REPORT.num_graphs == 2
    assert not REPORT.refused


def test_layers_with_one_mask_share_its_slices():
    graphs = []

    def keep(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    layers = torch.nn.ModuleList(Attention() for _ in range(3))

    def model(x, mask):
        for layer in layers:
            x = x + layer(x, mask)[0]
        return x

    mask = block_mask(document_causal(documents(96, 3)), 96)
    options = LoweringOptions(verify=True)  # then the graph has it, whose mask comes from outside
    torch.compile(model, backend=make_backend(keep, options), fullgraph=True)(
        torch.randn(BATCH, 96, 32), mask
    )
    targets = [node.target for node in graphs[0].graph.nodes]
    assert targets.count(torch.ops.magi.mask_bits.default) == 1
    assert targets.count(torch.ops.magi.attention.default) == 3
