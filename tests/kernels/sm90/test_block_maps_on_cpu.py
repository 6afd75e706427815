"""Forward and backward by block maps, as they are compiled for a GPU, on threads of a CPU: against fp64."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile.kernels.base import AttnProblem, Grads, Saved
from magi_compile.kernels.mapped import block_map_of
from magi_compile.kernels.sm90.backward import launch as backward
from magi_compile.kernels.sm90.forward import launch as forward
from magi_compile.kernels.sm90.runtime.driver import SHARED_BYTES
from magi_compile.masks.evaluation.block_lists import BlockLists
from magi_compile.masks.evaluation.block_table import BlockTable
from magi_compile.plan.block_map import ListShape
from tests.kernels.support.on_a_cpu import compile_once, launching
from tests.plan.torch_walks import pairs_of, plan_of_lists

NUM_SMS = 4
MOST_THREADS = 512
# batch, heads of the lists, of q, of keys, lengths, rows and keys of a block, head_dim, soft-cap, which pattern, and
# how many key intervals a query sees besides.
CASES = {
    "rows of nothing": (1, 4, 4, 2, 450, 500, 64, 64, 64, 0.0, "rows", 0),
    "neighbours see other keys": (1, 4, 4, 2, 450, 500, 64, 64, 64, 0.0, "turns", 0),
    "entries": (2, 1, 2, 2, 208, 240, 64, 64, 64, 0.0, "rows", 0),
    "one after the other": (1, 2, 2, 2, 333, 700, 64, 128, 64, 0.0, "thirds", 0),
    "heads of nothing": (1, 4, 4, 1, 300, 700, 64, 64, 128, 0.0, "heads", 0),
    "large blocks": (1, 2, 2, 1, 300, 500, 128, 128, 128, 5.0, "rows", 0),
    "wide heads": (1, 2, 2, 1, 200, 300, 64, 64, 192, 0.0, "rows", 0),
    "causal": (1, 4, 4, 2, 450, 500, 64, 64, 64, 0.0, "rows", 1),
    "causal entries": (2, 1, 2, 2, 208, 240, 64, 64, 64, 0.0, "rows", 1),
    "causal large blocks": (1, 2, 2, 1, 300, 500, 128, 128, 128, 0.0, "rows", 1),
    "two intervals, wide heads": (1, 2, 2, 1, 200, 300, 64, 64, 192, 0.0, "rows", 2),
}


# batch, heads of the table, of q, of keys, lengths, blocks of queries and of keys, head_dim, soft-cap, how many key
# intervals a query sees besides, and the block size of lists beside the table.
TABLES = {
    "heads": (1, 4, 4, 2, 450, 500, 7, 6, 64, 0.0, 0, None),
    "anywhere": (1, 4, 4, 2, 300, 500, 7, 6, 128, 0.0, 0, None),
    "entries": (2, 1, 2, 2, 208, 240, 4, 5, 64, 5.0, 0, None),
    "wide heads": (1, 2, 2, 1, 200, 300, 5, 4, 192, 0.0, 0, None),
    "causal": (1, 2, 2, 2, 333, 400, 5, 9, 64, 0.0, 1, None),
    "beside lists": (1, 2, 2, 2, 333, 400, 5, 9, 128, 0.0, 0, 64),
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return compile_once(tmp_path_factory)


@pytest.fixture
def launches(compiled, monkeypatch):
    """What runs when is another order for another `timing`."""
    found = SimpleNamespace(timing=0)

    def launch(function, grid, block, params, stream, options):
        num_sms = NUM_SMS if options.shared_bytes == SHARED_BYTES else 1
        rest = (found.timing, options.cluster or 1)
        function(grid, min(block, MOST_THREADS), params, num_sms, *rest)

    with launching(monkeypatch, compiled, NUM_SMS, launch):
        yield found


def listed_blocks(shape, pattern):
    generator = torch.Generator().manual_seed(3)
    sizes = (shape.batch, shape.heads, shape.num_q, shape.num_k)
    listed = torch.rand(sizes, generator=generator) < 0.5
    q, k = torch.arange(shape.num_q)[:, None], torch.arange(shape.num_k)
    if pattern == "heads":
        listed[:, 1::2] = False
    if pattern == "rows":
        listed[:, :, shape.num_q // 2] = False
        listed[..., shape.num_k // 2] = False
    if pattern == "turns":
        listed = ((q + k) % 2 == 0).expand(sizes)
    if pattern == "thirds":
        listed = (k * 3 // shape.num_k == q % 3).expand(sizes)
    return listed


def intervals_of(shape):
    """Causal ones, of every eighth query none, or parted by a gap: `[batch * seqlen_q, shape.intervals, 2]`."""
    if shape.intervals == 0:
        return None
    edges = torch.zeros(shape.batch, shape.seqlen_q, shape.intervals, 2, dtype=torch.int32)
    end = torch.arange(1, shape.seqlen_q + 1).clamp(max=shape.seqlen_k).int()
    edges[..., 0, 1] = end
    if shape.intervals == 2:
        edges[..., 0, 1] = end // 3
        edges[..., 1, 0], edges[..., 1, 1] = end // 2, end
    edges += shape.seqlen_k * torch.arange(shape.batch)[:, None, None, None]
    edges[:, ::8] = 0
    return edges.flatten(0, 1)


def reference(q, k, v, visible, dout, problem):
    q, k, v, dout = (x.double().requires_grad_() for x in (q, k, v, dout))
    keys, values = (x.repeat_interleave(problem.qhead_per_kvhead, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * problem.softmax_scale
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    probs = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    out = torch.einsum("hqk,khd->qhd", probs.masked_fill(~visible, 0), values)
    return out.detach(), lse.detach(), torch.autograd.grad(out, (q, k, v), dout)


def assert_close(x, y, what):
    size = max(1e-3, y.abs().max().item())
    torch.testing.assert_close(
        x.double() / size, y / size, atol=0.02, rtol=0, msg=lambda text: f"{what}: {text}"
    )


@pytest.mark.parametrize("passes", [1, 4])
@pytest.mark.parametrize("name", CASES)
def test_maps(name, passes, launches, monkeypatch):
    """In one pass, or for each head and each of two ranges of queries after the other."""
    batch, list_heads, heads, kv_heads, seqlen_q, seqlen_k, *of_case = CASES[name]
    rows, keys, dim, softcap, pattern, count = of_case
    passes = passes // 2 * heads // kv_heads or 1
    monkeypatch.setattr(backward, "map_passes", lambda *_: passes)
    shape = ListShape(batch, list_heads, seqlen_q, seqlen_k, rows, keys, count)
    sizes = (heads, kv_heads, dim, dim, dim**-0.5, softcap)
    problem = AttnProblem("cuda", (9, 0), torch.bfloat16, *sizes, block_map=block_map_of(shape))
    listed = listed_blocks(shape, pattern)
    order = listed.int().argsort(dim=-1, descending=True, stable=True).int()
    intervals = intervals_of(shape)
    plan = plan_of_lists(BlockLists(listed.sum(-1).int(), order), shape, problem, intervals)
    pairs = listed.repeat_interleave(rows, 2).repeat_interleave(keys, 3)
    check(plan, pairs[:, :, :seqlen_q, :seqlen_k], shape, problem, intervals, launches)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", TABLES)
def test_tables(name, deterministic, launches):
    """Blocks that begin and end anywhere."""
    batch, of_table, heads, kv_heads, seqlen_q, seqlen_k, *of_case = TABLES[name]
    num_q, num_k, dim, softcap, count, size = of_case
    blocks = (size, size) if size else (128, 128)
    shape = ListShape(batch, of_table, seqlen_q, seqlen_k, *blocks, count, num_q, num_k)
    sizes = (heads, kv_heads, dim, dim, dim**-0.5, softcap)
    problem = AttnProblem("cuda", (9, 0), torch.bfloat16, *sizes, block_map=block_map_of(shape))
    generator = torch.Generator().manual_seed(3)
    listed = torch.rand(batch, of_table, num_q, num_k, generator=generator) < 0.4
    listed[:, :, 1] = False
    of_tokens = [
        torch.randint(0, n, (batch, length), generator=generator).int()
        for n, length in ((num_q, seqlen_q), (num_k, seqlen_k))
    ]
    if name != "anywhere":
        of_tokens = [x.sort(-1).values for x in of_tokens]
    table, lists = BlockTable(listed, *of_tokens), None
    visible = pairs_of(table)
    if size:
        beside = listed_blocks(shape, "rows")
        order = beside.int().argsort(dim=-1, descending=True, stable=True).int()
        lists = BlockLists(beside.sum(-1).int(), order)
        pairs = beside.repeat_interleave(size, 2).repeat_interleave(size, 3)
        visible = visible & pairs[:, :, :seqlen_q, :seqlen_k]
    intervals = intervals_of(shape)
    plan = plan_of_lists(lists, shape, problem, intervals, table)
    check(plan, visible, shape, problem, intervals, launches, deterministic)


def check(plan, pairs, shape, problem, intervals, launches, deterministic=False):
    """Forward and backward of what `pairs [batch, heads, seqlen_q, seqlen_k]` and intervals show."""
    batch, seqlen_q, seqlen_k = shape.batch, shape.seqlen_q, shape.seqlen_k
    heads, kv_heads, dim = problem.nheads_q, problem.nheads_kv, problem.head_dim
    generator = torch.Generator().manual_seed(1)
    q, k, v, dout = (
        torch.randn(batch * length, count, dim, generator=generator).bfloat16()
        for length, count in (
            (seqlen_q, heads),
            (seqlen_k, kv_heads),
            (seqlen_k, kv_heads),
            (seqlen_q, heads),
        )
    )
    pairs = pairs.expand(batch, heads, -1, -1)
    visible = torch.stack([torch.block_diag(*pairs[:, h].float()) > 0 for h in range(heads)])
    if intervals is not None:
        col = torch.arange(batch * seqlen_k)
        visible &= ((intervals[..., :1] <= col) & (col < intervals[..., 1:])).any(1)
    out, lse, gradients = reference(q, k, v, visible, dout, problem)
    for timing in (0, 7):
        launches.timing = timing
        found = forward.forward((q, k, v), plan.q_walk, problem)
        assert_close(found.out, out, "out")
        assert torch.equal(found.lse.isfinite(), lse.isfinite())
        assert_close(found.lse.nan_to_num(neginf=0), lse.nan_to_num(neginf=0), "lse")
        saved = Saved(q, k, v, out.bfloat16(), lse.float())
        walks = plan.k_walk, problem
        options = {"q_walk": plan.q_walk, "deterministic": deterministic}
        grads = backward.backward(Grads(dout, None), saved, *walks, **options)
        for what, wanted in zip(("dq", "dk", "dv"), gradients, strict=True):
            assert_close(getattr(grads, what), wanted, what)
