"""Block lists without a mask_mod, through FlexAttention's own door on a GPU: what dense attention computes."""

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
from magi_compile._checks import synchronize_checks
from magi_compile._compat import num_compiled_graphs
from magi_compile.kernels import heuristics
from magi_compile.kernels.sm90.backward.launch import _prepared as prepared
from tests.support.deterministic import deterministic_algorithms
from tests.support.waits import no_waits

pytestmark = pytest.mark.gpu
# batch, heads of q, of keys and of the lists, entries of the lists, seqlen_q, seqlen_k, head_dim, block_size.
CASES = {
    "all heads": (1, 4, 4, 1, 1, 640, 640, 128, 128),
    "heads": (1, 4, 4, 4, 1, 640, 640, 128, 128),
    "groups": (1, 8, 2, 8, 1, 512, 768, 128, 64),
    "shared by groups": (2, 8, 2, 1, 2, 256, 256, 64, 64),
    "entries": (3, 4, 2, 4, 3, 320, 192, 128, (64, 64)),
    "one of entries": (3, 4, 4, 4, 1, 320, 192, 96, 64),
    "ragged": (1, 2, 2, 2, 1, 700, 1001, 128, 128),
    "tall": (1, 2, 2, 2, 1, 512, 1000, 128, (128, 64)),
    "wide": (1, 2, 2, 2, 1, 1024, 512, 256, (64, 256)),
    "wide heads": (1, 2, 1, 2, 1, 512, 512, 192, 64),
    "odd": (1, 4, 2, 4, 1, 700, 1001, 128, (48, 80)),
    "odd entries": (2, 4, 4, 1, 2, 320, 208, 64, (40, 104)),
    "odd, wide heads": (1, 2, 1, 2, 1, 512, 600, 256, 72),
}


