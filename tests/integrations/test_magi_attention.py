"""Programs as MagiAttention's documents show them, by our functions of their names, against dense attention."""

import importlib
import re
from enum import Enum

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from magi_compile import MaskType
from magi_compile.dtensor import ContextParallelOptions
from magi_compile.integrations.magi_attention import (
    AttnMaskType,
    AttnRanges,
    calc_attn,
    compute_pad_size,
    dispatch,
    flex_flash_attn_func,
    get_most_recent_key,
    get_position_ids,
    magi_attn_flex_key,
    magi_attn_varlen_key,
    make_flex_key_for_new_mask_after_dispatch,
    make_varlen_key_for_new_mask_after_dispatch,
    roll,
    undispatch,
)
from tests.dtensor.support.ranks import Ranks

S, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 200, 12, 4, 2, 8
BORDERS = [0, 37, 64, 150, S]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Theirs(Enum):
    """The enum of MagiAttention itself, where it is installed."""

    FULL = "full"
    BICAUSAL = "bi_causal"


class TheirRanges:
    """Their class of ranges."""

    def __init__(self, pairs):
        self.pairs = pairs

    def to_naive_ranges(self):
        return self.pairs


def visible(name):
    q, k = torch.arange(S)[:, None], torch.arange(S)
    document = torch.bucketize(torch.arange(S), torch.tensor(BORDERS[1:]), right=True)
    same = document[:, None] == document
    return {
        "full": torch.ones(S, S, dtype=torch.bool),
        "causal": q >= k,
        "prefix": (k < 50) | (q >= k),
        "window": (q >= k) & (q - k < 20),
        "mixed": torch.where(q < 100, (q >= k) & (k < 100), (k >= q - 100) & (k < 120)),
        "varlen": same,
        "varlen causal": same & (q >= k),
        "varlen window": same & (q - k <= 9) & (k - q <= 3),
    }[name]


FLEX = {
    "full": ([[0, S]], [[0, S]], "full"),
    "causal": (AttnRanges.from_ranges([[0, S]]), torch.tensor([[0, S]]), AttnMaskType.CAUSAL),
    "prefix": ([[0, 50], [50, S]], [[0, 50], [0, S]], ["full", MaskType.CAUSAL]),
    "window": (TheirRanges([[0, 20], [20, S]]), [(0, 20), (1, S)], ["causal", Theirs.BICAUSAL]),
    "mixed": ([[0, 100], [100, S]], [[0, 100], [0, 120]], [1, "inv_causal"]),
}
NUMBERS = {"full": [0], "causal": [1], "prefix": [0, 1], "window": [1, 3], "mixed": [1, 2]}
VARLEN = {
    "varlen": {},
    "varlen causal": {"causal": True},
    "varlen window": {"window_size": (9, 3)},
}


def make_key(name, group, **options):
    sizes = {"num_heads_q": HEADS, "num_heads_kv": KV_HEADS, "head_dim": HEAD_DIM}
    pad_size = compute_pad_size(S, group.size(), 16)
    rest = {**sizes, "pad_size": pad_size, "cp_group_or_mesh": group, **options}
    if name in FLEX:
        names = ("q_ranges", "k_ranges", "attn_mask_type")
        lists = dict(zip(names, FLEX[name], strict=True))
        lengths = {"total_seqlen_q": S, "total_seqlen_k": S}
        return magi_attn_flex_key(**(lists | lengths | rest))
    borders = torch.tensor(BORDERS, dtype=torch.int32)
    return magi_attn_varlen_key(borders, borders, **rest, **VARLEN[name])


def new_key(name, key):
    if name in FLEX:
        return make_flex_key_for_new_mask_after_dispatch(*FLEX[name], key_for_dispatch=key)
    return make_varlen_key_for_new_mask_after_dispatch(
        BORDERS, BORDERS, key_for_dispatch=key, **VARLEN[name]
    )


def dense(q, k, v, mask, sink=None, softcap=0.0):
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores.masked_fill(~mask, -torch.inf)
    largest = scores.amax((1, 2))
    if sink is not None:
        scores = torch.cat([scores, sink.T[:, None].expand(-1, len(q), -1)], 2)
    weights = scores.softmax(2)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v), scores.logsumexp(2).T, largest


def leaves():
    generator = torch.Generator().manual_seed(0)
    sizes = [(S, WIDTH), *((WIDTH, n * HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS)), (3, HEADS)]
    made = [torch.randn(size, generator=generator) * 0.5 for size in sizes]
    return [x.requires_grad_() for x in made], torch.randn(S, HEADS, HEAD_DIM, generator=generator)


