"""Mask data that breaks what the conversion relies on reaches the user as a Python exception."""

import pytest
import torch

from magi_compile import MaskDataError, flex_attention, make_backend
from magi_compile.lowering.options import LoweringOptions

from .conftest import BATCH, Attention, block_mask, document_causal, documents

BACKENDS = {
    "eager": lambda **options: make_backend("eager", LoweringOptions(**options)),
    "aot_eager": lambda **options: make_backend("aot_eager", LoweringOptions(**options)),
    "inductor": lambda **options: make_backend("inductor", LoweringOptions(**options)),
}


@pytest.mark.parametrize("inner", BACKENDS)
def test_ungrouped_documents(inner):
    """Documents 0 1 0: the tokens of document 0 are not contiguous."""
    model = Attention()
    x = torch.randn(BATCH, 96, 32)
    document = documents(96, 3)
    compiled = torch.compile(model, backend=BACKENDS[inner](), fullgraph=True)
    compiled(x, block_mask(document_causal(document), 96))
    broken = document.clone()
    broken[0, :8] = document[0, -1]
    broken[0, 8] = document[0, -1] + 1
    with pytest.raises(MaskDataError, match=r"mask_mod.*closure|document"):
        compiled(x, block_mask(document_causal(broken), 96))
    compiled(x, block_mask(document_causal(document), 96))


@pytest.mark.parametrize("inner", BACKENDS)
def test_capacity(inner):
    model = Attention()
    x = torch.randn(BATCH, 96, 32)
    compiled = torch.compile(model, backend=BACKENDS[inner](slice_capacity=2), fullgraph=True)
    compiled(x, block_mask(document_causal(torch.zeros(BATCH, 96, dtype=torch.int64)), 96))
    many = torch.arange(96).expand(BATCH, -1).contiguous() // 8
    with pytest.raises(MaskDataError, match="slice_capacity"):
        compiled(x, block_mask(document_causal(many), 96))


def test_eager():
    x = torch.randn(1, 2, 96, 16)
    document = (torch.arange(96) // 20 % 2).expand(BATCH, -1).contiguous()
    with pytest.raises(ValueError, match="document"):
        flex_attention(x, x, x, block_mask=block_mask(document_causal(document), 96, batch=1))


@pytest.mark.parametrize("where", ["graph", "outside"])
def test_what_the_launcher_makes_an_error_of(where):
    """PyTorch's C interface carries no types: behind the launcher it is a RuntimeError that begins with the exception's name."""

    def inner(gm, example_inputs):
        def run(*args):
            raise RuntimeError("MaskDataError: `doc` must be sorted")

        return run

    model, document = Attention(), documents(96, 3)
    masks = {"outside": block_mask(document_causal(document), 96)}

    @torch.compile(backend=make_backend(inner), fullgraph=True)
    def attend(x):
        mask = masks.get(where) or block_mask(document_causal(document), 96)
        return model(x, block_mask=mask)

    with pytest.raises(MaskDataError, match=r"^`doc` must be sorted$"):
        attend(torch.randn(BATCH, 96, 32))
