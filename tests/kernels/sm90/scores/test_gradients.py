"""Gradients of captured tensors by the Hopper kernels, as they are, on a CPU, against dense attention in fp64."""

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile.kernels.base import Grads, Saved
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


def _random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def of_keys(bias):
    return lambda score, b, h, q, kv: score + bias[b, kv]


def of_heads_and_keys(bias):
    return lambda score, b, h, q, kv: score + bias[h, kv]


def of_heads_and_queries(bias):
    return lambda score, b, h, q, kv: score + bias[h, q] * (kv - q) / 8


def of_queries_and_keys(bias):
    """Two look-ups of one tensor, which now and then lead to the same place."""
    return lambda score, b, h, q, kv: score + bias[h, q // 4] * bias[h, kv // 8]


def from_the_end(bias):
    return lambda score, b, h, q, kv: score + bias[h, kv - q]


def beside_a_constant(bias):
    """The other captured tensor needs no gradient."""
    return lambda score, b, h, q, kv: score + bias[h, q] * FIXED[kv]


def of_a_score(bias):
    """How the new score changes depends on the old one."""
    return lambda score, b, h, q, kv: score + torch.sin(score * bias[h])


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
    Case("of_heads_and_keys", of_heads_and_keys, [_random(NHEADS, SEQLEN)]),
    Case("of_heads_and_queries", of_heads_and_queries, [_random(NHEADS, SEQLEN)]),
    Case("of_queries_and_keys", of_queries_and_keys, [_random(NHEADS, SEQLEN)]),
    Case("from_the_end", from_the_end, [_random(NHEADS, SEQLEN)]),
    Case("beside_a_constant", beside_a_constant, [_random(NHEADS, SEQLEN)]),
    Case("of_a_score", of_a_score, [_random(NHEADS)]),
]


def kinds(name):
    """A program, and the dtypes and numbers of dimensions of its captured tensors."""
    case = LEARNED[name]
    program, tables = trace_score_program(case.make(*case.tensors()), torch.device("cpu"))
    return program, [x.dtype for x in tables], [x.dim() for x in tables]


@pytest.mark.parametrize("name", LEARNED)
def test_programs(name, kernel):
    check(kernel, LEARNED[name], CAUSAL)


@pytest.mark.parametrize("case", OWN, ids=lambda case: case.name)
def test_look_ups(case, kernel):
    check(kernel, case, CAUSAL)


@pytest.mark.parametrize("make", [of_heads_and_keys, of_keys, relative], ids=lambda x: x.__name__)
def test_rows_of_one_entry(make, kernel):
    """Of one head, so that they have the same place for a key."""
    sizes = (NHEADS, 2 * SEQLEN + 201) if make is relative else (NHEADS, 200)
    case = Case("long", make, [_random(*sizes)])
    check(kernel, case, CAUSAL, batch=1, seqlen=200)


UNDER_MASKS = [
    *[("alibi", FULL), ("alibi", BY_HEAD), ("relative", DOCUMENTS), ("relative", SCATTERED)],
    *[("learned", DOCUMENTS), ("documents", FULL), ("documents", BY_HEAD)],
]
OTHERS = [
    *[("alibi", DOCUMENTS), ("alibi", SCATTERED), ("relative", FULL), ("relative", BY_HEAD)],
    *[("learned", FULL), ("learned", SCATTERED), ("learned", BY_HEAD)],
    *[("documents", DOCUMENTS), ("documents", SCATTERED)],
]


@pytest.mark.parametrize(
    ("name", "mask"),
    [*UNDER_MASKS, *(pytest.param(*x, marks=pytest.mark.slow) for x in OTHERS)],
    ids=lambda x: getattr(x, "name", x),
)
def test_masks(name, mask, kernel):
    check(kernel, LEARNED[name], mask)


def test_an_index_out_of_bounds_has_no_gradient(kernel):
    """A look-up there gives 0."""
    case = Case("too_short", too_short, [_random(NHEADS, 20)])
    check(kernel, case, CAUSAL, dense=too_short_with_zeros)


WIDER = [
    *(("relative", head_dim) for head_dim in (80, 192, 256)),
    *[("alibi", 128), ("documents", 96)],
]
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
    check(kernel, LEARNED[name], CAUSAL, head_dim=head_dim)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(16, 72), pytest.param(128, 40, marks=pytest.mark.slow)]
)
def test_values_of_another_head_dim(head_dim, head_dim_v, kernel):
    check(kernel, LEARNED["relative"], CAUSAL, head_dim=head_dim, head_dim_v=head_dim_v)


@pytest.mark.parametrize(
    ("name", "head_dim"),
    [
        *[("alibi", 64), ("t5", 64), ("t5", 256)],
        pytest.param("alibi", 256, marks=pytest.mark.slow),
    ],
)
def test_one_long_sequence(name, head_dim, kernel):
    """Several tiles and blocks, most of which have one entry and no edge."""
    check(kernel, LEARNED[name], CAUSAL, batch=1, seqlen=300, head_dim=head_dim)


@pytest.mark.parametrize("name", ["alibi", "t5"])
def test_rows_behind_a_tile_are_of_another(name, kernel):
    """In blocks without an edge, where nothing else hides them."""
    check(kernel, LEARNED[name], FULL, seqlen=200)


@pytest.mark.parametrize("kernel", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_threads_in_any_order(head_dim, kernel):
    check(kernel, LEARNED["t5"], CAUSAL, batch=1, seqlen=300, head_dim=head_dim)


@pytest.mark.parametrize("name", ["learned", "tanh_of_sums", "temperature"])
def test_beside_slopes(name, kernel):
    check(kernel, LEARNED[name], CAUSAL, head_dim=128)


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
        check(kernel, LEARNED["alibi"], CAUSAL, deterministic=True)
    # Under the flag, which these tests have set, a call is not lowered.
    (reason,) = kernel.table_refusals(*kinds("alibi"))
    assert "torch.use_deterministic_algorithms(True) forbids" in reason
    check(kernel, LEARNED["alibi"], CAUSAL, deterministic=True, learns=False)


def test_no_order_is_asked_for(kernel):
    torch.use_deterministic_algorithms(False)
    for name in LEARNED:
        assert kernel.table_refusals(*kinds(name)) == []


def test_a_derivative_without_code_is_refused(kernel):
    torch.use_deterministic_algorithms(False)
    program, dtypes, ranks = kinds("alibi")
    assert "def d_l0_t0(" in program.code
    code = program.code.replace("def d_l0_t0(", "def old(") + (
        "def d_l0_t0(g, l0_t0):\n    return torch.ops.aten.special_bessel_j0.default(l0_t0)\n"
    )
    (reason,) = kernel.table_refusals(ScoreProgram("alibi", code), dtypes, ranks)
    assert "special_bessel_j0" in reason
