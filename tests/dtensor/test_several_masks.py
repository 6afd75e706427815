"""Models whose layers have different masks (Gemma 3, gpt-oss): tokens are spread once,
by the sum of the work of all."""

import re

import pytest
import torch
from torch import nn

from magi_compile import AttnSlices
from magi_compile.dtensor import (
    ContextParallelOptions,
    context_parallel,
    context_parallel_shard,
    plan,
)
from magi_compile.dtensor.planning.rank_plan import plan_rank_together
from tests.dtensor import transformer
from tests.dtensor.test_packing_with_context_parallel import (
    CUTS,
    EVEN,
    ODD,
    OPTIONS,
    check,
    graphs,
    mesh_of,
    step_of,
)
from tests.dtensor.transformer import block_mask, document_of, labels_of, mask_mod, tokens_of

NAMES = ("window", "documents", "window")  # of the layers


class Mixed(nn.Module):
    """Each layer with the mask of its name; attention may differ by name too."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.embedding = nn.Embedding(transformer.VOCABULARY, transformer.DIM)
        self.layers = nn.ModuleList(transformer.Layer() for _ in NAMES)

    def forward(self, tokens, positions, labels, masks):
        x = self.embedding(tokens)
        angles = positions[:, None] * 0.5 ** torch.arange(transformer.HEAD_DIM // 2)
        for name, layer in zip(NAMES, self.layers, strict=True):
            x = layer(x, angles, self.attention[name], masks[name])
        logits = nn.functional.linear(x, self.embedding.weight).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")


def make(attention):
    torch.manual_seed(0)
    return Mixed({name: getattr(transformer, x) for name, x in attention.items()})


def all_with(attention):
    return dict.fromkeys(NAMES, attention)


def on_one_process(document, tokens):
    model, at = make(all_with("dense")), torch.arange(len(document))
    masks = {name: mask_mod(name, document)(0, 0, at[:, None], at[None]) for name in NAMES}
    loss = model(tokens, at, labels_of(tokens, document), masks)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def train_inside(group, attention, backend):
    """BlockMasks that the model holds, by name."""
    model = make(attention)
    step = step_of(model, backend)
    cuts_of = [[]] * 2 if "causal_sdpa" in attention.values() else CUTS[:3]
    for cuts in cuts_of:
        document, tokens = document_of(cuts, ODD), tokens_of(1, ODD)
        expected = on_one_process(document, tokens)
        masks = {name: block_mask(name, document) for name in dict.fromkeys(NAMES)}
        labels = labels_of(tokens, document)
        model.zero_grad()
        with context_parallel(
            mesh_of(group),
            mask=masks,
            buffers=[tokens, positions := torch.arange(ODD), labels],
            buffer_seq_dims=[1, 0, 1],
            buffer_padding=[0, 0, -100],
            options=OPTIONS,
        ) as plans:
            assert list(plans) == list(masks)
            given = {
                name: plans[name].slices if attention[name] == "flex_flash_attention" else mask
                for name, mask in masks.items()
            }
            loss = step(tokens, positions, labels, given)
            loss.backward()
        assert all(mask.seq_lengths == (ODD, ODD) for mask in masks.values())
        check(group, model, loss, expected)
    return graphs()


@pytest.mark.parametrize(
    ("size", "attention", "backend"),
    [
        (2, all_with("flex_attention"), None),
        (2, all_with("flex_attention"), "aot_eager"),
        (2, all_with("our_flex_attention"), "aot_eager"),
        (2, all_with("flex_flash_attention"), None),
        (2, {"window": "flex_attention", "documents": "causal_sdpa"}, None),
        (2, {"window": "flex_attention", "documents": "causal_sdpa"}, "aot_eager"),
        (4, all_with("flex_attention"), None),
    ],
    ids=["flex", "flex_compiled", "ours_compiled", "flash", "sdpa", "sdpa_compiled", "four"],
)
def test_layers_with_different_masks(ranks_of, size, attention, backend):
    found = ranks_of(size).run(train_inside, attention, backend)
    assert found == [0 if backend is None else 1] * size


def train_by_plans(group, backend):
    """The functional form."""
    model, mesh = make(all_with("planned")), mesh_of(group)
    step = step_of(model, backend)
    for cuts in CUTS[:3]:
        document, tokens = document_of(cuts, ODD), tokens_of(2, ODD)
        masks = {name: mask_mod(name, document) for name in dict.fromkeys(NAMES)}
        weights = {"documents": 1, "window": 2}
        plans = plan(masks=masks, mesh=mesh, weights=weights, seqlen=ODD, options=OPTIONS)
        p = plans["window"]
        torch.testing.assert_close(p.positions, plans["documents"].positions)
        model.zero_grad()
        labels = p.labels(tokens, 1, documents=document)
        loss = step(p.shard(tokens, 1), p.positions, labels, plans)
        loss.backward()
        check(group, model, loss, on_one_process(document, tokens))
    return graphs()


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_the_functional_form(ranks_of, backend):
    found = ranks_of(2).run(train_by_plans, backend)
    assert found == [0 if backend is None else 1] * 2


def train_by_shards(group):
    model, mesh = make(all_with("flex_attention")), mesh_of(group)
    document, tokens = document_of(CUTS[0], EVEN), tokens_of(1, EVEN)
    masks = [block_mask(name, document) for name in dict.fromkeys(NAMES)]
    plans = plan(masks=masks, mesh=mesh, options=OPTIONS)
    whole = [tokens, torch.arange(EVEN), labels_of(tokens, document), *masks]
    tokens_here, positions, labels, window, documents = context_parallel_shard(
        mesh, whole, [1, 0, 1, None, None], plans
    )
    by_themselves = context_parallel_shard(mesh, whole, [1, 0, 1, None, None], padding=[0] * 5)
    assert [x.mask_mod.plan.is_causal for x in by_themselves[3:]] == [False, False]
    with context_parallel(mesh, mask=plans):
        loss = model(tokens_here, positions, labels, {"window": window, "documents": documents})
        loss.backward()
    check(group, model, loss, on_one_process(document, tokens))


def test_shards_out_of_place(ranks_of):
    ranks_of(2).run(train_by_shards)


def run_refused(group):
    mesh = mesh_of(group)
    causal, window = AttnSlices.causal(128), AttnSlices.sliding_window(128, 128, (20, 0))
    for error, message, arguments in [
        (
            ValueError,
            "one of `mask` and `masks` must be None, got both",
            {"mask": causal, "masks": [causal]},
        ),
        (
            ValueError,
            "`weights` must be None where `masks` is None",
            {"mask": causal, "weights": [1]},
        ),
        (TypeError, "`masks` must be a list or a dict of masks, got AttnSlices", {"masks": causal}),
        (ValueError, "`masks` must hold at least one mask", {"masks": []}),
        (
            ValueError,
            "`masks` must have the same length, got [128, 64]",
            {"masks": [causal, AttnSlices.causal(64)]},
        ),
        (
            ValueError,
            "`weights` must have an entry for each of the 2 masks, got 1",
            {"masks": [causal, window], "weights": [1]},
        ),
        (ValueError, "`weights` must be at least 1, got 0", {"masks": [causal], "weights": [0]}),
        (
            TypeError,
            "`weights` must be a list like `masks`, got dict",
            {"masks": [causal], "weights": {"a": 1}},
        ),
        (
            ValueError,
            "`weights` must have the names of `masks`, ['a'], got ['b']",
            {"masks": {"a": causal}, "weights": {"b": 1}},
        ),
        (
            TypeError,
            "`mesh` must be a DeviceMesh or a process group",
            {"mask": causal, "mesh": None},
        ),
    ]:
        with pytest.raises(error, match=re.escape(message)):
            plan(**{"mesh": mesh, **arguments})
    apart = [
        plan(x, mesh, options=ContextParallelOptions(chunk_size=n))
        for x, n in ((causal, 16), (window, 32))
    ]
    together = plan(masks=[causal, window], mesh=mesh, options=OPTIONS)
    q = torch.randn(1, 2, 64, 8)
    for error, message, given in [
        (
            ValueError,
            "must have plans that hold the same tokens, got others; make them together: plan(masks=[...], mesh=mesh)",
            apart,
        ),
        (TypeError, "`mask` must hold only masks or only plans, got both", [causal, apart[0]]),
    ]:
        with pytest.raises(error, match=re.escape(message)), context_parallel(mesh, mask=given):
            pass
    with pytest.raises(ValueError, match="a plan for each of the 1 BlockMasks"):
        context_parallel_shard(mesh, [block_mask("window", document_of([], 128))], [None], together)
    with (
        context_parallel(mesh, mask=together),
        pytest.raises(ValueError, match="of another plan"),
    ):
        torch.nn.attention.flex_attention.flex_attention(q, q, q, block_mask=apart[0].block_mask)


def test_masks_that_do_not_fit(ranks_of):
    ranks_of(2).run(run_refused)


def test_the_sum_of_work_is_balanced():
    """A window of documents and a causal mask, each of which would be placed otherwise alone."""
    seqlen, size = 4096, 4
    causal = AttnSlices.causal(seqlen)
    documents = AttnSlices.from_cu_seqlens([0, 3000, 3200, seqlen])
    for weights in ([1, 1], [1, 5], [5, 1]):
        plans = plan_rank_together(
            [causal, documents], size, 0, ContextParallelOptions(chunk_size=64), weights=weights
        )
        where = [x.dispatch for x in plans]
        assert torch.equal(where[0].chunks, where[1].chunks)
        loads = sum(
            weight * x.table.area[x.chunks].sum(1) for weight, x in zip(weights, where, strict=True)
        )
        assert loads.max() <= 1.03 * loads.double().mean(), weights
        assert plans[0].digest != plans[1].digest
    alone = plan_rank_together([causal], size, 0, ContextParallelOptions(chunk_size=64))[0]
    assert alone.digest != plans[0].digest
