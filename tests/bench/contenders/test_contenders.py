"""Contenders on the CPU: what they compute, what they refuse, how they are found."""

import itertools
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from magi_bench import clock, contenders, gate
from magi_bench.cases import Case
from magi_bench.clock import Protocol, matmul_tflops, measure
from magi_bench.contenders.base import Kernel, Layout, import_error, refusals
from magi_bench.contenders.flex import make_block_mask
from magi_bench.kernel.measure import Bench
from magi_bench.workloads.workload import build


def time(contender, case, passes, device="cpu"):
    """The row of a contender."""
    return Bench([contender], device).time(case, passes, QUICK)[contender.name]


def gated(contender, case):
    return Bench([contender], "cpu").gate(contender, case)


CAUSAL = Case("kernel", "causal", 96, 4, 2, 16, "float32")
DOCUMENTS = Case("kernel", "document_causal", 300, 4, 2, 16, "float32", lengths="pile")
BLOCKS = Case("sparse", "uniform_blocks", 128, 4, 2, 16, "float32", block=32, density=0.5)
QUICK = Protocol(budget_ms=1.0, min_reps=2, max_reps=3, flush_bytes=0)


class Doubled(Kernel):
    """Wrong: twice what naive attention gives."""

    name, label = "doubled", "doubled"
    devices, dtypes, layout = ("cpu",), ("float32",), Layout.HEADS_FIRST

    def prepare(self, workload, inputs):
        attend = contenders.load("naive").prepare(workload, inputs)
        return lambda q, k, v: 2 * attend(q, k, v)


class Broken(Doubled):
    """Raises what it is given."""

    def __init__(self, error):
        self.error = error

    def prepare(self, workload, inputs):
        raise self.error


class ForwardOnly(Doubled):
    has_backward = False

    def prepare(self, workload, inputs):
        return contenders.load("naive").prepare(workload, inputs)


@pytest.mark.parametrize("name", ["magi-cpu", "flash-cpu", "naive", "math"])
@pytest.mark.parametrize("case", [CAUSAL, DOCUMENTS], ids=lambda case: case.mask)
def test_right_and_timed(name, case):
    row = time(contenders.load(name), case, ("fwd", "bwd", "fwdbwd"))
    assert row["status"] == "ok"
    assert row["gate"]["passed"]
    assert set(row["gate"]["errors"]) == {"out", "dq", "dk", "dv"}
    workload = build(case)
    assert row["area"] * 4 == workload.pairs
    for which, times in row["passes"].items():
        assert 0 < times["p20_ms"] <= times["ms"] <= times["p80_ms"]
        assert times["tflops"] == pytest.approx(workload.flops(which) / times["ms"] / 1e9)


@pytest.mark.parametrize("name", ["magi-cpu", "naive"])
def test_sparse_masks_of_each_head(name):
    assert gated(contenders.load(name), BLOCKS)["status"] == "ok"


def test_wrong_results_are_not_timed():
    row = time(Doubled(), CAUSAL, ("fwd",))
    assert row["status"] == "wrong"
    assert "passes" not in row
    assert row["gate"]["errors"]["out"] == pytest.approx(1)


def test_not_a_number_is_wrong():
    class Nan(Doubled):
        def prepare(self, workload, inputs):
            attend = super().prepare(workload, inputs)
            return lambda q, k, v: attend(q, k, v) * math.nan

    assert gated(Nan(), CAUSAL)["status"] == "wrong"


@pytest.mark.parametrize(
    ("error", "status"),
    [(torch.OutOfMemoryError("17 GiB"), "oom"), (KeyError("x"), "error")],
)
def test_a_failure_is_a_row(error, status):
    row = time(Broken(error), CAUSAL, ("fwd",))
    assert row["status"] == status
    assert row["reason"]


def test_forward_only():
    row = time(ForwardOnly(), CAUSAL, ("fwd", "bwd"))
    assert list(row["passes"]) == ["fwd"]
    assert list(row["gate"]["errors"]) == ["out"]


def test_gate_is_at_a_reduced_length():
    naive = contenders.load("naive")
    assert Bench([naive], "cpu", gate_seqlen=64).gate(naive, CAUSAL)["gate"]["seqlen"] == 64


