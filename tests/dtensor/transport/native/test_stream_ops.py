"""Threads of autograd have no context of their own: every call of the driver comes after one was bound."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from cuda.bindings import driver

from magi_compile.dtensor.transport.native import stream_ops

STREAM = SimpleNamespace(cuda_stream=0)


@pytest.fixture
def calls(monkeypatch):
    """The names of what is called of a driver that does nothing, `bind_context` among them."""
    found = []

    def succeed(name):
        return lambda *_: found.append(name) or (driver.CUresult.CUDA_SUCCESS,)

    names = ("cuStreamBatchMemOp", "cuMemcpyBatchAsync", "cuMemcpyAsync")
    fake = SimpleNamespace(
        CUdeviceptr=driver.CUdeviceptr, **{name: succeed(name) for name in names}
    )
    monkeypatch.setattr(stream_ops, "driver", fake)
    monkeypatch.setattr(stream_ops, "bind_context", lambda: found.append("bind_context"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


def test_flags(calls):
    stream_ops.enqueue([object()], STREAM)
    assert calls == ["bind_context", "cuStreamBatchMemOp"]


def test_no_flags_are_no_call(calls):
    stream_ops.enqueue([], STREAM)
    assert calls == []


@pytest.mark.parametrize(
    ("can_batch", "copies"), [(True, ["cuMemcpyBatchAsync"]), (False, ["cuMemcpyAsync"] * 2)]
)
def test_copies(calls, monkeypatch, can_batch, copies):
    monkeypatch.setattr(stream_ops, "_can_batch", can_batch)
    stream_ops.copy([16, 32], [48, 64], [4, 8], STREAM)
    assert calls == ["bind_context", *copies]
