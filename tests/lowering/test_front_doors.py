"""backend="magi", enable(), and what they pass on to Inductor."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import magi_compile
from magi_compile import _compat
from magi_compile.lowering.options import LoweringOptions, split_options
from magi_compile.lowering.report import REPORT

from .conftest import BATCH, Attention, assert_same, block_mask, document_causal, documents


@pytest.fixture
def case():
    mask_mod = document_causal(documents(96, 3))
    return Attention(), torch.randn(BATCH, 96, 32), block_mask(mask_mod, 96), mask_mod


def test_enable_serves_stock_inductor(case):
    model, x, mask, mask_mod = case
    magi_compile.enable()
    ours = torch.compile(model, fullgraph=True)(x, mask)
    assert_same(list(ours), list(model.dense(x, mask_mod)))
    assert len(REPORT.lowered) == 1


def test_enabled_ends_with_its_block(case):
    model, x, mask, _ = case
    with magi_compile.enabled(strict=True):
        torch.compile(model, fullgraph=True)(x, mask)
    assert len(REPORT.lowered) == 1
    assert _compat.installed_pre_grad_pass() is None


def test_enable_serves_other_threads(case):
    model, x, mask, mask_mod = case

    @torch.no_grad()
    def num_lowered():
        torch._dynamo.reset()
        REPORT.clear()
        with torch._inductor.config.patch(force_disable_caches=True):
            ours = torch.compile(model, fullgraph=True)(x, mask)
        assert_same(list(ours), list(model.dense(x, mask_mod)))
        return len(REPORT.lowered)

    def in_a_thread(function):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function).result()

    with magi_compile.enabled():
        assert in_a_thread(num_lowered) == 1
    assert in_a_thread(_compat.installed_pre_grad_pass) is None
    magi_compile.enable()
    assert in_a_thread(num_lowered) == 1
    magi_compile.disable()
    assert in_a_thread(_compat.installed_pre_grad_pass) is None


def test_enable_refuses_to_replace_another_pass():
    _compat.install_pre_grad_pass(lambda graph: None)
    try:
        with pytest.raises(RuntimeError, match="pre_grad_custom_pass` must be free"):
            magi_compile.enable()
    finally:
        _compat.install_pre_grad_pass(None)


def test_mode_and_options_reach_inductor(case, monkeypatch):
    model, x, mask, _ = case
    seen = []

    def compile_fx(gm, example_inputs, options):
        seen.append(options)
        return gm.forward

    monkeypatch.setattr(torch._inductor, "compile", compile_fx)
    torch.compile(model, backend="magi", mode="max-autotune")(x, mask)
    torch._dynamo.reset()
    torch.compile(model, backend="magi", options={"magi.strict": True, "epilogue_fusion": False})(
        x, mask
    )
    assert seen[0]["max_autotune"] is True
    assert seen[1] == {"epilogue_fusion": False}


def test_unknown_option_is_named():
    with pytest.raises(ValueError, match=r"no entry 'magi.stict'; .* magi.strict"):
        split_options({"magi.stict": True})
    with pytest.raises(ValueError, match=r"`kernel` must be one of .*got 'fa3'"):
        LoweringOptions(kernel="fa3")
    with pytest.raises(ValueError, match="`slice_capacity` must be at least 1, got 0"):
        LoweringOptions(slice_capacity=0)
    with pytest.raises(TypeError, match="`slice_capacity` must be an int or None, got 'many'"):
        LoweringOptions(slice_capacity="many")
    with pytest.raises(TypeError, match="`strict` must be True or False, got 'yes'"):
        LoweringOptions(strict="yes")


def test_inner_backend_without_options_says_so(case):
    model, x, mask, _ = case
    backend = magi_compile.make_backend("eager")
    with pytest.raises(Exception, match="need the inner backend 'inductor', got 'eager'"):
        torch.compile(model, backend=backend, mode="max-autotune")(x, mask)


SECOND_PROCESS = """
import torch
from torch._dynamo.utils import counters
from tests.lowering.conftest import *
torch.manual_seed(0)
mask_mod = document_causal(documents(96, 3))
model, x = Attention(), torch.randn(BATCH, 96, 32)
out, lse = torch.compile(model, backend="magi", fullgraph=True)(x, block_mask(mask_mod, 96))
(out.square().sum() + lse.sum()).backward()
print("hits", counters["aot_autograd"]["autograd_cache_hit"], "bypass", counters["aot_autograd"]["autograd_cache_bypass"])
"""


@pytest.mark.slow
def test_second_process_hits_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    runs = [
        subprocess.run(
            [sys.executable, "-c", SECOND_PROCESS], check=True, capture_output=True, text=True
        ).stdout.split("\n")[-2]
        for _ in range(2)
    ]
    assert runs == ["hits 0 bypass 0", "hits 1 bypass 0"]
