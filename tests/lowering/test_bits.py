"""Masks that intervals cannot express run by bit blocks: the same values and gradients as dense attention."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor.experimental._context_parallel import _attention, _load_balancer
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
    noop_mask,
)

import magi_compile
from magi_compile import MaskDataError
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

SEQLEN, HEADS = 300, 4
NUMBERS = torch.randint(0, 8, (SEQLEN,), generator=torch.Generator().manual_seed(0))
TREE = torch.rand(SEQLEN, SEQLEN, generator=torch.Generator().manual_seed(1)) < 0.1
GLOBAL = torch.rand(SEQLEN, generator=torch.Generator().manual_seed(2)) < 0.05


def bits(b, h, q, kv):
    return (NUMBERS[q] & NUMBERS[kv]) != 0


def by_head(b, h, q, kv):
    return TREE[q, kv] & (q - kv < 20 * (h + 1))


def dilated(b, h, q, kv):
    return (q - kv) % 2 == 0


def neighbourhood(b, h, q, kv):
    row, column = torch.clamp(q // 13, 2, 20), torch.clamp(q % 13, 2, 10)
    return (torch.abs(row - kv // 13) <= 2) & (torch.abs(column - kv % 13) <= 2)


def tree(b, h, q, kv):
    return TREE[q, kv] & (q >= kv)


def scattered_global(b, h, q, kv):
    return (torch.abs(q - kv) < 10) | GLOBAL[kv] | GLOBAL[q]


def shuffled(b, h, q, kv):
    return NUMBERS[q] == NUMBERS[kv]


def in_place(b, h, q, kv):
    same = NUMBERS[q] == NUMBERS[kv]
    same &= q >= kv
    return same


def sees_nothing(b, h, q, kv):
    return TREE[q, kv] & (q % 3 == 0) & (q < 200)


MASKS = [
    *(
        bits,
        by_head,
        dilated,
        neighbourhood,
        tree,
        scattered_global,
        shuffled,
        in_place,
        sees_nothing,
    ),
]


def qkv(heads=HEADS, batch=BATCH):
    """q, k and v that need gradients, with half as many heads of keys as of queries."""
    generator = torch.Generator().manual_seed(3)
    sizes = ((batch, heads), (BATCH, heads // 2), (BATCH, heads // 2))
    return [
        torch.randn(*size, SEQLEN, 16, generator=generator, requires_grad=True) for size in sizes
    ]


def dense(q, k, v, mask):
    """The same in fp64, with the score matrix; rows that see nothing give 0."""
    q, k, v = q.double(), *(x.double().repeat_interleave(2, 1) for x in (k, v))
    scores = (q @ k.mT * 16**-0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v


def attend(q, k, v, mask):
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def compiled(inner="eager", **options):
    backend = make_backend(inner, LoweringOptions(strict=True, **options))
    return torch.compile(attend, backend=backend, fullgraph=True)


def run(function, tensors, *arguments):
    out = function(*tensors, *arguments)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    return [
        out.double(),
        *(x.double() for x in torch.autograd.grad((out * weights).sum(), tensors)),
    ]


def made(mask_mod, heads=HEADS):
    return create_block_mask(mask_mod, BATCH, heads, SEQLEN, SEQLEN, device="cpu")


@pytest.mark.parametrize("mask_mod", MASKS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "compiled"])
def test_values_and_gradients(mask_mod, is_eager):
    wanted = create_mask(mask_mod, BATCH, HEADS, SEQLEN, SEQLEN, device="cpu")
    function = magi_compile.flex_attention if is_eager else compiled()

    def ours(q, k, v):
        if is_eager:
            return function(q, k, v, block_mask=made(mask_mod), enable_gqa=True)
        return function(q, k, v, made(mask_mod))

    assert_same(run(ours, qkv()), run(dense, qkv(), wanted))


@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "compiled"])
def test_integers_show_where_they_are_not_0(is_eager):
    """PyTorch's kernels for GPUs read them so; its create_block_mask takes bools alone."""

    def numbers(b, h, q, kv):
        return NUMBERS[q] & NUMBERS[kv]

    mask = magi_compile.create_block_mask(numbers, BATCH, HEADS, SEQLEN, SEQLEN, device="cpu")
    wanted = create_mask(bits, BATCH, HEADS, SEQLEN, SEQLEN, device="cpu")
    function = compiled()

    def ours(q, k, v):
        if is_eager:
            return magi_compile.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        return function(q, k, v, mask)

    assert_same(run(ours, qkv()), run(dense, qkv(), wanted))


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_made_in_the_graph(inner):
    def model(q, k, v):
        return attend(q, k, v, create_block_mask(by_head, None, HEADS, SEQLEN, SEQLEN, "cpu"))

    ours = torch.compile(model, backend=make_backend(inner), fullgraph=True)
    wanted = create_mask(by_head, BATCH, HEADS, SEQLEN, SEQLEN, device="cpu")
    assert_same(run(ours, qkv()), run(dense, qkv(), wanted))


