"""Compilation of kernels begins while a graph is lowered, and that of the backward before the forward runs."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import magi_compile
from magi_compile import _compat
from magi_compile.kernels.cpu.kernel import CpuKernel
from magi_compile.lowering.backend import make_backend
from magi_compile.ops import library
from magi_compile.ops.masks.mask_call import MaskCall


@pytest.fixture
def events(monkeypatch):
    """What is begun, and what runs, in order."""
    found = []

    class Compiled(CpuKernel):
        def plan_of_sizes(self, num_slices, total_q, total_k, problem, device):
            pytest.fail("of ranks")

        def begin_plan(self, plan, problem):
            found.append("begin plan")

        def begin_forward(self, plan, problem, score=None, *, is_early=False):
            found.append("begin forward")

        def begin_backward(self, problem, score=None, *, wanted=(), deterministic=False):
            found.append("begin backward")

        def forward(self, *args, **kwargs):
            found.append("forward")
            return super().forward(*args, **kwargs)

        def backward(self, *args, **kwargs):
            found.append("backward")
            return super().backward(*args, **kwargs)

    kernel, choose = Compiled(), library.chosen_for
    monkeypatch.setattr(
        library, "chosen_for", lambda *a, **k: choose(*a, **k)._replace(kernel=kernel)
    )
    monkeypatch.setattr(_compat, "is_in_use", lambda device: True)
    monkeypatch.setattr(MaskCall, "begin", lambda call, kernel_on: found.append("begin mask"))
    return found


def causal(b, h, q, kv):
    return q >= kv


def first_steps(events, compiled):
    q, k, v = (torch.randn(1, 2, 256, 16, requires_grad=True) for _ in range(3))
    block_mask = magi_compile.create_block_mask(causal, None, None, 256, 256, device="cpu")
    out = compiled(q, k, v, block_mask=block_mask)
    out.sum().backward()
    return events


def test_a_graph(events):
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, backend=make_backend("aot_eager"))
    found = first_steps(events, compiled)
    assert found[0] == "begin mask"
    assert found.index("begin backward") < found.index("forward") < found.index("backward")


def test_eager(events):
    found = first_steps(events, magi_compile.flex_attention)
    assert found == ["begin backward", "forward", "backward"]
