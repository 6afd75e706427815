"""Cross attention across ranks: queries and keys are two sequences,
and loss and every gradient are those of one process."""

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import flex_attention as flex

import magi_compile
from magi_compile import AttnSlices
from magi_compile.dtensor import (
    ContextParallelOptions,
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
    plan,
)
from tests.dtensor import transformer
from tests.dtensor.support.across_ranks import run_on_ranks
from tests.dtensor.test_backward import phased, run_in_phases
from tests.dtensor.test_forward import OPTIONS as EARLY
from tests.dtensor.test_forward import run_early
from tests.dtensor.test_packing_with_context_parallel import OPTIONS, check, graphs, mesh_of
from tests.dtensor.transformer import labels_of
from tests.support.cases import FULL, Case, HeadShape, one, random_disjoint

DIM, HEAD_DIM, VOCABULARY = transformer.DIM, transformer.HEAD_DIM, transformer.VOCABULARY

# Attention itself, against the oracle.

Q_ENDS, K_ENDS = [0, 100, 103, 193, 240], [0, 20, 50, 50, 91]
PACKED = Case(
    "packed",
    Q_ENDS[-1],
    K_ENDS[-1],
    [(*Q_ENDS[i : i + 2], *K_ENDS[i : i + 2], FULL) for i in range(4)],
)
CASES = [
    PACKED,
    one(FULL, 201, 77, "text_to_video"),
    one(FULL, 5, 300, "many_keys"),
    one(FULL, 130, 1, "one_key"),
    Case("half_sees", 200, 90, [(0, 100, 0, 90, FULL)]),
    Case("nobody_sees", 90, 33, []),
    random_disjoint(90, 211, seed=1),
    random_disjoint(211, 90, seed=2),
]
WAYS = [
    ContextParallelOptions(chunk_size=16, degree=1, backward_degree=0),
    ContextParallelOptions(chunk_size=16, degree=0, backward_degree=2),
    ContextParallelOptions(),
]


def run_cases(group, cases, ways, is_compiled):
    for case in cases:
        case = replace(case, heads=HeadShape(4, 2, 16, 16))
        for options in ways:
            run_on_ranks(group, case, options, torch.float32, is_compiled=is_compiled)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention(ranks_of, case):
    ranks_of(2).run(run_cases, [case], WAYS, False)


def test_attention_of_four(ranks_of):
    ranks_of(4).run(run_cases, CASES, WAYS[:1], False)


def test_attention_compiled(ranks_of):
    ranks_of(2).run(run_cases, CASES[:1], WAYS[:1], True)


def test_kernels_in_steps(ranks_of):
    case = replace(PACKED, heads=HeadShape(4, 2, 16, 16))
    assert any(ranks_of(2).run(run_early, case, EARLY, torch.float32))
    assert any(ranks_of(2).run(run_in_phases, case, phased(0), torch.float32))


# Models


class Cross(nn.Module):
    """Attention of `x` over `memory`."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(DIM, transformer.NHEADS_Q * HEAD_DIM)
        self.kv = nn.Linear(DIM, 2 * transformer.NHEADS_KV * HEAD_DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x, memory, attention, mask):
        q, kv = (
            y.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for y in (self.q(x), self.kv(memory))
        )
        k, v = kv.chunk(2, 1)
        return x + self.out(attention(q, k, v, mask).transpose(1, 2).flatten(2))


class EncoderDecoder(nn.Module):
    """The sum of losses of the decoder's tokens; `attention` and masks by name: encoder, decoder, cross."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.encoder, self.decoder = transformer.Layer(), transformer.Layer()
        self.cross = Cross()

    def forward(self, source, source_positions, tokens, positions, labels, masks):
        angles = [
            at[:, None] * 0.5 ** torch.arange(HEAD_DIM // 2) for at in (source_positions, positions)
        ]
        of = self.attention
        memory = self.encoder(self.embedding(source), angles[0], of["encoder"], masks["encoder"])
        x = self.decoder(self.embedding(tokens), angles[1], of["decoder"], masks["decoder"])
        x = self.cross(x, memory, of["cross"], masks["cross"])
        logits = F.linear(x, self.embedding.weight).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction="sum")


