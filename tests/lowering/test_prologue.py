"""A mask from outside of a graph is derived once for its content,
and again when that changes in any way PyTorch tells."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import magi_compile
from magi_compile.lowering import prologue
from magi_compile.lowering.backend import make_backend

LENGTH = 130


@pytest.fixture
def derived(monkeypatch):
    """How often a mask was derived."""
    calls = []
    derive = prologue.Prologue.derive
    monkeypatch.setattr(
        prologue.Prologue, "derive", lambda self, *x: calls.append(1) or derive(self, *x)
    )
    prologue._kept.clear()
    return calls


def ids(*ends, device="cpu"):
    return torch.searchsorted(torch.tensor(ends), torch.arange(LENGTH), right=True).to(device)


def document_causal(document):
    return lambda b, h, q, kv: (document[q] == document[kv]) & (q >= kv)


def mask_of(document):
    mask_mod = document_causal(document)
    return create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device=document.device)


def check(function, mask, grad=True, device="cpu"):
    x = torch.randn(1, 2, LENGTH, 16, device=device, requires_grad=grad)
    dense = create_mask(mask.mask_mod, None, None, LENGTH, LENGTH, device=device)
    out, expected = function(x, mask), scaled_dot_product_attention(x, x, x, dense)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    if grad:
        grads = [torch.autograd.grad(y.sin().sum(), x)[0] for y in (out, expected)]
        torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)


def attend(x, mask):
    return flex_attention(x, x, x, block_mask=mask)


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_once_for_its_content(derived, inner, dynamic):
    compiled = torch.compile(attend, backend=make_backend(inner), fullgraph=True, dynamic=dynamic)
    document = ids(40, 90)
    mask = mask_of(document)
    for _ in range(3):
        check(compiled, mask)
    assert len(derived) == 1
    document.copy_(ids(40, 90))  # written to: nobody can know that it is the same
    check(compiled, mask)
    assert len(derived) == 2
    other = mask_of(ids(7, 100, 101))
    check(compiled, other)
    check(compiled, mask)
    assert len(derived) == 3


def test_layers_and_graphs_share_it(derived):
    class Layers(nn.Module):
        def forward(self, x, mask):
            return attend(x, mask) + attend(2 * x, mask)

    mask = mask_of(ids(40, 90))
    x = torch.randn(1, 2, LENGTH, 16)
    with torch.no_grad():
        for length in (1, 2):
            backend = make_backend("eager")
            compiled = torch.compile(Layers(), backend=backend, fullgraph=True)
            compiled(x.expand(length, -1, -1, -1)[:1], mask)
            torch._dynamo.reset()
    assert len(derived) == 1


def test_masks_in_turn_and_masks_that_die(derived, monkeypatch):
    monkeypatch.setattr(prologue._kept, "most", 3)
    compiled = torch.compile(attend, backend=make_backend("eager"), fullgraph=True)
    masks = [mask_of(ids(10 + n)) for n in range(6)]
    for mask in masks * 2:
        check(compiled, mask, grad=False)
        assert len(prologue._kept) <= 3
    for n in range(8):  # addresses of what died come back
        masks.clear()
        del mask
        gc.collect()
        mask = mask_of(ids(5 * n + 1))
        check(compiled, mask, grad=False)


def test_tensors_of_inference_mode_are_never_kept(derived):
    compiled = torch.compile(attend, backend=make_backend("eager"), fullgraph=True)
    with torch.inference_mode():
        document = ids(40, 90)
        mask = mask_of(document)
        for ends in ((40, 90), (10, 90)):
            document.copy_(ids(*ends))
            mask = mask_of(document)
            check(compiled, mask, grad=False)
    assert not prologue._kept


def test_outputs_of_cuda_graphs_are_never_kept(derived):
    """A graph that makes the mask returns the same tensors in every replay, with other values and the same version."""
    document = ids(40, 90)
    mask = mask_of(document)
    compiled = torch.compile(attend, backend=make_backend("eager"), fullgraph=True)
    torch._C._set_cached_tensors_enabled(True)
    torch._C._add_cached_tensor(document)
    try:
        for ends in ((40, 90), (10, 90)):
            document.data.copy_(ids(*ends))
            if ends[0] != 40:
                mask.kv_num_blocks.data.copy_(mask_of(document).kv_num_blocks)
            check(compiled, mask)
    finally:
        torch._C._remove_cached_tensor(document)
        torch._C._set_cached_tensors_enabled(False)
    assert not prologue._kept


def add_to_parts(document):
    """A list of views goes to one operator."""
    torch._foreach_add_(document.split(30), 1)


@pytest.mark.parametrize("write", [lambda x: x.add_(1), add_to_parts], ids=["whole", "parts"])
def test_a_graph_that_writes_to_its_inputs_derives_its_masks_itself(derived, write):
    def shifted(x, mask, document):
        write(document)
        return attend(x, mask)

    document = ids(40, 90)
    mask = mask_of(document)
    compiled = torch.compile(shifted, backend=make_backend("aot_eager"), fullgraph=True)
    for _ in range(2):
        check(lambda x, mask: compiled(x, mask, document), mask)
    assert not derived


def test_writes_to_what_no_mask_reads(derived):
    def counted(x, mask, steps):
        steps.add_(1)
        return attend(x, mask)

    steps, mask = torch.zeros(()), mask_of(ids(40, 90))
    compiled = torch.compile(counted, backend=make_backend("aot_eager"), fullgraph=True)
    for _ in range(3):
        check(lambda x, mask: compiled(x, mask, steps), mask)
    assert len(derived) == 1
    assert steps == 3


def test_verify_derives_in_every_run(derived):
    backend = make_backend("eager", magi_compile.LoweringOptions(verify=True))
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    mask = mask_of(ids(40, 90))
    for _ in range(2):
        check(compiled, mask)
    assert not derived


def test_data_out_of_order_and_back(derived):
    document = ids(40, 90)
    mask = mask_of(document)
    compiled = torch.compile(attend, backend=make_backend("eager"), fullgraph=True)
    for number in (2, 0, 2):
        document[100] = number
        for _ in range(2):
            check(compiled, mask)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_on_a_gpu(derived, mode):
    compiled = torch.compile(attend_64, backend="magi", mode=mode, fullgraph=True)
    document = ids(40, 90, device="cuda")
    mask = mask_of(document)
    for ends in ((40, 90), (7, 8, 100), (130,)):
        document.copy_(ids(*ends))
        mask = mask_of(document)
        for _ in range(4):
            check_64(compiled, mask)


@pytest.mark.gpu
def test_streams(derived):
    """A mask that one stream derives serves another one, which waits for it."""
    compiled = torch.compile(attend_64, backend="magi", fullgraph=True)
    check_64(compiled, mask_of(ids(40, 90, device="cuda")))
    for n in range(8):
        mask = mask_of(ids(3 + n, 90, device="cuda"))
        torch.cuda.synchronize()
        one, other = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(one):
            torch.cuda._sleep(20_000_000)
            check_64(compiled, mask, wait=False)
        with torch.cuda.stream(other):
            check_64(compiled, mask)
        torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_captured_graph_derives_its_masks_itself(derived):
    """Its replays see what is written to the captured tensor later."""
    compiled = torch.compile(attend_64, backend="magi", fullgraph=True)
    document = ids(130, device="cuda")
    mask = mask_of(document)  # one document: its lists hold every block of any layout
    x = torch.randn(1, 2, LENGTH, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            compiled(x, mask)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = compiled(x, mask)
        for ends in ((130,), (50, 51)):
            document.copy_(ids(*ends))
            graph.replay()
            dense = create_mask(mask.mask_mod, None, None, LENGTH, LENGTH, device="cuda")
            expected = scaled_dot_product_attention(x, x, x, dense)
            torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


def attend_64(x, mask):
    return flex_attention(x, x, x, block_mask=mask)


def check_64(function, mask, wait=True):
    x = torch.randn(1, 2, LENGTH, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = function(x, mask)
    (grad,) = torch.autograd.grad(out.float().sin().sum(), x)
    if wait:
        dense = create_mask(mask.mask_mod, None, None, LENGTH, LENGTH, device="cuda")
        expected = scaled_dot_product_attention(x, x, x, dense)
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
        (true,) = torch.autograd.grad(expected.float().sin().sum(), x)
        torch.testing.assert_close(grad, true, atol=5e-2, rtol=5e-2)
