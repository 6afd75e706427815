"""Where compiled code that we lower for begins and ends: who may train on a CPU, and what runs eagerly inside of it."""

import functools
import logging
import subprocess
import sys

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import magi_compile
from magi_compile import LoweringOptions, LoweringRefusedError
from magi_compile.lowering import regions
from magi_compile.lowering.backend import make_backend

from .conftest import BATCH, block_mask

SEQLEN = 96
STOCK_MESSAGE = "FlexAttention does not support backward on CPU"


def causal(b, h, q, kv):
    return q >= kv


def printing(b, h, q, kv):
    print("seen")
    return q >= kv


MASK, PRINTING = block_mask(causal, SEQLEN), block_mask(printing, SEQLEN)


def attend(x):
    return flex_attention(x, x, x, block_mask=MASK)


def attend_printing(x):
    return flex_attention(x + 1, x, x, block_mask=PRINTING)


@torch.compiler.disable
def attend_excluded(x):
    return flex_attention(x, x, x, block_mask=MASK)


def attend_through_excluded(x):
    return attend_excluded(x) * 2


def training_input():
    return torch.randn(BATCH, 2, SEQLEN, 16, requires_grad=True)


def test_training_on_a_cpu_under_our_doors():
    torch.compile(attend, backend=make_backend("aot_eager"))(training_input()).sum().backward()
    torch._dynamo.reset()
    with magi_compile.enabled():
        torch.compile(attend)(training_input()).sum().backward()


@pytest.mark.parametrize("backend", [None, "inductor", "aot_eager", "eager"])
def test_stock_flex_attention_refuses_with_its_own_message(backend):
    """Though our backend is loaded, and was in use before."""
    torch.compile(attend, backend=make_backend("aot_eager"))(training_input()).sum().backward()
    with magi_compile.enabled():
        torch.compile(attend)(training_input())
    magi_compile.enable()
    magi_compile.disable()
    torch._dynamo.reset()
    function = torch.compile(attend, backend=backend) if backend else attend
    with pytest.raises(NotImplementedError, match=STOCK_MESSAGE):
        function(training_input())


def test_eager_attention_refuses_also_where_we_are_enabled():
    with magi_compile.enabled(), pytest.raises(NotImplementedError, match=STOCK_MESSAGE):
        attend(training_input())


def test_enabled_serves_torch_export():
    """The exported graph of a model with parameters goes to Inductor, and so to us."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = torch.nn.Linear(16, 16)

        def forward(self, x):
            return attend(self.proj(x))

    x = torch.randn(BATCH, 2, SEQLEN, 16)
    with pytest.raises(NotImplementedError, match=STOCK_MESSAGE):
        torch.export.export(Model(), (x,))
    with magi_compile.enabled():
        assert torch.export.export(Model(), (x,))


def compiled(function, door, **options):
    if door == "enabled":
        magi_compile.enable(**options)
        return torch.compile(function)
    backend = make_backend("aot_eager", LoweringOptions(**options))
    return torch.compile(function, backend=backend)


EAGER = {"graph break": attend_printing, "excluded": attend_through_excluded}


@pytest.mark.parametrize(
    ("function", "door"), [(attend_printing, "backend"), (attend_through_excluded, "enabled")]
)
def test_eager_attention_inside_of_a_compiled_function_is_said_once(function, door, caplog):
    forward, x = compiled(function, door), torch.randn(BATCH, 2, SEQLEN, 16)
    with caplog.at_level(logging.WARNING, logger="magi_compile"):
        for _ in range(2):
            assert forward(x).shape == x.shape
    (record,) = caplog.records
    assert "FlexAttention at " in record.message
    assert "test_regions.py:" in record.message
    assert "runs eagerly and computes the whole score matrix" in record.message
    if function is attend_printing:
        assert "`print`" in record.message


@pytest.mark.parametrize("door", ["backend", "enabled"])
@pytest.mark.parametrize("function", EAGER.values(), ids=EAGER)
def test_eager_attention_raises_under_strict(function, door):
    forward = compiled(function, door, strict=True)
    with pytest.raises(
        LoweringRefusedError, match="runs eagerly and computes the whole score matrix"
    ):
        forward(torch.randn(BATCH, 2, SEQLEN, 16))


def test_training_on_a_cpu_says_why_it_runs_eagerly():
    """Also where the call is wrong: PyTorch looks at the device before it looks at the lengths."""
    forward = torch.compile(attend, backend="magi")
    with pytest.raises(NotImplementedError, match="block_mask has other lengths than q and k"):
        forward(torch.randn(BATCH, 2, SEQLEN + 1, 16, requires_grad=True))
    with pytest.raises(NotImplementedError, match=r"another device\.$"):
        attend(torch.randn(BATCH, 2, SEQLEN, 16, requires_grad=True))


def test_strict_as_an_option_of_torch_compile():
    forward = torch.compile(attend_printing, backend="magi", options={"magi.strict": True})
    with pytest.raises(LoweringRefusedError, match="runs eagerly"):
        forward(torch.randn(BATCH, 2, SEQLEN, 16))


def test_compiled_too_often(caplog):
    def scaled(x, factor):
        return flex_attention(x * factor, x, x, block_mask=MASK)

    forward = torch.compile(scaled, backend=make_backend("aot_eager"), dynamic=False)
    with (
        torch._dynamo.config.patch(recompile_limit=1),
        caplog.at_level(logging.WARNING, logger="magi_compile"),
    ):
        for factor in range(3):
            forward(torch.randn(BATCH, 2, SEQLEN, 16), factor)
    (record,) = (record for record in caplog.records if record.name == "magi_compile")
    assert "reached its recompile limit" in record.message


def test_nothing_is_said_of_attention_that_nobody_compiles_for_us(caplog):
    make_backend()
    with caplog.at_level(logging.WARNING, logger="magi_compile"):
        attend(torch.randn(BATCH, 2, SEQLEN, 16))
        torch.compile(attend_through_excluded, backend="eager")(torch.randn(BATCH, 2, SEQLEN, 16))
        magi_compile.explain(attend, torch.randn(BATCH, 2, SEQLEN, 16))
    assert not caplog.records


def test_import_changes_nothing_in_pytorch():
    program = (
        "from torch.nn.attention import flex_attention as flex\n"
        "before = flex._validate_device\n"
        "import magi_compile\n"
        "assert flex._validate_device is before\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_backends_in_wrappers_are_known():
    """Those of torch.compile, of Dynamo, of DistributedDataParallel, and partial functions."""
    backend = make_backend("aot_eager", LoweringOptions(strict=True))

    class Splitter:
        backend_compile_fn = functools.partial(backend)

        def compile_fn(self, gm, inputs):
            return gm

    def of_dynamo(*_):
        pass

    of_dynamo._torchdynamo_orig_callable = Splitter().compile_fn
    assert regions.options_for(of_dynamo) == LoweringOptions(strict=True)
    assert regions.options_for(torch._dynamo.lookup_backend("aot_eager")) is None
    assert regions.options_for(None) is None
