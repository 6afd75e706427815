"""Masks without exact slices, masks of each head and batch entry, and score_mods across ranks: what one process has."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import AuxRequest, BlockMask
from torch.utils.checkpoint import checkpoint

import magi_compile
from magi_compile.dtensor import (
    ContextParallelOptions,
    context_parallel,
    plan,
)
from magi_compile.dtensor.attention import context_parallel_attention
from magi_compile.dtensor.call import execution
from magi_compile.dtensor.call.scores import read_score_mod
from magi_compile.dtensor.planning import rank_plan
from magi_compile.dtensor.planning.rank_plan import PlanTensors
from magi_compile.dtensor.sequence import make_plan
from magi_compile.kernels.select import KERNELS
from magi_compile.lowering.backend import make_backend
from magi_compile.ops.sinks import lse_with_sinks, out_with_sinks
from tests.dtensor.support import early_on_cpus, phases_on_cpus
from tests.dtensor.test_packing_with_context_parallel import mesh_of

S, HEADS, KV_HEADS, D = 160, 4, 2, 8
SPREAD = ContextParallelOptions(chunk_size=16, degree=1, backward_degree=1)
AT_ONCE = ContextParallelOptions(chunk_size=40, degree=0, backward_degree=0)
UNEVEN = ContextParallelOptions(chunk_size=6, degree=2, backward_degree=2)  # cuts blocks, and pads


def random_bits(*shape, seed=0):
    bits = torch.rand(*shape, S, S, generator=torch.Generator().manual_seed(seed)) < 0.3
    bits[..., 5, :] = False  # a row that sees nothing
    bits[..., 96:] &= torch.arange(S)[:, None] > 80
    return bits


def of_mask_mod(mask_mod, batch=None, heads=None):
    return flex.create_block_mask(mask_mod, batch, heads, S, S, device="cpu")


def dilated(seed=0):
    return of_mask_mod(lambda b, h, q, kv: (q >= kv) & ((q - kv) % (3 + seed) == 0) & (q - kv < 90))


def scattered(seed=0):
    bits = random_bits(seed=seed)
    return of_mask_mod(lambda b, h, q, kv: bits[q, kv])


def of_heads(seed=0):
    bits = random_bits(HEADS, seed=seed)
    return of_mask_mod(lambda b, h, q, kv: bits[h, q, kv], None, HEADS)


def windows_of_heads(seed=0):
    widths = torch.tensor([3, 20, 70, 200]) + seed
    return of_mask_mod(lambda b, h, q, kv: (q >= kv) & (q - kv < widths[h]), None, HEADS)


def of_entries(seed=0):
    bits = random_bits(2, seed=seed)
    return of_mask_mod(lambda b, h, q, kv: bits[b, q, kv], 2)


def documents_of_entries(seed=0):
    document = torch.stack([torch.arange(S) // (33 + seed), torch.arange(S) // 70])
    return of_mask_mod(lambda b, h, q, kv: (document[b, q] == document[b, kv]) & (q >= kv), 2)


def of_entries_and_heads(seed=0):
    bits = random_bits(2, HEADS, seed=seed)
    return of_mask_mod(lambda b, h, q, kv: bits[b, h, q, kv], 2, HEADS)


def lists(*sizes, seed):
    """Block lists alone, of blocks of 32."""
    generator = torch.Generator().manual_seed(seed)
    listed = torch.rand(*sizes, S // 32, S // 32, generator=generator) < 0.5
    order = torch.argsort(listed.int(), dim=-1, descending=True, stable=True).int()
    return BlockMask.from_kv_blocks(
        listed.sum(-1, dtype=torch.int32), order, BLOCK_SIZE=32, seq_lengths=(S, S)
    )


def listed(seed=0):
    return lists(1, 1, seed=seed)


def listed_by_head(seed=0):
    return lists(1, HEADS, seed=seed)


def listed_by_entry(seed=0):
    return lists(2, 1, seed=seed)


def causal(seed=0):
    return of_mask_mod(lambda b, h, q, kv: (q >= kv) & (q < S - seed))


def alibi(slopes, bias):
    """With learned slopes."""
    return lambda score, b, h, q, kv: score + slopes.exp()[h] * (kv - q)


def relative(slopes, bias):
    """By a learned table of distances, and by what batch entry and head it is."""
    return lambda score, b, h, q, kv: score * (1 + b) + bias[h, (q - kv).clamp(-40, 40) + 40]


def capped(slopes, bias):
    return lambda score, b, h, q, kv: 2.0 * torch.tanh(score / 2.0)


def no_score_mod(slopes, bias):
    return None


CASES = {
    "dilated": (dilated, no_score_mod),
    "scattered, alibi": (scattered, alibi),
    "causal, relative": (causal, relative),
    "lists": (listed, no_score_mod),
    "lists of heads, alibi": (listed_by_head, alibi),
    "lists of entries": (listed_by_entry, no_score_mod),
    "heads": (of_heads, no_score_mod),
    "windows of heads, relative": (windows_of_heads, relative),
    "entries, relative": (of_entries, relative),
    "documents of entries": (documents_of_entries, no_score_mod),
    "entries and heads, capped": (of_entries_and_heads, capped),
}


def inputs(seed=0):
    """q, k, v, slopes, a table of biases, and the gradients of out and lse."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    q, k, v = (random(2, heads, S, D) for heads in (HEADS, KV_HEADS, KV_HEADS))
    learned = 0.3 * random(HEADS) - 3, 0.3 * random(HEADS, 81)
    return (q, k, v, *learned), random(2, HEADS, S, D), random(2, HEADS, S)


