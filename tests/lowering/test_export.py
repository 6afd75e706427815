"""torch.export, and what becomes of its graphs: AOTInductor under `enable()`."""

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import magi_compile
from magi_compile.lowering.flex import lower_flex_attention
from magi_compile.lowering.options import LoweringOptions
from magi_compile.lowering.report import REPORT

SEQLEN = 128
DOCUMENT = torch.arange(SEQLEN) // 50


def by_document(document):
    return create_block_mask(
        lambda b, h, q, kv: (document[q] == document[kv]) & (q >= kv),
        *(None, None, SEQLEN, SEQLEN),
        device="cpu",
        BLOCK_SIZE=64,
    )


def soft_capped(score, b, h, q, kv):
    return 5 * torch.tanh(score / 5)


class Model(nn.Module):
    """Its mask is made in the graph, of an input."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(32, 32)

    def block_mask(self, document):
        return by_document(document)

    def forward(self, x, document):
        q = self.proj(x).unflatten(-1, (2, 16)).transpose(1, 2)
        mask = self.block_mask(document)
        return flex_attention(q, q, q, soft_capped, mask).transpose(1, 2).flatten(2)


class WithBlockLists(Model):
    """Its mask is made outside of the graph."""

    mask = by_document(DOCUMENT)

    def block_mask(self, document):
        return self.mask


class ByHead(Model):
    """Heads have masks of their own, which depend on no tensor."""

    def block_mask(self, document):
        def mask_mod(b, h, q, kv):
            return (q >= kv) & (q - kv < 20 + 30 * h)

        return create_block_mask(mask_mod, None, 2, SEQLEN, SEQLEN, device="cpu", BLOCK_SIZE=64)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(params=[Model, WithBlockLists, ByHead])
def case(request):
    model, x = request.param().eval(), torch.randn(2, SEQLEN, 32)
    return model, (x, DOCUMENT), model(x, DOCUMENT)


@pytest.mark.parametrize("strict", [False, True])
def test_export_alone(case, strict):
    """An export is FlexAttention's, also where we are enabled: it runs anywhere."""
    model, inputs, expected = case
    magi_compile.enable()
    exported = torch.export.export(model, inputs, strict=strict)
    assert not REPORT.decisions
    torch.testing.assert_close(exported.module()(*inputs), expected)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_graph(case, strict):
    model, inputs, expected = case
    module = torch.export.export(model, inputs, strict=strict).module()
    (call,) = lower_flex_attention(module, LoweringOptions(strict=True))
    assert call.decision.kernel == "cpu"
    assert call.node.target is torch.ops.magi.attention.default
    torch.testing.assert_close(module(*inputs), expected)


@pytest.mark.parametrize(
    "case",
    [Model, *(pytest.param(x, marks=pytest.mark.slow) for x in (WithBlockLists, ByHead))],
    indirect=True,
)
def test_aot_inductor(case, tmp_path):
    model, inputs, expected = case
    exported = torch.export.export(model, inputs)
    with magi_compile.enabled(strict=True):
        path = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(tmp_path / "model.pt2")
        )
    assert len(REPORT.lowered) == 1
    loaded = torch._inductor.aoti_load_package(path)
    torch.testing.assert_close(loaded(*inputs), expected, atol=2e-5, rtol=2e-4)
    if type(model) is Model:
        other = torch.arange(SEQLEN) // 30
        expected = model(inputs[0], other)
        torch.testing.assert_close(loaded(inputs[0], other), expected, atol=2e-5, rtol=2e-4)
