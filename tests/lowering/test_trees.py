"""Masks of trees run by intervals: the rows that see a key are one, however many keys a row sees."""

import random
from typing import NamedTuple

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask, flex_attention

import magi_compile
from magi_compile.lowering import masks
from magi_compile.lowering.backend import make_backend
from magi_compile.lowering.masks import MaskOfCall, MaskRoute
from magi_compile.lowering.options import LoweringOptions
from magi_compile.masks import create_block_mask
from magi_compile.ops.masks import mask_bits

from .conftest import assert_same
from .test_bits import dense, run

BATCH, HEADS = 2, 4


class Tree(NamedTuple):
    """Numbers of the nodes of tokens in a packed order, depth first, int64 `[batch, seqlen]`: of the node, of the last
    one below it and one more, and of the document, the tree that it is in."""

    tin: torch.Tensor
    tout: torch.Tensor
    document: torch.Tensor


def random_tree(seqlen, seed, batch=BATCH):
    """Several trees, one after the other, whose nodes have 1 to 40 tokens."""
    entries = [_entry(seqlen, random.Random(f"{seed} {b}")) for b in range(batch)]
    return Tree(*(torch.tensor(x) for x in zip(*entries, strict=True)))


def _entry(seqlen, generator):
    tin, tout, document, path, ends = [], [], [], [], {}
    while len(tin) < seqlen:
        while path and generator.random() < 0.4:
            ends[path.pop()] = len(ends) + len(path) + 1
        node = len(ends) + len(path)
        document.append(node if not path else document[-1])
        path.append(node)
        tokens = min(generator.randint(1, 40), seqlen - len(tin))
        tin += [node] * tokens
        document += [document[-1]] * (tokens - 1)
    for node in path:
        ends[node] = max(tin) + 1
    tout = [ends[node] for node in tin]
    return tin, tout, document


def ancestors(tree):
    tin, tout, _ = tree
    return lambda b, h, q, kv: (tin[b, kv] <= tin[b, q]) & (tin[b, q] < tout[b, kv])


def turned_round(tree):
    tin, tout, _ = tree
    return lambda b, h, q, kv: (tout[b, kv] > tin[b, q]) & (tin[b, q] >= tin[b, kv])


def causal(tree):
    tin, tout, _ = tree
    return lambda b, h, q, kv: (q >= kv) & (tin[b, kv] <= tin[b, q]) & (tin[b, q] < tout[b, kv])


def causal_in_documents(tree):
    """Nodes are numbered anew in each document."""
    tin, tout, document = tree
    tin, tout = tin - document, tout - document

    def mask_mod(b, h, q, kv):
        is_below = (tin[b, kv] <= tin[b, q]) & (tin[b, q] < tout[b, kv])
        return is_below & (document[b, q] == document[b, kv]) & (kv <= q)

    return mask_mod


def both_ends(tree):
    tin, tout, _ = tree
    return lambda b, h, q, kv: (tin[b, kv] <= tin[b, q]) & (tout[b, q] <= tout[b, kv])


def by_last_row(tree):
    """As the library has it: each token is a node, and its subtree the rows up to `end`."""
    end = torch.stack(
        [torch.searchsorted(*entry) for entry in zip(tree.tin, tree.tout, strict=True)]
    )
    return lambda b, h, q, kv: (q >= kv) & (q < end[b, kv])


FORMS = [ancestors, turned_round, causal, causal_in_documents, both_ends, by_last_row]


