"""Packing with context parallelism is where others corrupt the loss silently: tokens are permuted, documents are cut by
ranks, labels are shifted after tokens are spread, padding is counted. Here loss and every gradient are those of one
process."""

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from magi_compile.dtensor import (
    ContextParallelOptions,
    context_parallel,
    context_parallel_shard,
    plan,
)
from magi_compile.masks import AttnSlices
from tests.dtensor import transformer
from tests.dtensor.transformer import (
    block_mask,
    document_of,
    labels_of,
    make,
    on_one_process,
    tokens_of,
)

OPTIONS = ContextParallelOptions(chunk_size=16)
MASKS = ["documents", "window", "frames", "prefix"]
CUTS = [[64, 90, 91, 140], [7], [100, 101, 102, 180, 199], [1, 150]]
EVEN, ODD = 256, 201  # 201 tokens are padded


def mesh_of(group):
    return DeviceMesh.from_group(group, "cpu")


def check(group, model, loss, expected):
    """Loss and gradients, summed up over ranks, are those of one process."""
    loss = loss.detach().clone()
    grads = [p.grad.clone() for p in model.parameters()]
    for x in (loss, *grads):
        dist.all_reduce(x, group=group)
    torch.testing.assert_close(loss, expected[0], rtol=1e-5, atol=1e-3)
    for (name, _), grad, wanted in zip(model.named_parameters(), grads, expected[1], strict=True):
        error = (grad - wanted).abs().max() / wanted.abs().max()
        assert error < 2e-5, f"{name}: {error:.1e}"


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def step_of(model, backend):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return model if backend is None else torch.compile(model, backend=backend, fullgraph=True)


def train_inside(
    group, names, attention, seqlen, backend=None, options=OPTIONS, *, batch=1, checkpointing=None
):
    """Steps with new masks: the model as it is, inside of the context. How many graphs that took."""
    mesh = mesh_of(group)
    model = make(getattr(transformer, attention), checkpointing)
    step = step_of(model, backend)
    for name, cuts in zip(names, CUTS, strict=False):
        document, tokens = document_of(cuts, seqlen), tokens_of(batch, seqlen)
        expected = on_one_process(name, document, tokens)
        mask, labels = block_mask(name, document), labels_of(tokens, document)
        model.zero_grad()
        with context_parallel(
            mesh,
            mask=mask,
            buffers=[tokens, positions := torch.arange(seqlen), labels],
            buffer_seq_dims=[1, 0, 1],
            buffer_padding=[0, 0, -100],
            options=options,
        ) as spread:
            given = spread.slices if attention == "flex_flash_attention" else mask
            loss = step(tokens, positions, labels, given)
            loss.backward()
        check(group, model, loss, expected)
    return graphs()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MASKS)
def test_loss_and_gradients_are_those_of_one_process(ranks_of, size, name):
    seqlen = ODD if size == 2 else EVEN
    ranks_of(size).run(train_inside, [name, name], "flex_attention", seqlen)


@pytest.mark.parametrize(
    ("size", "backend"), [(2, "magi"), pytest.param(4, "aot_eager", marks=pytest.mark.slow)]
)
def test_compiled_it_is_one_graph_for_all_masks(ranks_of, size, backend):
    found = ranks_of(size).run(train_inside, MASKS, "flex_attention", ODD, backend)
    assert found == [1] * size


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("attention", ["our_flex_attention", "flex_flash_attention"])
def test_our_functions(ranks_of, attention, backend):
    found = ranks_of(2).run(train_inside, MASKS[:2], attention, ODD, backend)
    assert found == [0 if backend is None else 1] * 2


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("attention", ["causal_sdpa", "imported_sdpa"])
def test_causal_sdpa(ranks_of, attention, backend):
    ranks_of(2).run(train_inside, ["causal"], attention, ODD, backend)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_entries_of_a_batch_share_the_mask(ranks_of, backend):
    ranks_of(2).run(train_batches, backend)


