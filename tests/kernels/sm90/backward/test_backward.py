"""The Hopper backward kernel against the fp64 oracle."""

from dataclasses import replace

import pytest
import torch

from magi_compile.kernels.base import BackwardOutput, Grads, Saved
from magi_compile.kernels.heuristics import HOPPER_HEAD_DIMS
from magi_compile.kernels.overlap import KeyTensors, SavedQueries
from magi_compile.kernels.plan import pack, unpack
from magi_compile.kernels.reference import exact_forward
from magi_compile.masks.slices import MaskType
from tests.kernels.support.bits import BIT_CASES, check_bits
from tests.support.cases import (
    MASKS,
    Case,
    HeadShape,
    one,
    random_disjoint,
    sliding_window,
    varlen,
)
from tests.support.deterministic import deterministic_algorithms
from tests.support.numerics import (
    AttentionResults,
    assert_attention_close,
    run_kernel,
)

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of compute capability 9.0"),
]
SPIN_CYCLES = 2_000_000

HEADS = [
    HeadShape(4, 2, 64, 64),
    HeadShape(8, 1, 96, 96),
    HeadShape(4, 1, 128, 128),
    HeadShape(3, 3, 128, 128),
    HeadShape(4, 2, 192, 192),
    HeadShape(6, 2, 256, 256),
]
WIDE = HEADS[4:]
RAGGED = [1, 63, 129, 300, 7, 128, 1, 52]
SHORT = [
    varlen("varlen_causal", RAGGED, MaskType.CAUSAL),
    random_disjoint(257, 391, 5),
    sliding_window(700, 300),
]
# A question that all of its answers see: one tile of keys has half of the work.
QUESTION = Case(
    "question",
    2048,
    2048,
    [(0, 2048, 0, 130, MaskType.FULL)]
    + [(at, at + 137, at, at + 137, MaskType.CAUSAL) for at in range(130, 2048, 137)],
)
# Four sections of six key-value heads on 132 SMs; those of one document walk in turns. The last tiles are in parts.
SECTIONS = [
    replace(case, heads=HeadShape(96, 24, 64, 64))
    for case in (
        one(MaskType.FULL, 2300),
        one(MaskType.CAUSAL, 2300),
        varlen("sections", [1500, 800], MaskType.FULL),
    )
]
# 136 long walks, of which thread blocks that start together stay together.
IN_STEP = Case("in_step", 4096, 17408, [(0, 4096, 0, 17408, MaskType.FULL)])
TINY = varlen("tiny", [1, 2, 3] * 700, MaskType.CAUSAL)
GROUPS = [
    HeadShape(4, 4, 128, 128),
    HeadShape(12, 3, 128, 128),
    HeadShape(8, 1, 128, 128),
    HeadShape(64, 1, 64, 64),
]
CASES = [
    *(replace(case, heads=heads) for case in MASKS for heads in (HEADS[0], HEADS[2], *WIDE)),
    *(replace(case, heads=heads) for case in SHORT for heads in HEADS),
    *(replace(case, heads=heads, softcap=5.0) for case in SHORT for heads in (*HEADS[:3], *WIDE)),
    *(replace(case, heads=heads) for case in SHORT for heads in GROUPS),
    *(replace(case, heads=heads) for case in BIT_CASES for heads in HEADS),
    *(replace(case, heads=heads, softcap=5.0) for case in BIT_CASES[:2] for heads in HEADS),
    replace(one(MaskType.CAUSAL, 4097), heads=HeadShape(2, 1, 128, 128)),
    replace(TINY, heads=HeadShape(8, 2, 128, 128)),
    replace(TINY, heads=HeadShape(2, 1, 192, 192)),
    *(replace(QUESTION, heads=HeadShape(group, 1, 128, 128)) for group in (5, 6, 8, 24)),
    *(replace(QUESTION, heads=HeadShape(8, 1, head_dim, head_dim)) for head_dim in (192, 256)),
    replace(QUESTION, heads=HeadShape(16, 2, 64, 64), softcap=5.0),
    *SECTIONS,
    replace(IN_STEP, heads=HeadShape(8, 1, 128, 128)),
    replace(IN_STEP, heads=HeadShape(2, 1, 192, 192)),
]


