"""Masks that look up blocks of queries and keys, and lists of odd blocks: by a table where a kernel walks maps, which
runs on threads of a CPU here."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile import MaskDataError
from magi_compile.kernels import select
from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.sm90 import kernel as hopper_kernel
from magi_compile.kernels.sm90.runtime.driver import SHARED_BYTES
from magi_compile.lowering import masks
from magi_compile.lowering.flex import lower_flex_attention
from magi_compile.lowering.options import LoweringOptions
from magi_compile.lowering.prologue import split_off
from magi_compile.lowering.report import LoweringReport
from magi_compile.masks.evaluation.block_lists import BlockLists
from magi_compile.ops import library
from magi_compile.ops.masks import plan_lists
from tests.kernels.support.on_a_cpu import compile_once, launching
from tests.plan.torch_walks import plan_of_lists
from tests.support.deterministic import deterministic_algorithms

BATCH, HEADS, HEADS_KV, LENGTH_Q, LENGTH_K, DIM = 1, 4, 2, 300, 330, 64
NUM_Q, NUM_K = 6, 7


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return compile_once(tmp_path_factory)


@pytest.fixture
def hopper(compiled, monkeypatch):
    """CPU tensors are those of a Hopper GPU for whoever chooses a way; `notes` are those of decisions."""

    def launch(function, grid, block, params, stream, options):
        num_sms = 4 if options.shared_bytes == SHARED_BYTES else 1
        function(grid, min(block, 512), params, num_sms, 0, options.cluster or 1)

    def problem_on(device, dtype, heads, softmax_scale, softcap=0.0):
        return AttnProblem("cuda", (9, 0), dtype, *heads, softmax_scale, softcap)

    for module in (select, library):
        monkeypatch.setattr(module, "problem_on", problem_on)
    monkeypatch.setattr(hopper_kernel, "plan_of_lists", plan_of_lists)
    monkeypatch.setattr(masks.MaskOfCall, "is_on_cpu", False)
    library.chosen_for.cache_clear()
    found = SimpleNamespace(notes=[])

    def backend(gm, example_inputs):
        report = LoweringReport()
        lower_flex_attention(gm, LoweringOptions(strict=True), report)
        found.notes += [note for decision in report.decisions for note in decision.notes]
        split = split_off(gm, example_inputs)
        found.targets = [str(node.target) for node in split.graph.graph.nodes]
        return split.wrap(split.graph)

    found.backend = backend
    with launching(monkeypatch, compiled, 4, launch):
        yield found
    library.chosen_for.cache_clear()


def blocks(seed=0, length_q=LENGTH_Q, length_k=LENGTH_K, heads=HEADS_KV):
    """Which blocks see each other, and the block of each query and of each key."""
    generator = torch.Generator().manual_seed(seed)
    listed = torch.rand(heads, NUM_Q, NUM_K, generator=generator) < 0.4
    of_tokens = [
        torch.randint(0, n, (length,), generator=generator).sort().values
        for n, length in ((NUM_Q, length_q), (NUM_K, length_k))
    ]
    return listed, *of_tokens


def inputs(length_q=LENGTH_Q, length_k=LENGTH_K, batch=BATCH):
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, length_q), (HEADS_KV, length_k), (HEADS_KV, length_k))
    return [torch.randn(batch, *x, DIM, generator=generator).bfloat16() for x in shapes]


def dense(q, k, v, visible):
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // HEADS_KV, 1) for x in (k, v))
    scores = (q @ k.mT * DIM**-0.5).masked_fill(~visible, -torch.inf)
    return torch.nan_to_num(scores.softmax(-1)) @ v


def assert_close(found, wanted):
    torch.testing.assert_close(found.double(), wanted, atol=0.02, rtol=0.02)


GROUP = HEADS // HEADS_KV


def by_heads(listed, of_q, of_k):
    return lambda b, h, q, kv: listed[h // GROUP, of_q[q], of_k[kv]]


def causal(listed, of_q, of_k):
    return lambda b, h, q, kv: (kv <= q) & listed[h // GROUP][of_q[q], of_k[kv]]


def of_one(listed, of_q, of_k):
    return lambda b, h, q, kv: listed[0, of_q[q], of_k[kv]]


def even(listed, of_q, of_k):
    return lambda b, h, q, kv: listed[h // GROUP, q // 56, kv // 48]


MODS = {f.__name__: f for f in (by_heads, causal, of_one, even)}


@pytest.mark.parametrize("name", MODS)
def test_mask_mods_of_blocks(name, hopper):
    """Made in the graph; with other blocks in every call, which compile nothing."""

    def attend(q, k, v, listed, of_q, of_k):
        mask_mod = MODS[name](listed, of_q, of_k)
        mask = create_block_mask(mask_mod, BATCH, HEADS, LENGTH_Q, LENGTH_K, device="cpu")
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    torch._dynamo.reset()
    step, (q, k, v) = torch.compile(attend, backend=hopper.backend, fullgraph=True), inputs()
    for seed in range(2):
        given = blocks(seed)
        visible = create_mask(MODS[name](*given), BATCH, HEADS, LENGTH_Q, LENGTH_K, device="cpu")
        assert_close(step(q, k, v, *given), dense(q, k, v, visible))
    heads = "all heads" if name == "of_one" else "each of 4 heads"
    assert len(hopper.notes) == 1
    assert hopper.notes[0].startswith(f"by the block table of {heads}, 6 x 7 blocks")
    assert ("one key interval" in hopper.notes[0]) == (name == "causal")


def test_calls_of_other_heads(hopper):
    """They look up the same tensors, of which one has more to look up."""
    listed, of_q, of_k = blocks(heads=2 * HEADS)

    def visible(b, h, q, kv):
        return listed[h, of_q[q], of_k[kv]]

    def attend(q, more, k, v, listed, of_q, of_k):
        def mask_mod(b, h, q, kv):
            return listed[h, of_q[q], of_k[kv]]

        def of_heads(x):
            mask = create_block_mask(mask_mod, BATCH, x.shape[1], LENGTH_Q, LENGTH_K, device="cpu")
            return flex_attention(x, k, v, block_mask=mask, enable_gqa=True)

        return of_heads(q), of_heads(more)

    torch._dynamo.reset()
    q, k, v = inputs()
    more = torch.cat((q, q.flip(1)), 1)
    step = torch.compile(attend, backend=hopper.backend, fullgraph=True)
    for x, found in zip((q, more), step(q, more, k, v, listed, of_q, of_k), strict=True):
        seen = create_mask(visible, BATCH, x.shape[1], LENGTH_Q, LENGTH_K, device="cpu")
        assert_close(found, dense(x, k, v, seen))


@pytest.mark.parametrize("name", ["by_heads", "causal"])
def test_a_block_mask_from_outside(name, hopper):
    """What its lists leave out is not seen."""
    given = blocks()
    mask = create_block_mask(
        MODS[name](*given), BATCH, HEADS, LENGTH_Q, LENGTH_K, device="cpu", BLOCK_SIZE=64
    )
    visible = create_mask(mask.mask_mod, BATCH, HEADS, LENGTH_Q, LENGTH_K, device="cpu")
    q, k, v = inputs()

    def attend(q, k, v, mask):
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    torch._dynamo.reset()
    step = torch.compile(attend, backend=hopper.backend, fullgraph=True)
    assert_close(step(q, k, v, mask), dense(q, k, v, visible))
    assert not any("mask_table" in x or "plan_lists" in x for x in hopper.targets)  # derived once
    fewer = mask.kv_num_blocks.clone()
    fewer[:, :, 2] = 0
    rest = (mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    sizes = {"BLOCK_SIZE": 64, "seq_lengths": (LENGTH_Q, LENGTH_K), "mask_mod": mask.mask_mod}
    cut = BlockMask.from_kv_blocks(fewer, *rest, **sizes)
    assert not (mask.full_kv_num_blocks[:, :, 2] > 0).any()
    visible[:, :, 128:192] = False
    assert_close(step(q, k, v, cut), dense(q, k, v, visible))


@pytest.mark.parametrize("is_causal", [False, True])
def test_lists_of_odd_blocks(is_causal, hopper):
    rows, keys = 48, 80
    generator = torch.Generator().manual_seed(0)
    num_q, num_k = -(-LENGTH_Q // rows), -(-LENGTH_K // keys)
    listed = torch.rand(BATCH, HEADS, num_q, num_k, generator=generator) < 0.5
    indices = listed.int().argsort(dim=-1, descending=True, stable=True).int()

    def below(b, h, q, kv):
        return kv <= q

    def attend(q, k, v, counts, indices):
        mask = BlockMask.from_kv_blocks(
            *(counts, indices),
            BLOCK_SIZE=(rows, keys),
            mask_mod=below if is_causal else None,
            seq_lengths=(LENGTH_Q, LENGTH_K),
            compute_q_blocks=False,
        )
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    visible = listed.repeat_interleave(rows, 2).repeat_interleave(keys, 3)
    visible = visible[:, :, :LENGTH_Q, :LENGTH_K]
    if is_causal:
        visible = visible.tril()
    torch._dynamo.reset()
    step = torch.compile(attend, backend=hopper.backend, fullgraph=True)
    q, k, v = inputs()
    found = step(q, k, v, listed.sum(-1).int(), indices)
    assert_close(found, dense(q, k, v, visible))
    assert hopper.notes[0].startswith("by the block lists of each of 4 heads, blocks of 48 x 80")


def test_an_index_that_is_no_block(hopper):
    def attend(q, k, v, listed, of_q, of_k):
        one = torch.ones(1, 1, 1, dtype=torch.int32)
        mask = BlockMask.from_kv_blocks(
            *(one, 0 * one[..., None]),
            BLOCK_SIZE=384,
            mask_mod=by_heads(listed, of_q, of_k),
            seq_lengths=(LENGTH_Q, LENGTH_K),
            compute_q_blocks=False,
        )
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    torch._dynamo.reset()
    step = torch.compile(attend, backend=hopper.backend, fullgraph=True)
    (q, k, v), (listed, of_q, of_k) = inputs(), blocks()
    visible = by_heads(listed, of_q, of_k)
    visible = create_mask(visible, BATCH, HEADS, LENGTH_Q, LENGTH_K, device="cpu")
    assert_close(step(q, k, v, listed, of_q, of_k), dense(q, k, v, visible))
    of_k = of_k.clone()
    of_k[5] = NUM_K
    with pytest.raises(
        MaskDataError, match=r"entries in \[-7, 7\), but it looks up 7 at position 5"
    ):
        step(q, k, v, listed, of_q, of_k)


def test_even_lists_in_graphs_of_any_lengths(hopper):
    def attend(q, k, v, counts, indices):
        mask = BlockMask.from_kv_blocks(
            *(counts, indices),
            BLOCK_SIZE=64,
            seq_lengths=(q.shape[2], k.shape[2]),
            compute_q_blocks=False,
        )
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    torch._dynamo.reset()
    step, (q, k, v) = torch.compile(attend, backend=hopper.backend, dynamic=True), inputs()
    listed = torch.rand(1, HEADS, 5, 6, generator=torch.Generator().manual_seed(0)) < 0.5
    order = listed.int().argsort(dim=-1, descending=True, stable=True).int()
    visible = listed.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :LENGTH_Q, :LENGTH_K]
    assert_close(step(q, k, v, listed.sum(-1).int(), order), dense(q, k, v, visible))


def test_graphs_of_any_lengths(hopper):
    """Of queries, keys and blocks."""

    def attend(q, k, v, listed, of_q, of_k):
        mask_mod = by_heads(listed, of_q, of_k)
        sizes = BATCH, HEADS, q.shape[2], k.shape[2]
        mask = create_block_mask(mask_mod, *sizes, device="cpu")
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    torch._dynamo.reset()
    step = torch.compile(attend, backend=hopper.backend, fullgraph=True, dynamic=True)
    for seed, lengths in enumerate([(300, 330), (280, 350)]):
        given = blocks(seed, *lengths)
        visible = create_mask(by_heads(*given), BATCH, HEADS, *lengths, device="cpu")
        q, k, v = inputs(*lengths)
        assert_close(step(q, k, v, *given), dense(q, k, v, visible))
    assert len(hopper.notes) == 1


@pytest.mark.parametrize("name", ["by_heads", "causal"])
def test_plans_of_eager_calls(name, hopper):
    """Of a GPU's tensors they are kept as long as the BlockMask is what it was."""
    mask = create_block_mask(
        MODS[name](*blocks()), BATCH, HEADS, LENGTH_Q, LENGTH_K, device="cpu", BLOCK_SIZE=128
    )
    q, k, v = inputs()
    sizes = (BATCH, LENGTH_Q, LENGTH_K)
    lists = BlockLists(*(getattr(mask, field) for field in BlockLists._fields))
    problem = select.problem_of(q, k, v, DIM**-0.5)
    plan = plan_lists._planned(mask, lists, sizes, problem, None)
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    out, *_ = torch.ops.magi.attention(*packed, [], plan, DIM**-0.5, 0.0, "hopper")
    visible = create_mask(mask.mask_mod, BATCH, HEADS, LENGTH_Q, LENGTH_K, device="cpu")
    assert_close(out.transpose(0, 1)[None], dense(q, k, v, visible))