class TextToVideo(nn.Module):
    """Layers of video over itself and over text, by the names of their masks; a loss that all values are in."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.video, self.text = nn.Linear(4, DIM), nn.Linear(4, DIM)
        self.layers = nn.ModuleDict({"video": Cross(), "text": Cross()})

    def forward(self, video, text, weights, masks):
        x, memory = self.video(video), self.text(text)
        for name, mask in masks.items():
            x = self.layers[name](x, memory if name == "text" else x, self.attention, mask)
        return (x.square() * weights[None, :, None]).sum()


def make(kind, attention):
    torch.manual_seed(0)
    return kind(attention)


def grads_of(model, *arguments):
    loss = model(*arguments)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def document_of(lengths):
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def tokens_of(seqlen):
    return torch.randint(VOCABULARY, (1, seqlen), generator=torch.Generator().manual_seed(seqlen))


def mask_mods(source_document, document):
    """Packed documents: the encoder sees its own, the decoder the past of its own, and the source of its own."""
    return {
        "encoder": lambda b, h, q, kv: source_document[q] == source_document[kv],
        "decoder": lambda b, h, q, kv: (document[q] == document[kv]) & (q >= kv),
        "cross": lambda b, h, q, kv: document[q] == source_document[kv],
    }


NAMES = ("encoder", "decoder", "cross")
# Lengths of source and target; of the second as many, and in the third the decoder has documents without a source.
PACKS = [
    ([20, 41, 7, 30], [60, 15, 99, 30]),
    ([50, 70, 84], [104, 60, 40]),
    ([130, 90], [20, 40, 33]),
]


def step_of(model, backend):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return model if backend is None else torch.compile(model, backend=backend, fullgraph=True)


def everything_of(lengths):
    """Tensors of the whole, their loss and gradients on one process, and mask_mods."""
    documents = [document_of(x) for x in lengths]
    source, tokens = (tokens_of(len(x)) for x in documents)
    at = [torch.arange(len(x)) for x in documents]
    labels = labels_of(tokens, documents[1])
    mods = mask_mods(*documents)
    shapes = {"encoder": (0, 0), "decoder": (1, 1), "cross": (1, 0)}
    dense = {
        name: mods[name](0, 0, at[rows][:, None], at[keys][None])
        for name, (rows, keys) in shapes.items()
    }
    whole = [source, at[0], tokens, at[1], labels]
    # Rows without keys give 0, as our kernels have it, where PyTorch's CPU kernel may not.
    model = make(EncoderDecoder, dict.fromkeys(NAMES, dense_attention))
    return whole, mods, grads_of(model, *whole, dense)


def dense_attention(q, k, v, mask):
    out = transformer.dense(q, k, v, mask | ~mask.any(1, keepdim=True))
    return out * mask.any(1)[:, None]


def block_mask(mod, queries, keys):
    return flex.create_block_mask(mod, None, None, queries, keys, "cpu")


def plans_of(mods, source, target, mesh):
    """The encoder's plan, and those of the decoder, whose keys lie where the encoder has them."""
    encoder = plan(mods["encoder"], mesh, seqlen=source, options=OPTIONS)
    masks = {
        "decoder": block_mask(mods["decoder"], target, target),
        "cross": block_mask(mods["cross"], target, source),
    }
    plans = plan(masks=masks, mesh=mesh, keys={"cross": encoder}, options=OPTIONS)
    assert plans["cross"].keys is encoder
    assert plans["cross"].is_cross
    assert plans["decoder"].keys is plans["decoder"]
    return {"encoder": encoder, **plans}


def train_by_plans(group, backend):
    """The functional form: all is spread by plans, which the step takes as arguments."""
    model = make(EncoderDecoder, dict.fromkeys(NAMES, transformer.planned))
    step = step_of(model, backend)
    for lengths in PACKS if backend is None else PACKS[::2]:
        (source, at, tokens, _, _), mods, expected = everything_of(lengths)
        plans = plans_of(mods, *map(sum, lengths), mesh_of(group))
        encoder, cross = plans["encoder"], plans["cross"]
        labels = cross.labels(tokens, 1, documents=document_of(lengths[1]))
        model.zero_grad()
        inputs = (
            *(cross.keys.shard(source, 1), cross.keys.positions),
            *(cross.shard(tokens, 1), cross.positions, labels),
        )
        loss = step(*inputs, plans)
        loss.backward()
        check(group, model, loss, expected)
        torch.testing.assert_close(encoder.unshard(encoder.shard(at, 0), 0), at)
    return graphs()


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_encoder_and_decoder_by_plans(ranks_of, backend):
    found = ranks_of(2).run(train_by_plans, backend)
    assert max(found) <= (0 if backend is None else 2)  # lengths become symbols