@pytest.fixture(scope="module")
def kernel():
    from magi_compile.kernels.sm90 import HopperKernel

    return HopperKernel()


class Backward:
    """The backward of one case, from the oracle's out and lse."""

    def __init__(self, kernel, case, dtype=torch.bfloat16):
        self.kernel = kernel
        self.slices = case.slices("cuda")
        self.problem = case.problem(dtype, "cuda")
        self.inputs = case.inputs(dtype, "cuda")
        q, k, v, _, _ = self.inputs
        out, lse = exact_forward(q, k, v, self.slices, self.problem.softmax_scale, case.softcap)
        self.out, self.lse = out.to(dtype), lse.float()
        self.plan = kernel.plan(self.slices, self.problem)

    def __call__(self, with_dlse=True, **replaced):
        named = {**self.inputs._asdict(), "out": self.out, "lse": self.lse, **replaced}
        dlse = named["dlse"] if with_dlse else None
        grads, saved = Grads(named["dout"], dlse), Saved(*(named[name] for name in Saved._fields))
        return self.kernel.backward(grads, saved, self.slices, self.plan, self.problem)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_matches_the_oracle(kernel, case, dtype):
    backward = Backward(kernel, case, dtype)
    grads = AttentionResults(None, None, *backward())
    assert_attention_close(grads, backward.inputs, backward.slices, backward.problem)


@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: heads.id)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_bits(kernel, heads, softcap):
    """Both passes, as other kernels with bit blocks are tested."""
    check_bits(kernel, torch.bfloat16, "cuda", heads, softcap)


def test_bits_in_a_cuda_graph(kernel):
    """The plan too: nothing waits, and a replay serves other bits."""
    case = replace(BIT_CASES[1], heads=HEADS[2])
    slices, problem = case.slices("cuda"), case.problem(torch.bfloat16, "cuda")
    inputs = case.inputs(torch.bfloat16, "cuda")
    run_kernel(kernel, inputs, slices, problem)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run_kernel(kernel, inputs, slices, problem)
    slices.bits.bitwise_not_()
    graph.replay()
    assert_attention_close(results, inputs, slices, problem)


def test_gradients_handed_on_are_those_of_keys_alone(kernel):
    """A rank's queries see the keys of another one, and behind them their own: walks that are long, and uneven. Those
    of the calls to compare with are even, and their dk and dv stay in registers."""
    rows, others = 16384, 8192
    heads = HeadShape(64, 8, 128, 128)
    both = Case("both", rows, others + rows, [(0, rows, 0, others + rows, MaskType.CAUSAL)], heads)
    others_alone = Case("others", rows, others, [(0, rows, 0, others, MaskType.FULL)], heads)
    own = replace(one(MaskType.CAUSAL, rows), heads=heads)
    q, k, v, dout, dlse = both.inputs(torch.bfloat16, "cuda")
    problem, slices = both.problem(torch.bfloat16, "cuda"), both.slices("cuda")
    out, lse = kernel.forward(q, k, v, slices, kernel.plan(slices, problem), problem)

    def gradients(case, keys):
        slices = case.slices("cuda")
        plan = kernel.plan(slices, problem)
        saved = Saved(q, k[keys], v[keys], out, lse)
        return kernel.backward(Grads(dout, dlse), saved, slices, plan, problem)

    found = gradients(both, slice(None))
    first, second = gradients(others_alone, slice(others)), gradients(own, slice(others, None))
    expected = (
        first.dq.float() + second.dq.float(),
        torch.cat((first.dk, second.dk)),
        torch.cat((first.dv, second.dv)),
    )
    for one_call, two_calls in zip(found, expected, strict=True):
        error = (one_call.float() - two_calls.float()).norm() / two_calls.float().norm()
        assert error < 5e-3
    again = gradients(both, slice(None))
    assert torch.equal(found.dk, again.dk)
    assert torch.equal(found.dv, again.dv)


