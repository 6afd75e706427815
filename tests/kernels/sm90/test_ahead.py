"""Fakes begin to compile the kernels that the calls behind them launch, and no others: on a CPU that thinks it is a
Hopper GPU."""

from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from magi_compile import _compat, warm_up
from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.heuristics import plan_tiles
from magi_compile.kernels.select import MaskKernel
from magi_compile.kernels.sm90 import kernel as hopper
from magi_compile.kernels.sm90.forward import split_kv
from magi_compile.kernels.sm90.kernel import HopperKernel
from magi_compile.kernels.sm90.masks import mask_bits, mask_slices
from magi_compile.kernels.sm90.planner import tile_plan
from magi_compile.kernels.sm90.runtime import ahead, driver
from magi_compile.masks.evaluation import verify
from magi_compile.ops import library
from magi_compile.ops.masks import mask_bits as bits_op
from magi_compile.ops.masks import mask_slices as slices_op
from tests.kernels.support import idle_driver

ROWS, HEADS = 300, (4, 2, 64, 64)
PROBLEM = AttnProblem("cuda", (9, 0), torch.bfloat16, *HEADS, 0.125)
CPU, GPU = torch.device("cpu"), torch.device("cuda")
META = torch.device("meta")  # as a GPU: the sizes of a plan follow from shapes


class PlanningKernel(HopperKernel):
    """Plans slices of a CPU as those of a GPU; of fakes, as ever."""

    def plan(self, slices, problem):
        if _compat.is_fake(slices.q_ranges):
            return super().plan(slices, problem)
        return tile_plan.plan_on_device(slices, plan_tiles(problem), problem)


@pytest.fixture
def asked(monkeypatch):
    """The kernels that were begun, and those that were loaded, in order."""
    begun, loaded = [], []
    idle_driver.fake_hopper(
        monkeypatch,
        num_sms=132,
        load_function=lambda variant, device: loaded.append(variant),
        launch=lambda *_: None,
        encode=lambda tensor_map, address: idle_driver.address_map(address),
    )
    monkeypatch.setattr(ahead, "begin", lambda variants, *, later=False: begun.extend(variants))
    monkeypatch.setattr(_compat, "is_in_use", lambda device: True)
    kernel = PlanningKernel()
    monkeypatch.setattr(
        library,
        "chosen_for",
        lambda device, dtype, heads, scale, softcap, name, **others: library.Chosen(
            kernel, replace(PROBLEM, softmax_scale=scale, softcap=softcap, **others)
        ),
    )
    for op, module, name in (
        (slices_op, mask_slices, "mask_slices"),
        (bits_op, mask_bits, "mask_bits"),
    ):
        found = MaskKernel(getattr(module, f"{name}_on_device"), getattr(module, f"begin_{name}"))
        monkeypatch.setattr(op, f"{name}_kernel", lambda arch, found=found: found)
    for module in (library, slices_op, bits_op):
        monkeypatch.setattr(module, "hand_over_to_launcher", lambda: None)
    size_of_splits = split_kv._size
    for module, name in ((split_kv, "_size"), (tile_plan, "size_of_splits")):
        monkeypatch.setattr(module, name, lambda *sizes: size_of_splits(*sizes[:-1], device=GPU))
    monkeypatch.setattr(verify, "is_verified", lambda known_as: True)
    hopper._begin_backward.cache_clear()
    monkeypatch.setattr(mask_bits, "_begun", set())
    yield begun, loaded
    idle_driver.clear_caches()
    hopper._begin_backward.cache_clear()


def lists_of_blocks():
    return [torch.zeros(1, 1, 3).int(), torch.zeros(1, 1, 3, 3).int()]


def document():
    return torch.zeros(ROWS).long()


BITS = "mask;; def mask(b, h, q, kv, t0):;;     return (t0[q] & t0[kv]) > 2"
COLUMNS = "(q >= kv) & (t0[q] == t0[kv])"
ALIBI = "s + t0[h] * (kv - q)"
SCORE = (
    "score + t0[h];; def l0_t0_0(h):;;     return h;; def score(score, l0_t0):;;     return score + l0_t0;; "
    "def d_score(g):;;     return g;; def d_l0_t0(g):;;     return g"
)
CASES = {
    "causal": {},
    "documents": {"mask": COLUMNS, "tables": [document]},
    "scalar table": {"mask": "kv < t0", "tables": [lambda: torch.tensor(7, dtype=torch.int32)]},
    "uint16": {"mask": COLUMNS, "tables": [lambda: document().to(torch.uint16)]},
    "captured int": {"mask": "q >= kv - s0", "symbols": [3]},
    "block lists": {"lists": lists_of_blocks},
    "capped": {"softcap": 3.0},
    "negative scale": {"scale": -0.125},
    "bits": {"mask": BITS, "tables": [document], "by_bits": True},
    "bits and lists": {
        "mask": BITS,
        "tables": [document],
        "by_bits": True,
        "lists": lists_of_blocks,
    },
    "deterministic": {"deterministic": True},
    "largest scores": {"largest": True},
    "score": {"score": SCORE},
    "score with gradients": {"score": SCORE, "wanted": [0]},
}


