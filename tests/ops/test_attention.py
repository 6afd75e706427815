"""The public functions: values against the oracle, and one error for each way to misuse them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, create_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

from magi_compile import AttnSlices, flex_attention, flex_flash_attention
from magi_compile.kernels.base import AttnProblem, Grads, Saved
from magi_compile.kernels.reference import exact_backward, exact_forward, exact_max_scores
from magi_compile.ops import attention

TOTAL_Q, TOTAL_K = 70, 90


@pytest.fixture
def slices():
    return AttnSlices.from_lists([(0, 30), (30, 64)], [(0, 40), (40, 90)], [1, 3], TOTAL_Q, TOTAL_K)


def packed(nheads_q=4, nheads_kv=2, head_dim=16, dtype=torch.float32, **options):
    torch.manual_seed(0)
    shapes = [(TOTAL_Q, nheads_q, head_dim), *[(TOTAL_K, nheads_kv, head_dim)] * 2]
    return [torch.randn(shape, dtype=dtype, **options) for shape in shapes]


def test_packed_values_and_gradients(slices):
    q, k, v = packed(requires_grad=True)
    out, lse, _ = flex_flash_attention(q, k, v, slices, softmax_scale=0.3, softcap=4.0)
    exact = exact_forward(q, k, v, slices, 0.3, 4.0)
    torch.testing.assert_close(out.double(), exact.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), exact.lse, atol=1e-5, rtol=1e-5)
    dout = torch.randn_like(out)
    dlse = torch.where(lse == -torch.inf, 0.0, torch.randn_like(lse))
    grads = torch.autograd.grad([out, lse], [q, k, v], [dout, dlse])
    expected = exact_backward(Grads(dout, dlse), Saved(q, k, v, *exact), slices, 0.3, 4.0)
    for grad, expect in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad.double(), expect, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("mask_type", [0, 1, 2, 3])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_scales_that_are_not_positive(scale, softcap, mask_type):
    slices = AttnSlices.from_lists([(0, 70)], [(0, 90)], [mask_type])
    q, k, v = packed(requires_grad=True)
    out, lse, _ = flex_flash_attention(q, k, v, slices, softmax_scale=scale, softcap=softcap)
    exact = exact_forward(q, k, v, slices, scale, softcap)
    torch.testing.assert_close(out.double(), exact.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), exact.lse, atol=1e-5, rtol=1e-5)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad([out, lse], [q, k, v], [dout, dlse])
    expected = exact_backward(Grads(dout, dlse), Saved(q, k, v, *exact), slices, scale, softcap)
    for grad, expect in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad.double(), expect, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("score_mod", [lambda s, *_: -s, lambda s, *_: s * 0], ids=["-", "0"])
@pytest.mark.parametrize("backend", ["magi", None])
def test_score_mods_that_are_not_positive(score_mod, backend):
    q, k, v = (torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3))
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 64, 64, device="cpu")
    attend = torch.compile(flex_attention, backend=backend) if backend else flex_attention
    out = attend(q, k, v, score_mod, mask)
    scores = score_mod(q @ k.mT / 4).masked_fill(~torch.ones(64, 64).bool().tril(), -math.inf)
    expected = scores.softmax(-1) @ v
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    ours, dense = (torch.autograd.grad(x.sin().sum(), [q, k, v]) for x in (out, expected))
    torch.testing.assert_close(ours, dense, atol=1e-5, rtol=1e-5)


def test_gradient_of_lse_alone(slices):
    q, k, v = packed(requires_grad=True)
    _, lse, _ = flex_flash_attention(q, k, v, slices)
    (grad,) = torch.autograd.grad(lse[:, :30].sum(), [q])
    exact = exact_forward(q, k, v, slices, 0.25)
    dlse = torch.zeros_like(lse)
    dlse[:, :30] = 1.0
    dout = torch.zeros_like(exact.out)
    expected = exact_backward(Grads(dout, dlse), Saved(q, k, v, *exact), slices, 0.25)
    torch.testing.assert_close(grad.double(), expected.dq, atol=1e-5, rtol=1e-5)


def wrong(**changes):
    """The packed arguments with some of them replaced."""
    arguments = dict(zip("qkv", packed(), strict=True))
    arguments.update(changes)
    return arguments


ERRORS = {
    "q 2-d": (lambda: wrong(q=torch.randn(70, 16)), r"`q` must be \[total, nheads, head_dim\], got shape \[70, 16\]"),
    "q int": (lambda: wrong(q=torch.ones(70, 4, 16, dtype=torch.int32)), "`q` must be float32.*got torch.int32"),
    "k dtype": (lambda: wrong(k=packed()[1].half()), "`k` must have the dtype of `q`, torch.float32, "
     "got torch.float16"),
    "k device": (lambda: wrong(k=packed()[1].to("meta")), "`k` must be on the device of `q`, cpu, got meta"),
    "k head_dim": (lambda: wrong(k=torch.randn(90, 2, 8)), "`k` must have the head_dim of `q`, 16, got 8"),
    "v heads": (lambda: wrong(v=torch.randn(90, 4, 16)), r"`v` must have the tokens and heads of `k`, "
     r"\[90, 2\], got \[90, 4\]"),
    "q heads": (lambda: wrong(q=torch.randn(70, 3, 16)), "`q` must have a multiple of the heads of "
     "`k`, 2, got 3 heads"),
    "q tokens": (lambda: wrong(q=torch.randn(71, 4, 16)), "`slices` must cover 71 query rows and 90 "
     "keys, got 70 and 90"),
    "q head_dim": (lambda: wrong(q=torch.ones(70, 4, 0), k=torch.ones(90, 2, 0)),
     "`q` must have a head_dim of at least 1, got 0"),
    "no heads": (lambda: wrong(k=torch.ones(90, 0, 16)), "`k` must have at least 1 head, got 0"),
    "scale": (lambda: wrong(softmax_scale=math.nan), "`softmax_scale` must be finite, got nan"),
    "softcap": (lambda: wrong(softcap=-1.0), "`softcap` must not be negative, got -1.0"),
    "kernel": (lambda: wrong(kernel="fa3"), "`kernel` must be one of .*, got 'fa3'"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_bad_packed_input(name, slices):
    arguments, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        flex_flash_attention(slices=slices, **arguments())


def test_arguments_of_another_type(slices):
    q, k, v = packed()
    with pytest.raises(TypeError, match="`k` must be a tensor, got list"):
        flex_flash_attention(q, [1], v, slices)
    with pytest.raises(TypeError, match="`softmax_scale` must be a number, got '1'"):
        flex_flash_attention(q, k, v, slices, softmax_scale="1")
    with pytest.raises(TypeError, match="`softcap` must be a number, got None"):
        flex_flash_attention(q, k, v, slices, softcap=None)
    x = torch.randn(1, 2, 64, 16)
    with pytest.raises(TypeError, match="`block_mask` must be a BlockMask, got function; make one"):
        flex_attention(x, x, x, block_mask=causal)
    with pytest.raises(TypeError, match="`scale` must be a number, got '1'"):
        flex_attention(x, x, x, scale="1")


def test_slices_of_another_type():
    with pytest.raises(TypeError, match="`slices` must be AttnSlices, got list"):
        flex_flash_attention(*packed(), [(0, 1)])


def test_slices_on_another_device(slices):
    with pytest.raises(ValueError, match=r"`slices` must be on the device of `q`, cpu, got meta"):
        flex_flash_attention(*packed(), slices.to("meta"))


def test_forced_kernel_that_refuses_says_why(slices):
    with pytest.raises(NotImplementedError, match="hopper: "):
        flex_flash_attention(*packed(), slices, kernel="hopper")


def causal(b, h, q, kv):
    return q + 5 >= kv


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
def test_flex_attention_equals_pytorch(masked, batch):
    torch.manual_seed(0)
    q = torch.randn(batch, 4, 70, 16)
    k, v = torch.randn(2, batch, 2, 90, 16)
    mask = create_block_mask(causal, None, None, 70, 90, device="cpu") if masked else None
    options = dict(block_mask=mask, scale=0.2, enable_gqa=True, return_aux=AuxRequest(lse=True))
    out, aux = flex_attention(q, k, v, **options)
    expected, expected_aux = torch.compile(torch_flex_attention, backend="eager")(
        q, k, v, **options
    )
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(aux.lse, expected_aux.lse, atol=1e-5, rtol=1e-5)


def test_flex_attention_trains_on_any_device():
    q, k, v = (torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3))
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 64, 64, device="cpu")
    ours = torch.autograd.grad(flex_attention(q, k, v, block_mask=mask).sin().sum(), [q, k, v])
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    expected = torch.autograd.grad(dense.sin().sum(), [q, k, v])
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_a_captured_tensor_that_is_written_to_is_read_again():
    x, limit = torch.randn(1, 2, 64, 16), torch.tensor(64)
    mask = create_block_mask(lambda b, h, q, kv: kv < limit, None, None, 64, 64, device="cpu")
    before = flex_attention(x, x, x, block_mask=mask)
    assert torch.equal(flex_attention(x, x, x, block_mask=mask), before)
    mask.full_kv_num_blocks.zero_()
    mask.kv_num_blocks.fill_(1)
    limit.fill_(40)
    expected = torch.nn.functional.scaled_dot_product_attention(x, x[:, :, :40], x[:, :, :40])
    torch.testing.assert_close(
        flex_attention(x, x, x, block_mask=mask), expected, atol=1e-5, rtol=1e-5
    )


def test_inference_mode_computes_the_same():
    """Its tensors do not count how often they are written to, which plans are remembered by."""
    x = torch.randn(1, 2, 64, 16)
    mask = create_block_mask(causal, None, None, 64, 64, device="cpu")
    expected = flex_attention(x, x, x, block_mask=mask)
    with torch.inference_mode():
        mask = create_block_mask(causal, None, None, 64, 64, device="cpu")
        for _ in range(2):
            assert torch.equal(flex_attention(x, x, x, block_mask=mask), expected)


def test_forward_mode_derivatives_are_refused(slices):
    """An op without a formula would drop the tangents: zeros in silence."""
    (q, k, v), bias = packed(), torch.zeros(4)
    tangent = torch.ones_like(q)

    def of_queries(q):
        return flex_flash_attention(q, k, v, slices).out

    def of_both(q):
        return of_queries(q), q

    def dual():
        with forward_ad.dual_level():
            return of_queries(forward_ad.make_dual(q, tangent))

    compiled = torch.compile(of_queries, backend="aot_eager")
    for run in (
        lambda: torch.func.jvp(of_queries, (q,), (tangent,)),
        lambda: torch.func.jvp(compiled, (q,), (tangent,)),
        lambda: torch.func.jacfwd(of_both)(q),
        lambda: torch.func.linearize(of_queries, q),
        dual,
    ):
        with pytest.raises(Exception, match="attention has no forward-mode derivatives"):
            run()
    # Of something else.
    _, found = torch.func.jvp(lambda x: of_queries(q) * x.sum(), (bias,), (torch.ones(4),))
    torch.testing.assert_close(found, 4 * of_queries(q))


def test_second_derivatives_are_refused():
    x = torch.randn(1, 2, 64, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(flex_attention(x, x, x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        grad.sum().backward()


def test_flex_attention_inside_compile_is_the_operator():
    graphs = []

    def keep(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    x = torch.randn(1, 2, 64, 16)
    torch.compile(flex_attention, backend=keep, fullgraph=True)(x, x, x)
    targets = [node.target for node in graphs[0].graph.nodes]
    assert torch.ops.higher_order.flex_attention in targets


PADDED_ERRORS = {
    "rank": (lambda x, m: dict(query=x[0]), r"`query` must be \[B, H, S, D\], got shape \[2, 64, 16\]"),
    "batch": (lambda x, m: dict(key=x.repeat(2, 1, 1, 1)), "`key` must have the batch size of `query`, 1, got 2"),
    "gqa": (lambda x, m: dict(key=x[:, :1], value=x[:, :1]), "`key` must have the heads of "
     "`query`, 2, got 1; set enable_gqa"),
    "length": (lambda x, m: dict(query=x[:, :, :32], block_mask=m), r"`block_mask` must be made "
     r"for 32 queries and 64 keys"),
    "value": (lambda x, m: dict(value=x[:, :, :10]), r"`value` must have the heads and length of "
     r"`key`, \[2, 64\], got \[2, 10\]"),
    "heads": (lambda x, m: dict(query=x.repeat(1, 2, 1, 1)[:, :3], enable_gqa=True), "`query` must have a multiple "
     "of the heads of `key`, 2, got 3"),
    "dtype": (lambda x, m: dict(key=x.half()), "`key` must have the dtype of `query`, torch.float32, "
     "got torch.float16"),
    "device": (lambda x, m: dict(value=x.to("meta")), "`value` must be on the device of `query`, cpu, got meta"),
    "aux": (lambda x, m: dict(return_lse=True, return_aux=AuxRequest(lse=True)), "one of `return_lse` and "
     "`return_aux` must be left out"),
}  # fmt: skip


@pytest.mark.parametrize("name", PADDED_ERRORS)
def test_bad_padded_input(name):
    changes, message = PADDED_ERRORS[name]
    x = torch.randn(1, 2, 64, 16)
    mask = create_block_mask(causal, None, None, 64, 64, device="cpu")
    with pytest.raises(ValueError, match=message):
        flex_attention(**{**dict(query=x, key=x, value=x), **changes(x, mask)})


def test_mask_of_another_batch_size():
    x = torch.randn(2, 2, 64, 16)
    mask = create_block_mask(causal, 3, None, 64, 64, device="cpu")
    with pytest.raises(ValueError, match="`block_mask` must have batch size 1 or 2, got 3"):
        flex_attention(x, x, x, block_mask=mask)


def after_gaps(b, h, q, kv):
    """Some rows see nothing."""
    return (q >= kv) & (q % 9 != 4)


SCORE_MODS = {
    "none": None,
    "negative": lambda score, *_: -2.0 * score,
    "softcap": lambda score, *_: 1.5 * torch.tanh(score / 1.5),
    "bias": lambda score, b, h, q, kv: score + 0.1 * (kv - q) * (h + 1),
}


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("name", SCORE_MODS)
def test_max_scores(name, by_head):
    def by_heads(b, h, q, kv):
        return after_gaps(b, h, q, kv) & (q - kv < 20 * (h + 1))

    score_mod, mask_mod = SCORE_MODS[name], by_heads if by_head else after_gaps
    q = torch.randn(2, 4, 64, 16, requires_grad=True)
    k, v = (torch.randn(2, 2, 64, 16, requires_grad=True) for _ in range(2))
    mask = create_block_mask(mask_mod, 2, 4 if by_head else None, 64, 64, device="cpu")
    out, aux = flex_attention(
        *(q, k, v, score_mod, mask, 0.3, True), return_aux=AuxRequest(lse=True, max_scores=True)
    )
    scores = q @ k.repeat_interleave(2, 1).mT * 0.3
    if score_mod is not None:
        grid = torch.meshgrid(*map(torch.arange, (2, 4, 64, 64)), indexing="ij")
        scores = score_mod(scores, *grid)
    visible = create_mask(mask_mod, 2, 4, 64, 64, device="cpu")
    expected = scores.masked_fill(~visible, -torch.inf).amax(-1)
    assert (aux.max_scores.dtype, aux.max_scores.requires_grad) == (torch.float32, False)
    assert (aux.max_scores[:, :, 4::9] == -torch.inf).all()
    torch.testing.assert_close(aux.max_scores, expected.detach(), atol=1e-5, rtol=1e-5)
    given = torch.autograd.grad(out.sum(), [q, k, v])
    again, lse = flex_attention(q, k, v, score_mod, mask, 0.3, True, return_lse=True)
    torch.testing.assert_close((out, aux.lse), (again, lse), atol=1e-5, rtol=1e-5)
    wanted = torch.autograd.grad(again.sum(), [q, k, v])
    torch.testing.assert_close(given, wanted, atol=2e-5, rtol=2e-5)
    _, alone = flex_attention(
        *(q, k, v, score_mod, mask, 0.3, True), return_aux=AuxRequest(max_scores=True)
    )
    assert alone.lse is None
    assert torch.equal(alone.max_scores, aux.max_scores)


@pytest.mark.parametrize("kernel", [None, "reference"])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("scale", [0.3, -0.5, 0.0])
def test_packed_max_scores(scale, softcap, kernel, slices):
    q, k, v = packed(requires_grad=True)
    given = dict(softmax_scale=scale, softcap=softcap, kernel=kernel)
    out, lse, max_scores = flex_flash_attention(q, k, v, slices, **given, return_max_scores=True)
    exact = exact_max_scores(q, k, slices, scale, softcap)
    assert (max_scores.dtype, max_scores.requires_grad) == (torch.float32, False)
    torch.testing.assert_close(max_scores.double(), exact.detach(), atol=1e-5, rtol=1e-5)
    assert (max_scores[:, 64:] == -torch.inf).all()
    results = flex_flash_attention(q, k, v, slices, **given)
    torch.testing.assert_close((out, lse), tuple(results[:2]), atol=1e-5, rtol=1e-5)
    dout = torch.randn_like(out)
    theirs = torch.autograd.grad(results.out, [q, k, v], dout)
    torch.testing.assert_close(torch.autograd.grad(out, [q, k, v], dout), theirs)


def test_packed_max_scores_with_sinks(slices):
    q, k, v = packed()
    sinks = torch.full((4,), 100.0)
    found = flex_flash_attention(q, k, v, slices, sinks=sinks, return_max_scores=True)
    exact = exact_max_scores(q, k, slices, 0.25)
    torch.testing.assert_close(found.max_scores.double(), exact, atol=1e-5, rtol=1e-5)
    assert (found.lse >= 100).all()


def test_packed_max_scores_in_a_compiled_function(slices):
    def attend(q, k, v):
        found = flex_flash_attention(q, k, v, slices, return_max_scores=True)
        return found.out, found.max_scores

    given = packed(requires_grad=True)
    ours = torch.compile(attend, backend="aot_eager", fullgraph=True)(*given)
    torch.testing.assert_close(ours, attend(*given), atol=1e-6, rtol=1e-6)
    assert not ours[1].requires_grad


def test_return_max_scores_is_a_flag(slices):
    with pytest.raises(TypeError, match="`return_max_scores` must be True or False, got 1"):
        flex_flash_attention(*packed(), slices, return_max_scores=1)


def test_slices_follow_what_a_mask_mod_computes_from_captured_tensors():
    """Views and sums of a tensor that is written to later, and numbers that were read from it."""
    length = 40
    doc, limit = torch.zeros(1, length, dtype=torch.int64), torch.tensor([20])

    def mask_mod(b, h, q, kv):
        ids = doc.squeeze(0) + 1
        return (ids[q] == ids[kv]) & (q >= kv) & (kv < int(limit.max()))

    x = torch.randn(1, 2, length, 16)
    mask = create_block_mask(mask_mod, None, None, length, length, device="cpu")
    for begin, end in ((40, 20), (10, 20), (10, 33)):
        doc[:, begin:] = 1
        limit.fill_(end)
        mask.kv_num_blocks.fill_(1)
        dense = create_mask(mask_mod, None, None, length, length, device="cpu")
        expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, dense).nan_to_num()
        actual = flex_attention(x, x, x, block_mask=mask)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"enable_gqa": "yes"}, TypeError, "`enable_gqa` must be True or False, got 'yes'"),
        ({"return_lse": 1}, TypeError, "`return_lse` must be True or False, got 1"),
        ({"return_aux": True}, TypeError, "`return_aux` must be an AuxRequest or None, got True"),
        ({"score_mod": "x"}, TypeError, "`score_mod` must be a function or None, got 'x'"),
        ({"scale": 10**400}, ValueError, "`scale` must fit in a float"),
        ({"score_mod": lambda s, b, h, q, kv: (s, s)}, NotImplementedError, "returns tuple"),
        ({"score_mod": lambda s, *_: s.add_(1)}, NotImplementedError, "changes a value in place"),
    ],
)
def test_arguments_of_the_wrong_kind(options, error, message):
    x = torch.randn(1, 2, 40, 16)
    with pytest.raises(error, match=message):
        flex_attention(x, x, x, **options)


def test_other_wrong_arguments():
    x = torch.randn(1, 2, 40, 16)
    with pytest.raises(ValueError, match="`query` must be a dense tensor, got one of layout"):
        flex_attention(x.to_sparse(), x, x)
    packed, slices = torch.randn(16, 1, 8), AttnSlices.full(16, 16)
    with pytest.raises(ValueError, match="`q` must have at least 1 head, got 0"):
        flex_flash_attention(packed[:, :0], packed, packed, slices)
    with pytest.raises(TypeError, match=r"`kernel` must be a name or None, got \['cpu'\]"):
        flex_flash_attention(packed, packed, packed, slices, kernel=["cpu"])


def test_autocast_and_numbers_of_numpy():
    x = torch.randn(1, 2, 40, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert flex_attention(x, x, x).dtype == torch.bfloat16
    expected = flex_attention(x, x, x, scale=0.5)
    torch.testing.assert_close(flex_attention(x, x, x, scale=np.float32(0.5)), expected)


@pytest.mark.parametrize(
    ("change", "kernel"),
    [
        ({}, "hopper"),
        ({"head_dim": 100, "head_dim_v": 100}, "triton"),
        ({"device_arch": (8, 0)}, "triton"),
        ({"device_type": "cpu", "device_arch": None}, "cpu"),
    ],
    ids=str,
)
def test_eager_calls_with_bit_blocks_run_where_the_hopper_kernel_refuses(change, kernel):
    """Triton's kernel is asked for by name: eager code has no FlexAttention to stay on."""
    pytest.importorskip("triton")
    pytest.importorskip("cuda.bindings")
    problem = AttnProblem("cuda", (9, 0), torch.bfloat16, 4, 2, 64, 64, 0.1, has_bits=True)
    assert attention._kernel_of_eager_call(replace(problem, **change)) == kernel