def test_refusals():
    def against(name, case, device):
        return refusals(contenders.load(name), build(case), device)

    assert against("magi-cpu", DOCUMENTS, "cpu") == []
    assert against("fa2", CAUSAL, "cpu") == [
        "runs on cuda, not on cpu",
        "takes bfloat16, float16, not float32",
    ]
    assert against("math", BLOCKS, "cpu") == ["has no sparse masks"]
    half = Case("kernel", "share_question", 3000, 4, 2, 64, lengths="pile")
    assert against("fa2", half, "cuda") == ["takes documents and windows only"]
    long = Case("kernel", "share_question", 2**16, 4, 2, 64, lengths="pile")
    assert against("mem-efficient", long, "cuda") == [
        "needs a dense mask of 8 GiB, more than 1 GiB"
    ]
    sparse = Case("sparse", "uniform_blocks", 256, 4, 2, 128, block=32, density=0.5)
    assert against("vsa", sparse, "cuda") == [
        "takes uniform blocks of 64, visible as a whole",
        "has no grouped heads",
    ]
    assert against("fa4-blocks", sparse, "cuda") == ["takes uniform blocks of 128"]
    assert against("cudnn-blocks", sparse, "cuda") == [
        "takes uniform blocks of 64 or 128, visible as a whole",
        "its backward has no grouped heads",
    ]
    assert against("flashinfer", sparse, "cuda") == []
    assert against("flashinfer-cake", sparse, "cuda") == [
        "takes uniform blocks of 64, visible as a whole"
    ]
    many = Case("sparse", "uniform_blocks", 8192, 6, 2, 64, block=64, density=0.5)
    assert against("flashinfer-cake", many, "cuda") == [
        "takes head_dim 128, not 64",
        "takes groups of 1, 2, 4 or 8 heads, not 3",
    ]
    dense = Case("sparse", "uniform_blocks", 8192, 4, 2, 128, block=64, density=0.6)
    assert against("flashinfer-cake", dense, "cuda") == [
        "takes 1 to 64 blocks of keys for a block of queries, not 77 to 77"
    ]
    causal = Case("sparse", "causal_blocks", 256, 4, 2, 128, block=64, density=0.5)
    assert against("flashinfer", causal, "cuda") == ["takes blocks that are visible as a whole"]


def listed_attention(q, k, v, lists):
    """Dense attention to the blocks that `lists` of cuDNN name."""
    count, index, size = (
        lists[x] for x in ("q2k_block_nums", "q2k_block_index", "sparse_block_size")
    )
    seen = torch.zeros(*count.shape, k.shape[1] // size, dtype=torch.bool)
    for at in itertools.product(*map(range, count.shape)):
        seen[at][index[at][: count[at]].long()] = True
    mask = seen.repeat_interleave(size, 2).repeat_interleave(size, 3)
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask
    )
    return out.transpose(1, 2)


def test_cudnn_is_given_block_lists(monkeypatch):
    """Of the package there are two functions, of which neither can be differentiated."""

    def forward(q, k, v, *, layout, allow_empty_block_nums, **lists):
        assert (layout, allow_empty_block_nums) == ("bshd", False)
        return {"o_tensor": listed_attention(q, k, v, lists), "lse_tensor": q.new_zeros(1)}

    def backward(dout, q, k, v, out, lse, *, layout, **lists):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            grads = torch.autograd.grad(listed_attention(*leaves, lists), leaves, dout)
        return dict(zip(("dq_tensor", "dk_tensor", "dv_tensor"), grads, strict=True))

    package = SimpleNamespace(
        block_sparse_attention_forward=forward, block_sparse_attention_backward=backward
    )
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(block_sparse_attention=package))
    monkeypatch.setitem(sys.modules, "cudnn.block_sparse_attention", package)
    contender = contenders.load("cudnn-blocks")
    monkeypatch.setattr(type(contender), "devices", ("cpu",))
    case = Case("sparse", "uniform_blocks", 512, 2, 2, 128, block=64, density=0.5)
    assert refusals(contender, build(case), "cpu") == []
    assert gated(contender, case)["gate"]["passed"]


def test_memory_is_refused_before_it_is_taken():
    case = Case("kernel", "causal", 2**18, 64, 8, 128, "float32")
    (reason,) = refusals(contenders.load("naive"), build(case), "cpu")
    assert reason.startswith("the scores would take 65536 GiB of")


@pytest.mark.parametrize("name", contenders.names())
def test_declarations(name):
    contender = contenders.load(name)
    assert contender.name == name
    assert contender.label
    assert set(contender.levels) <= {"kernel", "sparse"}
    assert set(contender.devices) <= {"cuda", "cpu"}


