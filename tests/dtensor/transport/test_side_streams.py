"""In which order an exchange between GPUs is enqueued, on streams that only write it down."""

import gc
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from magi_compile import _compat
from magi_compile.dtensor.transport import all_to_all
from magi_compile.dtensor.transport.all_to_all import Exchange
from magi_compile.dtensor.transport.hierarchical import _Behind


class Stream:
    """What is enqueued on it, in words; an event is a number."""

    def __init__(self, *_, **__):
        self.work = []

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def record_event(self):
        event = object()
        self.work.append(("record", event))
        return event

    def wait_event(self, event):
        self.work.append(("wait", event))


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


class Group:
    pass


@pytest.fixture
def streams(monkeypatch):
    """The current stream, and every one that is made."""
    current, made = Stream(), []

    def make(*_, **__):
        made.append(Stream())
        return made[-1]

    active = [current]

    @contextmanager
    def using(stream):
        active.append(stream)
        yield
        active.pop()

    def exchange(incoming, outgoing, recv, send, group):
        active[-1].work.append("exchange")

    monkeypatch.setattr(torch.cuda, "Stream", make)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: active[-1])
    monkeypatch.setattr(_compat, "current_stream", lambda device=None: active[-1])
    monkeypatch.setattr(torch.cuda, "stream", using)
    monkeypatch.setattr(_compat, "on_stream", using)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    monkeypatch.setattr(all_to_all, "_side_streams", type(all_to_all._side_streams)())
    return current, made


def start(group):
    return Exchange(torch.zeros(3, 2).as_subclass(OnGpu), [3, 0], [1, 1], group)


def test_an_exchange_is_behind_what_it_sends_and_in_front_of_what_follows(streams):
    current, made = streams
    exchange = start(Group())
    (side,) = made
    (_, packed), (_, reached) = current.work
    assert side.work[:2] == [("wait", packed), ("record", reached)]
    assert side.work[2] == "exchange"
    _, done = side.work[3]
    exchange.wait()
    assert current.work[2:] == [("wait", done)]


def test_nobody_waits_for_an_exchange_in_front_of_another(streams):
    current, _ = streams
    group = Group()
    first = start(group)
    second = start(group)
    assert [what for what, _ in current.work] == ["record", "wait", "record"]
    first.wait()
    second.wait()
    start(group)
    assert [what for what, _ in current.work[3:]] == ["wait", "wait", "record", "wait"]


def test_an_exchange_that_an_error_dropped_is_not_in_front_of_the_next(streams):
    current, made = streams
    group = Group()
    start(group)
    gc.collect()
    start(group)
    assert [what for what, _ in current.work] == ["record", "wait"] * 2
    assert len(made) == 1


def test_an_exchange_behind_another_follows_it_on_the_side_stream(streams):
    current, made = streams
    group, packs = Group(), []

    def pack(arrived, packed):
        packs.append((len(arrived), len(packed)))
        torch.cuda.current_stream().work.append("pack")

    first = start(group)
    like = torch.zeros(3, 2).as_subclass(OnGpu)
    both = _Behind(first, pack, like, [4, 0], [5, 1], group)
    (side,) = made
    assert packs == [(2, 4)]
    kinds = [x if isinstance(x, str) else x[0] for x in side.work]
    begin = kinds.index("exchange")
    assert kinds[begin : begin + 3] == ["exchange", "record", "pack"]
    assert kinds[-2:] == ["exchange", "record"]
    # Attention waits for neither: only for the first one to be reached.
    assert [what for what, _ in current.work] == ["record", "wait"]
    arrived = both.wait()
    assert [len(x) for x in arrived] == [2, 6]
    assert current.work[-1] == ("wait", side.work[-1][1])


def test_groups_have_side_streams_of_their_own(streams):
    _, made = streams
    groups = Group(), Group()
    exchanges = [start(group) for group in groups]
    assert len(made) == len(exchanges) == 2


@pytest.fixture
def segments(streams, monkeypatch):
    """Those of PyTorch's allocator, while a graph is captured."""
    segments = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    return segments


def segment_around(tensor, is_expandable):
    return {"address": tensor.data_ptr() - 64, "total_size": 128, "is_expandable": is_expandable}


def test_no_graph_captures_an_exchange_in_expandable_segments(segments, monkeypatch):
    packed = torch.zeros(3, 2).as_subclass(OnGpu)
    segments += [segment_around(packed, False), {**segment_around(packed, True), "address": 0}]
    Exchange(packed, [3, 0], [1, 1], Group())
    segments.append(segment_around(packed, True))
    with pytest.raises(RuntimeError, match="set NCCL_GRAPH_REGISTER=0 in the environment"):
        Exchange(packed, [3, 0], [1, 1], Group())
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    Exchange(packed, [3, 0], [1, 1], Group())
    monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    Exchange(packed, [3, 0], [1, 1], Group())
