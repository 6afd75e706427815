"""Attention with score programs in eager code: values and gradients as of dense attention,
captured tensors included."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import magi_compile
from magi_compile import UnsupportedScoreModError, make_backend
from tests.score.score_mods import (
    BATCH,
    CASES,
    HEADS,
    SEQLEN,
    assert_as_good_as_plain,
    causal,
    dense,
    qkv,
    results,
    scattered,
    scattered_by_head,
    window_by_head,
)

BY_NAME = {case.name: case for case in CASES}


def attend(score_mod, mask):
    def run(q, k, v):
        return magi_compile.flex_attention(q, k, v, score_mod, mask, None, True, return_lse=True)

    return run


def both_masks(mask_mod, heads=None):
    visible = create_mask(mask_mod, BATCH, HEADS, SEQLEN, SEQLEN, device="cpu")
    return create_block_mask(mask_mod, BATCH, heads, SEQLEN, SEQLEN, device="cpu"), visible


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_and_gradients(case, dtype):
    mask, visible = both_masks(causal)
    tensors, captures = qkv(dtype), case.tensors(dtype)
    ours = results(attend(case.make(*captures), mask), tensors, captures)
    assert_as_good_as_plain(ours, case.make, tensors, captures, visible)


@pytest.mark.parametrize(
    "mask_mod", [window_by_head, scattered, scattered_by_head], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("name", ["relative", "documents", "where"])
def test_masks_of_heads_and_of_bit_blocks(name, mask_mod):
    """Heads with masks of their own are batch entries, and rows of some blocks see nothing."""
    case = BY_NAME[name]
    mask, visible = both_masks(mask_mod, HEADS)
    tensors, captures = qkv(), case.tensors()
    ours = results(attend(case.make(*captures), mask), tensors, captures)
    assert_as_good_as_plain(ours, case.make, tensors, captures, visible)


def test_more_than_one_tile(monkeypatch):
    from magi_compile.kernels.cpu import kernel

    monkeypatch.setattr(kernel, "MAX_SCORE_ROWS", 32)
    monkeypatch.setattr(kernel, "MAX_SCORE_KEYS", 24)
    case = BY_NAME["learned"]
    mask, visible = both_masks(causal)
    tensors, captures = qkv(), case.tensors()
    ours = results(attend(case.make(*captures), mask), tensors, captures)
    assert_as_good_as_plain(ours, case.make, tensors, captures, visible)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_given_for_hidden_pairs_counts_for_nothing(bad):
    """Neither values, nor derivatives, nor look-ups out of bounds."""
    mask, _ = both_masks(causal)
    bias = torch.randn(SEQLEN, requires_grad=True)

    def shown(score, b, h, q, kv):
        return score + bias[(q - kv).clamp(min=0)]

    def with_bad(score, b, h, q, kv):
        return score * torch.where(q >= kv, 1.0, bad) + bias[q - kv]

    def out_of_bounds(score, b, h, q, kv):
        return score + bias[torch.where(q >= kv, q - kv, 10**6)] + (q - kv).float().sqrt() * 0

    want = results(attend(shown, mask), qkv(), [bias])
    for score_mod in (with_bad, out_of_bounds):
        ours = results(attend(score_mod, mask), qkv(), [bias])
        torch.testing.assert_close(ours, want, atol=2e-5, rtol=2e-5)


def test_scores_that_are_minus_infinity():
    """A row whose visible pairs all have it is like one that sees nothing, as in FlexAttention."""

    def cut(score, b, h, q, kv):
        return torch.where((q - kv < 3) & (q % 5 != 0), score, -float("inf"))

    mask, visible = both_masks(causal)
    tensors = qkv()
    ours = results(attend(cut, mask), tensors, [])
    assert (ours[0][:, :, ::5] == 0).all()
    assert (ours[1][:, :, ::5] == -torch.inf).all()
    assert_as_good_as_plain(ours, lambda: cut, tensors, [], visible)


def test_without_a_mask_and_with_other_lengths():
    q, k, v = qkv()
    q = q[:, :, :33].detach().requires_grad_()

    def score_mod(score, b, h, q, kv):
        return score + (kv - q) * 0.01 * b

    def ours(q, k, v):
        return magi_compile.flex_attention(q, k, v, score_mod, enable_gqa=True, return_lse=True)

    visible = torch.ones(33, SEQLEN, dtype=torch.bool)
    assert_as_good_as_plain(results(ours, [q, k, v], []), lambda: score_mod, [q, k, v], [], visible)


def test_a_negative_scale():
    q, k, v = qkv()
    case = BY_NAME["square"]
    want, _ = dense(-q, k, v, case.make(), torch.ones(SEQLEN, SEQLEN, dtype=torch.bool))
    ours = magi_compile.flex_attention(q, k, v, case.make(), scale=-0.25, enable_gqa=True)
    torch.testing.assert_close(ours, want)


def test_a_new_value_each_call():
    """What a score_mod holds is read in each call."""
    q, k, v = (x.detach() for x in qkv())
    visible = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool)
    for slope in (0.1, torch.tensor(0.2), 3):

        def score_mod(score, b, h, q, kv, slope=slope):
            return score + slope * (q - kv).abs()

        ours = magi_compile.flex_attention(q, k, v, score_mod, enable_gqa=True)
        want, _ = dense(q, k, v, score_mod, visible)
        torch.testing.assert_close(ours, want, atol=1e-4, rtol=1e-4)


TABLE = torch.zeros(3)
REFUSED = {
    "in place": (lambda s, *_: s.add_(1), "changes a value in place"),
    "random": (lambda s, *_: s + torch.rand(()), "`rand` is random"),
    "a branch": (lambda s, b, h, q, kv: s if q > kv else -s, "`bool` of .* needs its value"),
    "a value": (lambda s, b, h, q, kv: s + float(q), "`float` of `q` needs its value"),
    "a vector": (
        lambda s, b, h, q, kv: s + torch.stack([q, kv]).sum(),
        r"a tensor of shape \[2\] for each pair|takes a whole",
    ),
    "a row": (lambda s, b, h, q, kv: s + TABLE.expand(4, 3)[h].sum(), "a whole captured tensor"),
    "a constant": (lambda s, b, h, q, kv: torch.ones(()), "the same for all scores"),
    "a number": (lambda s, b, h, q, kv: 1.0, "returns float, not a score"),
    "complex": (lambda s, *_: torch.complex(s, s), r"it returns torch.complex64; convert"),
    "bf16": (lambda s, *_: s.bfloat16(), r"it returns torch.bfloat16; convert the new score to"),
    "an int": (lambda s, b, h, q, kv: q - kv, r"it returns torch.int32; convert the new score"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    score_mod, message = REFUSED[name]
    x = torch.randn(1, 2, 8, 16)
    with pytest.raises(UnsupportedScoreModError, match=message):
        magi_compile.flex_attention(x, x, x, score_mod)


def test_a_look_up_out_of_bounds():
    x = torch.randn(1, 2, 8, 16)
    message = r"score \+ TABLE\[q\]` must look up what is there, but index 3 is out of bounds for dimension 0"
    with pytest.raises(IndexError, match=message):
        magi_compile.flex_attention(x, x, x, lambda s, b, h, q, kv: s + TABLE[q])


def test_gradients_of_gradients_are_refused():
    x = torch.randn(1, 2, 8, 16, requires_grad=True)
    out = magi_compile.flex_attention(x, x, x, lambda s, b, h, q, kv: s * s)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        grad.sum().backward()


PROGRAM = "score + t0[h];; def l0_t0_0(h):;;     return h;; def score(score, l0_t0):;;     return score + l0_t0;; "
PROGRAM += "def d_score(g):;;     return g;; def d_l0_t0(g):;;     return g"


@pytest.fixture
def arguments():
    torch.manual_seed(0)
    slices = magi_compile.AttnSlices.from_lists(
        [(0, 20), (20, 40)], [(0, 20), (20, 40)], [1, 0], 40, 40
    )
    lists = [slices.q_ranges, slices.k_ranges, slices.mask_types]
    tensors = [torch.randn(40, heads, 16) for heads in (4, 2, 2)]
    return tensors, (lists, [], 0.25, 0.0, ""), ([], PROGRAM, [2, 4, 20, 20, 0])


def test_the_op(arguments):
    tensors, options, score = arguments
    tensors, bias = [x.requires_grad_() for x in tensors], torch.randn(4, requires_grad=True)
    given = (*tensors, *options, None, [bias], *score)
    torch.library.opcheck(torch.ops.magi.attention, given)
    given = (*(x.detach() for x in tensors), *options, None, [bias.detach()], *score)
    torch.library.opcheck(torch.ops.magi.ffa_fwd, given)


@pytest.mark.parametrize("wanted", [[0], []])
def test_the_op_of_gradients(arguments, wanted):
    tensors, options, score = arguments
    bias = torch.randn(4)
    out, lse, _ = torch.ops.magi.ffa_fwd(*tensors, *options, None, [bias], *score)
    given = (torch.randn_like(out), None, *tensors, out, lse, *options, False, None, [bias], *score)
    torch.library.opcheck(torch.ops.magi.ffa_bwd, (*given, wanted))
    *_, sums = torch.ops.magi.ffa_bwd(*given, wanted)
    assert (sums.shape, sums.dtype) == ((4 * len(wanted),), torch.float32)


def test_a_program_that_is_none(arguments):
    tensors, options, (symbols, _, numbering) = arguments
    with pytest.raises(ValueError, match="`program` must have a function `score`, got 'score'"):
        torch.ops.magi.ffa_fwd(*tensors, *options, None, [], symbols, "score", numbering)


def test_tables_of_any_length_compile_once():
    """Their gradients too, which the op gives in one piece."""

    def attend(q, k, v, bias, factors):
        def score_mod(score, b, h, q_idx, kv_idx):
            return score * factors[h] + bias[kv_idx]

        return flex_attention(q, k, v, score_mod)

    counter = CompileCounterWithBackend("aot_eager")
    lowered = make_backend(counter)
    compiled = torch.compile(attend, backend=lowered, fullgraph=True, dynamic=True)
    for length in (6, 7, 9, 11):
        tensors = [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)]
        tables = [torch.randn(length, requires_grad=True), torch.ones(2, requires_grad=True)]
        found = torch.autograd.grad(compiled(*tensors, *tables).sum(), [*tensors, *tables])
        eager = magi_compile.flex_attention(
            *tensors, lambda s, b, h, q, kv, tables=tables: s * tables[1][h] + tables[0][kv]
        )
        wanted = torch.autograd.grad(eager.sum(), [*tensors, *tables])
        torch.testing.assert_close(found, wanted)
        sizes = [x.untyped_storage().nbytes() for x in wanted[3:]]
        assert sizes == [4 * length, 8]  # none keeps the memory of the other
    assert counter.frame_count <= 1
