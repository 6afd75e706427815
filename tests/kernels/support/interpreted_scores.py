"""Score programs of the Triton kernel in Triton's CPU interpreter, in fp32.

Not collected: `test_scored.py` runs this file in a process of its own with TRITON_INTERPRET=1, because Triton
chooses its interpreter for good when it is first imported.
"""

import pytest
import torch

from magi_compile import AttnSlices
from magi_compile.kernels.base import AttnProblem, Grads, Saved
from magi_compile.kernels.scored import ScoreNeeds
from magi_compile.kernels.triton import TritonKernel
from magi_compile.masks.block_mask import convert_any_block_mask
from magi_compile.masks.evaluation.sizes import Heads
from magi_compile.score.program import ScoreCall
from magi_compile.score.read import trace_score_program
from tests.score.score_mods import (
    BATCH,
    CASES,
    DIM,
    HEADS,
    HEADS_KV,
    SEQLEN,
    alibi,
    assert_as_good_as_plain,
    causal,
    dense,
    qkv,
    results,
    scattered,
)
from tests.support.triton_interpreter import _interpreter  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy tells of every -inf
CPU = torch.device("cpu")
BY_NAME = {case.name: case for case in CASES}


def slices_of(mask_mod):
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(mask_mod, BATCH, None, SEQLEN, SEQLEN, device="cpu")
    return convert_any_block_mask(mask, BATCH, Heads(HEADS, HEADS_KV)).slices


def run(case, slices, deterministic=False):
    """out, lse and all gradients of the loss of `score_mods.results`, by the kernel."""
    kernel = TritonKernel()
    captures, tensors = case.tensors(), qkv()
    program, tables = trace_score_program(case.make(*captures), CPU)
    score = ScoreCall(program, [x.detach() for x in tables], [], SEQLEN, SEQLEN)
    dtypes, ranks = tuple(x.dtype for x in tables), tuple(x.dim() for x in tables)
    heads = (HEADS, HEADS_KV, DIM, DIM)
    problem = AttnProblem(
        "cpu",
        None,
        torch.float32,
        *heads,
        DIM**-0.5,
        has_bits=slices.bits is not None,
        has_score=True,
    )
    needs = ScoreNeeds(program, dtypes, ranks, wants_table_gradients=False)
    assert kernel.score_refusals(problem, needs) == []
    plan = kernel.plan(slices, problem)
    q, k, v = (x.detach().transpose(1, 2).flatten(0, 1) for x in tensors)
    out, lse = kernel.forward(q, k, v, slices, plan, problem, score=score)
    whole = out.view(BATCH, SEQLEN, HEADS, DIM).transpose(1, 2).contiguous()
    whole_lse = lse.view(HEADS, BATCH, SEQLEN).transpose(0, 1)
    weights = torch.linspace(-1, 1, whole.numel()).view(whole.shape)
    dout = weights.transpose(1, 2).flatten(0, 1)
    dlse = lse.masked_fill(lse == -torch.inf, torch.pi / 2).cos()
    wanted = [i for i in program.differentiable_tables if tables[i].requires_grad]
    sums = {i: torch.zeros(tables[i].shape) for i in wanted}
    grads = kernel.backward(
        *(Grads(dout, dlse), Saved(q, k, v, out, lse), slices, plan, problem),
        score=score._replace(sums=sums),
        deterministic=deterministic,
    )
    padded = [
        x.view(BATCH, SEQLEN, heads, DIM).transpose(1, 2)
        for x, heads in zip(grads, (HEADS, HEADS_KV, HEADS_KV), strict=True)
    ]
    roots, inputs = [tables[i] for i in wanted], [x for x in captures if x.requires_grad]
    captured = torch.autograd.grad(roots, inputs, [*sums.values()]) if inputs else ()
    return [whole, whole_lse, *padded, *captured], tensors, captures


def check(case, mask_mod):
    grid = torch.arange(SEQLEN)
    visible = mask_mod(None, None, grid[:, None], grid)
    ours, tensors, captures = run(case, slices_of(mask_mod))
    assert_as_good_as_plain(ours, case.make, tensors, captures, visible)


# Others below run these, or less of what others here do.
ELSEWHERE = ("alibi", "computed_alibi", "relative", "clamp")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(x, id=x.name, marks=pytest.mark.slow if x.name in ELSEWHERE else ())
        for x in CASES
    ],
)
def test_values_and_gradients(case):
    check(case, causal)


def test_bit_blocks():
    check(BY_NAME["relative"], scattered)


def test_heads_as_batch_entries():
    """Heads of queries as entries, `[batch * heads * seqlen, 1, dim]`, give what dense attention gives."""
    tensors, captures = qkv(), BY_NAME["alibi"].tensors()
    score_mod, grid = alibi(*captures), torch.arange(SEQLEN)
    visible = causal(None, None, grid[:, None], grid)
    expected, expected_lse, *grads = results(
        lambda *qkv: dense(*qkv, score_mod, visible), tensors, captures
    )
    q, k, v = (x.detach() for x in tensors)
    program, tables = trace_score_program(score_mod, CPU)
    score = ScoreCall(program, [x.detach() for x in tables], [], SEQLEN, SEQLEN, HEADS)
    rows = [
        (entry * SEQLEN, entry // (HEADS // HEADS_KV) * SEQLEN) for entry in range(BATCH * HEADS)
    ]
    q_ranges, k_ranges = ([(at, at + SEQLEN) for at in side] for side in zip(*rows, strict=True))
    totals = BATCH * HEADS * SEQLEN, BATCH * HEADS_KV * SEQLEN
    slices = AttnSlices.from_lists(q_ranges, k_ranges, [1] * len(rows), *totals)
    problem = AttnProblem("cpu", None, torch.float32, 1, 1, DIM, DIM, DIM**-0.5, has_score=True)
    kernel, packed = TritonKernel(), [x.reshape(-1, 1, DIM) for x in (q, k, v)]
    plan = kernel.plan(slices, problem)
    out, lse = kernel.forward(*packed, slices, plan, problem, score=score)
    torch.testing.assert_close(out.view(expected.shape), expected)
    torch.testing.assert_close(lse.view(expected_lse.shape), expected_lse)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    sums = {i: torch.zeros(tables[i].shape) for i in program.differentiable_tables}
    found = kernel.backward(
        *(Grads(weights, lse.cos()), Saved(*packed, out, lse), slices, plan, problem),
        score=score._replace(sums=sums),
        deterministic=False,
    )
    for actual, gradient in zip((*found, *sums.values()), grads, strict=True):
        torch.testing.assert_close(actual.view(gradient.shape), gradient, rtol=1e-4, atol=1e-4)


def test_atomics_under_deterministic_algorithms():
    slices = AttnSlices.from_lists([(0, 4)], [(0, 4)], [0], BATCH * SEQLEN, BATCH * SEQLEN)
    with pytest.raises(
        NotImplementedError,
        match="accumulates gradients of captured tensors with atomics",
    ):
        run(BY_NAME["alibi"], slices, deterministic=True)
    run(BY_NAME["clamp"], slices, deterministic=True)