def test_a_soft_cap():
    def capped(score, b, h, q, kv):
        return 2 * torch.tanh(score / 2)

    def ours(q, k, v):
        return flex_attention(q, k, v, capped, made(tree, None), enable_gqa=True)

    def wanted(q, k, v):
        q, k, v = q.double(), *(x.double().repeat_interleave(2, 1) for x in (k, v))
        mask = create_mask(tree, BATCH, HEADS, SEQLEN, SEQLEN, device="cpu")
        scores = 2 * torch.tanh(q @ k.mT * 16**-0.5 / 2)
        return scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num() @ v

    ours = torch.compile(ours, backend=make_backend("eager"))
    assert_same(run(ours, qkv()), run(wanted, qkv()))


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_the_data_of_a_step_decide(inner):
    """Documents 0 1 0 in one step, ordered ones before and after it: one graph."""
    model = Attention()
    x = torch.randn(BATCH, 96, 32)
    ordered = documents(96, 3)
    broken = ordered.clone()
    broken[0, :8] = ordered[0, -1]
    broken[0, 8] = ordered[0, -1] + 1
    step = torch.compile(model, backend=make_backend(inner), fullgraph=True)
    for document in (ordered, broken, ordered):
        mask_mod = document_causal(document)
        ours = values_and_grads(model, *step(x, block_mask(mask_mod, 96)))
        assert_same(ours, values_and_grads(model, *model.dense(x, mask_mod)))
    assert len(REPORT.lowered) == 1
    (note,) = REPORT.lowered[0].notes
    assert "by bit blocks where the data is out of order" in note


