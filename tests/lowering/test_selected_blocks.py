"""Attention to the blocks that `select_blocks` chooses: what dense attention computes, compiled and eager."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask, flex_attention

import magi_compile
from magi_compile import select_blocks
from magi_compile._compat import num_compiled_graphs
from magi_compile.lowering.options import LoweringOptions
from tests.support.waits import no_waits

SEQLEN = 300
CHOICES = {
    "each": {},
    "group": {"heads": "group", "init_blocks": 1},
    "all": {"heads": "all", "block_size": 128},
    "causal": {"causal": True, "local_blocks": 1, "by": "first"},
    "causal group": {"causal": True, "heads": "group", "init_blocks": 1, "local_blocks": 2},
    "causal all": {"causal": True, "heads": "all", "block_size": (128, 64)},
}


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, nheads, SEQLEN, 16, generator=generator, requires_grad=True)
        for nheads in (4, 2, 2)
    ]


def dense(q, k, v, mask):
    """Attention to what a mask shows in the blocks that it lists."""
    (batch, nheads, seqlen, head_dim), (rows, keys) = q.shape, mask.BLOCK_SIZE
    listed = mask.to_dense().bool().repeat_interleave(rows, 2).repeat_interleave(keys, 3)
    shown = create_mask(mask.mask_mod, batch, nheads, seqlen, seqlen, device=q.device)
    visible = shown & listed[:, :, :seqlen, :seqlen]
    k, v = (x.repeat_interleave(nheads // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * head_dim**-0.5).masked_fill(~visible, -torch.inf)
    return (scores - scores.logsumexp(-1, keepdim=True).clamp(min=-1e30)).exp() @ v


def step(attend, *args):
    out = attend(*args)
    return [out, *torch.autograd.grad(out.square().sum(), args[:3])]


def assert_close(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=1e-4)


def attend_to(mask):
    return lambda q, k, v: flex_attention(q, k, v, block_mask=mask(q, k), enable_gqa=True)


def compiled(function, inner="inductor"):
    backend = magi_compile.make_backend(inner, LoweringOptions(strict=True))
    return torch.compile(function, backend=backend, fullgraph=True)


@pytest.mark.parametrize(
    ("choice", "inner"),
    [
        *((choice, "aot_eager") for choice in CHOICES),
        ("causal all", "inductor"),
        *(
            pytest.param(choice, "inductor", marks=pytest.mark.slow)
            for choice in CHOICES
            if choice != "causal all"
        ),
    ],
)
def test_chosen_in_the_graph(choice, inner):
    """With other choices in every call, which compile nothing."""

    def choose(q, k):
        return select_blocks(q, k, 3, **CHOICES[choice])

    attend = compiled(attend_to(choose), inner)
    for seed in range(3):
        given, before = inputs(seed), num_compiled_graphs()
        assert_close(step(attend, *given), step(dense, *given, choose(*given[:2])))
        assert seed == 0 or num_compiled_graphs() == before


@pytest.mark.parametrize("choice", CHOICES)
def test_chosen_in_front_of_the_graph(choice):
    def attend(q, k, v, mask):
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    attend = compiled(attend, "aot_eager")
    for seed in range(3):
        given, before = inputs(seed), num_compiled_graphs()
        mask = select_blocks(*given[:2], 3, **CHOICES[choice])
        found, wanted = step(attend, *given, mask), step(dense, *given, mask)
        assert_close(found, wanted)
        assert seed == 0 or num_compiled_graphs() == before
    eager = magi_compile.flex_attention(*given, block_mask=mask, enable_gqa=True)
    torch.testing.assert_close(eager, wanted[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("choice", CHOICES)
def test_compiled_as_eager(choice):
    def lists(q, k):
        mask = select_blocks(q, k, 3, **CHOICES[choice])
        return [x for x in mask.as_tuple() if isinstance(x, torch.Tensor)]

    q, k, _ = inputs()
    found = torch.compile(lists, backend="aot_eager", fullgraph=True)(q, k)
    for x, y in zip(found, lists(q, k), strict=True):
        assert torch.equal(x, y)
        assert not x.requires_grad


@pytest.mark.parametrize("causal", [False, True])
def test_lists_by_key_are_not_computed(causal):
    """They are FlexAttention's own, for its backward."""
    nodes = []

    def keep(gm, example_inputs):
        nodes.extend(gm.graph.nodes)
        return gm.forward

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=keep, bw_compiler=keep)
    attend = attend_to(lambda q, k: select_blocks(q, k, 3, causal=causal))
    q, k, v = (x.detach() for x in inputs())
    torch.compile(attend, backend=magi_compile.make_backend(backend), fullgraph=True)(q, k, v)
    names = [str(node.target) for node in nodes]
    assert names.count("aten.topk.default") == 1
    assert names.count("aten.sort.stable") == 2 * causal  # partial and full blocks by query
    assert not any("index_put" in name for name in names)


@pytest.mark.gpu
@pytest.mark.parametrize("choice", CHOICES)
def test_on_a_gpu(choice):
    """Without waiting for it."""

    @compiled
    def attend(q, k, v):
        mask = select_blocks(q, k, 3, **CHOICES[choice])
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(2, nheads, 320, 64) for nheads in (4, 2, 2)]
    for number in range(3):
        given = [
            torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
            for shape in shapes
        ]
        leaves = [x.requires_grad_() for x in given]
        with no_waits() if number == 2 else nullcontext():
            found = step(attend, *leaves)
        mask = select_blocks(*leaves[:2], 3, **CHOICES[choice])
        wanted = step(dense, *(x.detach().double().requires_grad_() for x in leaves), mask)
        for x, y in zip(found, wanted, strict=True):
            size = y.abs().max()
            torch.testing.assert_close(x.double() / size, y / size, atol=0.02, rtol=0)