def project(x, weights):
    return [(x @ w).unflatten(1, (-1, HEAD_DIM)) for w in weights]


def expected(masks, softcap):
    (x, *weights, sink), weight = leaves()
    results = [dense(*project(x, weights), visible(m), sink, softcap) for m in masks]
    outs = [out for out, *_ in results]
    loss = sum((out * weight).sum() for out in outs)
    return results, torch.autograd.grad(loss, [x, *weights, sink])


def step(group, masks, softcap=0.0, **options):
    """The quick start's program, over layers of several masks."""
    results, gradients = expected(masks, softcap)
    (x, *weights, sink), weight = leaves()
    key = make_key(masks[0], group, **options)
    keys = [key, *(new_key(name, key) for name in masks[1:])]
    qkv = project(dispatch(x, key), weights)
    loss = 0
    for of_mask, (out, lse, largest) in zip(keys, results, strict=True):
        assert of_mask.has_the_tokens_of(key)
        assert get_most_recent_key(group) is keys[-1]
        local, meta = calc_attn(
            *qkv, key=of_mask, sink=sink, softcap=softcap, return_max_logits=True
        )
        whole = undispatch(local, of_mask)
        torch.testing.assert_close(whole, out, **CLOSE)
        torch.testing.assert_close(undispatch(meta.lse, of_mask), lse, **CLOSE)
        torch.testing.assert_close(meta.max_logits, largest, **CLOSE)
        loss = loss + (whole * weight).sum()
    found = torch.autograd.grad(loss, [x, *weights, sink])
    torch.testing.assert_close(found[0], gradients[0], **CLOSE)  # whole on each rank
    for mine, wanted in zip(found[1:], gradients[1:], strict=True):
        dist.all_reduce(mine, group=group)
        torch.testing.assert_close(mine, wanted, **CLOSE)


def every_mask(group):
    for name in [*FLEX, *VARLEN]:
        step(group, [name], chunk_size=16)
    step(group, ["causal"], softcap=3.0)
    step(group, ["causal", "window", "varlen window"], chunk_size=7)  # with padding
    options = ContextParallelOptions(strategy="min_heap", chunk_size=32, degree=1)
    step(group, ["prefix", "mixed"], dist_attn_config=options)


def compiled(group):
    """`calc_attn` is part of one graph, whatever the key."""
    (x, *weights, sink), _ = leaves()
    run = torch.compile(calc_attn, backend="aot_eager", fullgraph=True)
    for name in ("causal", "window"):
        key = make_key(name, group, chunk_size=16)
        qkv = project(dispatch(x, key), weights)
        ((out, _, largest),), _ = expected([name], 0.0)
        local, meta = run(*qkv, key, sink, return_max_logits=True)
        torch.testing.assert_close(undispatch(local, key), out, **CLOSE)
        torch.testing.assert_close(meta.max_logits, largest, **CLOSE)