def test_more_slices_than_there_is_room_for():
    model = Attention()
    x = torch.randn(BATCH, 96, 32)
    options = LoweringOptions(slice_capacity=2)
    step = torch.compile(model, backend=make_backend("eager", options), fullgraph=True)
    for document in (torch.zeros(BATCH, 96).long(), torch.arange(96).expand(BATCH, -1) // 8):
        mask_mod = document_causal(document.contiguous())
        ours = values_and_grads(model, *step(x, block_mask(mask_mod, 96)))
        assert_same(ours, values_and_grads(model, *model.dense(x, mask_mod)))


def test_data_out_of_order_of_a_mask_mod_that_is_read_again():
    """Its look-up of `pairs[q, -1]` goes through torch.vmap only with an index that has values for each q, too."""

    numbers, pairs = NUMBERS.float(), torch.stack([NUMBERS, NUMBERS], -1).int()

    def mask_mod(b, h, q, kv):
        is_few = torch.isin(numbers, torch.tensor([1, 2]))[kv.int()]
        return q.ge(is_few == False) & (pairs[q, -1] > 2.0)  # noqa: E712

    run_it = torch.compile(attend, backend=make_backend("eager"))
    tensors = [x.detach() for x in qkv()]
    wanted = create_mask(mask_mod, BATCH, HEADS, SEQLEN, SEQLEN, device="cpu")
    torch.testing.assert_close(
        run_it(*tensors, made(mask_mod)).double(), dense(*tensors, wanted), atol=2e-5, rtol=2e-4
    )
    assert (len(REPORT.lowered), len(REPORT.refused)) == (1, 0)


def test_block_lists_decide_beside_a_mask_mod_that_shows_everything():
    """Others for each head, in blocks of any size."""
    rows, keys = 48, 80
    listed = torch.rand(BATCH, HEADS, -(-SEQLEN // rows), -(-SEQLEN // keys)) < 0.5
    indices = listed.int().argsort(dim=-1, descending=True, stable=True).int()
    lists = BlockMask.from_kv_blocks(
        *(listed.sum(-1).int(), indices),
        BLOCK_SIZE=(rows, keys),
        seq_lengths=(SEQLEN, SEQLEN),
    )
    wanted = listed.repeat_interleave(rows, 2).repeat_interleave(keys, 3)[..., :SEQLEN, :SEQLEN]
    want = run(dense, qkv(), wanted)
    assert_same(run(compiled(), qkv(), lists), want)
    ours = run(lambda q, k, v: magi_compile.flex_attention(q, k, v, None, lists, None, True), qkv())
    assert_same(ours, want)


def test_more_batch_entries_of_queries_than_of_keys():
    q, k, v = qkv()
    k, v = (x[:1].detach().requires_grad_() for x in (k, v))
    wanted = create_mask(shuffled, BATCH, None, SEQLEN, SEQLEN, device="cpu")
    assert_same(run(compiled(), [q, k, v], made(shuffled)), run(dense, [q, k, v], wanted))


@pytest.mark.parametrize("mask_mod", [bits, shuffled], ids=["no order", "another order"])
def test_block_lists_that_hide_something_or_show_too_much(mask_mod):
    mask = made(mask_mod)
    fewer = BlockMask.from_kv_blocks(
        mask.kv_num_blocks.clamp(max=1),
        mask.kv_indices,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask_mod,
        seq_lengths=mask.seq_lengths,
    )
    too_full = made(noop_mask)
    too_full.mask_mod = mask_mod
    message = "must be blocks in which its mask_mod hides no key"
    with pytest.raises(MaskDataError, match=message):
        magi_compile.flex_attention(*qkv(), block_mask=too_full, enable_gqa=True)
    with pytest.raises(MaskDataError, match=message):
        compiled()(*qkv(), too_full)
    listed = fewer.to_dense().bool().repeat_interleave(128, 2).repeat_interleave(128, 3)
    wanted = create_mask(mask_mod, BATCH, HEADS, SEQLEN, SEQLEN, device="cpu")
    wanted = run(dense, qkv(), wanted & listed[:, :, :SEQLEN, :SEQLEN])
    for function in (
        compiled(),
        lambda q, k, v, x: magi_compile.flex_attention(q, k, v, block_mask=x, enable_gqa=True),
    ):
        assert_same(run(function, qkv(), fewer), wanted)


def test_block_lists_of_blocks_that_are_not_there():
    mask = made(bits)
    mask.kv_indices[0, 0, 0, 0] = 7
    with pytest.raises(MaskDataError, match=r"`block_mask.kv_indices` must be in \[0, 3\), but"):
        compiled()(*qkv(), mask)


@pytest.mark.parametrize("count", [-1, 4])
def test_block_lists_of_more_blocks_than_there_are(count):
    mask = made(bits)
    mask.kv_num_blocks[0, 0, 1] = count
    words = rf"`block_mask.kv_num_blocks` must be from 0 to 3, .*, but it holds {count}"
    with pytest.raises(MaskDataError, match=words):
        compiled()(*qkv(), mask)


def test_explained():
    explanation = magi_compile.explain(attend, *(x.detach() for x in qkv()), made(by_head))
    (call,) = explanation.calls
    wanted = create_mask(by_head, BATCH, HEADS, SEQLEN, SEQLEN, device="cpu")
    assert call.density == pytest.approx(float(wanted.double().mean()))
    assert "blocks of bits" in str(call)
    assert "by bit blocks: `TREE[q, kv]` looks up a row and a key together" in str(call)


@pytest.mark.parametrize(
    "mask_mod", [lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: q // 100 == kv // 100]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_tokens_that_a_load_balancer_has_permuted(rank, mask_mod, monkeypatch):
    """PyTorch's context parallelism: the mask of one rank's queries over all keys, both looked up in a permutation. No
    way for intervals; kernels with bit blocks take it, and on a GPU it is refused."""
    seqlen, size = 512, 2
    monkeypatch.setattr(_attention, "_compiled_create_block_mask", create_block_mask)
    mesh = SimpleNamespace(get_local_rank=lambda: rank, size=lambda: size, device_type="cpu")
    balancer = _load_balancer._HeadTailLoadBalancer(seqlen, size, "cpu")
    mask = _attention._create_cp_block_mask(
        mask_mod, None, None, seqlen, seqlen, mesh, load_balancer=balancer
    )
    q, k, v = (torch.randn(1, 2, n, 16) for n in (seqlen // size, seqlen, seqlen))

    def attend(q, k, v, mask):
        return flex_attention(q, k, v, block_mask=mask)

    backend = make_backend("eager", LoweringOptions())
    with torch.no_grad():
        ours = torch.compile(attend, backend=backend, fullgraph=True)(q, k, v, mask)
    assert not REPORT.refused
    (decision,) = REPORT.lowered
    assert "load balancer of PyTorch's context parallelism has permuted" in decision.notes[0]
    assert_same(ours, attend(q, k, v, mask))