def test_without_a_gradient_of_lse(kernel):
    backward = Backward(kernel, replace(SHORT[0], heads=HEADS[2]))
    grads = AttentionResults(None, None, *backward(with_dlse=False))
    assert_attention_close(
        grads, backward.inputs, backward.slices, backward.problem, with_dlse=False
    )


MANY = varlen("many", [700, 1, 333, 2000, 64, 1500], MaskType.CAUSAL)
PACKED = varlen("packed", [61, 130, 7, 200, 33] * 20, MaskType.CAUSAL)  # several to a tile


@pytest.mark.parametrize("head_dim", HOPPER_HEAD_DIMS)
@pytest.mark.parametrize("case", [MANY, QUESTION], ids=lambda case: case.id)
def test_dk_and_dv_are_bitwise_equal(kernel, case, head_dim):
    backward = Backward(kernel, replace(case, heads=HeadShape(16, 2, head_dim, head_dim)))
    first = backward()
    for _ in range(100):
        assert_same(first, backward())


def test_dk_and_dv_of_several_sections_are_bitwise_equal(kernel):
    backward = Backward(kernel, SECTIONS[0])
    first = backward()
    for _ in range(20):
        assert_same(first, backward())


@pytest.mark.parametrize("head_dim", HOPPER_HEAD_DIMS)
@pytest.mark.parametrize(
    "case",
    [MANY, PACKED, QUESTION, one(MaskType.FULL, 3000), sliding_window(2500, 600)],
    ids=lambda case: case.id,
)
def test_deterministic_dq_is_bitwise_equal(kernel, case, head_dim):
    with deterministic_algorithms():
        backward = Backward(kernel, replace(case, heads=HeadShape(16, 2, head_dim, head_dim)))
        first = backward()
        for _ in range(100):
            for expected, actual in zip(first, backward(), strict=True):
                assert torch.equal(expected, actual)


@pytest.mark.parametrize("case", [*SHORT, BIT_CASES[1]], ids=lambda case: case.id)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("heads", [HEADS[2], *WIDE], ids=str)
def test_deterministic_matches_the_oracle(kernel, case, softcap, heads):
    backward = Backward(kernel, replace(case, heads=heads, softcap=softcap))
    with deterministic_algorithms():
        grads = AttentionResults(None, None, *backward())
    assert_attention_close(grads, backward.inputs, backward.slices, backward.problem)


def test_strided_inputs(kernel):
    backward = Backward(kernel, replace(SHORT[0], heads=HeadShape(4, 4, 128, 128)))
    q, k, v, dout, dlse = backward.inputs
    expected = backward()
    qkv = torch.stack((q, k, v), 1)  # a packed projection
    assert_same(expected, backward(**dict(zip("qkv", qkv.unbind(1), strict=True))))
    heads_first = {
        name: x.transpose(0, 1).contiguous().transpose(0, 1)
        for name, x in {"q": q, "k": k, "v": v, "dout": dout, "out": backward.out}.items()
    }
    assert_same(expected, backward(**heads_first))
    odd = {
        name: torch.nn.functional.pad(x, (1, 2))[..., 1:-2]
        for name, x in {"q": q, "k": k, "v": v, "dout": dout, "out": backward.out}.items()
    }
    assert_same(expected, backward(**odd))
    assert_same(expected, backward(dlse=dlse.T.contiguous().T, lse=backward.lse.T.contiguous().T))
    summed = backward(dout=torch.ones_like(dout))
    assert_same(summed, backward(dout=torch.ones_like(dout[:1, :1, :1]).expand_as(dout)))


def test_does_not_read_past_the_ends(kernel):
    backward = Backward(kernel, replace(one(MaskType.FULL, 100, 70), heads=HEADS[2]))
    names = ("q", "k", "v", "dout")
    padded = {
        name: torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 100), value=torch.nan)[: x.shape[0]]
        for name, x in zip(names, backward.inputs[:4], strict=True)
    }
    assert_same(backward(), backward(**padded))


