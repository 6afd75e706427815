"""Gradients of captured tensors by the Hopper kernels, as they are, on a CPU, against dense attention in fp64."""

from functools import partial

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile.kernels.base import AttnProblem, Grads, Saved
from magi_compile.kernels.scored import ScoreNeeds
from magi_compile.score.program import ScoreProgram
from magi_compile.score.read import trace_score_program
from tests.kernels.support.scored_calls import (
    BATCH,
    BY_HEAD,
    CAUSAL,
    DOCUMENTS,
    FULL,
    NHEADS,
    SCATTERED,
    Call,
    check,
)
from tests.score.score_mods import CASES, SEQLEN, Case, alibi, relative

LEARNED = {case.name: case for case in CASES if any(x.is_floating_point() for x in case.captures)}
FIXED = torch.randn(SEQLEN, generator=torch.Generator().manual_seed(5))


def _random(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def of_keys(bias):
    return lambda score, b, h, q, kv: score + bias[b, kv]


def of_heads_and_keys(bias):
    return lambda score, b, h, q, kv: score + bias[h, kv]


def of_rows_and_keys(of_key, of_query, of_both):
    """Each tensor is looked up at other indices, the last one twice, which now and then lead to the same place."""

    def score_mod(score, b, h, q, kv):
        score = score + of_key[h, kv] + of_query[h, q] * (kv - q) / 8
        return score + of_both[h, q // 4] * of_both[h, kv // 8]

    return score_mod


def of_pairs_and_scores(distance, beside, of_score):
    """From the end of a tensor, beside a captured tensor that needs no gradient, and so that the change of the new
    score depends on the old one."""

    def score_mod(score, b, h, q, kv):
        score = score + torch.sin(score * of_score[h])
        return score + distance[h, kv - q] + beside[h, q] * FIXED[kv]

    return score_mod


def too_short(bias):
    return lambda score, b, h, q, kv: score + bias[h, q - kv]


def too_short_with_zeros(bias):
    size = bias.shape[1]

    def score_mod(score, b, h, q, kv):
        distance = q - kv
        known = bias[h, distance.clamp(0, size - 1)]
        return score + torch.where(distance < size, known, torch.zeros_like(known))

    return score_mod


OWN = [
    Case("of_keys", of_keys, [_random(BATCH, SEQLEN)]),
    Case(
        "of_rows_and_keys", of_rows_and_keys, [_random(NHEADS, SEQLEN, seed=i) for i in (1, 2, 3)]
    ),
    Case(
        "of_pairs_and_scores",
        of_pairs_and_scores,
        [_random(NHEADS, SEQLEN), _random(NHEADS, SEQLEN, seed=2), _random(NHEADS, seed=3)],
    ),
]


# Programs of these kinds have a forward in `test_on_cpu.py`, and some here.
check_backward = partial(check, has_forward=False)


def refusals(kernel, name, of_program=lambda program: program):
    """Reasons against gradients of the captured tensors of a program, or of what `of_program` makes of it."""
    case = LEARNED[name]
    program, tables = trace_score_program(case.make(*case.tensors()), torch.device("cpu"))
    dtypes, ranks = tuple(x.dtype for x in tables), tuple(x.dim() for x in tables)
    problem = AttnProblem("cuda", (9, 0), torch.bfloat16, 4, 2, 64, 64, 0.1, has_score=True)
    needs = ScoreNeeds(of_program(program), dtypes, ranks, wants_table_gradients=True)
    return kernel.score_refusals(problem, needs)


@pytest.mark.parametrize("name", LEARNED)
def test_programs(name, kernel):
    check(kernel, LEARNED[name], CAUSAL)


@pytest.mark.parametrize("case", OWN, ids=lambda case: case.name)
def test_look_ups(case, kernel):
    check_backward(kernel, case, CAUSAL)


@pytest.mark.parametrize("make", [of_heads_and_keys, of_keys, relative], ids=lambda x: x.__name__)
def test_rows_of_one_entry(make, kernel):
    """Of one head, so that they have the same place for a key."""
    sizes = (NHEADS, 2 * SEQLEN + 201) if make is relative else (NHEADS, 200)
    case = Case("long", make, [_random(*sizes)])
    check_backward(kernel, case, CAUSAL, batch=1, seqlen=200)


UNDER_MASKS = [
    *[("alibi", FULL), ("relative", DOCUMENTS), ("relative", SCATTERED)],
    *[("learned", DOCUMENTS), ("documents", BY_HEAD)],
]
OTHERS = [
    *[("alibi", DOCUMENTS), ("alibi", SCATTERED), ("relative", FULL), ("relative", BY_HEAD)],
    *[("alibi", BY_HEAD), ("learned", FULL), ("learned", SCATTERED), ("learned", BY_HEAD)],
    *[("documents", FULL), ("documents", DOCUMENTS), ("documents", SCATTERED)],
]


@pytest.mark.parametrize(
    ("name", "mask"),
    [*UNDER_MASKS, *(pytest.param(*x, marks=pytest.mark.slow) for x in OTHERS)],
    ids=lambda x: getattr(x, "name", x),
)
def test_masks(name, mask, kernel):
    check_backward(kernel, LEARNED[name], mask)


def test_an_index_out_of_bounds_has_no_gradient(kernel):
    """A look-up there gives 0."""
    case = Case("too_short", too_short, [_random(NHEADS, 20)])
    check_backward(kernel, case, CAUSAL, dense=too_short_with_zeros)


# 128 and 256 are those of `test_beside_slopes` and `test_one_long_sequence`.
WIDER = [("relative", 192), ("documents", 96)]
OTHERS_WIDER = [
    (name, head_dim)
    for name in ("alibi", "relative", "documents")
    for head_dim in (80, 96, 128, 192, 256)
    if (name, head_dim) not in WIDER
]


@pytest.mark.parametrize(
    ("name", "head_dim"),
    [*WIDER, *(pytest.param(*x, marks=pytest.mark.slow) for x in OTHERS_WIDER)],
)
def test_wider_heads(name, head_dim, kernel):
    check_backward(kernel, LEARNED[name], CAUSAL, head_dim=head_dim)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(16, 72), pytest.param(128, 40, marks=pytest.mark.slow)]
)
def test_values_of_another_head_dim(head_dim, head_dim_v, kernel):
    check_backward(kernel, LEARNED["relative"], CAUSAL, head_dim=head_dim, head_dim_v=head_dim_v)