def lists(case, seed=0, density=0.4, full_share=0.5):
    batch, heads, _, list_heads, entries, seqlen_q, seqlen_k, _, size = case
    rows, keys = size if isinstance(size, tuple) else (size, size)
    num_q, num_k = -(-seqlen_q // rows), -(-seqlen_k // keys)
    generator = torch.Generator("cuda").manual_seed(seed)
    listed = (
        torch.rand(entries, list_heads, num_q, num_k, device="cuda", generator=generator) < density
    )
    listed[..., num_q // 2, :] = False
    is_full = torch.rand(listed.shape, device="cuda", generator=generator) < full_share

    def kind(grid):
        order = torch.rand(grid.shape, device="cuda", generator=generator).masked_fill(~grid, 2)
        return grid.sum(-1).int(), order.argsort(-1).int()

    mask = BlockMask.from_kv_blocks(
        *kind(listed & ~is_full),
        *kind(listed & is_full),
        BLOCK_SIZE=(rows, keys),
        seq_lengths=(seqlen_q, seqlen_k),
    )
    dense = listed.repeat_interleave(rows, 2).repeat_interleave(keys, 3)
    return mask, dense[:, :, :seqlen_q, :seqlen_k].expand(batch, heads, -1, -1)


def inputs(case, seed=0, dtype=torch.bfloat16):
    batch, heads, kv_heads, _, _, seqlen_q, seqlen_k, head_dim, _ = case
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = [
        (batch, heads, seqlen_q),
        (batch, kv_heads, seqlen_k),
        (batch, kv_heads, seqlen_k),
        (batch, heads, seqlen_q),
    ]
    return [
        torch.randn(*x, head_dim, device="cuda", dtype=dtype, generator=generator) for x in shapes
    ]


def dense_attention(q, k, v, visible, score_mod=None):
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if score_mod is not None:
        b, h, i, j = (torch.arange(n, device="cuda") for n in scores.shape)
        places = (b[:, None, None, None], h[:, None, None], i[:, None], j)
        scores = score_mod(scores, *places)
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    probs = torch.where(
        visible, (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp(), 0
    )
    return probs @ v, lse


def compare(found, wanted, tolerance=0.02):
    for x, y in zip(found, wanted, strict=True):
        is_there = y.isfinite()
        assert torch.equal(is_there, x.isfinite())
        size = max(1e-3, y[is_there].abs().max().item())
        torch.testing.assert_close(
            x.double()[is_there] / size, y.double()[is_there] / size, atol=tolerance, rtol=0
        )


def step(attend, q, k, v, dout, *rest):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = attend(*leaves, *rest)
    return [out, lse, *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


def compiled(**options):
    def attend(q, k, v, mask):
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True, **options)

    return torch.compile(attend, backend="magi", fullgraph=True, options={"magi.strict": True})


@pytest.mark.parametrize("name", CASES)
def test_every_shape(name):
    """With other lists in every call, which compile nothing."""
    torch._dynamo.reset()
    case, attend = CASES[name], compiled()
    for seed in range(3):
        mask, visible = lists(case, seed)
        given = inputs(case, seed)
        before = num_compiled_graphs()
        found = step(attend, *given, mask)
        compare(found, step(dense_attention, *given, visible))
        assert seed < 2 or num_compiled_graphs() == before  # the second one may find sizes dynamic


def test_long_lists():
    torch._dynamo.reset()
    case = (1, 2, 1, 2, 1, 8192, 4096, 64, 64)
    mask, visible = lists(case, density=0.05)
    given = inputs(case)
    compare(step(compiled(), *given, mask), step(dense_attention, *given, visible))


def test_lists_made_in_the_graph():
    """Chosen by the queries and keys themselves, as top-k attention does."""
    torch._dynamo.reset()
    case = (1, 4, 4, 4, 1, 1024, 1024, 128, 64)

    def choose(q, k):
        means = [x.unflatten(2, (-1, 64)).mean(3) for x in (q, k)]
        return (means[0] @ means[1].mT).topk(4, -1).indices

    @torch.compile(backend="magi", fullgraph=True, options={"magi.strict": True})
    def attend(q, k, v):
        chosen = choose(q.detach(), k.detach()).int()
        counts = torch.full(chosen.shape[:3], 4, dtype=torch.int32, device="cuda")
        mask = BlockMask.from_kv_blocks(counts, chosen, BLOCK_SIZE=64, seq_lengths=(1024, 1024))
        return flex_attention(q, k, v, block_mask=mask, return_lse=True)

    for seed in range(2):
        given = inputs(case, seed)
        chosen = choose(*given[:2])
        listed = torch.zeros(1, 4, 16, 16, dtype=torch.bool, device="cuda").scatter(3, chosen, True)
        visible = listed.repeat_interleave(64, 2).repeat_interleave(64, 3)
        compare(step(attend, *given), step(dense_attention, *given, visible))


def test_score_mods():
    torch._dynamo.reset()
    case = CASES["groups"]
    mask, visible = lists(case)
    given = inputs(case)
    slopes = 0.01 * torch.arange(1, 9, device="cuda")

    def alibi(score, b, h, q, kv):
        return score - slopes[h] * (q - kv).abs()

    def capped(score, b, h, q, kv):
        return 3.0 * torch.tanh(score / 3.0)

    for score_mod in (alibi, capped):
        found = step(compiled(score_mod=score_mod), *given, mask)
        compare(found, step(dense_attention, *given, visible, score_mod))


def test_largest_scores():
    torch._dynamo.reset()
    case = CASES["heads"]
    mask, visible = lists(case)
    q, k, v, _ = inputs(case)

    @torch.compile(backend="magi", fullgraph=True, options={"magi.strict": True})
    def attend(q, k, v, mask):
        request = AuxRequest(lse=True, max_scores=True)
        return flex_attention(q, k, v, block_mask=mask, return_aux=request)

    out, aux = attend(q, k, v, mask)
    scores = (q.double() @ k.double().mT * q.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf)
    compare([out, aux.lse, aux.max_scores], [*dense_attention(q, k, v, visible), scores.amax(-1)])


def test_indices_out_of_range():
    torch._dynamo.reset()
    case = CASES["heads"]
    mask, _ = lists(case)
    given = inputs(case)
    mask.kv_num_blocks.fill_(1)
    mask.kv_indices.fill_(77)

    def attend_and_wait():
        compiled()(*given[:3], mask)
        synchronize_checks()

    with pytest.raises(MaskDataError, match="77 is listed for q block"):
        attend_and_wait()


def test_nothing_waits_for_new_lists():
    torch._dynamo.reset()
    case, attend = CASES["heads"], compiled()
    q, k, v, _ = inputs(case)
    masks = [lists(case, seed) for seed in range(3)]
    with torch.no_grad():
        for mask, _ in masks[:2]:
            attend(q, k, v, mask)
        torch.cuda.synchronize()
        with no_waits():
            out, lse = attend(q, k, v, masks[2][0])
    visible = masks[2][1]
    compare([out, lse], dense_attention(q, k, v, visible))


@pytest.mark.parametrize("block", [64, 128])
def test_soft_cap_and_long_queries(block, monkeypatch):
    """In passes, each for one head and some of its queries."""
    torch._dynamo.reset()
    monkeypatch.setattr(heuristics, "_MAP_CACHED_BYTES", 2**20)
    monkeypatch.setattr(heuristics, "_MAP_CACHED_BYTES_OF_SMALL_L2", 2**20)
    prepared.cache_clear()
    case = (1, 4, 2, 4, 1, 4096, 2048, 128, block)
    mask, visible = lists(case)
    given = inputs(case)

    def capped(score, b, h, q, kv):
        return 3.0 * torch.tanh(score / 3.0)

    for score_mod in (None, capped):
        found = step(compiled(score_mod=score_mod), *given, mask)
        compare(found, step(dense_attention, *given, visible, score_mod))
    prepared.cache_clear()


def test_int64_lists():
    torch._dynamo.reset()
    case = CASES["heads"]
    mask, visible = lists(case)
    q, k, v, _ = inputs(case)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        setattr(mask, name, getattr(mask, name).long())
    with torch.no_grad():
        compare(compiled()(q, k, v, mask), dense_attention(q, k, v, visible))


def test_broken_lists_stay_broken():
    torch._dynamo.reset()
    case, attend = CASES["heads"], compiled()
    mask, _ = lists(case)
    q, k, v, _ = inputs(case)
    mask.kv_indices.fill_(77)

    def attend_and_wait():
        attend(q, k, v, mask)
        synchronize_checks()

    for _ in range(3):
        with pytest.raises(MaskDataError, match="77 is listed"):
            attend_and_wait()


def test_one_graph_of_two_block_sizes():
    """The same lists mean other pairs."""
    torch._dynamo.reset()
    counts = torch.full((1, 1, 8), 1, dtype=torch.int32, device="cuda")
    chosen = torch.tensor([3, 0, 2, 1, 1, 2, 3, 0], dtype=torch.int32, device="cuda")
    indices = chosen.view(1, 1, 8, 1)

    @torch.compile(backend="magi", fullgraph=True, options={"magi.strict": True})
    def attend(q, k, v, counts, indices):
        masks = [
            BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=size, seq_lengths=(1024, 1024))
            for size in (128, 256)
        ]
        return [flex_attention(q, k, v, block_mask=mask) for mask in masks]

    q, k, v, _ = inputs((1, 2, 2, 1, 1, 1024, 1024, 64, 128))
    listed = torch.zeros(8, 8, dtype=torch.bool, device="cuda").scatter(
        1, indices[0, 0].long(), True
    )
    with torch.no_grad():
        for out, size in zip(attend(q, k, v, counts, indices), (128, 256), strict=True):
            visible = listed.repeat_interleave(size, 0).repeat_interleave(size, 1)[:1024, :1024]
            compare([out], dense_attention(q, k, v, visible.expand(1, 2, -1, -1))[:1])


def test_cuda_graph():
    torch._dynamo.reset()
    case = CASES["groups"]

    @torch.compile(backend="magi", fullgraph=True, options={"magi.strict": True})
    def attend(q, k, v, counts, indices):
        mask = BlockMask.from_kv_blocks(
            counts, indices, BLOCK_SIZE=64, seq_lengths=(512, 768), compute_q_blocks=False
        )
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True)

    q, k, v, _ = inputs(case)
    listed = torch.rand(1, 8, 8, 12, device="cuda")
    counts = torch.full((1, 8, 8), 3, dtype=torch.int32, device="cuda")
    indices = listed.argsort(-1).int()
    with torch.no_grad():
        for _ in range(3):
            attend(q, k, v, counts, indices)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = attend(q, k, v, counts, indices)
        for _ in range(2):
            indices.copy_(torch.rand_like(listed).argsort(-1))
            graph.replay()
            chosen = indices[..., :3].long()
            grid = torch.zeros(1, 8, 8, 12, dtype=torch.bool, device="cuda").scatter(
                3, chosen, True
            )
            visible = grid.repeat_interleave(64, 2).repeat_interleave(64, 3)
            compare([out, lse], dense_attention(q, k, v, visible))


@pytest.mark.parametrize("name", CASES)
def test_deterministic(name):
    """The same bits every time."""
    torch._dynamo.reset()
    case = CASES[name]
    mask, visible = lists(case)
    given = inputs(case)
    with deterministic_algorithms():
        attend = compiled()
        first, second = (step(attend, *given, mask) for _ in range(2))
    compare(first, step(dense_attention, *given, visible))
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", ["heads", "shared by groups", "tall"])
def test_eager(name):
    """Without a wait, and as the lists are now: written in place, they are read again."""
    case = CASES[name]
    mask, visible = lists(case)
    given = inputs(case)

    def attend(q, k, v, mask):
        return magi_compile.flex_attention(
            q, k, v, block_mask=mask, enable_gqa=True, return_lse=True
        )

    compare(step(attend, *given, mask), step(dense_attention, *given, visible))
    torch.cuda.synchronize()
    other, visible = lists(case, 1)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        getattr(mask, name).copy_(getattr(other, name))
    with torch.no_grad(), no_waits():
        out, lse = attend(*given[:3], mask)
    compare([out / 1, lse], dense_attention(*given[:3], visible))


DOCUMENT = torch.arange(2048) // 150


def causal(b, h, q, kv):
    return q >= kv


def window(b, h, q, kv):
    return (q >= kv) & (q - kv < 100)


def sink_and_window(b, h, q, kv):
    return (q >= kv) & ((q - kv < 90) | (kv < 20))


def documents(document):
    return lambda b, h, q, kv: (document[q] == document[kv]) & (q >= kv)


def of_entries(lengths):
    return lambda b, h, q, kv: (kv < lengths[b]) & (q >= kv)


def masks_beside(case):
    """A mask_mod by name, as a function of the batch entry, the head, the query and the key."""
    device = torch.device("cuda")
    lengths = torch.tensor([150, 77, 192], device=device)
    named = {
        "causal": causal,
        "window": window,
        "sink_and_window": sink_and_window,
        "documents": documents(DOCUMENT.to(device)),
    }
    if case[0] == 3:
        named["of_entries"] = of_entries(lengths)
    return named


def lists_beside(case, mask_mod, seed=0):
    """Lists, all of them partial, beside a mask_mod; and what both show."""
    batch, heads, _, _, _, seqlen_q, seqlen_k, *_ = case
    mask, listed = lists(case, seed, density=0.6, full_share=0.0)
    shown = create_mask(mask_mod, batch, heads, seqlen_q, seqlen_k, device="cuda")
    mask.mask_mod = mask_mod
    return mask, listed & shown


@pytest.mark.parametrize("mask", ["causal", "window", "sink_and_window", "documents", "of_entries"])
@pytest.mark.parametrize("name", CASES)
def test_beside_a_mask_mod(name, mask):
    """With other lists in every call, which compile nothing."""
    torch._dynamo.reset()
    case, attend = CASES[name], compiled()
    mask_mod = masks_beside(case).get(mask)
    if mask_mod is None:
        pytest.skip("one batch entry")
    for seed in range(3):
        block_mask, visible = lists_beside(case, mask_mod, seed)
        given = inputs(case, seed)
        before = num_compiled_graphs()
        found = step(attend, *given, block_mask)
        compare(found, step(dense_attention, *given, visible))
        assert seed < 2 or num_compiled_graphs() == before
    synchronize_checks()


@pytest.mark.parametrize("name", ["heads", "groups", "entries", "wide heads"])
def test_beside_a_mask_mod_otherwise(name):
    """In eager code, deterministic, with a score_mod and a soft-cap."""
    torch._dynamo.reset()
    case = CASES[name]
    block_mask, visible = lists_beside(case, causal)
    given = inputs(case)

    def eager(q, k, v, mask):
        return magi_compile.flex_attention(
            q, k, v, block_mask=mask, enable_gqa=True, return_lse=True
        )

    wanted = step(dense_attention, *given, visible)
    compare(step(eager, *given, block_mask), wanted)
    with torch.no_grad(), no_waits():
        eager(*given[:3], block_mask)
    with deterministic_algorithms():
        attend = compiled()
        first, second = (step(attend, *given, block_mask) for _ in range(2))
    compare(first, wanted)
    assert all(map(torch.equal, first, second))

    def alibi(score, b, h, q, kv):
        return score - 0.01 * (h + 1) * (q - kv).abs()

    def capped(score, b, h, q, kv):
        return 3.0 * torch.tanh(score / 3.0)

    for score_mod in (alibi, capped):
        found = step(compiled(score_mod=score_mod), *given, block_mask)
        compare(found, step(dense_attention, *given, visible, score_mod))


@pytest.mark.parametrize("name", CASES)
def test_deterministic_beside_a_window(name):
    """Of 128 queries in a line of bits, the window shows blocks of keys to some and not to others: whose turn it is has
    to be known all the same."""
    torch._dynamo.reset()
    case = CASES[name]
    block_mask, visible = lists_beside(case, window)
    given = inputs(case)
    with deterministic_algorithms():
        attend = compiled()
        first, second = (step(attend, *given, block_mask) for _ in range(2))
    compare(first, step(dense_attention, *given, visible))
    assert all(map(torch.equal, first, second))


def test_full_blocks_beside_a_mask_mod():
    """They are not masked, and have to be full."""
    torch._dynamo.reset()
    case = CASES["groups"]
    whole = create_block_mask(causal, 1, 8, 512, 768, "cuda", 64)
    counts = whole.full_kv_num_blocks.clone()
    counts[:, ::2] //= 2
    mask = BlockMask.from_kv_blocks(
        *(whole.kv_num_blocks, whole.kv_indices, counts, whole.full_kv_indices),
        BLOCK_SIZE=64,
        mask_mod=causal,
        seq_lengths=(512, 768),
    )
    visible = mask.to_dense().bool().repeat_interleave(64, 2).repeat_interleave(64, 3)
    visible = visible & create_mask(causal, 1, 8, 512, 768, device="cuda")
    given, attend = inputs(case), compiled()
    compare(step(attend, *given, mask), step(dense_attention, *given, visible))
    synchronize_checks()
    mask.full_kv_num_blocks.fill_(12)
    mask.full_kv_indices.copy_(torch.arange(12, device="cuda").expand(1, 8, 8, 12))

    def attend_and_wait():
        attend(*given[:3], mask)
        synchronize_checks()

    with pytest.raises(MaskDataError, match="hides no key, but it hides some in kv block"):
        attend_and_wait()


@pytest.mark.parametrize("heads", ["each", "group", "all"])
def test_causal_selection(heads):
    """Chosen in the graph, with other data compiled once."""
    torch._dynamo.reset()
    case = (*CASES["groups"][:5], 1000, 1000, 128, 64)
    options = {"causal": True, "by": "first", "local_blocks": 1, "heads": heads}

    @torch.compile(backend="magi", fullgraph=True, options={"magi.strict": True})
    def attend(q, k, v):
        mask = magi_compile.select_blocks(q, k, 5, **options)
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True)

    for seed in range(2):
        given = inputs(case, seed)
        mask = magi_compile.select_blocks(*given[:2], 5, **options)
        visible = mask.to_dense().bool().repeat_interleave(64, 2).repeat_interleave(64, 3)
        visible = visible[:, :, :1000, :1000] & create_mask(causal, 1, 8, 1000, 1000, device="cuda")
        compare(step(attend, *given), step(dense_attention, *given, visible))
    synchronize_checks()