def train_batches(group, backend):
    train_inside(group, ["documents"], "flex_attention", EVEN, backend, batch=3)


def train_checkpointed(group, attention, checkpointing, backend):
    train_inside(group, ["causal"], attention, ODD, backend, checkpointing=checkpointing)


CHECKPOINTING = [("reentrant", None), ("not reentrant", None), ("not reentrant", "aot_eager")]


@pytest.mark.parametrize(
    ("attention", "checkpointing", "backend"),
    [
        *(("flex_attention", *way) for way in CHECKPOINTING),
        ("our_flex_attention", *CHECKPOINTING[0]),
        ("flex_flash_attention", *CHECKPOINTING[1]),
        ("causal_sdpa", *CHECKPOINTING[2]),
        *(
            pytest.param(attention, *CHECKPOINTING[i], marks=pytest.mark.slow)
            for attention, ways in (
                *[("our_flex_attention", (1, 2)), ("flex_flash_attention", (0, 2))],
                ("causal_sdpa", (0, 1)),
            )
            for i in ways
        ),
    ],
)
def test_layers_that_run_again_in_the_backward(ranks_of, attention, checkpointing, backend):
    ranks_of(2).run(train_checkpointed, attention, checkpointing, backend)


def train_by_plans(group, backend):
    """The functional form: nothing is changed in place, and backward may be anywhere. Windows are in
    test_several_masks.py."""
    name = "documents"
    mesh, model = mesh_of(group), make(transformer.planned)
    step = step_of(model, backend)
    for cuts in CUTS:
        document, tokens = document_of(cuts, ODD), tokens_of(2, ODD)
        expected = on_one_process(name, document, tokens)
        p = plan(transformer.mask_mod(name, document), mesh, seqlen=ODD, options=OPTIONS)
        model.zero_grad()
        labels = p.labels(tokens, 1, documents=document)
        loss = step(p.shard(tokens, 1), p.positions, labels, p)
        loss.backward()
        check(group, model, loss, expected)
        assert int(p.sum((labels != -100).sum())) == int(
            (labels_of(tokens, document) != -100).sum()
        )
    return graphs()


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_the_functional_form(ranks_of, backend):
    found = ranks_of(2).run(train_by_plans, backend)
    assert found == [0 if backend is None else 1] * 2


def train_by_shards(group, backend):
    """Buffers that are spread out of place, the BlockMask among them; the context has the plan."""
    mesh, model = mesh_of(group), make(transformer.flex_attention)
    step = step_of(model, backend)
    document, tokens = document_of(CUTS[0], EVEN), tokens_of(1, EVEN)
    whole = {
        "tokens": tokens,
        "positions": torch.arange(EVEN),
        "labels": labels_of(tokens, document),
    }
    whole["mask"] = block_mask("documents", document)
    p = plan(whole["mask"], mesh, options=OPTIONS)
    dims = {"tokens": 1, "positions": 0, "labels": 1, "mask": None}
    local = context_parallel_shard(mesh, whole, dims, p)
    with context_parallel(mesh, mask=p):
        loss = step(**local)
        loss.backward()
    check(group, model, loss, on_one_process("documents", document, tokens))


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_shards_out_of_place(ranks_of, backend):
    ranks_of(2).run(train_by_shards, backend)


def run_labels_of_few(group):
    for n, wanted in ((0, []), (1, [-100]), (2, [7, -100])):
        p = plan(AttnSlices.causal(n), group)
        tokens, documents = torch.full((2, n), 7), torch.zeros(n)
        for given in (None, documents):
            labels = p.labels(tokens, 1, documents=given)
            assert p.unshard(labels, 1).tolist() == [wanted] * 2
            assert (labels[:, p.is_padding] == -100).all()


def test_labels_of_few_tokens(ranks_of):
    ranks_of(2).run(run_labels_of_few)


