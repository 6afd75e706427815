"""Block lists beside a mask_mod: trusted where the graph makes them from it, held against it where they are given."""

import pytest
import torch
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
    noop_mask,
)
from torch.utils.checkpoint import checkpoint

import magi_compile
from magi_compile import MaskDataError
from magi_compile.lowering import analysis
from magi_compile.lowering.backend import make_backend
from magi_compile.lowering.masks import MaskOfCall
from magi_compile.lowering.report import REPORT

from .conftest import block_mask

SEQLEN = 192


def causal(b, h, q, kv):
    return q >= kv


def attend(x, mask):
    return flex_attention(x, x, x, block_mask=mask)


def compiled(fn, inner="eager"):
    return torch.compile(fn, backend=make_backend(inner), fullgraph=True)


def selected(mask):
    """`mask` with only the first block of each row listed, as block-sparse attention does."""
    return BlockMask.from_kv_blocks(
        mask.kv_num_blocks.clamp(max=1),
        mask.kv_indices,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask.mask_mod,
        seq_lengths=mask.seq_lengths,
    )


@pytest.fixture
def x():
    return torch.randn(2, 2, SEQLEN, 16)


def dense(x, mask):
    """FlexAttention's meaning: what the mask_mod shows in blocks that are listed."""
    (rows, keys), seqlen = mask.BLOCK_SIZE, x.shape[2]
    listed = mask.to_dense().bool().repeat_interleave(rows, -2).repeat_interleave(keys, -1)
    shown = create_mask(mask.mask_mod, 1, 1, seqlen, seqlen, device="cpu")
    shown = shown & listed[..., :seqlen, :seqlen]
    scores = (x @ x.mT * x.shape[-1] ** -0.5).masked_fill(~shown, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ x


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_lists_that_hide_something(x, inner):
    run, mask = compiled(attend, inner), selected(block_mask(causal, SEQLEN))
    with torch.no_grad():
        torch.testing.assert_close(run(x, mask), dense(x, mask), atol=2e-5, rtol=2e-4)
        assert "block lists hide something" in REPORT.lowered[-1].notes[0]
        whole = block_mask(causal, SEQLEN)
        torch.testing.assert_close(run(x, whole), dense(x, whole), atol=2e-5, rtol=2e-4)


def test_lists_of_each_head_that_hide_something(x):
    """One head sees all that is causal, the other one the first block of it."""
    whole = create_block_mask(causal, None, 2, SEQLEN, SEQLEN, device="cpu", BLOCK_SIZE=64)
    counts = whole.kv_num_blocks.clone(), whole.full_kv_num_blocks.clone()
    counts[0][:, 1] = 0
    counts[1][:, 1].clamp_(max=1)
    mask = BlockMask.from_kv_blocks(
        *(counts[0], whole.kv_indices, counts[1], whole.full_kv_indices),
        BLOCK_SIZE=64,
        mask_mod=causal,
        seq_lengths=(SEQLEN, SEQLEN),
    )
    with torch.no_grad():
        for run in (
            compiled(attend),
            lambda x, mask: magi_compile.flex_attention(x, x, x, None, mask),
        ):
            torch.testing.assert_close(run(x, mask), dense(x, mask), atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_lists_that_hide_something_in_other_graphs(is_dynamic, is_checkpointed):
    """Of any lengths, and in a checkpointed region, whose inputs are those of another graph."""

    def model(x, mask):
        if is_checkpointed:
            return checkpoint(attend, x, mask, use_reentrant=False)
        return attend(x, mask)

    run = torch.compile(model, backend=make_backend("eager"), fullgraph=True, dynamic=is_dynamic)
    for seqlen in (SEQLEN, SEQLEN + 100) if is_dynamic else (SEQLEN,):
        x = torch.randn(2, 2, seqlen, 16, requires_grad=is_checkpointed)
        mask = selected(block_mask(causal, seqlen))
        torch.testing.assert_close(run(x, mask), dense(x, mask), atol=2e-5, rtol=2e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_lists_of_a_checkpointed_region_that_the_graph_computes(x):
    def model(x, counts, indices):
        mask = BlockMask.from_kv_blocks(
            *(counts.clamp(max=1), indices),
            BLOCK_SIZE=whole.BLOCK_SIZE,
            mask_mod=causal,
            seq_lengths=(SEQLEN, SEQLEN),
        )
        return checkpoint(attend, x, mask, use_reentrant=False)

    whole = block_mask(causal, SEQLEN)
    found = compiled(model)(x.requires_grad_(), whole.kv_num_blocks, whole.kv_indices)
    torch.testing.assert_close(found, dense(x, selected(whole)), atol=2e-5, rtol=2e-4)


def test_lists_of_each_head_of_data_without_intervals(x):
    """Data that are out of order in the first call, too, have bit blocks of each head."""
    document = torch.randint(0, 3, (SEQLEN,))
    whole = block_mask(lambda b, h, q, kv: document[q] == document[kv], SEQLEN)
    counts = whole.kv_num_blocks.expand(-1, 2, -1).clone()
    counts[:, 1].clamp_(max=1)
    mask = BlockMask.from_kv_blocks(
        *(counts, whole.kv_indices.expand(-1, 2, -1, -1).contiguous()),
        BLOCK_SIZE=whole.BLOCK_SIZE,
        mask_mod=whole.mask_mod,
        seq_lengths=whole.seq_lengths,
    )
    with torch.no_grad():
        torch.testing.assert_close(compiled(attend)(x, mask), dense(x, mask), atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("mask_mod", [causal, lambda b, h, q, kv: kv < 0], ids=["causal", "none"])
def test_sizes_of_lists_that_kernels_walk(x, mask_mod, is_dynamic, monkeypatch):
    """On a GPU: a mask_mod that shows nothing has an interval, which says so, and sizes of blocks are static."""
    shapes = []

    def refuse(problem, shape, *_):
        shapes.append(shape)
        raise NotImplementedError("walks no lists")

    monkeypatch.setattr(analysis, "select_for_lists", refuse)
    monkeypatch.setattr(MaskOfCall, "is_on_cpu", False)

    def model(x, mask):
        return attend(x, selected(mask))

    mask = block_mask(causal, SEQLEN)
    mask.mask_mod = mask_mod
    run = torch.compile(model, backend=make_backend("eager"), fullgraph=True, dynamic=is_dynamic)
    with torch.no_grad():
        found = run(x, mask)
    if not is_dynamic:  # else refused, and PyTorch's own code of operations does not look at lists
        torch.testing.assert_close(found, dense(x, selected(mask)), atol=2e-5, rtol=2e-4)
    assert [(x.block_rows, x.block_keys, x.intervals) for x in shapes] == [(64, 64, 1)]
    assert type(shapes[0].block_rows) is int


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_lists_that_leave_out_blocks_later(x, inner):
    """A graph for lists that hide nothing says so: it has the slices of the mask_mod alone."""
    run = compiled(attend, inner)
    with torch.no_grad():
        mask = block_mask(causal, SEQLEN)
        run(x, mask)
        mask.full_kv_num_blocks.zero_()
        message = "must hold every block .* leave out kv block 0 of q block 1 of batch entry 0"
        for _ in range(2):
            with pytest.raises(MaskDataError, match=message):
                run(x, mask)


def test_lists_that_call_too_much_full(x):
    whole, half = block_mask(noop_mask, SEQLEN), block_mask(causal, SEQLEN)
    whole.mask_mod = causal
    run = compiled(attend)
    with torch.no_grad():
        run(x, half)
        with pytest.raises(MaskDataError, match="hides some in kv block 0 of q block 0 of batch"):
            run(x, whole)


def test_lists_are_held_against_the_data_of_the_step(x):
    document = torch.zeros(SEQLEN, dtype=torch.int64)
    document[100:] = 1
    mask = block_mask(lambda b, h, q, kv: document[q] == document[kv], SEQLEN, batch=1)
    run = compiled(attend)
    with torch.no_grad():
        run(x, mask)
        run(x, mask)
        document[100:] = 0  # of two blocks, neither is listed for the other
        torch.testing.assert_close(run(x, mask), dense(x, mask), atol=2e-5, rtol=2e-4)


def test_inference_mode(x):
    with torch.inference_mode():
        mask = block_mask(causal, SEQLEN)
        found = compiled(attend)(x, mask)
    dense = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    torch.testing.assert_close(found, dense, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_lists_made_in_the_graph_are_not_computed(x, is_checkpointed):
    graphs = []

    def keep(gm, example_inputs):
        graphs.extend(m for m in gm.modules() if isinstance(m, torch.fx.GraphModule))
        return gm.forward

    def model(x):
        mask = create_block_mask(causal, None, None, SEQLEN, SEQLEN, device="cpu")
        if is_checkpointed:
            return checkpoint(attend, x, mask, use_reentrant=False)
        return attend(x, mask)

    compiled(model, keep)(x)
    (node,) = (
        node
        for graph in graphs
        for node in graph.graph.nodes
        if node.target is torch.ops.magi.mask_slices.default
    )
    assert node.args[8:10] == ([], [])


def test_a_mask_that_shows_everything(x):
    def model(x):
        return attend(x, create_block_mask(noop_mask, None, None, SEQLEN, SEQLEN, device="cpu"))

    full = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(x), full, atol=2e-5, rtol=2e-4)
        assert not REPORT.refused
        # Without a mask_mod the lists are all there is.
        given = compiled(attend)(x, block_mask(noop_mask, SEQLEN))
    torch.testing.assert_close(given, full, atol=2e-5, rtol=2e-4)
    assert "the block lists decide" in REPORT.lowered[-1].notes[0]
