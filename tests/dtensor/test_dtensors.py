"""DTensors as q, k and v: heads and entries of a batch sharded, tokens by a plan alone;
results and gradients are the whole's."""

import re

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.attention import flex_attention as flex

import magi_compile
from magi_compile import AttnSlices
from magi_compile.dtensor import context_parallel, plan
from magi_compile.dtensor.attention import context_parallel_attention
from magi_compile.dtensor.planning.rank_plan import PlanTensors
from tests.dtensor.test_packing_with_context_parallel import OPTIONS

S = 64
R, HEADS = Replicate(), Shard(1)  # the heads are dimension 1 in both layouts


def mesh_of(group, shape=None, names=("tp",)):
    ranks = torch.arange(group.size()).view(shape or (group.size(),))
    return DeviceMesh("cpu", ranks, mesh_dim_names=names)


def mesh_of_2x2(group, names=("cp", "tp")):
    return mesh_of(group, (2, 2), names)


def documents(b, h, q, kv):
    return (q >= kv) & ((q >= 23) == (kv >= 23)) & ((q >= 41) == (kv >= 41))


SLICES = AttnSlices.from_cu_seqlens([0, 23, 41, S], causal=True)


def random(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def packed(nheads_q, nheads_kv):
    """q, k, v and the gradient of the output."""
    return random((S, nheads_q, 8), (S, nheads_kv, 8), (S, nheads_kv, 16), (S, nheads_q, 16))


def padded(batch, nheads_q, nheads_kv):
    heads = (nheads_q, nheads_kv, nheads_kv, nheads_q)
    return random(
        *((batch, n, S, d) for n, d in zip(heads, (8, 8, 16, 16), strict=True)),
    )


def flash(q, k, v):
    return magi_compile.flex_flash_attention(q, k, v, SLICES, softcap=3.0)


def lse_placements(placements, dims):
    return tuple(Shard(dims[p.dim]) if isinstance(p, Shard) else p for p in placements)


def check(attend, tensors, mesh, placements, kv_placements, dims, backend=None):
    """`attend` of DTensors against that of whole tensors, as to values, placements and gradients."""
    torch._dynamo.reset()
    *qkv, dout = tensors
    leaves = [x.clone().requires_grad_() for x in qkv]
    out, lse, *_ = attend(*leaves)
    wanted = [out.detach(), lse.detach()]
    wanted += torch.autograd.grad((out, lse), leaves, (dout, torch.ones_like(lse)))
    inputs = [
        distribute_tensor(x, mesh, where).requires_grad_()
        for x, where in zip(qkv, (placements, kv_placements, kv_placements), strict=True)
    ]
    run = attend
    if backend is not None:
        lowered = magi_compile.make_backend("aot_eager")
        run = torch.compile(
            attend, backend=lowered if backend == "lowered" else backend, fullgraph=True
        )
    out, lse, *_ = run(*inputs)
    of_lse = lse_placements(placements, dims)
    dlse = distribute_tensor(torch.ones_like(wanted[1]), mesh, of_lse)
    grads = torch.autograd.grad(
        (out, lse), inputs, (distribute_tensor(dout, mesh, placements), dlse)
    )
    sums = tuple(b if a == b else Partial() for a, b in zip(placements, kv_placements, strict=True))
    found = [out, lse, *grads]
    for x, where in zip(found, (placements, of_lse, placements, sums, sums), strict=True):
        assert isinstance(x, DTensor)
        assert x.placements == tuple(where)
    for x, y in zip(found, wanted, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x.full_tensor(), y, rtol=1e-5, atol=1e-5)


# Heads over one dimension or two, with keys and values that are sharded too, or replicated: 3 groups of 4 heads over 2
# ranks are cut.
ONE = [
    (4, 2, [R], [R]),
    (4, 2, [HEADS], [HEADS]),
    (4, 2, [HEADS], [R]),
    (4, 1, [HEADS], [R]),
    (12, 3, [HEADS], [R]),
]
TWO = [
    (4, 4, [HEADS, HEADS], [HEADS, HEADS]),
    (8, 2, [HEADS, HEADS], [HEADS, R]),
    (12, 3, [HEADS, HEADS], [R, R]),
    (4, 2, [R, HEADS], [R, HEADS]),
    (4, 1, [HEADS, R], [R, R]),
]


def run_packed(group, nheads_q, nheads_kv, placements, kv_placements, backend):
    mesh = mesh_of(group) if len(placements) == 1 else mesh_of_2x2(group, ("dp", "tp"))
    tensors = packed(nheads_q, nheads_kv)
    check(flash, tensors, mesh, placements, kv_placements, (1, 0), backend)


# In a graph a case of each kind: where shards are equal, and where a group of queries is cut.
@pytest.mark.parametrize(
    ("case", "backend"),
    [*((case, None) for case in ONE), (ONE[1], "aot_eager"), (ONE[4], "aot_eager")],
    ids=str,
)
def test_heads_over_two_ranks(ranks_of, case, backend):
    ranks_of(2).run(run_packed, *case, backend)


@pytest.mark.parametrize(
    ("case", "backend"),
    [*((case, None) for case in TWO), (TWO[1], "aot_eager"), (TWO[2], "aot_eager")],
    ids=str,
)
def test_heads_over_two_dimensions(ranks_of, case, backend):
    ranks_of(4).run(run_packed, *case, backend)


def run_padded(group, case, backend):
    names = ("dp", "tp")
    mesh = mesh_of(group) if len(case[2]) == 1 else mesh_of_2x2(group, names)
    nheads_q, nheads_kv, placements, kv_placements = case
    mask = flex.create_block_mask(documents, None, None, S, S, "cpu")

    def attend(q, k, v):
        return magi_compile.flex_attention(
            q, k, v, block_mask=mask, scale=0.4, enable_gqa=True, return_lse=True
        )

    tensors = padded(4, nheads_q, nheads_kv)
    check(attend, tensors, mesh, placements, kv_placements, (0, 1, 2), backend)


@pytest.mark.parametrize("backend", [None, "lowered"])
@pytest.mark.parametrize(
    "case", [ONE[2], ONE[4], (4, 2, [Shard(0)], [Shard(0)])], ids=["groups", "cut", "entries"]
)
def test_flex_attention(ranks_of, case, backend):
    ranks_of(2).run(run_padded, case, backend)


@pytest.mark.parametrize("backend", [None, "lowered"])
def test_entries_and_heads(ranks_of, backend):
    ranks_of(4).run(run_padded, (4, 2, [Shard(0), HEADS], [Shard(0), R]), backend)


# Tokens, by a plan


def run_planned(group, backend, has_tokens):
    """Queries of 4 heads on "tp", 1 head of keys on all of it. The mesh has the tokens too, or the heads alone."""
    mesh = mesh_of_2x2(group)
    torch._dynamo.reset()
    q, k, v, dout = padded(2, 4, 1)
    p = plan(SLICES, mesh["cp"], options=OPTIONS)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = magi_compile.flex_attention(
        *leaves,
        block_mask=flex.create_block_mask(documents, None, None, S, S, "cpu"),
        enable_gqa=True,
    )
    wanted_grads = torch.autograd.grad(wanted, leaves, dout)
    on = mesh if has_tokens else mesh["tp"]
    tokens = [Shard(2)] if has_tokens else []

    def spread(x, where):
        x = p.shard(x, 2)
        if where != R:
            x = x.chunk(2, 1)[mesh.get_local_rank("tp")]
        return DTensor.from_local(x, on, [*tokens, where])

    inputs = [spread(x, w).requires_grad_() for x, w in ((q, HEADS), (k, R), (v, R))]

    def attend(q, k, v, p):
        return p.attention(q, k, v)

    run = attend
    if backend:
        run = torch.compile(attend, backend=backend, fullgraph=True)
    out = run(*inputs, p)
    assert p.attention(*inputs, return_lse=True)[1].placements == (*tokens, HEADS)
    grads = torch.autograd.grad(out, inputs, spread(dout, HEADS))
    assert [x.placements[-1] for x in (out, *grads)] == [HEADS, HEADS, Partial(), Partial()]
    for x, y in zip((out, *grads), (wanted, *wanted_grads), strict=True):
        x = x.redistribute(placements=[*tokens, R]).to_local()
        torch.testing.assert_close(p.unshard(x, 2), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("has_tokens", [True, False])
def test_tokens_by_a_plan(ranks_of, has_tokens, backend):
    ranks_of(4).run(run_planned, backend, has_tokens)


def attentions(p):
    """Everything that runs over all ranks inside of the context, with its layout."""
    mask = p.block_mask
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return {
        "flex": lambda q, k, v: flex.flex_attention(q, k, v, block_mask=mask, enable_gqa=True),
        "ours": lambda q, k, v: magi_compile.flex_attention(
            q, k, v, block_mask=mask, enable_gqa=True
        ),
        "flash": lambda q, k, v: (
            magi_compile.flex_flash_attention(*(x[0].transpose(0, 1) for x in (q, k, v)), p.slices)
            .out.transpose(0, 1)
            .unsqueeze(0)
        ),
        "sdpa": lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True),
    }


def run_inside(group, name, backend):
    torch._dynamo.reset()
    mesh = mesh_of_2x2(group)
    q, k, v, _ = padded(1, 4, 2)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    with context_parallel(mesh["cp"], mask=AttnSlices.causal(S), options=OPTIONS) as p:
        attend = attentions(p)[name]
        if backend:
            attend = torch.compile(attend, backend=backend, fullgraph=True)
        local = [p.shard(x, 2).chunk(2, 1)[mesh.get_local_rank("tp")] for x in (q, k, v)]
        for on, where in ((mesh, [Shard(2), HEADS]), (mesh["tp"], [HEADS])):
            out = attend(*(DTensor.from_local(x, on, where) for x in local))
            assert out.placements == tuple(where)
            out = out.redistribute(placements=[*where[:-1], R]).to_local()
            torch.testing.assert_close(p.unshard(out, 2), wanted)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("name", ["flex", "ours", "flash", "sdpa"])
def test_inside_of_the_context(ranks_of, name, backend):
    ranks_of(4).run(run_inside, name, backend)


# What is refused


def refused(group):
    """Each with the DTensors, the message, and the tensor that the message says to redistribute."""
    mesh, two = mesh_of(group), DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("cp", "tp"))
    tokens = (
        "must have all tokens on every rank outside of context parallelism, got Shard(0) on "
        "dimension 'tp' of its mesh; redistribute"
    )
    q, k, v, _ = packed(4, 2)
    odd = packed(3, 3)

    def spread(x, where, on=mesh):
        return distribute_tensor(x, on, where)

    def partial(x):
        return DTensor.from_local(x, mesh, [Partial()])

    yield from [
        (
            TypeError,
            "`k` must be a DTensor, as others of q, k, v are, got Tensor",
            [spread(q, [R]), k, v],
        ),
        (TypeError, "`q` must be a DTensor", [q, spread(k, [R]), v]),
        (
            ValueError,
            f"`q` {tokens} it, q.redistribute(placements=[Replicate()])",
            [spread(x, [Shard(0)]) for x in (q, k, v)],
        ),
        (
            ValueError,
            "`q` must be Replicate() or Shard(1), heads, on dimension 'tp' of its mesh, got Partial(); redistribute it",
            [partial(q), spread(k, [R]), spread(v, [R])],
        ),
        (
            ValueError,
            "`q` must be Replicate() or Shard(1), heads,",
            [spread(x, [Shard(2)]) for x in (q, k, v)],
        ),
        (
            ValueError,
            "`k` must be Shard(1), as `q` is, or Replicate() on dimension 'tp' of its mesh, got "
            "Partial(); redistribute it, k.redistribute(placements=[Shard(1)])",
            [spread(q, [HEADS]), partial(k), partial(v)],
        ),
        (
            ValueError,
            "`k` must be Replicate(), as `q` is, on dimension 'tp' of its mesh, got Shard(1)",
            [spread(x, [w]) for x, w in ((q, R), (k, HEADS), (v, HEADS))],
        ),
        (
            ValueError,
            "`v` must have the placement of `k` on dimension 'tp' of its mesh, Shard(1), got "
            "Replicate(); redistribute it, v.redistribute(placements=[Shard(1)])",
            [spread(x, [w]) for x, w in ((q, HEADS), (k, HEADS), (v, R))],
        ),
        (
            ValueError,
            "`q` must have a multiple of 2 heads, as many as ranks share them, got 3; redistribute "
            "it, q.redistribute(placements=[Replicate()])",
            [spread(x, [HEADS]) for x in odd[:3]],
        ),
        (
            ValueError,
            "`k` must have a multiple of 2 heads, as many as ranks share them, got 1; redistribute "
            "it, k.redistribute(placements=[Replicate()])",
            [spread(x, [HEADS]) for x in packed(4, 1)[:3]],
        ),
        (
            ValueError,
            "`q` must have a multiple of the heads of `k`, 3, got 4 heads",
            [spread(x, [w]) for x, w in zip((q, *odd[1:3]), (HEADS, R, R), strict=True)],
        ),
        (
            ValueError,
            "`k` must be on the mesh of `q`",
            [spread(q, [R]), spread(k, [R, R], two), spread(v, [R])],
        ),
        (
            ValueError,
            "`q` must have 3 dimensions, got shape [1, 64, 4, 8]",
            [spread(x[None], [R]) for x in (q, k, v)],
        ),
    ]


