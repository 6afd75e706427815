"""Heads with masks of their own run by intervals: the same values and gradients as dense attention,
without bit blocks."""

import pytest
import torch
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)

import magi_compile
from magi_compile import MaskDataError
from magi_compile.lowering.backend import make_backend
from magi_compile.lowering.options import LoweringOptions
from magi_compile.lowering.report import REPORT
from magi_compile.masks import AttnSlices

from .conftest import assert_same

BATCH, HEADS, SEQLEN = 2, 4, 150
WINDOW = torch.tensor([5, 40, 0, 200])
OF_ENTRIES = torch.tensor([[5, 40, 0, 200], [7, 1, 60, 3]])
PREFIX = torch.tensor([0, 70, 20, 149], dtype=torch.int32)
DOCUMENT = torch.stack([torch.arange(SEQLEN) // 50, torch.arange(SEQLEN) // 33])
OF_HEADS = torch.stack([torch.arange(SEQLEN) // n for n in (150, 40, 13, 70)])
SPAN = torch.tensor([2.5, 17.0, 80.25, 1e9])


def window(b, h, q, kv):
    return (q - kv).abs() <= WINDOW[h]


def window_of_entry(b, h, q, kv):
    return (q >= kv) & (q - kv <= OF_ENTRIES[b, h])


def prefix(b, h, q, kv):
    return (kv <= PREFIX[h]) | (q >= kv)


def every_other_head(b, h, q, kv):
    return (h % 2 == 0) | ((q - kv < 40) & (q >= kv))


def documents(b, h, q, kv):
    return (DOCUMENT[b, q] == DOCUMENT[b, kv]) & (q >= kv) & (q - kv <= WINDOW[h])


def documents_of_heads(b, h, q, kv):
    return OF_HEADS[h, q] == OF_HEADS[h, kv]


def keys_of_heads(b, h, q, kv):
    return (q >= kv) & (OF_HEADS[h, kv] >= h)


def span(b, h, q, kv):
    return (kv >= q - SPAN[h]) & (q >= kv)


def sees_nothing(b, h, q, kv):
    return (q >= kv) & (h > q % 3)


MASKS = [
    *(window, window_of_entry, prefix, every_other_head, documents, documents_of_heads),
    *(keys_of_heads, span, sees_nothing),
]


def qkv(heads=(HEADS, 2), batch=(BATCH, BATCH), seqlen_k=SEQLEN):
    generator = torch.Generator().manual_seed(3)
    shapes = [(batch[i], heads[i], (SEQLEN, seqlen_k)[i], 16) for i in (0, 1, 1)]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def dense(q, k, v, mask_mod, score_mod=None):
    """The same in fp64, with the score matrix; rows that see nothing give 0."""
    sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    mask = create_mask(mask_mod, *sizes, device="cpu")
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), *(x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT * 16**-0.5
    if score_mod is not None:
        index = [torch.arange(size).view(-1, *[1] * (3 - i)) for i, size in enumerate(sizes)]
        scores = score_mod(scores, *index)
    scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v, scores.logsumexp(-1)


def made(mask_mod, batch=BATCH, heads=HEADS, seqlen_k=SEQLEN, **options):
    return create_block_mask(mask_mod, batch, heads, SEQLEN, seqlen_k, "cpu", **options)


def attend(q, k, v, mask, score_mod=None):
    aux = AuxRequest(lse=True)
    out, aux = flex_attention(q, k, v, score_mod, block_mask=mask, enable_gqa=True, return_aux=aux)
    return out, aux.lse


def in_eager_code(q, k, v, mask, score_mod=None):
    return magi_compile.flex_attention(
        q, k, v, score_mod, block_mask=mask, enable_gqa=True, return_lse=True
    )


def compiled(inner="eager", **options):
    options = LoweringOptions(strict=True, **options)
    return torch.compile(attend, backend=make_backend(inner, options), fullgraph=True)


def run(function, tensors, *arguments):
    """What it gives, and the gradients of both outputs together."""
    out, lse = function(*tensors, *arguments)
    loss = out * torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    loss = loss.sum() + lse.masked_fill(lse == -torch.inf, 0.0).sin().sum()
    found = [out, lse, *torch.autograd.grad(loss, tensors)]
    return [x.double() for x in found]


OF_HEADS_NOTE = "each head has a mask of its own"
DECIDES = "by intervals, or by bit blocks where the data is out of order"


def notes():
    (decision,) = REPORT.lowered
    return decision.notes


@pytest.mark.parametrize("mask_mod", MASKS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "compiled"])
def test_values_and_gradients(mask_mod, is_eager):
    function = in_eager_code if is_eager else compiled(verify=True)
    ours = run(function, qkv(), made(mask_mod))
    assert_same(ours, run(dense, qkv(), mask_mod))
    if not is_eager:
        assert notes() in ((OF_HEADS_NOTE,), (DECIDES, OF_HEADS_NOTE))


@pytest.mark.parametrize("mask_mod", [window_of_entry, documents], ids=lambda f: f.__name__)
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "compiled"])
def test_groups_of_heads(mask_mod, heads, is_eager):
    """Each head its own keys, all heads the same ones, and one head alone, which is head 0."""
    function = in_eager_code if is_eager else compiled()
    ours = run(function, qkv(heads), made(mask_mod, heads=heads[0]))
    assert_same(ours, run(dense, qkv(heads), mask_mod))


@pytest.mark.parametrize("mask_mod", [window_of_entry, documents], ids=lambda f: f.__name__)
def test_one_batch_entry_of_keys_serves_all(mask_mod):
    ours = run(compiled(), qkv(batch=(2, 1)), made(mask_mod))
    assert_same(ours, run(dense, qkv(batch=(2, 1)), mask_mod))


def test_other_lengths_of_keys():
    ours = run(compiled(), qkv(seqlen_k=77), made(window, seqlen_k=77))
    assert_same(ours, run(dense, qkv(seqlen_k=77), window))


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_made_in_the_graph(inner):
    def model(q, k, v):
        return attend(q, k, v, create_block_mask(documents, None, HEADS, SEQLEN, SEQLEN, "cpu"))

    ours = torch.compile(model, backend=make_backend(inner), fullgraph=True)
    assert_same(run(ours, qkv()), run(dense, qkv(), documents))


def test_under_stock_inductor():
    magi_compile.enable()
    ours = torch.compile(attend, fullgraph=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        assert_same(run(ours, qkv(), made(prefix)), run(dense, qkv(), prefix))
    assert notes() == (DECIDES, OF_HEADS_NOTE)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_other_windows_compile_nothing(inner):
    def model(q, k, v, windows):
        def mask_mod(b, h, q, kv):
            return (q >= kv) & (q - kv <= windows[b, h])

        return attend(q, k, v, create_block_mask(mask_mod, 2, HEADS, SEQLEN, SEQLEN, "cpu"))

    ours = torch.compile(model, backend=make_backend(inner), fullgraph=True)
    for windows in (OF_ENTRIES, OF_ENTRIES.flip(0), torch.zeros_like(OF_ENTRIES)):

        def mask_mod(b, h, q, kv, windows=windows):
            return (q >= kv) & (q - kv <= windows[b, h])

        assert_same(run(ours, qkv(), windows), run(dense, qkv(), mask_mod))
    assert (len(REPORT.lowered), REPORT.num_graphs) == (1, 1)


def test_what_a_graph_holds_where_no_data_decide():
    """One op of slices, with room for those of each head."""
    found = []

    def inner(gm, examples):
        found.extend(n for n in gm.graph.nodes if getattr(n.target, "namespace", "") == "magi")
        return gm.forward

    def model(q, k, v):
        return attend(q, k, v, create_block_mask(every_other_head, None, HEADS, 150, 150, "cpu"))

    torch.compile(model, backend=make_backend(inner), fullgraph=True)(*qkv())
    slices, attention = found
    assert slices.target is torch.ops.magi.mask_slices.default
    assert slices.args[6] == BATCH * HEADS * (SEQLEN // 16 + 256)
    assert slices.args[-1] == [HEADS, 2]
    assert attention.target is torch.ops.magi.attention.default
    *_, numbering, by_entry = attention.args
    assert by_entry
    assert list(numbering) == [BATCH, HEADS, SEQLEN, SEQLEN, 1]  # by head


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
def test_the_op(heads):
    """What runs on a GPU, where nothing looks at the data: `magi::mask_slices`, two slices for each entry and head."""
    program = "(q >= kv) & (q - kv <= t0[b, h])"
    sizes = (BATCH, SEQLEN, SEQLEN, 50, torch.device("cpu"), [], [], True, list(heads))
    q_ranges, k_ranges, types = torch.ops.magi.mask_slices([OF_ENTRIES], [], program, *sizes)
    num_keys = BATCH * heads[1] * SEQLEN
    slices = AttnSlices(q_ranges, k_ranges, types, BATCH * HEADS * SEQLEN, num_keys).compact()
    assert len(slices) <= 2 * BATCH * HEADS
    shown = slices.to_dense().view(BATCH, HEADS, SEQLEN, BATCH, heads[1], SEQLEN)
    wanted = torch.zeros_like(shown)
    mask = create_mask(window_of_entry, BATCH, HEADS, SEQLEN, SEQLEN, device="cpu")
    for b in range(BATCH):
        for h in range(HEADS):
            wanted[b, h, :, b, h * heads[1] // HEADS] = mask[b, h]
    assert torch.equal(shown, wanted)


def test_few_slices():
    explanation = magi_compile.explain(attend, *(x.detach() for x in qkv()), made(window))
    (call,) = explanation.calls
    wanted = create_mask(window, BATCH, HEADS, SEQLEN, SEQLEN, device="cpu")
    assert call.density == pytest.approx(float(wanted.double().mean()))
    assert len(call.slices) <= 3 * BATCH * HEADS
    assert OF_HEADS_NOTE in str(call)


def test_a_mask_without_tensors_says_how_it_runs():
    run(compiled(), qkv(), made(every_other_head))
    assert notes() == (OF_HEADS_NOTE,)


def test_data_out_of_order_in_one_head():
    """The step has bit blocks then, the ones before and behind it have not: one graph."""
    broken = OF_HEADS.clone()
    broken[2, 100:] = 0
    ours = compiled()
    for table in (OF_HEADS, broken, OF_HEADS):

        def mask_mod(b, h, q, kv, table=table):
            return (table[h, q] == table[h, kv]) & (q >= kv)

        assert_same(run(ours, qkv(), made(mask_mod)), run(dense, qkv(), mask_mod))
        eager = run(in_eager_code, qkv(), made(mask_mod))
        assert_same(eager, run(dense, qkv(), mask_mod))
    assert len(REPORT.lowered) == 1


def test_bits_where_a_user_asks_for_them():
    assert_same(run(compiled(bits=True), qkv(), made(window)), run(dense, qkv(), window))
    assert notes() == ("by bit blocks: options={'magi.bits': True} asks for them", OF_HEADS_NOTE)


def test_a_window_that_is_not_there():
    """The heads have four masks, the tensor three."""
    short = WINDOW[:3]

    def mask_mod(b, h, q, kv):
        return q - kv <= short[h]

    mask = made(mask_mod, heads=3)
    with pytest.raises(ValueError, match=r"must have at least 4 entries in dimension 0, got 3"):
        compiled()(
            *qkv(),
            BlockMask.from_kv_blocks(
                mask.kv_num_blocks[:, :1],
                mask.kv_indices[:, :1],
                mask_mod=mask_mod,
                seq_lengths=(SEQLEN, SEQLEN),
            ),
        )


def test_an_index_that_is_not_there_names_the_head():
    def mask_mod(b, h, q, kv):
        return q - kv <= WINDOW[h * 2]

    one = made(lambda b, h, q, kv: q >= kv, None, None)
    one.mask_mod = mask_mod
    with pytest.raises(
        MaskDataError, match=r"looks up 4 at position 0 of batch entry 0 and head 2"
    ):
        compiled()(*qkv(), one)


def test_a_score_mod_beside_it():
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0])

    def alibi(score, b, h, q, kv):
        return score - slopes[h] * (q - kv).abs()

    for function in (compiled(), in_eager_code):
        ours = run(function, qkv(), made(window), alibi)
        assert_same(ours, run(dense, qkv(), window, alibi))


@pytest.mark.parametrize("block", [16, (32, 64)])
@pytest.mark.parametrize("mask_mod", MASKS, ids=lambda f: f.__name__)
def test_block_lists(mask_mod, block):
    """Ours are PyTorch's, and lists of all heads and of each are held against the masks of heads."""
    theirs = made(mask_mod, BLOCK_SIZE=block)
    ours = magi_compile.create_block_mask(mask_mod, BATCH, HEADS, SEQLEN, SEQLEN, "cpu", block)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
    tensors = [x.detach() for x in qkv()]
    assert_same(compiled()(*tensors, ours), in_eager_code(*tensors, theirs))


def test_block_lists_that_hide_something_of_one_head():
    mask = made(window, BLOCK_SIZE=16)
    fewer = mask.kv_num_blocks.clone()
    fewer[1, 2] = 0
    wrong = BlockMask.from_kv_blocks(
        *(fewer, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices),
        BLOCK_SIZE=16,
        mask_mod=window,
        seq_lengths=(SEQLEN, SEQLEN),
    )
    listed = torch.ones(BATCH, HEADS, SEQLEN, SEQLEN, dtype=torch.bool)
    listed[1, 2] = (
        wrong.to_dense()[1, 2].bool().repeat_interleave(16, 0).repeat_interleave(16, 1)
    )[:SEQLEN, :SEQLEN]
    wanted = run(dense, qkv(), lambda b, h, q, kv: window(b, h, q, kv) & listed[b, h, q, kv])
    for function in (compiled(), in_eager_code):
        assert_same(run(function, qkv(), wrong), wanted)


@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "compiled"])
def test_block_lists_of_other_heads(is_eager):
    q, k, v = (torch.randn(BATCH, HEADS, SEQLEN, 16) for _ in range(3))
    function = in_eager_code if is_eager else compiled()
    with pytest.raises(ValueError, match="`block_mask` must have heads 1 or 4, got 3"):
        function(q, k, v, made(window, heads=3))


