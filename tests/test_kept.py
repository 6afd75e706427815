"""What is kept of tensors and objects, and when it is made again."""

import gc
import weakref

import pytest
import torch

from magi_compile import _kept
from magi_compile._kept import Made, Memo

CPU = torch.device("cpu")


class Owner:
    pass


@pytest.fixture
def memo():
    return Memo(3, lambda value: [value])


def count(memo, owners, key="", sources=(), is_unchanged=None, **options):
    """The value under `key`: how often values have been made."""
    made = vars(memo).setdefault("made", [])

    def make():
        made.append(torch.ones(2).add(1))
        return Made(len(made), sources, is_unchanged)

    return memo.get(owners, key, make, CPU, **options)


def test_owners_and_keys_are_told_apart(memo):
    first, second = Owner(), Owner()
    assert [count(memo, [x], key) for x in (first, second) for key in "ab"] == [1, 2, 3, 4]
    assert count(memo, [second], "b") == 4
    assert count(memo, [first], "a") == 5  # the least recently used went


def test_what_dies_takes_its_value_along(memo):
    owner = Owner()
    count(memo, [owner])
    del owner
    gc.collect()
    assert len(memo) == 0


@pytest.mark.parametrize("place", ["owner", "source"])
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: x[0].fill_(3),
        lambda x: x.set_(torch.ones(3)),
        lambda x: setattr(x, "data", torch.ones(3)),
    ],
    ids=["add_", "a view", "set_", "data is bound anew"],
)
def test_writes(memo, place, write):
    owner, x = Owner(), torch.zeros(3)
    given = ([x], "", ()) if place == "owner" else ([owner], "", [x])
    assert [count(memo, *given) for _ in range(2)] == [1, 1]
    write(x)
    assert [count(memo, *given) for _ in range(2)] == [2, 2]


def test_tensors_whose_writes_nobody_counts(memo):
    with torch.inference_mode():
        x = torch.zeros(3)
    assert [count(memo, [x]) for _ in range(2)] == [1, 2]
    assert [count(memo, [Owner()], "", [x]) for _ in range(2)] == [3, 4]
    assert len(memo) == 0


def test_sources_that_nobody_knows(memo):
    owner = Owner()
    assert [count(memo, [owner], "", None) for _ in range(2)] == [1, 2]


def test_what_says_that_it_has_changed(memo):
    owner, same = Owner(), [True]
    assert [count(memo, [owner], "", (), lambda: same[0]) for _ in range(2)] == [1, 1]
    same[0] = False
    assert count(memo, [owner], "", (), lambda: True) == 2


def test_a_value_is_made_outside_of_the_modes_of_the_caller(memo):
    seen = []

    def make():
        x = torch.ones(2, 2)
        seen.append((x.is_inference(), torch.is_grad_enabled(), (x @ x).dtype))
        return Made(x)

    owner = Owner()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        memo.get([owner], "", make, CPU)
    assert seen == [(False, False, torch.float32)]


def test_hooks_and_dispatch_modes_see_nothing(memo):
    from torch.utils.flop_counter import FlopCounterMode

    def make():
        x = torch.ones(2, 2, requires_grad=True)
        with torch.enable_grad():
            return Made((x @ x).exp())

    with (
        FlopCounterMode(display=False) as counter,
        torch.autograd.graph.saved_tensors_hooks(
            lambda x: pytest.fail("a hook saw it"), lambda x: x
        ),
    ):
        memo.get([Owner()], "", make, CPU)
    assert counter.get_total_flops() == 0


def test_owners_stay_mortal(memo):
    owner = Owner()
    owner.loop = owner
    count(memo, [owner], "", [torch.ones(1)])
    ref = weakref.ref(owner)
    del owner
    gc.collect()
    assert ref() is None


def test_while_a_graph_is_captured(memo, monkeypatch):
    """What it makes is its own; what was kept before serves where the caller says so, and stays."""
    owner = Owner()
    assert count(memo, [owner]) == 1
    with monkeypatch.context() as capture:
        capture.setattr(_kept, "_stream_on", lambda device: (0, True))
        assert count(memo, [owner]) == 2
        assert count(memo, [owner], serves_capture=True) == 1
        assert count(memo, [owner], "another", serves_capture=True) == 3
    assert count(memo, [owner]) == 1
    assert len(memo) == 1


@pytest.mark.gpu
def test_streams_and_capture():
    memo, owner, device = Memo(3, lambda value: [value]), Owner(), torch.device("cuda")
    made = []

    def make():
        torch.cuda._sleep(10_000_000)
        made.append(torch.full((1000,), 7.0, device=device))
        return Made(made[-1])

    memo.get([owner], "", make, device)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert bool((memo.get([owner], "", make, device) == 7).all())
    assert len(made) == 1
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        memo.get([owner], "", lambda: Made(made[0] + 1), device)
        kept = memo.get([owner], "", make, device, serves_capture=True)
    assert kept is made[0]