def run_refused(group):
    for error, message, given in refused(group):
        with pytest.raises(error, match=re.escape(message)):
            magi_compile.flex_flash_attention(*given, SLICES)
    mesh = mesh_of(group)
    q, k, v, _ = padded(3, 2, 2)
    spread = [distribute_tensor(x, mesh, [Shard(0)]) for x in (q, k, v)]
    message = (
        "`query` must have a multiple of 2 entries of the batch, as many as ranks share them, got 3"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        magi_compile.flex_attention(*spread)
    spread = [distribute_tensor(x, mesh, [Shard(3)]) for x in (q, k, v)]
    message = (
        "`query` must be Replicate(), Shard(0), entries, or Shard(1), heads, on dimension 'tp' "
        "of its mesh, got Shard(3)"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        magi_compile.flex_attention(*spread)
    spread = [distribute_tensor(x, mesh, [R]) for x in padded(1, 4, 2)[:3]]
    with pytest.raises(ValueError, match="set enable_gqa=True for grouped queries"):
        magi_compile.flex_attention(*spread)
    # What is wrong is said in graphs too.
    spread = [distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, v)]
    torch._dynamo.reset()
    compiled = torch.compile(magi_compile.flex_attention, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="must have all tokens on every rank"):
        compiled(*spread)


def test_wrong_placements_say_what_to_redistribute(ranks_of):
    ranks_of(2).run(run_refused)


def run_refused_plans(group):
    mesh = mesh_of_2x2(group)
    p = plan(SLICES, mesh["cp"], options=OPTIONS)
    q = torch.randn(1, 4, p.seqlen_local, 8)
    on_plan = (
        "must be Shard(2), tokens in the order of the plan, on dimension 'cp' of its mesh, the "
        "dimension of the plan, got Replicate()"
    )
    elsewhere = (
        "`q` must have all tokens on every rank where the ranks are not those of the plan, "
        "got Shard(2) on dimension 'tp'"
    )
    behind = "`key` must be Shard(1), heads, on dimension 'cp' of its mesh too, since it is that on a later dimension"
    for message, placements, kv_placements in [
        (on_plan, [R, R], [R, R]),
        (elsewhere, [Shard(2), Shard(2)], [Shard(2), Shard(2)]),
    ]:
        x, y = (DTensor.from_local(q, mesh, where) for where in (placements, kv_placements))
        with pytest.raises(ValueError, match=re.escape(message)):
            p.attention(x, y, y)
    x, y = (DTensor.from_local(q, mesh, where) for where in ([HEADS, HEADS], [R, HEADS]))
    with pytest.raises(ValueError, match=re.escape(behind)):
        magi_compile.flex_attention(x, y, y, enable_gqa=True)
    # The sequence of a DTensor on the heads' dimension alone is this rank's.
    whole = DTensor.from_local(torch.randn(1, 4, S, 8), mesh["tp"], [HEADS])
    with pytest.raises(
        ValueError, match="`q` must have the 32 tokens of this rank in dimension 2, got 64"
    ):
        p.attention(whole, whole, whole)


def test_tokens_that_the_plan_has_not_spread(ranks_of):
    ranks_of(4).run(run_refused_plans)


def run_stock(group):
    """What PyTorch's FlexAttention does with DTensors, and the way: `local_map`."""
    from torch.distributed.tensor.experimental import local_map

    mesh = mesh_of(group)
    whole = padded(1, 4, 4)[:3]
    mask = flex.create_block_mask(documents, None, None, S, S, "cpu")
    spread = [distribute_tensor(x, mesh, [HEADS]) for x in whole]
    torch._dynamo.reset()
    compiled = torch.compile(flex.flex_attention, backend="eager")
    with pytest.raises((NotImplementedError, torch._dynamo.exc.TorchDynamoException)):
        compiled(*spread, block_mask=mask)
    mapped = local_map(
        lambda q, k, v: flex.flex_attention(q, k, v, block_mask=mask),
        out_placements=[HEADS],
        in_placements=([HEADS],) * 3,
    )
    out = mapped(*spread)
    assert out.placements == (HEADS,)
    torch.testing.assert_close(
        out.full_tensor(), magi_compile.flex_attention(*whole, block_mask=mask)
    )


def test_flex_attention_of_pytorch_by_local_map(ranks_of):
    ranks_of(2).run(run_stock)


# Masks and score_mods of graphs, which may tell heads and entries of a batch apart


def run_numbers(group, placements):
    """A score_mod and a mask for each entry, of our kernels and of PyTorch's operator: both see the whole's numbers."""
    mesh = mesh_of(group)
    whole = padded(2, 4, 4)[:3]
    ends = torch.tensor([40, 64])
    mask = flex.create_block_mask(
        lambda b, h, q, kv: kv < ends[b], 2, 4, S, S, "cpu", BLOCK_SIZE=16
    )

    def slopes(score, b, h, q, kv):
        return score + (h + 1) * (q - kv) / 16

    torch._dynamo.reset()
    with torch.no_grad():
        wanted = flex.flex_attention(*whole, slopes, mask)
        spread = [distribute_tensor(x, mesh, placements) for x in whole]
        found = torch.compile(magi_compile.flex_attention, backend="aot_eager", fullgraph=True)(
            *spread, slopes, mask
        )
        torch.testing.assert_close(found.full_tensor(), wanted)
        eager = magi_compile.flex_attention(*spread, slopes, mask)
        torch.testing.assert_close(eager.full_tensor(), wanted)


@pytest.mark.parametrize("placements", [[HEADS], [Shard(0)]], ids=["heads", "entries"])
def test_numbers_of_heads_and_entries_are_the_whole_s(ranks_of, placements):
    ranks_of(2).run(run_numbers, placements)


def run_captured(group, of_table):
    """A DTensor that a function captures is an error that says what to write, and that has the whole's gradients."""
    mesh = mesh_of(group)
    q, k, v, dout = padded(2, 4, 4)
    whole = random((4,))[0].requires_grad_()
    table = distribute_tensor(whole.detach(), mesh, [of_table]).requires_grad_()

    def attend(slopes, *qkv):
        return magi_compile.flex_attention(
            *qkv, lambda score, b, h, q, kv: score + (slopes * 0.1)[h] * (kv - q)
        )

    spread = [distribute_tensor(x, mesh, [HEADS]) for x in (q, k, v)]
    p = plan(documents, group, seqlen=S, options=OPTIONS)
    x = p.shard(q, 2)
    for call in (
        lambda: attend(table, *spread),
        lambda: attend(table, q, k, v),
        lambda: p.attention(x, x, x, score_mod=lambda s, b, h, q, kv: s + table[h] * (kv - q)),
    ):
        message = (
            r"`score_mod` must capture no DTensor, got `(slopes|table)`; .*full_tensor\(grad_pl"
        )
        with pytest.raises(ValueError, match=message):
            call()
    found = attend(table.full_tensor(grad_placements=[Partial()]), *spread)
    wanted = attend(whole, q, k, v)
    torch.testing.assert_close(found.full_tensor(), wanted)
    (wanted,) = torch.autograd.grad(wanted, whole, dout)
    (found,) = torch.autograd.grad(found, table, distribute_tensor(dout, mesh, [HEADS]))
    torch.testing.assert_close(found.full_tensor(), wanted)
    flags = distribute_tensor(torch.arange(S) > 20, mesh, [of_table])
    message = "`mask_mod` must capture no DTensor, got `flags`; capture the whole tensor, flags.full_tensor()"
    with pytest.raises(ValueError, match=re.escape(message)):
        plan(lambda b, h, q, kv: flags[q] == flags[kv], group, seqlen=S)


@pytest.mark.parametrize("of_table", [R, Shard(0)], ids=str)
def test_captured_dtensors(ranks_of, of_table):
    ranks_of(2).run(run_captured, of_table)


def run_lowered(group, placements):
    """The call on local tensors is lowered, with a score_mod and masks of shards too;
    new masks compile nothing again."""
    mesh = mesh_of(group)
    whole = padded(2, 4, 2)[:3]

    def softcapped(score, b, h, q, kv):
        return 5.0 * torch.tanh(score / 5.0)

    def attend(q, k, v, mask):
        return magi_compile.flex_attention(q, k, v, softcapped, mask, enable_gqa=True)

    def mask_of(cut):
        document = torch.arange(S) // cut
        return flex.create_block_mask(
            lambda b, h, q, kv: (document[q] == document[kv]) & (q >= kv), None, None, S, S, "cpu"
        )

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    strict = magi_compile.make_backend("aot_eager", magi_compile.LoweringOptions(strict=True))
    compiled = torch.compile(attend, backend=strict, fullgraph=True)
    with torch.no_grad():
        spread = [distribute_tensor(x, mesh, placements) for x in whole]
        for cut in (17, 30, 40):
            found = compiled(*spread, mask_of(cut))
            torch.testing.assert_close(found.full_tensor(), attend(*whole, mask_of(cut)))
            torch.testing.assert_close(
                attend(*spread, mask_of(cut)).full_tensor(), found.full_tensor()
            )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("placements", [[HEADS], [Shard(0)]], ids=["heads", "entries"])
def test_shards_are_lowered(ranks_of, placements):
    ranks_of(2).run(run_lowered, placements)


# The ops themselves


def run_ops(group, placements):
    mesh = mesh_of_2x2(group)
    q, k, v, dout = packed(4, 2)
    given = [distribute_tensor(x, mesh, [R, R]) for x in SLICES.lists]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse, _ = magi_compile.flex_flash_attention(*leaves, SLICES, softmax_scale=0.3)
    wanted = torch.autograd.grad((out, lse), leaves, (dout, torch.ones_like(lse)))
    inputs = [
        distribute_tensor(x, mesh, where).requires_grad_()
        for x, where in zip((q, k, v), [placements] * 3, strict=True)
    ]
    *found, nothing = torch.ops.magi.attention(*inputs, given, [], 0.3, 0.0, "")
    assert nothing.shape == (0,)
    of_lse = lse_placements(placements, (1, 0))
    assert found[0].placements == tuple(placements)
    assert found[1].placements == of_lse
    dlse = distribute_tensor(torch.ones_like(lse), mesh, of_lse)
    grads = torch.autograd.grad(found, inputs, (distribute_tensor(dout, mesh, placements), dlse))
    for x, y in zip((*found, *grads), (out, lse, *wanted), strict=True):
        torch.testing.assert_close(x.full_tensor(), y, rtol=1e-5, atol=1e-5)
    # Without lse, and tokens, which DTensor gathers.
    (gradient,) = torch.autograd.grad(
        torch.ops.magi.attention(*inputs, given, [], 0.3, 0.0, "")[0].sum(), inputs[:1]
    )
    assert gradient.shape == q.shape
    rows = [distribute_tensor(x, mesh, [Shard(0), R]) for x in (q, k, v)]
    gathered = torch.ops.magi.attention(*rows, given, [], 0.3, 0.0, "")[0]
    torch.testing.assert_close(gathered.full_tensor(), out.detach())


def run_ops_with_a_numbering(group):
    """Heads have numbers in it, of which a shard would have others: they are gathered,
    whatever the rule for such shapes was before."""
    mesh = mesh_of_2x2(group)
    q, k, v, _ = packed(4, 2)
    given = [SLICES.q_ranges, SLICES.k_ranges, SLICES.mask_types]
    given = [distribute_tensor(x, mesh, [R, R]) for x in given]
    inputs = [distribute_tensor(x, mesh, [R, HEADS]) for x in (q, k, v)]
    numbering = [1, 4, q.shape[0], k.shape[0], 0]
    for text in ("", BY_HEAD, ""):
        rest = (None, None, [], text, numbering)
        out, lse, _ = torch.ops.magi.attention(*inputs, given, [], 0.3, 0.0, "", *rest)
        lists = [SLICES.q_ranges, SLICES.k_ranges, SLICES.mask_types]
        wanted = torch.ops.magi.attention(q, k, v, lists, [], 0.3, 0.0, "", *rest)
        torch.testing.assert_close(out.full_tensor(), wanted[0])
        torch.testing.assert_close(lse.full_tensor(), wanted[1])
        entries = [x.redistribute(placements=[R, R]).transpose(0, 1)[None] for x in inputs]
        entries = [x.redistribute(placements=[R, HEADS]) for x in entries]
        out, *_ = torch.ops.magi.attention(*entries, given, [], 0.3, 0.0, "", *rest, True)
        torch.testing.assert_close(out.full_tensor()[0].transpose(0, 1), wanted[0])


BY_HEAD = (
    "score * (h + 1);; def score(score, h):;;     return score * (h + 1);; def d_score(g, "
    "h):;;     return g * (h + 1)"
)


def test_ops_with_a_numbering(ranks_of):
    ranks_of(4).run(run_ops_with_a_numbering)


@pytest.mark.parametrize("placements", [[R, R], [R, HEADS], [HEADS, R]], ids=str)
def test_ops_on_dtensors(ranks_of, placements):
    ranks_of(4).run(run_ops, placements)


def run_ops_across_ranks(group):
    """Tokens on the dimension of the group, heads on the other."""
    mesh = mesh_of_2x2(group)
    q, k, v, dout = packed(4, 2)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse, _ = magi_compile.flex_flash_attention(*leaves, SLICES, softmax_scale=0.3)
    wanted = torch.autograd.grad((out, lse), leaves, (dout, torch.ones_like(lse)))
    p = plan(SLICES, mesh["cp"], options=OPTIONS)

    def spread(x):
        local = p.shard(x, 0).chunk(2, 1)[mesh.get_local_rank("tp")]
        return DTensor.from_local(local, mesh, [Shard(0), HEADS])

    def whole(x, tokens=0):
        placements = [Shard(tokens), R]
        return p.unshard(x.redistribute(placements=placements).to_local(), tokens)

    # Each rank has its own, so that nobody may broadcast them.
    meta, data = (DTensor.from_local(x, mesh, [R, R]) for x in (p.meta, p.data))
    options = (0.3, 0.0, "", "auto", p.group_name, p.group_name)
    inputs = [spread(x).requires_grad_() for x in (q, k, v)]
    *found, _ = torch.ops.magi.cp_attention(*inputs, meta, data, *options)
    assert [x.placements for x in found] == [(Shard(0), HEADS), (Shard(1), Shard(0))]
    ones = torch.ones_like(found[1])
    grads = torch.autograd.grad(found, inputs, (spread(dout), ones))
    assert all(x.placements == (Shard(0), HEADS) for x in grads)
    torch.testing.assert_close(whole(found[1], 1), lse)
    for x, y in zip((found[0], *grads), (out, *wanted), strict=True):
        torch.testing.assert_close(whole(x), y, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
    attend = context_parallel_attention
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for function in (attend, compiled):
        by_function = function(
            *inputs, PlanTensors(p.meta, p.data), p.group_name, softmax_scale=0.3
        )
        for x, y in zip(by_function[:2], found, strict=True):
            assert x.placements == y.placements
            torch.testing.assert_close(x.to_local(), y.to_local())
    with_max = torch.ops.magi.cp_attention(*inputs, meta, data, *options, return_max_scores=True)
    assert with_max[2].placements == with_max[1].placements == found[1].placements
    # On the wrong dimension.
    rows = DTensor.from_local(q, mesh, [R, Shard(0)])
    with pytest.raises(ValueError, match="`q` must have the 32 rows of the plan, got"):
        torch.ops.magi.cp_attention(rows, rows, rows, meta, data, *options)


def test_ops_across_ranks_on_dtensors(ranks_of):
    ranks_of(4).run(run_ops_across_ranks)