def train_inside(group, attention):
    """The model as it is, inside of the context; buffers are of the sequence that their length says."""
    model = make(EncoderDecoder, attention)
    for lengths in PACKS[::2]:
        whole, mods, expected = everything_of(lengths)
        mesh = mesh_of(group)
        plans = plans_of(mods, *map(sum, lengths), mesh)
        before = [x.clone() for x in whole]
        model.zero_grad()
        with context_parallel(
            mesh,
            mask=plans,
            buffers=whole,
            buffer_seq_dims=[1, 0, 1, 0, 1],
            buffer_padding=[0, 0, 0, 0, -100],
        ):
            given = {
                name: x.slices
                if attention[name] is transformer.flex_flash_attention
                else x.block_mask
                for name, x in plans.items()
            }
            loss = model(*whole, given)
            loss.backward()
        check(group, model, loss, expected)
        assert all(torch.equal(x, y) for x, y in zip(whole, before, strict=True))


@pytest.mark.parametrize(
    ("size", "attention"),
    [
        (2, "flex_attention"),
        (2, "our_flex_attention"),
        (2, "flex_flash_attention"),
        (4, "flex_attention"),
    ],
)
def test_encoder_and_decoder_inside(ranks_of, size, attention):
    ranks_of(size).run(train_inside, dict.fromkeys(NAMES, getattr(transformer, attention)))


