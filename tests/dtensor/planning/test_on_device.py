"""What is kept on a GPU for all streams is used by one after the other."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from magi_compile import _compat
from magi_compile.dtensor import on_device, plan_ahead
from magi_compile.dtensor.call.execution import unpack
from magi_compile.dtensor.on_device import Streams, to_device
from magi_compile.dtensor.planning.rank_plan import (
    ContextParallelOptions,
    plan_rank,
    plan_rank_ahead,
)
from magi_compile.masks.slices import AttnSlices

GPU = torch.device("cuda", 0)
OPTIONS = ContextParallelOptions(chunk_size=8)


class Stream:
    def __init__(self):
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)


class Kept:
    def __init__(self):
        self.recorded = []

    def record_stream(self, stream):
        self.recorded.append(stream)


@pytest.fixture
def use(monkeypatch):
    """Enters a `Streams` on a stream, captured or not."""

    def of_stream(streams, stream, *tensors, device=GPU, is_captured=False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_captured)
        monkeypatch.setattr(_compat, "current_stream", lambda device: stream)
        streams.enter(device, *tensors)

    return of_stream


def test_a_stream_waits_for_the_one_before(use):
    streams, (first, second, third) = Streams(), (Stream() for _ in range(3))
    for stream in (first, first, second, second, third, first):
        use(streams, stream)
    assert (first.waited_for, second.waited_for, third.waited_for) == ([third], [first], [second])


def test_the_allocator_knows_who_else_reads(use):
    streams, (first, second), tensor = Streams(), (Stream() for _ in range(2)), Kept()
    for stream in (first, second, second):
        use(streams, stream, tensor)
    assert tensor.recorded == [second]


def test_a_captured_stream_neither_waits_nor_is_waited_for(use):
    streams, (first, captured, third) = Streams(), (Stream() for _ in range(3))
    use(streams, first)
    use(streams, captured, is_captured=True)
    use(streams, third)
    assert (captured.waited_for, third.waited_for) == ([], [first])


def test_devices_have_streams_of_their_own(use):
    streams, one, other = Streams(), Stream(), Stream()
    use(streams, one)
    use(streams, other, device=torch.device("cuda", 1))
    use(streams, other, device=torch.device("cpu"))
    assert not other.waited_for


def test_whatever_is_kept_is_entered(monkeypatch):
    """Each time, also where it was made before."""
    entered = []
    monkeypatch.setattr(on_device.Streams, "enter", lambda self, *_: entered.append(self))
    mask = AttnSlices.causal(72)
    plan = plan_rank(mask, 2, 0, OPTIONS)
    ahead = plan_rank_ahead(mask, 2, 0, OPTIONS, "cpu")
    host_ahead = plan_ahead(mask, ranks=(2, 0), options=OPTIONS)
    for use in (lambda: plan.tensors("cpu"), ahead.result, host_ahead.result):
        for _ in range(2):
            entered.clear()
            use()
            assert entered
    tensors = plan.tensors("cpu")
    device_plan = unpack(*tensors)
    entered.clear()
    assert unpack(*tensors) is device_plan
    assert entered == [device_plan.streams]


def test_a_compiler_traces_the_copy():
    """`SequencePlan.unshard` and `permutation` may be in a compiled step."""
    devices = []

    def backend(graph, inputs):
        outputs = [node for node in graph.graph.nodes if node.op == "output"]
        devices.append(outputs[0].args[0][0].meta["example_value"].device.type)
        return lambda *given: (torch.zeros(3),)

    compiled = torch.compile(lambda x: to_device(x, GPU), backend=backend, fullgraph=True)
    compiled(torch.zeros(3))
    with FakeTensorMode():
        devices.append(to_device(torch.zeros(3), GPU).device.type)
    assert devices == ["cuda", "cuda"]


@pytest.mark.gpu
def test_a_plan_that_waits_on_another_stream():
    """A second caller gets the kept plan, on a stream that has done all before the copy of the first one begins."""
    mask, side = AttnSlices.from_cu_seqlens([0, 1000, 5000], causal=True), torch.cuda.Stream()
    plan = plan_rank(mask, 2, 0)
    wanted = plan.tensors("cpu").data
    future = plan_rank_ahead(mask, 2, 0, device="cuda")
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)
        future.result()
    found = [plan.tensors("cuda").data, future.result().tensors("cuda").data]
    unpacked = unpack(*plan.tensors("cuda")).forward[0].slices.q_ranges
    assert not side.query()
    copies = [x.clone() for x in found]
    assert all(torch.equal(x.cpu(), wanted) for x in copies)
    assert torch.equal(unpacked.cpu(), unpack(*plan.tensors("cpu")).forward[0].slices.q_ranges)
