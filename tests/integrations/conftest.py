import logging

import pytest
import torch

import magi_compile
from magi_compile import _warnings
from magi_compile.kernels.cpu import CpuKernel
from magi_compile.lowering.report import REPORT


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    REPORT.clear()
    torch.manual_seed(0)
    yield
    magi_compile.disable()


@pytest.fixture
def forwards(monkeypatch):
    """One entry for each attention that our kernel has run."""
    runs = []
    forward = CpuKernel.forward
    monkeypatch.setattr(
        CpuKernel, "forward", lambda *args, **rest: runs.append(1) or forward(*args, **rest)
    )
    return runs


@pytest.fixture
def warnings_of_ours(monkeypatch, caplog):
    """What the integration has warned of, each thing once."""
    monkeypatch.setattr(_warnings, "_said", set())
    caplog.set_level(logging.WARNING, "magi_compile")
    return lambda: [record.message for record in caplog.records if record.name == "magi_compile"]