def qkv(seqlen_q, seqlen_k):
    generator = torch.Generator().manual_seed(3)
    sizes = ((HEADS, seqlen_q), (HEADS // 2, seqlen_k), (HEADS // 2, seqlen_k))
    return [
        torch.randn(BATCH, heads, length, 16, generator=generator, requires_grad=True)
        for heads, length in sizes
    ]


def attend(q, k, v, mask):
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def eager(q, k, v, mask):
    return magi_compile.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


@pytest.fixture
def no_bits(monkeypatch):
    """Bit blocks of a mask are an error."""

    def fail(*_):
        raise AssertionError("the mask has gone by bit blocks")

    monkeypatch.setattr(mask_bits, "_from_mask_mod", fail)


def made(mask_mod, seqlen_q, seqlen_k):
    return create_block_mask(mask_mod, BATCH, None, seqlen_q, seqlen_k, device="cpu")


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_values_and_gradients(form, way, no_bits):
    """Of lengths that are no multiples of a block, and of fewer keys than rows."""
    compiled = torch.compile(attend, backend=make_backend("aot_eager"), fullgraph=True)
    for seed, (seqlen_q, seqlen_k) in enumerate([(300, 300), (333, 250)]):
        mask_mod = form(random_tree(seqlen_q, seed))
        wanted = create_mask(mask_mod, BATCH, None, seqlen_q, seqlen_k, device="cpu")
        mask, inputs = made(mask_mod, seqlen_q, seqlen_k), qkv(seqlen_q, seqlen_k)
        if way == "eager":
            ours = run(eager, inputs, mask)
        else:
            explanation = magi_compile.explain(attend, *inputs, mask)
            notes = "; ".join(explanation.calls[0].decision.notes)
            assert "by intervals" in notes
            assert "by bit blocks:" not in notes
            assert ("rows that see a key" in notes) == (form is not both_ends)
            ours = run(compiled, inputs, mask)
        assert_same(ours, run(dense, inputs, wanted))


def test_made_in_the_graph_by_inductor(no_bits):
    tree = random_tree(300, 5)

    def model(q, k, v, tin, tout):
        mask_mod = causal(Tree(tin, tout, None))
        return attend(q, k, v, torch.nn.attention.flex_attention.create_block_mask(
            mask_mod, BATCH, None, 300, 300, "cpu"
        ))  # fmt: skip

    ours = torch.compile(model, backend=make_backend("inductor"), fullgraph=True)
    for tree in (random_tree(300, 5), random_tree(300, 6)):
        inputs = qkv(300, 300)
        wanted = create_mask(causal(tree), BATCH, None, 300, 300, device="cpu")
        assert_same(run(ours, inputs, tree.tin, tree.tout), run(dense, inputs, wanted))


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_a_tree_of_each_head(way, no_bits):
    seeds = range(HEADS)
    end = torch.stack([40 * random_tree(200, seed, batch=1).tout[0] for seed in seeds])  # in rows

    def mask_mod(b, h, q, kv):
        return (q >= kv) & (q < end[h, kv])

    compiled = torch.compile(attend, backend=make_backend("aot_eager"), fullgraph=True)
    mask = create_block_mask(mask_mod, BATCH, HEADS, 200, 200, device="cpu")
    wanted = create_mask(mask_mod, BATCH, HEADS, 200, 200, device="cpu")
    ours = run(eager if way == "eager" else compiled, qkv(200, 200), mask)
    assert_same(ours, run(dense, qkv(200, 200), wanted))


def test_two_slices_of_each_node():
    tree = random_tree(3000, 7, batch=1)
    for form in FORMS:
        mask = create_block_mask(form(tree), 1, None, 3000, 3000, device="cpu")
        slices = magi_compile.masks.slices_from_block_mask(mask, batch=1)
        assert len(slices) <= 2 * (int(tree.tin.max()) + 1)


def test_data_out_of_order():
    """Tokens in any order: bit blocks, and the same graph as for those in order."""
    ordered = random_tree(300, 8)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    mixed = Tree(*(x[:, order].contiguous() for x in ordered))
    step = torch.compile(attend, backend=make_backend("eager"), fullgraph=True)
    for tree in (ordered, mixed, ordered):
        inputs = qkv(300, 300)
        mask_mod = causal_in_documents(tree)
        wanted = create_mask(mask_mod, BATCH, None, 300, 300, device="cpu")
        assert_same(run(step, inputs, made(mask_mod, 300, 300)), run(dense, inputs, wanted))


def in_a_row(x, y):
    """Solved for rows it takes for granted that one table grows, solved for keys that two do."""
    end = y + 5

    def mask_mod(b, h, q, kv):
        return (y[kv] <= x[q]) & (x[q] <= end[kv])

    return mask_mod


@pytest.mark.parametrize("case", ["tree", "queries out of order", "nothing in order"])
def test_the_data_of_a_graph_decide_on_a_gpu(case, monkeypatch):
    """Which of both ways, and whether one of them."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.arange(300) // 10
    by_tens = torch.randperm(30, generator=generator).repeat_interleave(10)
    mixed = numbers[torch.randperm(300, generator=generator)]
    mask_mod = {
        "tree": causal_in_documents(random_tree(300, 9)),
        "queries out of order": in_a_row(by_tens, numbers),
        "nothing in order": in_a_row(mixed, mixed),
    }[case]
    routes, of = [], MaskRoute.of

    def watched(call, options):
        routes.append(of(call, options))
        return routes[-1]

    mask = made(mask_mod, 300, 300)
    monkeypatch.setattr(MaskOfCall, "is_on_cpu", False)
    monkeypatch.setattr(masks.MaskRoute, "of", watched)
    inputs = qkv(300, 300)
    wanted = create_mask(mask_mod, BATCH, None, 300, 300, device="cpu")
    step = torch.compile(attend, backend=make_backend("eager", LoweringOptions()), fullgraph=True)
    assert_same(run(step, inputs, mask), run(dense, inputs, wanted))
    (route,) = routes
    assert bool(route.reasons) == (case == "nothing in order")
    if not route.reasons:
        assert route.program.by_keys == (case == "tree")