def tokens(group):
    """Positions, roll, padding and the gradients of dispatch and undispatch."""
    key = make_key("varlen causal", group, chunk_size=7)
    assert key.has_padding
    ids = torch.arange(S)
    local = dispatch(ids, key, pad_value=-1)
    torch.testing.assert_close(get_position_ids(key), local.clamp(min=0))
    torch.testing.assert_close(undispatch(local, key), ids)
    for shift in (-1, 2):
        found = undispatch(roll(local, shift, 0, key), key)
        torch.testing.assert_close(found, ids.roll(shift))
    x = torch.randn(S, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight = torch.arange(S * 3.0).view(S, 3) * (dist.get_rank(group) + 1)
    own = torch.zeros(S, 1)  # the factor of the rank that holds a row
    own[local[local >= 0]] = dist.get_rank(group) + 1.0
    dist.all_reduce(own, group=group)
    for is_partial, factor in ((False, own), (True, sum(range(group.size() + 1)))):
        whole = undispatch(dispatch(x, key).square(), key, is_partial)
        (gradient,) = torch.autograd.grad(whole, x, weight)
        wanted = 2 * x.detach() * torch.arange(S * 3.0).view(S, 3) * factor
        torch.testing.assert_close(gradient, wanted)


def refusals(group):
    for error, message, options in [
        (TypeError, "`chunk_size` and `strategy` for dispatch_config", {"dist_attn_config": 3}),
        (NotImplementedError, "call magi_compile.dtensor.plan", {"is_same_source": False}),
        (NotImplementedError, "`total_seqlen_k` than", {"k_ranges": [[0, 9]], "total_seqlen_k": 9}),
        (TypeError, "`total_seqlen_k` must be an int", {"total_seqlen_k": "9"}),
        (TypeError, "`is_k_permutable` must be True or False", {"is_k_permutable": 1}),
        (TypeError, "`attn_mask_type` must be a type or", {"attn_mask_type": None}),
        (TypeError, "`cp_group_or_mesh` must be a DeviceMesh", {"cp_group_or_mesh": "cp"}),
        (
            TypeError,
            "`cp_group_or_mesh` must be a DeviceMesh",
            {"cp_group_or_mesh": None, "chunk_size": 8},
        ),
        (TypeError, "`chunk_size` must be an int, got '8'", {"chunk_size": "8"}),
        (
            ValueError,
            "`chunk_size` must be that of `dist_attn_config`, 8, got 16",
            {"dist_attn_config": ContextParallelOptions(chunk_size=8), "chunk_size": 16},
        ),
        (
            NotImplementedError,
            "`cp_group_or_mesh` must have one dimension, got 2",
            {"cp_group_or_mesh": init_device_mesh("cpu", (1, group.size()))},
        ),
    ]:
        with pytest.raises(error, match=re.escape(message)):
            make_key("causal", group, **options)
    key, x = make_key("causal", group), torch.zeros(S, HEADS, HEAD_DIM)
    local = dispatch(x, key)
    for message, call in {
        "`key` must be a key, as magi_attn_flex_key makes it, got int": lambda: dispatch(x, 3),
        "`key` must be a key, as magi_attn_flex_key makes it, got None": lambda: undispatch(
            x, None
        ),
        "`key` must be a key, as magi_attn_flex_key makes it, got Ten": lambda: roll(x, 1, 0, x),
        "`key` must be a key, as magi_attn_flex_key makes it, got str": lambda: get_position_ids(
            ""
        ),
        "`key` must be a key, as magi_attn_flex_key makes it, got list": lambda: calc_attn(
            x, x, x, []
        ),
        "`key_for_dispatch` must be a key": lambda: new_key("causal", group),
        "`key_for_dispatch` must be a key, as": lambda: new_key("varlen", None),
        "`pad_value` must be a number, got None": lambda: dispatch(x, key, None),
        "`is_partial_grad` must be True or False": lambda: undispatch(local, key, 1),
        "`shift` must be an int, got 1.5": lambda: roll(local, 1.5, 0, key),
        "`sink` must be a tensor or None": lambda: calc_attn(local, local, local, key, 3),
        "`softmax_scale` must be a number": lambda: calc_attn(
            local, local, local, key, softmax_scale="x"
        ),
        "`softcap` must be a number": lambda: calc_attn(local, local, local, key, softcap=None),
        "`return_max_logits` must be True": lambda: calc_attn(
            local, local, local, key, return_max_logits=1
        ),
        "`window_size` must be (left, right), got 3": lambda: (
            make_varlen_key_for_new_mask_after_dispatch(BORDERS, BORDERS, key, window_size=3)
        ),
    }.items():
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            call()
    with pytest.raises(ValueError, match=r"`window_size` must be \(left, right\), got 3"):
        magi_attn_varlen_key(BORDERS, BORDERS, HEADS, KV_HEADS, HEAD_DIM, 0, group, window_size=3)
    rest = (HEADS, KV_HEADS, HEAD_DIM, 0, group)
    for message, lists in {
        "`attn_mask_type` must be full, causal": ([[0, S]], [[0, S]], "triangular"),
        r"`attn_mask_type` must have shape \[1\], got \[2\]": ([[0, S]], [[0, S]], [0, 1]),
        "got 4": ([[0, S]], [[0, S]], [4]),
        "overlap": ([[0, S], [0, S]], [[0, S], [5, S]], 0),
    }.items():
        with pytest.raises(ValueError, match=message):
            magi_attn_flex_key(*lists, S, S, *rest)
    other = dist.new_group()
    with pytest.raises(ValueError, match="`cp_group` must be a process group that has had a key"):
        get_most_recent_key(other)
    with pytest.raises(ValueError, match=r"`cp_group` must be a process group .* got 3"):
        get_most_recent_key(3)


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request):
    started = Ranks(request.param)
    yield started
    started.close()


@pytest.mark.parametrize("function", [every_mask, compiled, tokens, refusals])
def test_across_ranks(ranks, function):
    ranks.run(function)