def test_explain_beside_a_mask_mod():
    case = CASES["groups"]
    mask, _ = lists_beside(case, causal)
    q, k, v, _ = inputs(case)

    def attend(q, k, v, mask):
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    text = str(magi_compile.explain(attend, q, k, v, mask))
    assert "blocks of 64 x 64, in which a query sees one key interval of its mask_mod" in text


def test_explain():
    case = CASES["groups"]
    mask, visible = lists(case)
    q, k, v, _ = inputs(case)

    def attend(q, k, v, mask):
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    (call,) = magi_compile.explain(attend, q, k, v, mask).calls
    assert call.density == pytest.approx(visible.double().mean().item())
    text = str(call)
    assert "lists    8 x 12 blocks for each of 8 heads, density 0." in text
    assert "by the block lists of each of 8 heads, blocks of 64 x 64" in text


def uneven(case, seed=0, density=0.4, order="in order"):
    """Which blocks of `size` tokens in the mean see each other, and the block of each query and key."""
    _, _, _, heads, entries, seqlen_q, seqlen_k, _, size = case
    generator = torch.Generator("cuda").manual_seed(seed)
    counts = [max(length // size, 1) for length in (seqlen_q, seqlen_k)]
    listed = torch.rand(entries, heads, *counts, device="cuda", generator=generator) < density
    listed[..., counts[0] // 2, :] = False
    of_tokens = []
    for count, length in zip(counts, (seqlen_q, seqlen_k), strict=True):
        block = torch.randint(0, count, (entries, length), device="cuda", generator=generator)
        of_tokens.append(block.sort(-1).values if order == "in order" else block)
    return listed, *of_tokens


def visible_of(case, given):
    listed, of_q, of_k = given
    batch, heads = case[:2]
    listed = listed.expand(batch, heads, -1, -1)
    b, h, q, k = (torch.arange(n, device="cuda") for n in (batch, heads, case[5], case[6]))
    of_q, of_k = (x.expand(batch, -1) for x in (of_q, of_k))
    b, h = b[:, None, None, None], h[:, None, None]
    return listed[b, h, of_q[b, q[:, None]], of_k[b, k]]


def compiled_blocks(case, is_causal=False, score_mod=None):
    batch, heads, _, list_heads, entries, seqlen_q, seqlen_k, *_ = case

    def attend(q, k, v, listed, of_q, of_k):
        def mask_mod(b, h, q_idx, kv_idx):
            entry, head = b if entries > 1 else 0, h if list_heads > 1 else 0
            shown = listed[entry, head, of_q[entry, q_idx], of_k[entry, kv_idx]]
            return shown & (kv_idx <= q_idx) if is_causal else shown

        mask = create_block_mask(mask_mod, batch, heads, seqlen_q, seqlen_k, device="cuda")
        return flex_attention(q, k, v, score_mod, block_mask=mask, enable_gqa=True, return_lse=True)

    return torch.compile(attend, backend="magi", fullgraph=True, options={"magi.strict": True})


UNEVEN = {
    "heads": (1, 4, 2, 4, 1, 700, 1001, 128, 70),
    "all heads": (1, 4, 4, 1, 1, 1024, 1024, 64, 100),
    "entries": (2, 4, 2, 4, 2, 320, 208, 128, 40),
    "small blocks": (1, 2, 2, 2, 1, 1000, 900, 128, 20),
    "wide heads": (1, 2, 1, 2, 1, 512, 600, 192, 60),
    "wider heads": (1, 2, 1, 2, 1, 512, 600, 256, 60),
    "long": (1, 2, 1, 2, 1, 8192, 4096, 128, 128),
}


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("name", UNEVEN)
def test_blocks_that_begin_anywhere(name, is_deterministic):
    """With other blocks in every call, which compile nothing."""
    torch._dynamo.reset()
    case = UNEVEN[name]
    attend = compiled_blocks(case)
    with deterministic_algorithms(is_deterministic):
        for seed in range(3):
            blocks, given = uneven(case, seed), inputs(case, seed)
            before = num_compiled_graphs()
            found = step(attend, *given, *blocks)
            compare(found, step(dense_attention, *given, visible_of(case, blocks)))
            # The first one of a process meets PyTorch's warning about `return_lse`, which is a guard of its graph.
            assert seed < 2 or num_compiled_graphs() == before
        if is_deterministic:
            again = step(attend, *given, *blocks)
            assert all(map(torch.equal, found, again))


@pytest.mark.parametrize("name", ["heads", "entries", "wide heads"])
def test_causal_blocks_that_begin_anywhere(name):
    torch._dynamo.reset()
    case = UNEVEN[name]
    given, blocks = inputs(case), uneven(case)
    found = step(compiled_blocks(case, is_causal=True), *given, *blocks)
    compare(found, step(dense_attention, *given, visible_of(case, blocks).tril()))


def test_blocks_of_tokens_that_lie_anywhere():
    torch._dynamo.reset()
    case = UNEVEN["heads"]
    given, blocks = inputs(case), uneven(case, order="anywhere", density=0.1)
    found = step(compiled_blocks(case), *given, *blocks)
    compare(found, step(dense_attention, *given, visible_of(case, blocks)))


def test_score_mods_of_blocks_that_begin_anywhere():
    torch._dynamo.reset()
    case = UNEVEN["heads"]
    given, blocks = inputs(case), uneven(case)
    slopes = 0.01 * torch.arange(1, 5, device="cuda")

    def alibi(score, b, h, q, kv):
        return score - slopes[h] * (q - kv).abs()

    def capped(score, b, h, q, kv):
        return 3.0 * torch.tanh(score / 3.0)

    for score_mod in (alibi, capped):
        found = step(compiled_blocks(case, score_mod=score_mod), *given, *blocks)
        wanted = step(dense_attention, *given, visible_of(case, blocks), score_mod)
        compare(found, wanted)


@pytest.mark.parametrize("size", [64, 128])
def test_a_block_mask_of_blocks_that_begin_anywhere(size):
    """Made outside of the graph, in eager code too; its lists and its mask_mod are both what is seen."""
    torch._dynamo.reset()
    case = UNEVEN["heads"]
    given, (listed, of_q, of_k) = inputs(case), uneven(case)

    def mask_mod(b, h, q, kv):
        return listed[0, h, of_q[0, q], of_k[0, kv]]

    mask = create_block_mask(mask_mod, 1, 4, 700, 1001, device="cuda", BLOCK_SIZE=size)
    wanted = step(dense_attention, *given, visible_of(case, (listed, of_q, of_k)))
    for _ in range(2):
        compare(step(compiled(), *given, mask), wanted)

    def eager(q, k, v):
        return magi_compile.flex_attention(
            q, k, v, block_mask=mask, enable_gqa=True, return_lse=True
        )

    compare(step(eager, *given), wanted)


def test_a_captured_graph_of_blocks_that_begin_anywhere():
    torch._dynamo.reset()
    case = UNEVEN["heads"]
    (q, k, v, _), attend = inputs(case), compiled_blocks(case)
    blocks = uneven(case, 0)
    with torch.no_grad():
        for _ in range(3):
            attend(q, k, v, *blocks)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            attend(q, k, v, *blocks)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = attend(q, k, v, *blocks)
        for seed in range(2):
            others = uneven(case, seed)
            for x, y in zip(blocks, others, strict=True):
                x.copy_(y)
            graph.replay()
            compare(found, dense_attention(q, k, v, visible_of(case, others)))


def test_nothing_waits_for_other_blocks():
    torch._dynamo.reset()
    case = UNEVEN["heads"]
    (q, k, v, _), attend = inputs(case), compiled_blocks(case)
    blocks = [uneven(case, seed) for seed in range(3)]
    with torch.no_grad():
        for given in blocks[:2]:
            attend(q, k, v, *given)
        torch.cuda.synchronize()
        with no_waits():
            found = attend(q, k, v, *blocks[2])
    compare(found, dense_attention(q, k, v, visible_of(case, blocks[2])))


def test_a_block_that_there_is_not():
    torch._dynamo.reset()
    case = UNEVEN["heads"]
    listed, of_q, of_k = uneven(case)
    of_k[0, 5] = listed.shape[3]

    def attend_and_wait():
        compiled_blocks(case)(*inputs(case)[:3], listed, of_q, of_k)
        synchronize_checks()

    with pytest.raises(MaskDataError, match="must look up entries in"):
        attend_and_wait()
