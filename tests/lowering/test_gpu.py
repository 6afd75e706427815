"""The lowering end to end on a GPU: training, changing masks, CUDA graphs, checks that fail."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import (
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
)
from torch.nn.functional import scaled_dot_product_attention

import magi_compile
from magi_compile.lowering.report import REPORT
from magi_compile.masks.library import sliding_tiles
from tests.masks.support.mask_mods import block_diffusion
from tests.support.waits import no_waits

pytestmark = pytest.mark.gpu

SEQLEN, HEADS_Q, HEADS_KV, HEAD_DIM = 1521, 8, 2, 64


def inputs(seed=0, seqlen=SEQLEN, batch=2, heads_q=HEADS_Q, head_dims=(HEAD_DIM, HEAD_DIM)):
    torch.manual_seed(seed)
    heads, dims = (heads_q, HEADS_KV, HEADS_KV), (head_dims[0], *head_dims)
    shapes = [(batch, seqlen, *sizes) for sizes in zip(heads, dims, strict=True)]
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    return [tensor.transpose(1, 2).requires_grad_() for tensor in tensors]


def document_mask(lengths):
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).cuda()

    def mask_mod(b, h, q, kv):
        return (document[q] == document[kv]) & (q >= kv)

    return create_block_mask(mask_mod, None, None, len(document), len(document), device="cuda")


def block_diffusion_mask(lengths):
    """Documents once noisy, and once more clean: equal values of a captured tensor in two places."""
    total = sum(lengths)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    document = document.repeat(2).cuda()
    blocks = block_diffusion(1, 2 * total, 2 * total)

    def same(b, h, q, kv):
        return document[q] == document[kv]

    mask_mod = and_masks(same, blocks)
    return create_block_mask(mask_mod, None, None, 2 * total, 2 * total, device="cuda")


def batchified_mask(lengths):
    """Each 300 rows on their own; what repeats is one interval for a row."""
    total = sum(lengths)

    def mask_mod(b, h, q, kv):
        return (q // 300 == kv // 300) & ((kv % 300 <= q % 300) | (kv % 300 < 17))

    return create_block_mask(mask_mod, None, None, total, total, device="cuda")


def sliding_tiles_mask(lengths):
    """Up to 16 intervals for a row."""
    mask = sliding_tiles(lengths, tile=64, width=5, height=3, device="cuda")
    total = sum(lengths)
    return create_block_mask(mask.mask_mod, None, None, total, total, device="cuda")


def attend(q, k, v, mask):
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def attend_densely(q, k, v, mask):
    visible = create_mask(mask.mask_mod, None, None, q.shape[2], k.shape[2], device=q.device)
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, visible, enable_gqa=True)


def results(function, q, k, v, mask):
    out = function(q, k, v, mask)
    return [out, *torch.autograd.grad(out, [q, k, v], torch.ones_like(out))]


LAYOUTS = [(1521,), (100, 1400, 21), (500, 500, 521), (1, 2, 1518)]


def check_training(
    layouts,
    batch=2,
    heads_q=HEADS_Q,
    make_mask=document_mask,
    head_dims=(HEAD_DIM, HEAD_DIM),
):
    """As close to dense attention in fp32 as FlexAttention's own kernels are, and one graph for all documents."""
    ours = torch.compile(attend, backend="magi", fullgraph=True)
    stock = torch.compile(attend, fullgraph=True)
    for seed, lengths in enumerate(layouts):
        mask = make_mask(lengths)
        tensors = inputs(seed, mask.seq_lengths[0], batch, heads_q, head_dims)
        exact = [t.detach().float().requires_grad_() for t in tensors]
        expected = results(attend_densely, *exact, mask)
        for name, our, their, true in zip(
            ("out", "dq", "dk", "dv"),
            results(ours, *tensors, mask),
            results(stock, *tensors, mask),
            expected,
            strict=True,
        ):
            error, allowed = (our - true).abs().max(), 2 * (their - true).abs().max() + 1e-3
            assert error <= allowed, f"{name} for {lengths}: {error} > {allowed}"
    assert [decision.kernel for decision in REPORT.decisions] == ["hopper"]


def test_training_matches_flex_attention():
    check_training(LAYOUTS)


@pytest.mark.parametrize("head_dims", [(80, 80), (192, 128), (32, 32), (96, 128)], ids=str)
def test_head_dimensions_in_between(head_dims):
    check_training([(100, 1400, 21)], head_dims=head_dims)


def test_training_with_tiles_in_splits():
    """The long document's tiles are too few for the SMs, those of the short ones are not cut."""
    check_training([(4000,), (400,) * 10], batch=1, heads_q=4)


def test_block_diffusion_of_packed_documents():
    check_training([(300, 460), (33, 127, 600)], make_mask=block_diffusion_mask)


def test_masks_that_repeat_along_the_keys():
    check_training([(1521,)], make_mask=batchified_mask)


def test_sliding_tiles():
    check_training([(3840,), (1000, 2840)], batch=1, make_mask=sliding_tiles_mask)