@pytest.mark.parametrize("name", FLEX)
@pytest.mark.parametrize("as_tensors", [False, True])
def test_one_device(name, as_tensors):
    (x, *weights, sink), weight = leaves()
    q_ranges, k_ranges, types = FLEX[name]
    if as_tensors:
        types = torch.tensor(NUMBERS[name], dtype=torch.int32)
        pairs = [getattr(r, "to_naive_ranges", lambda r=r: r)() for r in (q_ranges, k_ranges)]
        q_ranges, k_ranges = (torch.as_tensor(r, dtype=torch.int32) for r in pairs)
    (expected_of,), gradients = expected([name], 0.0)
    for _ in range(2):  # tensors that are known, the second time
        out, meta = flex_flash_attn_func(
            *(*project(x, weights), q_ranges, k_ranges, types),
            sink=sink,
            softcap=0,
            return_max_logits=True,
            auto_range_merge=True,
            deterministic=False,
        )
        found = (out, meta.lse, meta.max_logits)
        for mine, wanted in zip(found, expected_of, strict=True):
            torch.testing.assert_close(mine, wanted, **CLOSE)
        found = torch.autograd.grad((out * weight).sum(), [x, *weights, sink])
        torch.testing.assert_close(found, gradients, **CLOSE)


def test_ranges_that_change():
    """Tensors are read again when they were written to, and None is full."""
    q, k, v = (torch.randn(S, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
    ranges, types = torch.tensor([[0, S]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    full, meta = flex_flash_attn_func(q, k, v, ranges, ranges)
    torch.testing.assert_close(full, dense(q, k, v, visible("full"))[0], **CLOSE)
    assert meta.max_logits is None
    torch.testing.assert_close(flex_flash_attn_func(q, k, v, ranges, ranges, types)[0], full)
    types.fill_(1)
    causal = dense(q, k, v, visible("causal"))[0]
    torch.testing.assert_close(
        flex_flash_attn_func(q, k, v, ranges, ranges, types)[0], causal, **CLOSE
    )
    compiled = torch.compile(flex_flash_attn_func, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, ranges, ranges, types)[0], causal, **CLOSE)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (TypeError, "no argument `dropout`", {"dropout": 0.1}),
        (
            NotImplementedError,
            r"torch.use_deterministic_algorithms\(True\)",
            {"deterministic": True},
        ),
        (NotImplementedError, "`sink_layout` must be left out, got 'ssh'", {"sink_layout": "ssh"}),
        (NotImplementedError, "a mask_mod", {"index_attn_indices": [[1]]}),
        (
            ValueError,
            r"`sink` must be \[num_sinks, heads\], got shape \[4\]",
            {"sink": torch.ones(4)},
        ),
        (TypeError, "`sink` must be a tensor or None, got int", {"sink": 3}),
        (TypeError, "`softmax_scale` must be a number, got 'x'", {"softmax_scale": "x"}),
        (TypeError, "`softcap` must be a number, got None", {"softcap": None}),
        (TypeError, "`return_max_logits` must be True or False", {"return_max_logits": 1}),
        (TypeError, "`q` must be a tensor, got int", {"q": 3}),
        (ValueError, r"`k` must be \[tokens, heads, head_dim\]", {"k": torch.zeros(S)}),
        (ValueError, "`q_ranges` must be a list of ints", {"q_ranges": 3}),
        (ValueError, "`k_ranges` must", {"k_ranges": None}),
        (ValueError, "`attn_type_map` must be full, causal", {"attn_type_map": "triangular"}),
        (TypeError, "`attn_type_map` must be a type or", {"attn_type_map": 1.5}),
        (TypeError, "`attn_type_map` must hold int32", {"attn_type_map": torch.zeros(1)}),
    ],
)
def test_what_one_device_refuses(error, message, options):
    x = torch.randn(S, HEADS, HEAD_DIM)
    given = {"q": x, "k": x, "v": x, "q_ranges": [[0, S]], "k_ranges": [[0, S]]} | options
    with pytest.raises(error, match=message):
        flex_flash_attn_func(**given)


def test_names_of_lists_on_the_device():
    x, ranges = torch.randn(S, HEADS, HEAD_DIM), torch.tensor([[0, S]], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"`attn_type_map` must have shape \[1\], got \[2\]"):
        flex_flash_attn_func(x, x, x, ranges, ranges, torch.zeros(2, dtype=torch.int32))


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("DispatchConfig", "`chunk_size` and `strategy`"),
        ("MinHeapDispatchAlg", "`strategy`"),
        ("OverlapConfig", "`degree` and `backward_degree`"),
        ("AttnOverlapMode", "`degree` and `backward_degree`"),
        ("GrpCollConfig", "`cost`"),
        ("DistAttnConfig", "`chunk_size`, `strategy`"),
    ],
)
def test_configs_name_our_options(name, option):
    module = importlib.import_module("magi_compile.integrations.magi_attention")
    with pytest.raises(ImportError, match=f"`{name}` .* ContextParallelOptions .*{option}"):
        getattr(module, name)
    with pytest.raises(AttributeError, match="has no attribute 'flash'"):
        module.flash  # noqa: B018