def calls(
    like,
    device,
    *,
    scale=0.125,
    softcap=0.0,
    deterministic=False,
    largest=False,
    score="",
    wanted=(),
    **mask,
):
    """A mask, its plan, attention and its gradients; `like(tensor)` gives each tensor, on `device`."""
    slices, bits = mask_of(like, device, **mask)
    plan = torch.ops.magi.plan(
        *(*slices, ROWS, ROWS, torch.bfloat16, *HEADS, softcap, "", bits, bool(score))
    )
    options = (slices, plan, scale, softcap, "")
    tables = [like(torch.zeros(4))] if score else []
    of_score = (bits, tables, [], score, [1, 4, ROWS, ROWS, 0] if score else [])
    q, k, v = (like(torch.zeros(ROWS, heads, 64).bfloat16()) for heads in (4, 2, 2))
    out, lse, _ = torch.ops.magi.ffa_fwd(*(q, k, v, *options, *of_score), return_max_scores=largest)
    given = (out, None, q, k, v, out, lse, *options, deterministic, *of_score, wanted)
    torch.ops.magi.ffa_bwd(*given)


def mask_of(like, device, mask="q >= kv", tables=(), symbols=(), lists=list, by_bits=False):
    captured, block_lists = [like(x()) for x in tables], [like(x) for x in lists()]
    op = torch.ops.magi.mask_bits if by_bits else torch.ops.magi.mask_slices
    size = [128, 128] if block_lists else []
    sizes = (1, ROWS, ROWS, 0 if by_bits else 20)
    *slices, last = op(captured, list(symbols), mask, *sizes, device, block_lists, size)
    return (slices, last) if by_bits else ([*slices, last], None)


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_what_is_begun_is_what_is_loaded(asked, name, is_dynamic):
    begun, loaded = asked
    mode = FakeTensorMode(shape_env=ShapeEnv() if is_dynamic else None)
    with mode:
        calls(
            lambda x: mode.from_tensor(x, static_shapes=not is_dynamic).to(META),
            META,
            **CASES[name],
        )
    assert loaded == []
    with torch.no_grad():
        calls(lambda x: x, CPU, **CASES[name])
    assert len(loaded) >= 6
    assert set(begun) == set(loaded)


@pytest.mark.parametrize("name", ["causal", "documents", "block lists", "bits"])
def test_a_wheel_has_what_a_first_call_needs(asked, name):
    """The program of a mask that needs bit blocks is the user's own."""
    begun, _ = asked
    mode = FakeTensorMode()
    with mode:
        calls(lambda x: mode.from_tensor(x).to(META), META, **CASES[name])
    in_wheel = warm_up.variants((64,), (torch.bfloat16,), ())
    assert {x.entry for x in set(begun) - set(in_wheel)} <= {"ffa_mask_bits"}
    assert len(begun) >= 6


@pytest.mark.parametrize("name", ["causal", "score with gradients"])
def test_an_eager_forward_begins_its_backward(asked, name):
    begun, loaded = asked
    with torch.no_grad():
        calls(lambda x: x.requires_grad_(x.is_floating_point()), CPU, **CASES[name])
    assert set(begun) == {x for x in loaded if "backward" in x.entry or "gradients" in x.entry}
    assert len(begun) == 4 if "score" in name else 3


def test_an_eager_forward_without_gradients_begins_nothing(asked):
    begun, _ = asked
    with torch.no_grad():
        calls(lambda x: x, CPU)
    assert begun == []


def test_a_forward_does_not_fail_where_its_backward_would(asked, monkeypatch):
    """As where gradients of a captured parameter have no code: there may be no backward."""

    def begin_backward(*_, **__):
        raise NotImplementedError("no gradients")

    _, loaded = asked
    monkeypatch.setattr(PlanningKernel, "begin_backward", begin_backward)
    with torch.no_grad():
        calls(
            lambda x: x.requires_grad_(x.is_floating_point()), CPU, **CASES["score with gradients"]
        )
    assert any("forward" in x.entry for x in loaded)


def test_nothing_is_begun_for_a_gpu_that_is_not_there(asked, monkeypatch):
    begun, _ = asked
    monkeypatch.setattr(_compat, "is_in_use", lambda device: False)
    mode = FakeTensorMode()
    with mode:
        calls(lambda x: mode.from_tensor(x).to(META), META)
    assert begun == []


@pytest.mark.gpu
@pytest.mark.parametrize("has_score", [False, True])
def test_a_compiled_graph_on_a_gpu(monkeypatch, has_score):
    """What its calls load has been begun before; of a head dimension that no other test has."""
    begun, loaded = [], []
    begin, cubin_of = ahead.begin, driver.cubin_of
    monkeypatch.setattr(
        ahead, "begin", lambda variants, **rest: begin(begun.extend(variants) or begun, **rest)
    )
    monkeypatch.setattr(
        driver, "cubin_of", lambda variant: loaded.append(variant) or cubin_of(variant)
    )
    torch.compiler.reset()
    head_dim = 152 if has_score else 168
    q, k, v = (
        torch.randn(1, n, 1024, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (4, 2, 2)
    )
    document = torch.arange(1024, device="cuda") // 300

    def mask_mod(b, h, q, kv):
        return (q >= kv) & (document[q] == document[kv]) & (kv < 1000 - head_dim)

    def score_mod(score, b, h, q, kv):
        return score - (q - kv) * 0.25

    compiled = torch.compile(flex_attention, backend="magi")
    block_mask = create_block_mask(mask_mod, None, None, 1024, 1024)
    out = compiled(q, k, v, score_mod if has_score else None, block_mask, enable_gqa=True)
    assert {x.entry for x in loaded} >= {"ffa_mask_slices", "ffa_forward"}
    out.sum().backward()
    assert "ffa_backward" in {x.entry for x in loaded}
    assert set(loaded) <= set(begun)