def test_inference_in_a_cuda_graph():
    """Inductor's CUDA graphs capture the derivation of the slices, the plan and the kernel."""
    compiled = torch.compile(attend, backend="magi", mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for lengths in LAYOUTS * 2:
            tensors, mask = inputs(1), document_mask(lengths)
            expected = torch.compile(attend, fullgraph=True)(*tensors, mask)
            torch.testing.assert_close(
                compiled(*tensors, mask).clone(), expected, atol=2e-2, rtol=2e-2
            )


def test_data_of_a_later_call_are_an_exception_and_the_context_survives():
    """Those of the call that was compiled had intervals."""
    compiled = torch.compile(attend, backend="magi", fullgraph=True)
    tensors = inputs()
    assert torch.isfinite(compiled(*tensors, document_mask((1521,)))).all()
    broken = document_mask((761, 760))
    document = broken.mask_mod.__closure__[0].cell_contents
    document.copy_(torch.arange(SEQLEN, device="cuda") // 10 % 2)

    def attend_and_wait():
        compiled(*tensors, broken)  # raises by itself where the device is quick
        magi_compile.synchronize_checks()

    with pytest.raises(
        magi_compile.MaskDataError,
        match=r"`document\[kv\]` must hold.*, but the value \d+ that row.*'magi.bits': True",
    ):
        attend_and_wait()
    assert torch.isfinite(compiled(*tensors, document_mask((1521,)))).all()
    magi_compile.synchronize_checks()


@pytest.mark.parametrize("place", ["outside", "inside"])
@pytest.mark.parametrize("is_asked", [False, True], ids=["by_data", "asked_for"])
def test_data_without_intervals(place, is_asked):
    """They have bit blocks, in the call that is compiled and in later ones."""

    def made(document):
        def mask_mod(b, h, q, kv):
            return (document[q] == document[kv]) & (q >= kv)

        return create_block_mask(mask_mod, None, None, SEQLEN, SEQLEN, device="cuda")

    def attention(q, k, v, document):
        return flex_attention(q, k, v, block_mask=made(document), enable_gqa=True)

    in_order = torch.arange(SEQLEN, device="cuda") // 100
    documents = [torch.randint(0, 9, (SEQLEN,), device="cuda"), in_order % 4, in_order]
    if is_asked:
        documents.reverse()
    options = {"magi.bits": is_asked, "magi.strict": True}
    torch._dynamo.reset()
    function = attention if place == "inside" else attend
    compiled = torch.compile(function, backend="magi", options=options, fullgraph=True)
    tensors = inputs()
    for document in documents:
        out = compiled(*tensors, document if place == "inside" else made(document))
        exact = [x.detach().float().requires_grad_() for x in tensors]
        seen = (document[:, None] == document).tril()
        k, v = (x.repeat_interleave(HEADS_Q // HEADS_KV, 1) for x in exact[1:])
        wanted = torch.nn.functional.scaled_dot_product_attention(exact[0], k, v, attn_mask=seen)
        dout = torch.randn_like(wanted)
        ours = [out, *torch.autograd.grad(out, tensors, dout.to(out.dtype))]
        truth = [wanted, *torch.autograd.grad(wanted, exact, dout)]
        for x, y in zip(ours, truth, strict=True):
            assert (x.float() - y).norm() / y.norm() < 1e-2
    magi_compile.synchronize_checks()


@pytest.mark.parametrize("place", ["outside", "inside"])
def test_a_new_mask_waits_for_nothing(place):
    """Forward and backward of the third step, whose documents are new."""

    def attend(q, k, v, block_mask, document):
        if block_mask is None:
            block_mask = create_block_mask(
                lambda b, h, q, kv: (document[q] == document[kv]) & (q >= kv),
                *(None, None, SEQLEN, SEQLEN),
                device="cuda",
            )
        return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)

    compiled = torch.compile(attend, backend="magi", fullgraph=True)
    q, k, v = inputs()
    layouts = [(700, 1, 820), (20, 1501), (500, 500, 521)]
    masks = [document_mask(lengths) if place == "outside" else None for lengths in layouts]
    documents = [
        torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).cuda()
        for lengths in layouts
    ]
    for mask, document in list(zip(masks, documents, strict=True))[:2]:
        compiled(q, k, v, mask, document).sum().backward()
    with no_waits():
        compiled(q, k, v, masks[2], documents[2]).sum().backward()


def test_eager_calls_wait_for_nothing():
    """Once their mask is known."""
    q, k, v = inputs()
    mask = document_mask((700, 1, 820))
    packed = [x.detach()[0].transpose(0, 1).requires_grad_() for x in (q, k, v)]
    slices = magi_compile.masks.slices_from_block_mask(mask)

    def step():
        magi_compile.flex_attention(q, k, v, block_mask=mask, enable_gqa=True).sum().backward()
        magi_compile.flex_flash_attention(*packed, slices).out.sum().backward()

    step()
    step()
    with no_waits():
        step()