def run_exact_padding(group):
    """Numbers of other kinds that the dtype holds."""
    p = plan(AttnSlices.causal(3), group)
    for dtype, value in [
        (torch.int64, -100.0),
        (torch.float16, Fraction(1, 2)),
        (torch.bool, True),
    ]:
        x = p.shard(torch.zeros(3, dtype=dtype), 0, padding=value)
        assert (x[p.is_padding] == float(value)).all()


def test_exact_padding(ranks_of):
    ranks_of(1).run(run_exact_padding)


def run_labels(group):
    """Labels that are shifted after tokens are spread are others, and so is the loss."""
    document, tokens = document_of(CUTS[0], EVEN), tokens_of(2, EVEN)
    p = plan(block_mask("documents", document), mesh_of(group), options=OPTIONS)
    right = p.labels(tokens, 1, documents=document)
    torch.testing.assert_close(p.unshard(right, 1), labels_of(tokens, document))
    torch.testing.assert_close(right, p.labels(labels_of(tokens, document), -1, is_shifted=True))
    assert (p.labels(tokens)[:, p.positions == EVEN - 1] == -100).all()
    local = p.shard(tokens, 1)
    wrong = torch.cat([local[:, 1:], torch.full((2, 1), -100)], 1)
    is_wrong = (wrong != right).any()
    assert int(p.sum(is_wrong.long())) > 0


def test_labels_are_shifted_before_tokens_are_spread(ranks_of):
    ranks_of(2).run(run_labels)


def run_padding(group):
    """Padding is in nobody's loss: its labels are ignored, and attention gives it 0."""
    p = plan(block_mask("causal", document_of([], ODD)), mesh_of(group), options=OPTIONS)
    assert p.has_padding
    assert int(p.sum(p.is_padding.sum())) == p.seqlen_local * p.cp_size - ODD
    assert (p.labels(tokens_of(1, ODD))[:, p.is_padding] == -100).all()
    assert (p.shard(torch.ones(ODD), 0)[p.is_padding] == 0).all()
    q, k, v = (torch.randn(1, 2, p.seqlen_local, 8, requires_grad=True) for _ in range(3))
    out, lse = p.attention(q, k, v, return_lse=True)
    assert (out[:, :, p.is_padding] == 0).all()
    assert (lse[:, :, p.is_padding] == -torch.inf).all()
    out.sum().backward()
    for x in (q, k, v):
        assert (x.grad[:, :, p.is_padding] == 0).all()


def test_padding(ranks_of):
    ranks_of(2).run(run_padding)


def train_with_fsdp(group, backend):
    """Two sequences at a time, each over two ranks; parameters are spread over the ranks that have other sequences."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "cp"))
    which = mesh.get_local_rank("dp")
    model = make(transformer.flex_attention)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    step = model
    if backend:
        torch._dynamo.reset()
        step = torch.compile(model, backend=backend)
    packs = [(document_of(cuts, EVEN), tokens_of(1, EVEN) + i) for i, cuts in enumerate(CUTS[:2])]
    packs = [(document, tokens % transformer.VOCABULARY) for document, tokens in packs]
    expected = [on_one_process("documents", *pack) for pack in packs]
    document, tokens = packs[which]
    mask, labels = block_mask("documents", document), labels_of(tokens, document)
    positions = torch.arange(EVEN)
    with context_parallel(
        mesh["cp"],
        mask=mask,
        buffers=[tokens, positions, labels],
        buffer_seq_dims=[1, 0, 1],
        options=OPTIONS,
    ) as p:
        loss = step(tokens, positions, labels, mask)
        loss.backward()
    torch.testing.assert_close(p.sum(loss), expected[which][0], rtol=1e-5, atol=1e-3)
    for (name, x), *wanted in zip(
        model.named_parameters(), *(grads for _, grads in expected), strict=True
    ):
        error = p.sum(x.grad.full_tensor()) - sum(wanted) / 2  # the mean over "dp", as FSDP has it
        assert error.abs().max() < 2e-5 * sum(wanted).abs().max(), name


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_with_parameters_spread_over_another_dimension(ranks_of, backend):
    ranks_of(4).run(train_with_fsdp, backend)
