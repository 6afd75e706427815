"""Score programs in the Hopper kernels, as they are, on a CPU, against dense attention in fp64; see
`tests/kernels/sm90/forward/test_on_cpu.py`."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile.kernels.base import AttnProblem, new_max_scores
from magi_compile.kernels.heuristics import HOPPER_HEAD_DIMS
from magi_compile.kernels.scored import ScoreNeeds
from magi_compile.kernels.sm90 import kernel as module
from magi_compile.score.read import trace_score_program
from tests.kernels.support.scored_calls import (
    BATCH,
    BY_HEAD,
    CAUSAL,
    NHEADS,
    NHEADS_KV,
    SCATTERED,
    Call,
    check,
)
from tests.score.score_mods import CASES, SEQLEN

CPU = torch.device("cpu")
PROGRAMS = {case.name: case for case in CASES}


def check_constants(kernel, name, mask, **how):
    """With captured tensors that need no gradients."""
    return check(kernel, PROGRAMS[name], mask, learns=False, **how)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, kernel):
    check_constants(kernel, name, CAUSAL)


@pytest.mark.parametrize(
    ("name", "head_dim"),
    [
        *[("relative", 128), ("tanh_of_sums", 192)],
        *(
            pytest.param(name, head_dim, marks=pytest.mark.slow)
            for name, head_dim in (
                *[("alibi", 128), ("alibi", 192), ("relative", 192), ("tanh_of_sums", 128)],
            )
        ),
    ],
)
def test_wider_heads(name, head_dim, kernel):
    check_constants(kernel, name, CAUSAL, head_dim=head_dim)


@pytest.mark.parametrize(
    "name",
    [
        *["learned", "square"],
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("clamp", "temperature", "where")),
    ],
)
def test_two_thread_blocks_share_a_tile_where_slopes_are_kept(name, kernel):
    check_constants(kernel, name, CAUSAL, head_dim=128)


@pytest.mark.parametrize("head_dim", HOPPER_HEAD_DIMS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_program_is_refused(name, head_dim):
    sizes = (4, 2, head_dim, head_dim, 0.1)
    problem = AttnProblem("cuda", (9, 0), torch.bfloat16, *sizes, has_score=True)
    program, tables = trace_score_program(PROGRAMS[name].make(*PROGRAMS[name].tensors()), CPU)
    dtypes, ranks = tuple(x.dtype for x in tables), tuple(x.dim() for x in tables)
    needs = ScoreNeeds(program, dtypes, ranks, wants_table_gradients=False)
    assert module.HopperKernel().score_refusals(problem, needs) == []


@pytest.mark.parametrize("mask", [SCATTERED, BY_HEAD], ids=lambda mask: mask.name)
def test_bits_where_slopes_are_kept(mask, kernel):
    check_constants(kernel, "tanh_of_sums", mask, head_dim=128)


def test_a_long_sequence_where_slopes_are_kept(kernel):
    check_constants(kernel, "tanh_of_sums", CAUSAL, batch=1, seqlen=300, head_dim=128)


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        *[("alibi", BY_HEAD), ("documents", SCATTERED), ("square", SCATTERED)],
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (("alibi", SCATTERED), ("documents", BY_HEAD), ("square", BY_HEAD))
        ),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_bits_and_heads_that_are_entries(name, mask, kernel):
    check_constants(kernel, name, mask)


@pytest.mark.parametrize("name", ["alibi", "tanh_of_sums"])
def test_one_long_sequence(name, kernel):
    """Blocks that have one entry, which short sequences do not."""
    check_constants(kernel, name, CAUSAL, batch=1, seqlen=300)


@pytest.mark.parametrize(
    ("name", "head_dim"),
    [
        *[("alibi", 64), ("square", 128)],
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("alibi", 128), ("square", 64))),
    ],
)
def test_deterministic(name, head_dim, kernel):
    given = (kernel, name, CAUSAL)
    first, second = (
        check_constants(*given, head_dim=head_dim, deterministic=True) for _ in range(2)
    )
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


ASKED = list(zip(("alibi", "clamp", "square"), (CAUSAL, SCATTERED, BY_HEAD), strict=True))
OTHERS_ASKED = [
    (name, mask)
    for name in ("alibi", "clamp", "square")
    for mask in (CAUSAL, SCATTERED, BY_HEAD)
    if (name, mask) not in ASKED
]


@pytest.mark.parametrize(
    ("name", "mask"),
    [*ASKED, *(pytest.param(*x, marks=pytest.mark.slow) for x in OTHERS_ASKED)],
    ids=lambda x: getattr(x, "name", x),
)
def test_max_scores(name, mask, kernel):
    case, shape = PROGRAMS[name], (BATCH, SEQLEN, 64, 64)
    captures = [x.detach() for x in case.tensors(torch.bfloat16)]
    call = Call(kernel, case.make, captures, mask, shape, torch.bfloat16)
    call.problem = replace(call.problem, has_max_scores=True)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(BATCH, heads, SEQLEN, 64, generator=generator).bfloat16()
        for heads in (NHEADS, NHEADS_KV, NHEADS_KV)
    )
    packed = [call.packed(x) for x in (q, k, v)]
    found = new_max_scores(packed[0])
    given = (call.slices, call.plan, call.problem)
    kernel.forward(*packed, *given, score=call.score, max_scores=found)
    scores = q.double() @ k.double().repeat_interleave(NHEADS // NHEADS_KV, 1).mT * 64**-0.5
    grid = [torch.arange(size) for size in scores.shape]
    scores = case.make(*captures)(scores, *torch.meshgrid(*grid, indexing="ij"))
    exact = scores.masked_fill(~mask.dense(BATCH, SEQLEN), -torch.inf).amax(-1)
    actual = call.unpacked(found.t()[..., None], q.shape)[..., 0]
    assert torch.equal(actual == -torch.inf, exact == -torch.inf)
    torch.testing.assert_close(actual.double(), exact, atol=1e-4, rtol=1e-4)