def sdpa(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def train_video(group, attention, backend, frames, words):
    """BlockMasks or slices as they are, both sequences among the buffers."""
    model = make(TextToVideo, attention)
    step = step_of(model, backend)
    generator = torch.Generator().manual_seed(0)
    video, text = (torch.randn(1, n, 4, generator=generator) for n in (frames, words))
    weights = torch.randn(frames, generator=generator)
    # Frames see those before them, and the text, but for its padding and some first frames.
    mods = {
        "video": lambda b, h, q, kv: q // 24 >= kv // 24,
        "text": lambda b, h, q, kv: (kv < words - 3) & (q >= 16),
    }
    lengths = {"video": frames, "text": words}
    at = torch.arange(frames)[:, None]
    masks, dense = {}, {}
    for name in mods:
        dense[name] = mods[name](0, 0, at, torch.arange(lengths[name])[None])
        masks[name] = block_mask(mods[name], frames, lengths[name])
        if attention is sdpa:
            dense[name] = torch.ones_like(dense[name])
            masks[name] = AttnSlices.full(frames, lengths[name])
    expected = grads_of(make(TextToVideo, dense_attention), video, text, weights, dense)
    with context_parallel(
        mesh_of(group),
        mask=masks,
        buffers=[video, text, weights],
        buffer_seq_dims=[1, 1, 0],
        buffer_padding=[0, 0, 0],
        options=OPTIONS,
    ) as plans:
        p = plans["text"]
        assert (p.total, p.keys.total) == (frames, words)
        assert (video.shape[1], text.shape[1]) == (p.seqlen_local, p.keys.seqlen_local)
        loss = step(video, text, weights, masks)
        loss.backward()
    check(group, model, loss, expected)
    assert text.shape[1] == words
    return graphs()


@pytest.mark.parametrize(
    ("attention", "backend", "frames", "words"),
    [
        (transformer.flex_attention, None, 201, 77),
        pytest.param(transformer.flex_attention, "magi", 201, 77, marks=pytest.mark.slow),
        (transformer.flex_attention, None, 40, 301),
        (sdpa, None, 201, 77),
        (sdpa, "aot_eager", 40, 301),
    ],
)
def test_text_to_video(ranks_of, attention, backend, frames, words):
    found = ranks_of(2).run(train_video, attention, backend, frames, words)
    assert found == [0 if backend is None else 1] * 2


# The rest of the door


def qkv(p, *, nheads=2):
    lengths = p.seqlen_local, p.keys.seqlen_local, p.keys.seqlen_local
    return [torch.randn(1, nheads, n, 8) for n in lengths]


def run_padding(group):
    """Padding of either sequence is in nobody's loss."""
    p = plan(AttnSlices.full(201, 77), mesh_of(group), options=OPTIONS)
    for tokens in (p, p.keys):
        assert tokens.has_padding
        x = torch.arange(float(tokens.total))
        local = tokens.shard(x, 0, padding=-1)
        assert int(tokens.sum((local == -1).sum())) == tokens.seqlen_local * 2 - tokens.total
        torch.testing.assert_close(tokens.unshard(local, 0), x)
    q, k, v = (x.requires_grad_() for x in qkv(p))
    out = p.attention(q, k, v)
    assert (out[:, :, p.is_padding] == 0).all()
    out.sum().backward()
    for x, tokens in ((q, p), (k, p.keys), (v, p.keys)):
        assert (x.grad[:, :, tokens.is_padding] == 0).all()
    assert "keys      77, " in str(p.explain())
    assert p.explain().gathered_rows == p.keys.seqlen_local


def test_padding(ranks_of):
    ranks_of(2).run(run_padding)


def run_one_mask(group):
    """A BlockMask that is for this rank's frames and words inside."""
    mask = block_mask(lambda b, h, q, kv: kv < 30, 100, 40)
    q, k, v = (torch.randn(1, 2, n, 8) for n in (100, 40, 40))
    wanted = flex.flex_attention(q, k, v, block_mask=mask)
    with context_parallel(
        mesh_of(group),
        mask=mask,
        buffers=[q, k, v],
        buffer_seq_dims=[2, 2, 2],
        buffer_padding=[0] * 3,
    ) as p:
        out = flex.flex_attention(q, k, v, block_mask=mask)
    torch.testing.assert_close(p.unshard(out, 2), wanted)
    assert mask.seq_lengths == (100, 40)


def test_one_mask(ranks_of):
    ranks_of(2).run(run_one_mask)


def run_lists(group):
    mesh = mesh_of(group)
    p = plan(lambda b, h, q, kv: kv * 4 <= q, mesh, seqlen=(256, 64), options=OPTIONS)
    whole = [torch.arange(256)[None], torch.arange(64)]
    local = context_parallel_shard(mesh, whole, [1, 0], p)
    torch.testing.assert_close(local[1], p.keys.shard(whole[1], 0))
    again = context_parallel_unshard(mesh, local, [1, 0], p)
    assert all(torch.equal(x, y) for x, y in zip(whole, again, strict=True))


def test_lists_of_tensors(ranks_of):
    ranks_of(2).run(run_lists)


def run_dtensors(group):
    """Tokens of both sequences sharded on the dimension of the plan."""
    mesh = mesh_of(group)
    p = plan(AttnSlices.full(201, 77), mesh, options=OPTIONS)
    local = [x.requires_grad_() for x in qkv(p)]
    out = p.attention(*local)
    expected = (out, *torch.autograd.grad(out.square().sum(), local))
    inputs = [DTensor.from_local(x, mesh, [Shard(2)]) for x in local]
    out = p.attention(*inputs)
    found = (out.to_local(), *torch.autograd.grad(out.to_local().square().sum(), local))
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_dtensors(ranks_of):
    ranks_of(2).run(run_dtensors)


def run_refused(group):
    mesh = mesh_of(group)
    alone, _ = dist.new_subgroups(group_size=1)
    p = plan(AttnSlices.full(128, 64), mesh, options=OPTIONS)
    twin = plan(AttnSlices.full(64), mesh, options=OPTIONS)
    other = plan(AttnSlices.full(64), mesh, options=ContextParallelOptions(chunk_size=8))
    equal = plan(AttnSlices.full(64), mesh, keys=other, options=OPTIONS)
    q, k, v = qkv(p)
    x = torch.zeros(64)

    def inside(mask, *buffers):
        with context_parallel(mesh, mask=mask, buffers=buffers, buffer_seq_dims=[0] * len(buffers)):
            return magi_compile.flex_flash_attention(x, x, x, AttnSlices.full(64))

    def attend(mask, q, k, is_causal=False):
        with context_parallel(mesh, mask=mask):
            F.scaled_dot_product_attention(q, k, k, is_causal=is_causal)

    full = AttnSlices.full
    for error, message, call in [
        (
            ValueError,
            "`k` must have the 32 keys of this rank in dimension 2, got 64",
            lambda: p.attention(q, q, q),
        ),
        (
            ValueError,
            "`q` must have the 64 tokens of this rank in dimension 2, got 32",
            lambda: p.attention(k, k, v),
        ),
        (
            ValueError,
            "`x` must have the 64 tokens of the whole sequence in dimension 0, got 65",
            lambda: p.keys.shard(torch.zeros(65), 0),
        ),
        (
            ValueError,
            "`buffers[0]` must have as many tokens in dimension 0 as queries or keys, 64 or 128, got 65",
            lambda: inside(p, torch.zeros(65)),
        ),
        (
            ValueError,
            "`buffers[0]` must have a length that says whether it is of queries or of keys, got 64 in "
            "dimension 0, which both have; take "
            "SequencePlan.shard(x, dim) for queries and SequencePlan.keys.shard(x, dim) for keys",
            lambda: inside(equal, torch.zeros(64)),
        ),
        (
            ValueError,
            "take SequencePlan.unshard(x, dim) for queries",
            lambda: context_parallel_unshard(mesh, [torch.zeros(32)], [0], equal),
        ),
        (ValueError, "`slices` must be plan.slices", lambda: inside([twin, equal])),
        (
            ValueError,
            "`key` must have a length that says which of the masks is meant, got 32 for 32 queries, "
            "which 2 of them have",
            lambda: attend([twin, equal], k, k),
        ),
        (
            ValueError,
            "got 31 for 64 queries, which 0 of them have",
            lambda: attend(
                plan(masks=[full(128), full(128, 64)], mesh=mesh, options=OPTIONS), q, k[:, :, :31]
            ),
        ),
        (
            ValueError,
            "`is_causal` must be False: the mask of context_parallel is not causal",
            lambda: attend(plan(AttnSlices.causal(64), mesh, keys=other), k, k, True),
        ),
        (ValueError, "or with `keys`, where the keys of one are", lambda: attend([p, other], k, k)),
        (TypeError, "`keys` must be the SequencePlan", lambda: plan(full(9, 7), mesh, keys=7)),
        (
            ValueError,
            "`keys` must hold the 7 keys of the mask on 2 ranks, got 64 tokens on 2",
            lambda: plan(full(9, 7), mesh, keys=twin),
        ),
        (
            ValueError,
            "`keys` must be spread over the ranks of `mesh`",
            lambda: plan(full(9, 64), alone, keys=twin),
        ),
        (
            TypeError,
            "`keys` must be a dict like `masks`, got list",
            lambda: plan(masks={"a": full(9, 64)}, mesh=mesh, keys=[twin]),
        ),
        (
            TypeError,
            "`keys` must be a list like `masks`, got SequencePlan",
            lambda: plan(masks=[full(9, 64)], mesh=mesh, keys=twin),
        ),
        (
            ValueError,
            "`keys` must have an entry for each of the 1 masks, got 2",
            lambda: plan(masks=[full(9, 64)], mesh=mesh, keys=[twin, None]),
        ),
        (
            ValueError,
            "`keys` must have names of `masks`, ['a'], got ['b']",
            lambda: plan(masks={"a": full(9, 64)}, mesh=mesh, keys={"b": twin}),
        ),
        (
            ValueError,
            "`seqlen` must be the length of `mask`, (9, 7), got 9",
            lambda: plan(full(9, 7), mesh, seqlen=9),
        ),
        (
            ValueError,
            "`seqlen` must be a number, or those of queries and of keys, got (9, 7, 1)",
            lambda: plan(full(9, 7), mesh, seqlen=(9, 7, 1)),
        ),
        (
            ValueError,
            "`mask` must be given for 9 queries and 7 keys, got None (causal)",
            lambda: plan(None, mesh, seqlen=(9, 7)),
        ),
    ]:
        with pytest.raises(error, match=re.escape(message)):
            call()


def test_wrong_use(ranks_of):
    ranks_of(2).run(run_refused)