def test_two_masks_of_one_graph():
    """Heads with masks of their own beside a mask of all heads, and beside other heads."""

    def model(q, k, v):
        def mask(mask_mod, heads):
            return create_block_mask(mask_mod, None, heads, SEQLEN, SEQLEN, "cpu")

        out, first = attend(q, k, v, mask(window, HEADS))
        out, second = attend(out, k, v, mask(lambda b, h, q, kv: q >= kv, None))
        out, third = attend(out[:, :2], k, v, mask(window, 2))
        return out, first[:, :2] + second[:, :2] + third

    def wanted(q, k, v):
        out, first = dense(q, k, v, window)
        out, second = dense(out, k, v, lambda b, h, q, kv: q >= kv)
        out, third = dense(out[:, :2], k, v, window)
        return out, first[:, :2] + second[:, :2] + third

    ours = torch.compile(model, backend=make_backend("aot_eager"), fullgraph=True)
    assert_same(run(ours, qkv()), run(wanted, qkv()))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("is_made_outside", [False, True], ids=["made inside", "made outside"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_on_a_gpu(heads, is_made_outside, head_dim):
    """Values and gradients of FlexAttention, and none of its graphs: other windows in the second step."""
    batch, seqlen = 2, 1000
    document = (torch.rand(batch, seqlen, device="cuda") < 0.01).cumsum(1)

    def mask_of(windows):
        def mask_mod(b, h, q, kv):
            near = (q - kv <= windows[b, h]) | (kv < h * 10)
            return (document[b, q] == document[b, kv]) & (q >= kv) & near

        return create_block_mask(mask_mod, batch, heads[0], seqlen, seqlen, "cuda")

    def model(q, k, v, windows, mask):
        return attend(q, k, v, mask_of(windows) if mask is None else mask)

    backend = make_backend("inductor", LoweringOptions(strict=True))
    ours = torch.compile(model, backend=backend, fullgraph=True)
    theirs = torch.compile(attend, fullgraph=True)
    for seed in range(2):
        torch.manual_seed(seed)
        windows = torch.randint(0, 300, (batch, heads[0]), device="cuda")
        tensors = [
            torch.randn(batch, n, seqlen, head_dim, device="cuda").bfloat16().requires_grad_()
            for n in (heads[0], heads[1], heads[1])
        ]
        mask = mask_of(windows)
        ours_of = run(ours, tensors, windows, mask if is_made_outside else None)
        for one, other in zip(ours_of, run(theirs, tensors, mask), strict=True):
            finite = other.isfinite()
            assert torch.equal(one.isfinite(), finite)
            difference = (one[finite] - other[finite]).abs()
            assert difference.max() <= 0.03 * other[finite].abs().max()
            assert difference.mean() <= 0.02 * other[finite].abs().mean()
    magi_compile.synchronize_checks()
    assert REPORT.lowered[0].kernel == "hopper"
    assert notes()[0] == OF_HEADS_NOTE  # and no word of bit blocks before it


def test_dynamic_lengths():
    """One graph for all lengths."""
    ours = torch.compile(attend, backend=make_backend("aot_eager"), fullgraph=True, dynamic=True)
    for length in (SEQLEN, 96, 131):
        tensors = [x[:, :, :length].detach().requires_grad_() for x in qkv()]
        mask = create_block_mask(window, BATCH, HEADS, length, length, "cpu")
        assert_same(run(ours, tensors, mask), run(dense, tensors, window))
