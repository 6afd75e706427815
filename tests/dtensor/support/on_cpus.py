"""The native collective on CPUs: ranks share files in memory, and streams do at once what they are told.

What the ranks exchange, fill, await and read is that of the real thing; only the engines and the streams are not.
"""

import contextlib
import ctypes
import os
import tempfile
import time

import pytest
import torch
import torch.distributed as dist

from magi_compile import _compat
from magi_compile.dtensor.transport.native import NativeCollective, stream_ops, window
from magi_compile.dtensor.transport.native.pulls import COPY_ENGINE


class Emulated(NativeCollective):
    name = "emulated"

    def __init__(self):
        super().__init__(COPY_ENGINE)

    def refusals(self, group, device):
        return []


class Stream:
    """Everything it is told has happened already."""

    def wait_stream(self, other):
        pass

    def wait_event(self, event):
        pass

    def record_event(self):
        return object()

    def query(self):
        return True


def symmetric_empty(num_bytes, device):
    handle, path = tempfile.mkstemp()
    os.close(handle)
    memory = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    memory.path = path
    return memory.fill_(99)


def symmetric_rendezvous(memory, group_name):
    group = _compat.resolve_process_group(group_name)
    paths = [None] * group.size()
    dist.all_gather_object(paths, memory.path, group)
    peers = [
        torch.from_file(path, shared=True, size=len(memory), dtype=torch.uint8) for path in paths
    ]
    dist.barrier(group)
    os.unlink(memory.path)
    return peers


def word_at(address):
    return ctypes.c_uint32.from_address(address)


def set_flag(address, value):
    def run():
        word_at(address).value = value

    return run


def await_flag(address):
    def run():
        end = time.monotonic() + 20
        while word_at(address).value != 1:
            assert time.monotonic() < end, "a flag was never set"
            time.sleep(0)

    return run


def enqueue(ops, stream):
    for run in ops:
        run()


def copy(targets, sources, sizes, stream):
    for target, source, size in zip(targets, sources, sizes, strict=True):
        ctypes.memmove(target, source, size)


@contextlib.contextmanager
def emulation():
    """Inside, `Emulated` works."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", lambda *_, **__: Stream())
        patch.setattr(_compat, "current_stream", lambda *_: Stream())
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        patch.setattr(torch.cuda, "device", lambda *_: contextlib.nullcontext())
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(_compat, "symmetric_empty", symmetric_empty)
        patch.setattr(_compat, "symmetric_rendezvous", symmetric_rendezvous)
        patch.setattr(_compat, "symmetric_addresses", lambda peers: [x.data_ptr() for x in peers])
        patch.setattr(window, "set_flag", set_flag)
        patch.setattr(window, "await_flag", await_flag)
        patch.setattr(stream_ops, "enqueue", enqueue)
        patch.setattr(stream_ops, "copy", copy)
        yield