def test_a_plan_of_other_heads(hopper):
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in inputs())
    listed, of_q, of_k = blocks(heads=HEADS // 2)
    table = [listed[None], of_q.int()[None], of_k.int()[None]]
    sizes = (BATCH, LENGTH_Q, LENGTH_K, q.dtype, [HEADS // 2, 2, DIM, DIM], 0.0, "hopper")
    plan = torch.ops.magi.plan_lists([], [], *sizes, table=table)
    with pytest.raises(ValueError, match="2 heads, which must be 1 or those of `q`, 4"):
        torch.ops.magi.attention(q, k, v, [], plan, DIM**-0.5, 0.0, "hopper")


@pytest.mark.parametrize("size", [(64, 128), (128, 64), (192, 256)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_beside_lists(size, deterministic, hopper, monkeypatch):
    """Of a causal table and of lists of one head for all."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)  # no gradients on a CPU
    rows, keys = size
    generator = torch.Generator().manual_seed(0)
    listed = torch.rand(1, 1, -(-LENGTH_Q // rows), -(-LENGTH_K // keys), generator=generator) < 0.6
    order = listed.int().argsort(dim=-1, descending=True, stable=True).int()
    mask = BlockMask.from_kv_blocks(
        *(listed.sum(-1).int(), order),
        BLOCK_SIZE=size,
        mask_mod=causal(*blocks()),
        seq_lengths=(LENGTH_Q, LENGTH_K),
    )
    visible = create_mask(mask.mask_mod, BATCH, HEADS, LENGTH_Q, LENGTH_K, device="cpu")
    visible &= listed.repeat_interleave(rows, 2).repeat_interleave(keys, 3)[
        ..., :LENGTH_Q, :LENGTH_K
    ]
    given = [x.requires_grad_() for x in inputs()]

    def attend(q, k, v, mask):
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    torch._dynamo.reset()
    step = torch.compile(attend, backend=hopper.backend, fullgraph=True)
    with deterministic_algorithms(deterministic):
        out = step(*given, mask)
        dout = torch.randn(out.shape, generator=generator).bfloat16()
        found = torch.autograd.grad(out, given, dout)
    wide = [x.detach().double().requires_grad_() for x in given]
    # A query that sees nothing sees its keys alike, and has no gradient.
    nothing = ~visible.any(-1, keepdim=True)
    wanted = torch.where(nothing, 0, dense(*wide, visible | nothing))
    assert_close(out, wanted)
    for x, y in zip(found, torch.autograd.grad(wanted, wide, dout.double()), strict=True):
        assert_close(x / y.abs().max(), y / y.abs().max())
    assert hopper.notes[0].startswith("by the block table of each of 4 heads, 6 x 7 blocks")
