"""backend="magi", enable(), and what they pass on to Inductor."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import magi_compile
from magi_compile import _compat
from magi_compile.lowering.backend import _version_of_sources, make_backend
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
        with pytest.raises(RuntimeError, match="pre_grad_custom_pass` must be None for `enable`"):
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


def test_the_keys_of_the_cache_hold_our_sources(case, monkeypatch):
    """What was compiled for other sources of ours is not found."""
    keys, compile_ = [], torch._inductor.compile

    def keep(gm, example_inputs, options):
        keys.append(torch.compiler.config.cache_key_tag)
        return compile_(gm, example_inputs, options=options)

    monkeypatch.setattr(torch._inductor, "compile", keep)
    model, x, mask, _ = case
    with torch.compiler.config.patch(cache_key_tag="theirs"):
        torch.compile(model, backend="magi")(x, mask)
        assert torch.compiler.config.cache_key_tag == "theirs"
    assert keys == [f"theirs {_version_of_sources()}"]


def test_unknown_option_is_named():
    with pytest.raises(ValueError, match=r"no entry 'magi.stict'; .* magi.strict"):
        split_options({"magi.stict": True})
    with pytest.raises(ValueError, match=r"`kernel` must be one of .*got 'fa3'"):
        LoweringOptions(kernel="fa3")
    with pytest.raises(ValueError, match="`slice_capacity` must be at least 1, got 0"):
        LoweringOptions(slice_capacity=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slice_capacity": "many"}, "`slice_capacity` must be an int or None, got 'many'"),
        ({"slice_capacity": True}, "`slice_capacity` must be an int or None, got True"),
        ({"slice_capacity": 3.5}, "`slice_capacity` must be an int or None, got 3.5"),
        ({"strict": "yes"}, "`strict` must be True or False, got 'yes'"),
        ({"strict": 1}, "`strict` must be True or False, got 1"),
        ({"kernel": 5}, r"`kernel` must be a name \(.*cpu.*\) or None, got 5"),
        ({"kernel": ["cpu"]}, r"`kernel` must be a name \(.*\) or None, got \['cpu'\]"),
    ],
)
def test_values_of_the_wrong_type(options, message):
    with pytest.raises(TypeError, match=message):
        LoweringOptions(**options)
    with pytest.raises(TypeError, match=message):
        magi_compile.enable(**options)
    with pytest.raises(TypeError, match=message):
        split_options({f"magi.{name}": value for name, value in options.items()})
    assert _compat.installed_pre_grad_pass() is None


def test_unknown_options():
    message = "takes only the options strict, kernel, slice_capacity, bits, verify, got unknown=1"
    with pytest.raises(TypeError, match=f"`enable` {message}"):
        magi_compile.enable(unknown=1)
    with pytest.raises(TypeError, match=f"`enabled` {message}"), magi_compile.enabled(unknown=1):
        pass
    with pytest.raises(
        TypeError, match=r"`options` must be a LoweringOptions, got \{'strict': True\}"
    ):
        make_backend(options={"strict": True})


def test_inner_backend_without_options_says_so(case):
    model, x, mask, _ = case
    backend = magi_compile.make_backend("eager")
    with pytest.raises(Exception, match="need the inner backend 'inductor', got 'eager'"):
        torch.compile(model, backend=backend, mode="max-autotune")(x, mask)


SECOND_PROCESS = """
import sys
import magi_compile
import torch
from torch._dynamo.utils import counters
from tests.lowering.conftest import *
torch.manual_seed(0)
mask_mod = document_causal(documents(96, 3))
model, x = Attention(), torch.randn(BATCH, 96, 32)
door = sys.argv[1]
if door == "enable":
    magi_compile.enable()
    from magi_compile import _compat
    import pickle
    graph_pass = _compat.installed_pre_grad_pass()
    assert pickle.loads(pickle.dumps(graph_pass)).uuid() == graph_pass.uuid()
backend = "inductor" if door == "enable" else "magi"
out, lse = torch.compile(model, backend=backend, fullgraph=True)(x, block_mask(mask_mod, 96))
(out.square().sum() + lse.sum()).backward()
aot, inductor = counters["aot_autograd"], counters["inductor"]
print(
    "hits", aot["autograd_cache_hit"], "bypass", aot["autograd_cache_bypass"],
    "graphs: hits", inductor["fxgraph_cache_hit"], "misses", inductor["fxgraph_cache_miss"],
    "bypass", inductor["fxgraph_cache_bypass"],
)
"""


@pytest.mark.parametrize("door", ["magi", pytest.param("enable", marks=pytest.mark.slow)])
def test_second_process_hits_the_cache(door, tmp_path, monkeypatch):
    """Of autograd's cache, which holds both graphs: they are not even looked for, or found, in Inductor's."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    runs = [
        subprocess.run(
            [sys.executable, "-c", SECOND_PROCESS, door], check=True, capture_output=True, text=True
        )
        for _ in range(2)
    ]
    assert not any("pickle" in run.stderr for run in runs)
    first, second = (run.stdout.split("\n")[-2] for run in runs)
    assert first == "hits 0 bypass 0 graphs: hits 0 misses 2 bypass 0"
    assert second == "hits 1 bypass 0 graphs: hits 2 misses 0 bypass 0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strict": True}, "no entry 'strict'; did you mean 'magi.strict'?"),
        ({"Magi.strict": True}, "no entry 'Magi.strict'; did you mean 'magi.strict'?"),
        ({"magi": True}, "no entry 'magi'; the entries of this backend are magi.bits, "),
        ({"epilogue_fuson": True}, "no entry 'epilogue_fuson'; did you mean 'epilogue_fusion'?"),
        ({3: True}, "no entry 3; the entries of this backend are magi.bits, "),
        ("strict", "`options` must be a dict or None, got 'strict'"),
    ],
)
def test_entries_that_nobody_has(options, message):
    kind = TypeError if isinstance(options, str) else ValueError
    with pytest.raises(kind, match=re.escape(message)):
        torch.compile(lambda x: x + 1, backend="magi", options=options)(torch.ones(2))