def test_no_such_contender():
    with pytest.raises(ValueError, match=r"`contender` must be one of magi-hopper, .*, got 'x'"):
        contenders.load("x")


def test_entry_points(monkeypatch):
    class Point:
        name = "theirs"

        def __init__(self, made):
            self.load = lambda: made

    found = {"theirs": Point(Doubled)}
    monkeypatch.setattr(contenders, "_third_party", lambda: found)
    contenders.load.cache_clear()
    assert contenders.names()[-1] == "theirs"
    assert isinstance(contenders.load("theirs"), Doubled)
    found["theirs"] = Point(dict)
    contenders.load.cache_clear()
    with pytest.raises(TypeError, match="`theirs` must be a Kernel, got dict"):
        contenders.load("theirs")
    contenders.load.cache_clear()


def test_import_error_is_one_line():
    assert import_error("no_such_package") == (
        "ModuleNotFoundError: No module named 'no_such_package'"
    )
    assert import_error("json") is None


@pytest.mark.parametrize("layout", Layout)
def test_layouts(layout):
    x = torch.randn(6, 2, 3)
    is_copy = layout is Layout.HEADS
    assert (layout.of(x).data_ptr() == x.data_ptr()) != is_copy
    assert layout.of(x).is_contiguous() or not is_copy
    assert torch.equal(layout.to_packed(layout.of(x)), x)


@pytest.mark.parametrize("mask", ["share_question", "document_full", "causal"])
def test_block_mask_is_flex_attentions_own(mask):
    case = Case("kernel", mask, 600, 4, 2, 16, "float32", lengths="pile")
    workload = build(case)
    ours = make_block_mask(workload, torch.device("cpu"))
    theirs = create_block_mask(workload.mask_mod, None, None, 600, 600, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(ours.full_kv_num_blocks.sum(), theirs.full_kv_num_blocks.sum())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", [DOCUMENTS, BLOCKS], ids=lambda case: case.mask)
def test_flex_attention_reads_our_block_mask(case):
    workload = build(case)
    q, k, v, _ = (Layout.HEADS_FIRST.of(x) for x in workload.inputs("cpu"))
    block_mask = make_block_mask(workload, torch.device("cpu"))
    out = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)
    expected = contenders.load("naive").prepare(workload, workload.inputs("cpu"))(q, k, v)
    torch.testing.assert_close(out, expected)


def test_gate_checks_gradients_of_forward_and_backward_contenders():
    workload = build(CAUSAL)
    inputs = workload.inputs("cpu")
    naive = contenders.load("naive")
    run = gate.run(naive.prepare(workload, inputs), naive, inputs)
    check = gate.check(run, naive.layout, workload, inputs)
    assert check.passed
    assert not check._replace(allowed=dict.fromkeys(check.allowed, 0.0)).passed


def test_timing():
    result = measure(lambda: None, "cpu", QUICK)
    assert result["reps"] == 3
    assert [Protocol(budget_ms=10.0).reps(ms) for ms in (0.01, 1.0, 90.0, 110.0)] == [50, 10, 5, 3]
    assert matmul_tflops("cpu", QUICK) > 0


def test_the_first_of_long_calls_counts(monkeypatch):
    monkeypatch.setattr(clock, "_flush_buffer", lambda protocol: None)
    monkeypatch.setattr(clock, "_gpu_times", lambda run, reps, host_ms, flush: [150.0] * reps)
    for wait_ms, reps, slowest in ((199.0, 3, 200.0), (49.0, 5, 150.0)):
        first = {"host_ms": 1.0, "wait_ms": wait_ms, "peak_bytes": 7}
        monkeypatch.setattr(clock, "_first_call", lambda run, first=first: dict(first))
        result = measure(lambda: None, "cuda", Protocol())
        assert (result["reps"], result["p80_ms"], result["ms"]) == (reps, slowest, 150.0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["magi-hopper", "magi-triton"])
@pytest.mark.parametrize(
    "case",
    [
        Case("kernel", "document_causal", 512, 4, 2, 128, "bfloat16", lengths="pile"),
        Case("sparse", "uniform_blocks", 512, 4, 2, 128, "bfloat16", block=64, density=0.5),
    ],
    ids=lambda case: case.mask,
)
def test_our_kernels_on_a_gpu(name, case):
    row = time(contenders.load(name), case, ("fwd", "bwd"), "cuda")
    assert (row["status"], row.get("reason")) == ("ok", None)