@pytest.mark.parametrize(
    ("name", "head_dim"),
    [
        *[("alibi", 64), ("t5", 64), ("t5", 256)],
        pytest.param("alibi", 256, marks=pytest.mark.slow),
    ],
)
def test_one_long_sequence(name, head_dim, kernel):
    """Several tiles and blocks, most of which have one entry and no edge."""
    check_backward(kernel, LEARNED[name], CAUSAL, batch=1, seqlen=300, head_dim=head_dim)


@pytest.mark.parametrize("name", ["alibi", "t5"])
def test_rows_behind_a_tile_are_of_another(name, kernel):
    """In blocks without an edge, where nothing else hides them."""
    check(kernel, LEARNED[name], FULL, seqlen=200)


@pytest.mark.parametrize(("kernel", "head_dim"), [(1, 64), (2, 256), (3, 64)], indirect=["kernel"])
def test_threads_in_any_order(head_dim, kernel):
    check_backward(kernel, LEARNED["t5"], CAUSAL, batch=1, seqlen=300, head_dim=head_dim)


@pytest.mark.parametrize(
    "name", ["learned", "tanh_of_sums", pytest.param("temperature", marks=pytest.mark.slow)]
)
def test_beside_slopes(name, kernel):
    check_backward(kernel, LEARNED[name], CAUSAL, head_dim=128)


@pytest.mark.parametrize(
    "table_dtype",
    [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64],
    ids=str,
)
def test_wide_tables(table_dtype, kernel):
    check(kernel, LEARNED["relative"], CAUSAL, table_dtype=table_dtype)


def test_no_keys(kernel):
    call = Call(kernel, alibi, [torch.ones(NHEADS)], CAUSAL, (1, 8, 64, 64), torch.bfloat16)
    q, nothing = torch.ones(8, NHEADS, 64).bfloat16(), torch.ones(0, 2, 64).bfloat16()
    out, lse = call.forward(q, nothing, nothing)
    found = torch.zeros(call.score.tables[0].shape)
    saved = Saved(q, nothing, nothing, out, lse)
    qkv = call.backward(Grads(out, None), saved, {0: found})
    assert not found.any()
    assert found.shape == (NHEADS,)
    assert not qkv.dq.any()


def test_the_order_of_atomics_is_refused(kernel):
    with pytest.raises(NotImplementedError, match="with atomics"):
        check_backward(kernel, LEARNED["alibi"], CAUSAL, deterministic=True)
    # Under the flag, which these tests have set, a call is not lowered.
    (reason,) = refusals(kernel, "alibi")
    assert "torch.use_deterministic_algorithms(True) forbids" in reason
    check_backward(kernel, LEARNED["alibi"], CAUSAL, deterministic=True, learns=False)


def test_no_order_is_asked_for(kernel):
    torch.use_deterministic_algorithms(False)
    for name in LEARNED:
        assert refusals(kernel, name) == []


def test_a_derivative_without_code_is_refused(kernel):
    torch.use_deterministic_algorithms(False)

    def without_code(program):
        assert "def d_l0_t0(" in program.code
        code = program.code.replace("def d_l0_t0(", "def old(") + (
            "def d_l0_t0(g, l0_t0):\n    return torch.ops.aten.special_bessel_j0.default(l0_t0)\n"
        )
        return ScoreProgram("alibi", code)

    (reason,) = refusals(kernel, "alibi", without_code)
    assert "special_bessel_j0" in reason