def test_plans_from_the_host_and_from_the_device_agree(kernel):
    backward = Backward(kernel, replace(MASKS[-1], heads=HEADS[2]))
    device = backward()
    host = kernel.plan(replace(MASKS[-1], heads=HEADS[2]).slices(), backward.problem)
    memory, shape = pack(host)
    backward.plan = unpack([memory.cuda(), shape])
    assert_same(device, backward())


def test_in_a_cuda_graph(kernel):
    backward = Backward(kernel, replace(SHORT[0], heads=HeadShape(64, 8, 128, 128)))
    check_in_a_cuda_graph(backward(), backward)


def check_in_a_cuda_graph(expected, call):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for _ in range(3):
        for grad in captured:
            grad.fill_(torch.nan)
        graph.replay()
        assert_same(expected, captured)


class InPhases:
    """`Backward` of keys that come late on another stream, where their gradients leave too."""

    def __init__(self, backward):
        self.backward = backward
        self.stream = torch.cuda.Stream()

    def __call__(self):
        backward, stream = self.backward, self.stream
        q, k, v, dout, dlse = backward.inputs
        keys, grads = ([torch.full_like(x, torch.nan) for x in (k, v)] for _ in range(2))
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SPIN_CYCLES)
            for there, x in zip(keys, (k, v), strict=True):
                there.copy_(x)

        saved = SavedQueries(q, backward.out, backward.lse)
        rest = (backward.slices, backward.plan, backward.problem)
        steps = backward.kernel.phased_backward(Grads(dout, dlse), saved, *rest)
        steps.begin()
        torch.cuda.current_stream().wait_stream(stream)
        steps.main(KeyTensors(*keys, *grads))
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            left = [x.clone() for x in grads]
        dq = steps.finish()
        torch.cuda.current_stream().wait_stream(stream)
        return BackwardOutput(dq, *left)


@pytest.mark.parametrize(
    ("case", "heads"),
    [
        (MANY, HeadShape(16, 2, 128, 128)),
        (MANY, HeadShape(4, 4, 64, 64)),
        (QUESTION, HeadShape(16, 2, 128, 128)),
        (SHORT[0], HeadShape(4, 2, 192, 192)),
        (SECTIONS[0], SECTIONS[0].heads),
    ],
    ids=lambda x: x.id,
)
def test_phases_give_what_one_call_gives(kernel, case, heads):
    backward = Backward(kernel, replace(case, heads=heads))
    expected, in_phases = backward(), InPhases(backward)
    for _ in range(5):
        assert_same(expected, in_phases())


def test_deterministic_phases_are_bitwise_equal(kernel):
    with deterministic_algorithms():
        backward = Backward(kernel, replace(MANY, heads=HeadShape(16, 2, 128, 128)))
        for expected, actual in zip(backward(), InPhases(backward)(), strict=True):
            assert torch.equal(expected, actual)


def test_phases_in_a_cuda_graph(kernel):
    backward = Backward(kernel, replace(SHORT[0], heads=HeadShape(64, 8, 128, 128)))
    check_in_a_cuda_graph(backward(), InPhases(backward))


def test_no_rows_and_no_keys(kernel):
    for seqlen_q, seqlen_k in ((0, 5), (5, 0)):
        case = replace(one(MaskType.FULL, seqlen_q, seqlen_k), heads=HEADS[0], rows=[])
        backward = Backward(kernel, case)
        for grad, x in zip(backward(), backward.inputs, strict=False):
            assert grad.shape == x.shape
            assert not grad.any()


def assert_same(expected, actual):
    """dk and dv to the last bit; dq is summed up in any order."""
    assert torch.equal(expected.dk, actual.dk)
    assert torch.equal(expected.dv, actual.dv)
    torch.testing.assert_close(expected.dq, actual.dq)
