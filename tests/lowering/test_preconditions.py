"""Data that mean nothing to a mask_mod reach the user as a Python exception."""

import pytest
import torch

from magi_compile import MaskDataError, flex_attention, make_backend

from .conftest import BATCH, Attention, block_mask, document_causal, documents


def looked_up(table, end):
    """A mask_mod whose index is data: `end[b]` past `table` is nowhere."""

    def mask_mod(b, h, q, kv):
        return table[end[b] - 1] >= kv

    return mask_mod


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_an_index_out_of_range(inner):
    model = Attention()
    x = torch.randn(BATCH, 96, 32)
    table, end = torch.arange(96), torch.full((BATCH,), 96)
    compiled = torch.compile(model, backend=make_backend(inner), fullgraph=True)
    mask = block_mask(looked_up(table, end), 96)
    compiled(x, mask)
    end[1] = 200
    with pytest.raises(MaskDataError, match=r"must look up entries in \[-96, 96\), but .* 199"):
        compiled(x, mask)
    end[1] = 96
    compiled(x, mask)


def test_eager():
    x = torch.randn(1, 2, 96, 16)
    table, end = torch.arange(96), torch.full((1,), 96)
    mask = block_mask(looked_up(table, end), 96, batch=1)
    end[0] = 200
    with pytest.raises(MaskDataError, match="must look up entries in"):
        flex_attention(x, x, x, block_mask=mask)


def test_what_intervals_can_not_express():
    """There the mask_mod itself says where it stands."""
    x = torch.randn(1, 2, 96, 16)
    table = torch.arange(96)

    def mask_mod(b, h, q, kv):
        return (table[q + table[0]] * kv) % 3 == 0

    mask = block_mask(mask_mod, 96, batch=1)
    table[0] = 1
    with pytest.raises(MaskDataError, match="must look up table at indices in"):
        flex_attention(x, x, x, block_mask=mask)
    with torch.no_grad(), pytest.raises(MaskDataError, match="must look up table at"):
        torch.compile(flex_attention, backend=make_backend("eager"))(x, x, x, block_mask=mask)


@pytest.mark.parametrize("where", ["graph", "outside"])
def test_what_the_launcher_makes_an_error_of(where):
    """PyTorch's C interface carries no types: behind the launcher it is a RuntimeError that begins with the exception's
    name."""

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