def leaves_of(tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def gradients(out, lse, leaves, dout, dlse):
    dlse = dlse.masked_fill(lse.detach() == -torch.inf, 0.0)
    found = torch.autograd.grad((out, lse), leaves, (dout, dlse), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def on_one_process(mask, score_mod):
    given, dout, dlse = inputs()
    leaves = leaves_of(given)
    q, k, v, *learned = leaves
    out, lse = magi_compile.flex_attention(
        *(q, k, v, score_mod(*learned), mask), enable_gqa=True, return_lse=True
    )
    return out.detach(), lse.detach(), gradients(out, lse, leaves, dout, dlse)


def compare(group, p, expected, out, lse, grads):
    """Rows of all ranks against one process; gradients of what all ranks have add up."""
    for x in grads[3:]:
        dist.all_reduce(x, group=group)
    wholes = [p.unshard(x, 2) for x in (out, lse, *grads[:3])]
    wanted_out, wanted_lse, wanted = expected
    pairs = zip([*wholes, *grads[3:]], [wanted_out, wanted_lse, *wanted], strict=True)
    for x, y in pairs:
        size = y[y.isfinite()].abs().max().item()
        torch.testing.assert_close(x, y, atol=1e-5 * max(1, size), rtol=1e-4)


def planned(q, k, v, score_mod, p):
    return p.attention(q, k, v, score_mod=score_mod(), return_lse=True)


def called(q, k, v, score_mod, mask):
    return flex.flex_attention(q, k, v, score_mod, mask, enable_gqa=True, return_lse=True)


def step(group, mask, score_mod, options, attend=None):
    """A forward and a backward across ranks, by the plan itself, or by `attend` inside of the door."""
    expected = on_one_process(mask, score_mod)
    given, dout, dlse = inputs()
    if attend is None:
        p = plan(mask, mesh_of(group), options=options)
        _step(group, p, p, expected, (given, dout, dlse), score_mod, planned)
        return
    buffers = [given[0].clone()]
    padding = [0]
    with context_parallel(
        mesh_of(group),
        mask=mask,
        buffers=buffers,
        buffer_seq_dims=[2],
        buffer_padding=padding,
        options=options,
    ) as p:
        torch.testing.assert_close(buffers[0], p.shard(given[0], 2))
        _step(group, p, mask, expected, (given, dout, dlse), score_mod, attend)
    torch.testing.assert_close(buffers[0], given[0])


def _step(group, p, mask, expected, given, score_mod, attend):
    tensors, dout, dlse = given
    leaves = leaves_of([*(p.shard(x, 2) for x in tensors[:3]), *tensors[3:]])
    q, k, v, *learned = leaves
    out, lse = attend(q, k, v, lambda: score_mod(*learned), mask)
    grads = gradients(out, lse, leaves, p.shard(dout, 2), p.shard(dlse, 2))
    compare(group, p, expected, out, lse, grads)


def eagerly(q, k, v, score_mod, mask):
    return called(q, k, v, score_mod(), mask)


def ours(q, k, v, score_mod, mask):
    return magi_compile.flex_attention(
        *(q, k, v, score_mod(), mask), enable_gqa=True, return_lse=True
    )


def run_eager(group, name):
    make, score_mod = CASES[name]
    step(group, make(), score_mod, SPREAD)
    step(group, make(), score_mod, AT_ONCE, eagerly)
    step(group, make(1), score_mod, UNEVEN, ours)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_eager(ranks_of, name, size):
    ranks_of(size).run(run_eager, name)


def run_on_two_hosts(group):
    def handed_on(options):
        return replace(options, hosts=(0, 1, 1, 0), hierarchical=True)

    step(group, scattered(), alibi, handed_on(SPREAD), eagerly)
    step(group, of_entries_and_heads(), no_score_mod, handed_on(AT_ONCE))
    step(group, of_heads(), relative, handed_on(UNEVEN), ours)
    assert plan(scattered(), mesh_of(group), options=handed_on(SPREAD)).explain().relayed[0]


def run_as_torchrun_starts_it(group):
    """Ranks of two hosts, which nobody but the launcher mentions."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("LOCAL_WORLD_SIZE", 2), ("WORLD_SIZE", 4), ("GROUP_WORLD_SIZE", 2)):
            patch.setenv(name, str(value))
        asked = replace(AT_ONCE, hierarchical=True)
        for options in (AT_ONCE, asked):
            made = plan(causal(), mesh_of(group), options=options)
            assert made.explain().hosts == (0, 0, 1, 1)
        step(group, causal(), relative, AT_ONCE)
        step(group, causal(), relative, asked)
        step(group, scattered(), alibi, replace(SPREAD, hierarchical=True), eagerly)


def test_as_torchrun_starts_it(ranks_of):
    ranks_of(4).run(run_as_torchrun_starts_it)


def test_two_hosts(ranks_of):
    ranks_of(4).run(run_on_two_hosts)


# Compiled: the next step has another mask's data, and compiles nothing again.


def run_compiled(group, name, checkpointing, backend, options=SPREAD):
    make, score_mod = CASES[name]
    # PyTorch warns once of `return_lse`, which must not be inside of a compiled checkpoint.
    flex.flex_attention(*[torch.zeros(1, 1, 16, 16)] * 3, return_lse=True)
    torch._dynamo.reset()
    before = magi_compile._compat.num_compiled_graphs()

    def layer(q, k, v, mask, *learned):
        return called(q, k, v, score_mod(*learned), mask)

    def model(q, k, v, mask, *learned):
        if checkpointing:
            return checkpoint(layer, q, k, v, mask, *learned, use_reentrant=False)
        return layer(q, k, v, mask, *learned)

    compiled = torch.compile(model, backend=backend or make_backend("aot_eager"), fullgraph=True)
    for seed in range(3):
        mask = make(seed)
        expected = on_one_process(mask, score_mod)
        tensors, dout, dlse = inputs()
        with context_parallel(mesh_of(group), mask=mask, options=options) as p:
            leaves = leaves_of([*(p.shard(x, 2) for x in tensors[:3]), *tensors[3:]])
            q, k, v, *learned = leaves
            out, lse = compiled(q, k, v, mask, *learned)
            grads = gradients(out, lse, leaves, p.shard(dout, 2), p.shard(dlse, 2))
            compare(group, p, expected, out, lse, grads)
        if seed == 0:
            first = magi_compile._compat.num_compiled_graphs()
            assert first == before + 1
    assert magi_compile._compat.num_compiled_graphs() <= first + 1  # lengths that become symbols


COMPILED = {
    "scattered, alibi": False,
    "entries, relative": True,
    "windows of heads, relative": False,
    "lists of heads, alibi": True,
    "dilated": True,
}  # and if it is checkpointed
ALSO_ON_FOUR = ["scattered, alibi", "entries, relative", "lists of heads, alibi"]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, 2) for name in COMPILED),
        *(
            pytest.param(name, 4, marks=[] if name in ALSO_ON_FOUR else pytest.mark.slow)
            for name in COMPILED
        ),
    ],
)
def test_compiled(ranks_of, name, size):
    ranks_of(size).run(run_compiled, name, COMPILED[name], None)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["scattered, alibi", "windows of heads, relative"])
def test_compiled_by_inductor(ranks_of, name, size):
    ranks_of(size).run(run_compiled, name, False, "magi")


def run_compiled_plan(group):
    """The plan as an argument, packed tensors, and the largest scores."""

    @torch.compile(backend=make_backend("aot_eager"), fullgraph=True)
    def attend(q, k, v, p, slopes):
        return p.attention(
            *(q, k, v), score_mod=alibi(slopes, None), return_aux=AuxRequest(max_scores=True)
        )

    for seed in range(2):
        mask = scattered(seed)
        (q, k, v, slopes, _), dout, _ = inputs()
        one = leaves_of([*(x[:1] for x in (q, k, v)), slopes])
        wanted, aux = magi_compile.flex_attention(
            *(*one[:3], alibi(one[3], None), mask),
            enable_gqa=True,
            return_aux=AuxRequest(max_scores=True),
        )
        p = plan(mask, mesh_of(group), options=SPREAD)
        leaves = leaves_of([*(p.shard(x[0].transpose(0, 1), 0) for x in (q, k, v)), slopes])
        out, found = attend(*leaves[:3], p, leaves[3])
        torch.testing.assert_close(p.unshard(out, 0), wanted[0].transpose(0, 1))
        torch.testing.assert_close(p.unshard(found.max_scores, 1), aux.max_scores[0])
        expected = torch.autograd.grad(wanted, one, dout[:1])
        *of_rows, of_slopes = torch.autograd.grad(out, leaves, p.shard(dout[0].transpose(0, 1), 0))
        dist.all_reduce(of_slopes, group=group)
        for x, y in zip(of_rows, expected[:3], strict=True):
            torch.testing.assert_close(p.unshard(x, 0), y[0].transpose(0, 1), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(of_slopes, expected[3], atol=1e-3, rtol=1e-4)


def test_a_plan_in_a_graph(ranks_of):
    ranks_of(2).run(run_compiled_plan)


# What composes with them


def run_composed(group):
    mask, tensors = of_heads(), inputs()[0]
    q, k, v, slopes, _ = tensors
    sinks = torch.linspace(-1, 2, HEADS)
    p = plan(mask, mesh_of(group), options=SPREAD)
    out, aux = p.attention(
        *(p.shard(x, 2) for x in (q, k, v)),
        score_mod=alibi(slopes, None),
        sinks=sinks,
        scale=0.5,
        return_aux=AuxRequest(lse=True, max_scores=True),
    )
    wanted, wanted_aux = magi_compile.flex_attention(
        *(q, k, v, alibi(slopes, None), mask, 0.5),
        enable_gqa=True,
        return_aux=AuxRequest(lse=True, max_scores=True),
    )
    wanted = out_with_sinks(wanted, wanted_aux.lse, sinks, heads_first=True)
    for x, y in (
        (out, wanted),
        (aux.lse, lse_with_sinks(wanted_aux.lse, sinks)),
        (aux.max_scores, wanted_aux.max_scores),
    ):
        torch.testing.assert_close(p.unshard(x, 2), y, atol=1e-5, rtol=1e-4)


def test_sinks_and_largest_scores(ranks_of):
    ranks_of(2).run(run_composed)


def run_one_call(group):
    """Where a plan is for a kernel that begins early, of which none has score programs."""
    document = torch.arange(2048) // 900

    def mask_mod(b, h, q, kv):
        return (document[q] == document[kv]) & (q >= kv)

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 2048, D, generator=generator) for heads in (2, 1, 1))
    slopes = torch.tensor([0.01, 0.03])
    options = ContextParallelOptions(chunk_size=16, degree=0, backward_degree=1)
    p = plan(mask_mod, mesh_of(group), seqlen=2048, options=options)
    assert p._planned.forward_is_early
    out = p.attention(*(p.shard(x, 2) for x in (q, k, v)), score_mod=alibi(slopes.log(), None))
    mask = flex.create_block_mask(mask_mod, None, None, 2048, 2048, device="cpu")
    wanted = magi_compile.flex_attention(q, k, v, alibi(slopes.log(), None), mask, enable_gqa=True)
    torch.testing.assert_close(p.unshard(out, 2), wanted)


def test_a_plan_for_a_kernel_that_begins_early(ranks_of):
    ranks_of(2).run(run_one_call)


def run_without_overlap_inside(group, name):
    """By a kernel that begins early, or whose backward has steps: neither of these with what slices do not say."""
    support = {"phased_cpu": phases_on_cpus, "early_cpu": early_on_cpus}[name]
    classes = {"phased_cpu": "PhasedCpuKernel", "early_cpu": "EarlyCpuKernel"}
    phases_on_cpus.steps.clear()
    early_on_cpus.free.clear()
    (q, k, v, slopes, bias), dout, _ = inputs()
    options = ContextParallelOptions(chunk_size=16, degree=0, backward_degree=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KERNELS, name, f"{support.__name__}:{classes[name]}")
        for make, score_mod in ((scattered, None), (of_heads, None), (causal, alibi(slopes, bias))):
            p = plan(make(), mesh_of(group), options=options)
            found = []
            for kernel in (name, "cpu"):
                leaves = leaves_of(p.shard(x[0].transpose(0, 1), 0) for x in (q, k, v))
                out, *_ = context_parallel_attention(
                    *(*leaves, PlanTensors(p.meta, p.data), group),
                    kernel=kernel,
                    score_mod=score_mod,
                )
                dout_local = p.shard(dout[0].transpose(0, 1), 0)
                found.append([out, *torch.autograd.grad(out, leaves, dout_local)])
            for x, y in zip(*found, strict=True):
                torch.testing.assert_close(x, y)
    assert set(phases_on_cpus.steps) <= {"one call"}
    assert not early_on_cpus.free


@pytest.mark.parametrize("name", ["phased_cpu", "early_cpu"])
def test_kernels_that_overlap_inside(ranks_of, name):
    ranks_of(2).run(run_without_overlap_inside, name)


def run_shares(group, dim):
    """Tokens over one dimension of the mesh; heads (`dim` 1) or batch entries (0) over the other."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("cp", "tp"))
    kinds = (
        (of_heads, alibi, SPREAD),
        (of_entries_and_heads, relative, SPREAD),
        (of_entries_and_heads, alibi, UNEVEN),
        (of_entries, alibi, SPREAD),
        (of_entries, relative, UNEVEN),
        (documents_of_entries, no_score_mod, AT_ONCE),
        (documents_of_entries, relative, UNEVEN),
    )
    for make, score_mod, options in kinds:
        mask = make()
        out, lse, wanted = on_one_process(mask, score_mod)
        p = plan(mask, mesh["cp"], options=options)
        tensors, dout, dlse = inputs()
        rank = mesh.get_local_rank("tp")

        def share(x, p=p, rank=rank):
            return p.shard(x, 2).chunk(2, dim)[rank].contiguous()

        leaves = leaves_of([*map(share, tensors[:3]), *tensors[3:]])
        qkv = [DTensor.from_local(x, mesh, [Shard(2), Shard(dim)]) for x in leaves[:3]]
        found, found_lse = p.attention(*qkv, score_mod=score_mod(*leaves[3:]), return_lse=True)
        local, local_lse = found.to_local(), found_lse.to_local()
        grads = gradients(local, local_lse, leaves, share(dout), share(dlse))
        for x in grads[3:]:
            dist.all_reduce(x, group=group)
        pairs = [(local, out), (local_lse, lse), *zip(grads[:3], wanted[:3], strict=True)]
        for x, y in pairs:
            wanted_part = y.chunk(2, dim)[rank]
            torch.testing.assert_close(p.unshard(x, 2), wanted_part, atol=1e-5, rtol=1e-4)
        for x, y in zip(grads[3:], wanted[3:], strict=True):
            torch.testing.assert_close(x, y, atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("dim", [1, 0], ids=["heads", "entries"])
def test_shares(ranks_of, dim):
    ranks_of(4).run(run_shares, dim)


def run_rows_of_entries(group):
    """Rows of a batch entry go where that entry needs them, and nowhere else; a kernel that overlaps inside does so."""
    p = plan(documents_of_entries(), mesh_of(group), options=SPREAD)
    alone = []
    for b in range(2):
        document = torch.arange(S) // (33, 70)[b]
        mask = of_mask_mod(
            lambda _, h, q, kv, document=document: (document[q] == document[kv]) & (q >= kv)
        )
        alone.append(plan(mask, mesh_of(group), permutation=p).explain())
    said = p.explain()
    for name in ("area", "local_area", "received_rows", "sent_rows"):
        together = [sum(pair) for pair in zip(*(getattr(x, name) for x in alone), strict=True)]
        assert list(getattr(said, name)) == together, name
    assert said.gathered_rows == sum(x.gathered_rows for x in alone)
    assert sum(p._planned.forward[1].transfer.recv_counts) == said.received_rows[group.rank()]
    (q, k, v, *_), dout, _ = inputs()
    phases_on_cpus.steps.clear()
    found = []
    for kernel in (None, "phased_cpu"):
        with pytest.MonkeyPatch.context() as patch:
            if kernel:
                where = f"{phases_on_cpus.__name__}:PhasedCpuKernel"
                patch.setitem(KERNELS, "phased_cpu", where)
            leaves = leaves_of(p.shard(x, 2).permute(2, 0, 1, 3).flatten(1, 2) for x in (q, k, v))
            tensors = PlanTensors(p.meta, p.data)
            out, *_ = context_parallel_attention(
                *leaves, tensors, group, kernel=kernel, batch_entries=2
            )
            dout_local = p.shard(dout, 2).permute(2, 0, 1, 3).flatten(1, 2)
            found.append([out, *torch.autograd.grad(out, leaves, dout_local)])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)
    remote = p._planned.backward[1].slices
    assert ("main" in phases_on_cpus.steps) == (len(remote) > 0)
    return len(remote)


def test_rows_of_entries(ranks_of):
    assert any(ranks_of(2).run(run_rows_of_entries))


def run_a_share_of_too_few(group):
    """Heads are sharded, and batch entries are not as many as the mask is for."""
    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("tp", "cp"))
    p = plan(of_entries_and_heads(), mesh["cp"], options=SPREAD)
    rank = mesh.get_local_rank("tp")
    qkv = [p.shard(x[:1].chunk(2, 1)[rank], 2) for x in inputs()[0][:3]]
    q, k, v = (DTensor.from_local(x, mesh, [Shard(1), Shard(2)]) for x in qkv)
    with pytest.raises(
        ValueError, match=r"must have the 2 batch entries that .* own, got 1; where"
    ):
        p.attention(q, k, v)
    rows, tensors = [x[0].transpose(0, 1) for x in qkv], p._planned.tensors("cpu")
    with pytest.raises(ValueError, match=r"`share` must be the first batch entry, .* got \[0, 2\]"):
        context_parallel_attention(*rows, tensors, mesh.get_group("cp"), share=(0, 2))


def test_a_share_of_too_few(ranks_of):
    ranks_of(2).run(run_a_share_of_too_few)


def run_several_masks(group):
    """One placement for masks of all kinds, and for queries and keys that are two sequences."""
    masks = {
        "scattered": scattered(),
        "causal": causal(),
        "heads": of_heads(),
        "entries": of_entries(),
    }
    plans = plan(masks=masks, weights=dict.fromkeys(masks, 2), mesh=mesh_of(group), options=SPREAD)
    tables = [x._planned.dispatch.table for x in plans.values()]
    assert [x.num_entries for x in tables] == [1, 1, HEADS, 2]
    bits = torch.rand(HEADS, 90, S, generator=torch.Generator().manual_seed(0)) < 0.4
    cross = flex.create_block_mask(
        lambda b, h, q, kv: bits[h, q, kv], 1, HEADS, 90, S, device="cpu"
    )
    plans["cross"] = plan(cross, mesh_of(group), options=UNEVEN)
    q, k, v, slopes, _ = inputs()[0]
    for name, mask in {**masks, "cross": cross}.items():
        p, whole = plans[name], q[:, :, :90] if name == "cross" else q
        local = p.shard(whole, 2), p.keys.shard(k, 2), p.keys.shard(v, 2)
        out = p.attention(*local, score_mod=alibi(slopes, None))
        wanted = magi_compile.flex_attention(
            *(whole, k, v, alibi(slopes, None), mask), enable_gqa=True
        )
        torch.testing.assert_close(p.unshard(out, 2), wanted, atol=1e-5, rtol=1e-4)


def test_several_masks(ranks_of):
    ranks_of(2).run(run_several_masks)


def run_random_masks(group):
    """Two dozens of masks against dense attention."""
    for seed in range(24):
        generator = torch.Generator().manual_seed(seed)
        batch, heads = 1 + seed % 2, (1, HEADS)[seed // 2 % 2]
        dense = torch.rand(batch, heads, S, S, generator=generator) < (0.01, 0.3, 0.99)[seed % 3]
        first, last = sorted(torch.randint(0, S, (2,), generator=generator).tolist())
        dense[..., first:last, :] = dense[..., first:last, :1]  # rows that see all or nothing

        def mask_mod(b, h, q, kv, dense=dense, heads=heads):
            return dense[b, h, q, kv] if heads > 1 else dense[b, 0, q, kv]

        mask = of_mask_mod(mask_mod, batch, heads if heads > 1 else None)
        (q, k, v, *_), dout, _ = inputs(seed)
        whole = leaves_of(x[:batch] for x in (q, k, v))
        scores = whole[0] @ whole[1].repeat_interleave(2, 1).mT * D**-0.5
        sees = dense.any(-1, keepdim=True)
        p = torch.softmax(scores.masked_fill(~dense, -torch.inf).masked_fill(~sees, 0.0), -1)
        wanted = (p * sees) @ whole[2].repeat_interleave(2, 1)
        expected = torch.autograd.grad(wanted, whole, dout[:batch])
        planned = plan(mask, mesh_of(group), options=(SPREAD, AT_ONCE, UNEVEN)[seed % 3])
        leaves = leaves_of(planned.shard(x[:batch], 2) for x in (q, k, v))
        out = planned.attention(*leaves)
        grads = torch.autograd.grad(out, leaves, planned.shard(dout[:batch], 2))
        for x, y in zip((out, *grads), (wanted, *expected), strict=True):
            torch.testing.assert_close(planned.unshard(x, 2), y, atol=1e-5, rtol=1e-4)


def test_random_masks(ranks_of):
    ranks_of(2).run(run_random_masks)


# What is said of them


def run_evaluated_once(group):
    """As long as nobody writes to what it reads."""
    bits, calls = random_bits(), []
    mask = of_mask_mod(lambda b, h, q, kv: bits[q, kv])
    q, k, v = inputs()[0][:3]
    convert = make_plan.convert_whole_block_mask

    def counted(given):
        calls.append(given)
        return convert(given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_plan, "convert_whole_block_mask", counted)
        for step in range(4):
            if step == 2:
                bits[0, ::2] ^= True
            with context_parallel(mesh_of(group), mask=mask, options=SPREAD) as p:
                local = [p.shard(x, 2) for x in (q, k, v)]
                out = flex.flex_attention(*local, None, mask, enable_gqa=True)
            wanted = magi_compile.flex_attention(q, k, v, None, mask, enable_gqa=True)
            torch.testing.assert_close(p.unshard(out, 2), wanted, atol=1e-5, rtol=1e-4)
            assert len(calls) == 1 + step // 2


def test_a_mask_is_evaluated_once(ranks_of):
    ranks_of(2).run(run_evaluated_once)


def run_explain(group):
    p = plan(of_entries_and_heads(), mesh_of(group), options=SPREAD)
    told = p.explain()
    assert "of them blocks of bits; masks of 2 batch entries and 4 heads" in str(told)
    assert "slices on rank" in plan(causal(), mesh_of(group), options=SPREAD).explain().mask
    (q, k, v, *learned), *_ = inputs()
    local = [p.shard(x, 2) for x in (q, k, v)]

    def model(q, k, v):
        return p.attention(q, k, v, score_mod=relative(*learned))

    said = str(magi_compile.explain(model, *local))
    assert "1 attentions run across ranks" in said
    assert (
        "across ranks with score (score * (1 + b)) + learned[1][h, ((q - kv).clamp(-40, 40) + 40)]"
        in said
    )


def test_explain(ranks_of):
    ranks_of(2).run(run_explain)


def run_other_bits(group):
    """Of rank 1."""
    bits = random_bits().clone()
    bits[100, 100] ^= group.rank() == 1
    p = plan(of_mask_mod(lambda b, h, q, kv: bits[q, kv]), mesh_of(group), options=SPREAD)
    q, k, v = (p.shard(x, 2) for x in inputs()[0][:3])
    with pytest.raises(ValueError, match=r"the plans of ranks \[1\] differ from that of rank 0"):
        p.attention(q, k, v)
    p = plan(scattered(), mesh_of(group), options=SPREAD)
    factor = 1 + group.rank()
    with pytest.raises(
        ValueError, match=r"`score_mod` must be the same on all ranks of `group`, but rank 1"
    ):
        p.attention(q, k, v, score_mod=lambda score, b, h, q, kv: score + factor * (q - kv))


def test_ranks_that_differ(ranks_of):
    ranks_of(2).run(run_other_bits)


def run_wrong_use(group):
    mesh = mesh_of(group)
    q, k, v, *learned = inputs()[0]

    def attend(mask, q=q, k=k, v=v, **options):
        p = plan(mask, mesh, options=SPREAD, seqlen=None if hasattr(mask, "kv_indices") else S)
        p.attention(*(p.shard(x, 2) for x in (q, k, v)), **options)

    bits = random_bits(HEADS)
    of_head = lambda b, h, q, kv: bits[h, q, kv]  # noqa: E731
    with pytest.raises(
        NotImplementedError, match=r"depends on it \(h\), got 4; plan a BlockMask .*H=4"
    ):
        attend(of_head)
    with pytest.raises(
        ValueError, match="`q` must have the 4 heads that have masks of their own, got 2"
    ):
        attend(of_heads(), *(x[:, :2] for x in (q, k, v)))
    p, packed = plan(of_entries(), mesh, options=SPREAD), torch.randn(80, HEADS, D)
    with pytest.raises(ValueError, match=r"`q` must be \[B, H, .* got packed tensors \[80, 4, 8\]"):
        p.attention(packed, packed, packed)
    with pytest.raises(ValueError, match=r"`q` must have the 2 batch entries .*, got 1; where"):
        attend(of_entries(), *(x[:1] for x in (q, k, v)))
    with pytest.raises(ValueError, match=r"`softcap` must be 0.0 beside a `score_mod`, .* got 3.0"):
        attend(causal(), score_mod=alibi(*learned), softcap=3.0)
    with pytest.raises(TypeError, match="`score_mod` must be a function or None, got 3"):
        attend(causal(), score_mod=3)
    with pytest.raises(NotImplementedError, match="`slices` of a plan say no blocks of bits"):
        plan(scattered(), mesh, options=SPREAD).slices  # noqa: B018
    branching = torch.compile(
        lambda p, q, k, v: p.attention(q, k, v, score_mod=lambda s, *_: s + torch.rand(())),
        backend=make_backend("aot_eager"),
    )
    p = plan(causal(), mesh, options=SPREAD)
    with pytest.raises(Exception, match=r"`score_mod` of an attention across ranks .* is random"):
        branching(p, *(p.shard(x, 2) for x in (q, k, v)))
    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(
            lambda p, q, k, v, slopes: p.attention(q, k, v, score_mod=alibi(slopes, None)),
            backend=backend,
            fullgraph=True,
        )
        p = plan(causal(), mesh, options=SPREAD)
        message = "`score_mod` must be None in code compiled for another backend than"
        with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
            compiled(p, *(p.shard(x, 2) for x in (q, k, v)), learned[0])


def test_wrong_use(ranks_of):
    ranks_of(2).run(run_wrong_use)


def run_heads_of_a_tensor(group):
    """Of a DTensor with all heads on every rank."""
    mask, (q, k, v, *_) = of_heads(), inputs()[0]
    p = plan(mask, mesh_of(group), options=SPREAD)
    mesh = DeviceMesh.from_group(group, "cpu")
    local = [DTensor.from_local(p.shard(x, 2), mesh, [Shard(2)]) for x in (q, k, v)]
    out = p.attention(*local).to_local()
    wanted = magi_compile.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    torch.testing.assert_close(p.unshard(out, 2), wanted)
    assert Replicate() not in p.attention(*local).placements


def test_heads_of_a_tensor(ranks_of):
    ranks_of(2).run(run_heads_of_a_tensor)


def run_opcheck(group):
    p = plan(scattered(), mesh_of(group), options=SPREAD)
    q, k, v = (torch.randn(S, heads, D, requires_grad=True) for heads in (4, 2, 2))
    slopes = torch.full((HEADS,), 0.1, requires_grad=True)
    _, score = read_score_mod(lambda s, b, h, q, kv: s + slopes[h] * (kv - q), q.device)
    common = (p.meta, p.data, 0.3, 0.0, "cpu", "auto", *[group.group_name] * 2, 2)
    torch.library.opcheck(torch.ops.magi.cp_attention, (q, k, v, *common, *score, None, True))
    q, k, v = (x.detach() for x in (q, k, v))
    _, score = read_score_mod(lambda s, b, h, q, kv: s + slopes.detach()[h] * (kv - q), q.device)
    torch.library.opcheck(torch.ops.magi.cp_ffa_fwd, (q, k, v, *common, *score, None, True))
    lse = torch.randn(HEADS, S)
    wanted = {"wanted": [i for i, x in enumerate(score.tables) if x.is_floating_point()]}
    backward = (q, lse, q, k, v, q, lse, *common, *score)
    torch.library.opcheck(torch.ops.magi.cp_ffa_bwd, backward, wanted)
    p = plan(of_heads(), mesh_of(group), options=SPREAD)
    common = (p.meta, p.data, *common[2:-1], 1)
    torch.library.opcheck(torch.ops.magi.cp_ffa_fwd, (q, k, v, *common))
    torch.library.opcheck(torch.ops.magi.cp_ffa_bwd, (q, lse, q, k, v, q, lse, *common))


def run_more_bits_than_are_kept(group):
    """Masks of one call are returned together, and layers that take turns keep their plans."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_plan, "MOST_BITS", 1)
        plans = plan(
            masks=[scattered(), of_heads(), of_entries()], mesh=mesh_of(group), options=SPREAD
        )
        assert len(plans) == 3
        unpacked = [[execution.unpack(p.meta, p.data) for p in plans] for _ in range(2)]
        assert all(x is y for x, y in zip(*unpacked, strict=True))


def test_more_bits_than_are_kept(ranks_of):
    ranks_of(2).run(run_more_bits_than_are_kept)


def run_blocks_of_one_rank(group):
    """A rank whose rows see whole blocks chooses its kernel as the others do."""
    shown = torch.rand(512, 512, generator=torch.Generator().manual_seed(0)) < 0.5
    shown[:256] = True
    mask = flex.create_block_mask(
        lambda b, h, q, kv: shown[q, kv], None, None, 512, 512, device="cpu"
    )
    p = plan(mask, mesh_of(group), options=ContextParallelOptions(strategy="sequential"))
    found = execution.unpack(p.meta, p.data)
    assert (len(found.bits) > 0) == (group.rank() == 1)
    q, k, v = (
        torch.randn(1, 2, 512, 16, generator=torch.Generator().manual_seed(n)) for n in range(3)
    )
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=shown)
    out = p.attention(*(p.shard(x, 2) for x in (q, k, v)))
    torch.testing.assert_close(p.unshard(out, 2), wanted, atol=1e-5, rtol=1e-4)


def test_blocks_of_one_rank(ranks_of):
    ranks_of(2).run(run_blocks_of_one_rank)


def test_opcheck(ranks_of):
    ranks_of(1).run(run_opcheck)
