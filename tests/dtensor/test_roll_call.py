"""Ranks that wait find out which do not, through a store."""

import gc
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from magi_compile import _compat
from magi_compile.dtensor.ranks import agreement
from magi_compile.dtensor.ranks.roll_call import KEY, RollCall

PAUSE = 0.02


@pytest.fixture
def calls():
    """Those of three ranks; all leave in the end."""
    store = dist.HashStore()
    found = [RollCall(lambda: store, rank, 3) for rank in range(3)]
    yield found
    for call in found:
        call.leave()


def wait(calls, numbers, seconds=10 * PAUSE):
    for call, number in zip(calls, numbers, strict=True):
        if number is not None:
            call.wait_in(number, PAUSE)
    time.sleep(seconds)


@pytest.mark.parametrize(
    ("numbers", "absent"),
    [
        ((5, 5, 5), []),
        ((5, 6, 7), []),  # who is ahead has been here
        ((5, 5, None), [2]),
        ((5, None, None), [1, 2]),
        ((5, 5, 4), [2]),
        ((10, 10, 9), [2]),  # by number, and not by text
    ],
)
def test_who_does_not_wait(calls, numbers, absent):
    wait(calls, numbers)
    assert calls[0].absent(numbers[0]) == absent


def test_who_waits_no_longer(calls):
    wait(calls, (5, 5, 5))
    calls[2].leave()
    time.sleep(8 * PAUSE)
    assert calls[0].absent(5) == [2]
    assert calls[1].of_absent(5) == (
        "rank 2 did not take part in time: ended, stopped, or busy with something else"
    )
    calls[1].leave()
    time.sleep(8 * PAUSE)
    assert calls[0].of_absent(5).startswith("ranks 1, 2 did not")


def test_what_was_said_long_ago_does_not_count(calls):
    wait(calls, (5, 5, 5))
    for call in calls:
        call.leave()
    time.sleep(4 * PAUSE)
    wait(calls, (6, 6, None))
    assert calls[0].absent(6) == [2]


def test_all_wait(calls):
    wait(calls, (5, 5, 5))
    assert calls[0].of_absent(5).startswith("all ranks wait in it; a GPU hangs")


def test_a_round_of_many_ranks_is_few_requests():
    """All ranks ask one host, at the same time, each moment."""
    asked, said = [], {f"{KEY}/{rank}": b"1 1" for rank in range(1, 100)}

    class Store:
        def set(self, key, value):
            said[key] = value.encode()

        def check(self, keys):
            asked.append("check")
            return all(key in said for key in keys)

        def has_extended_api(self):
            return True

        def multi_get(self, keys):
            asked.append("multi_get")
            return [said[key] for key in keys]

    call = RollCall(Store, 0, 101)
    wait([call], [1])
    call.leave()
    first = asked.index("multi_get")
    assert first == 101
    assert set(asked[first + 2 :: 2]) == {"multi_get"}
    assert set(asked[first + 1 :: 2]) == {"check"}  # of the one that has not said anything
    assert call._rounds[-1].said.keys() == set(range(100))


def test_a_roll_call_that_is_gone_has_no_thread():
    """As that of a process group which was destroyed while it waited."""
    store = dist.HashStore()
    call = RollCall(lambda: store, 0, 2)
    wait([call], [1])
    thread = call._thread
    assert thread.is_alive()
    del call
    gc.collect()
    thread.join(20 * PAUSE)
    assert not thread.is_alive()


def hang(*_):
    time.sleep(1000)


def refuse(*_):
    raise RuntimeError("connection refused")


@pytest.mark.parametrize("answer", [hang, refuse])
def test_a_store_that_does_not_answer(answer):
    class Store:
        set = answer

    call = RollCall(Store, 0, 2)
    wait([call], [1])
    call.leave()
    assert call.absent(1) is None
    assert "the store of the process group does not answer" in call.of_absent(1)


@pytest.mark.parametrize("is_own", [True, False])
def test_ranks_wait_for_the_timeout_that_the_group_has_now(monkeypatch, tmp_path, is_own):
    """By the store, as those do whose group has no backend for CPUs. Trainers shorten it after their first step."""
    store = dist.FileStore(str(tmp_path / "store"), 2)
    own, timeout = store.clone(), timedelta(seconds=60)
    monkeypatch.setattr(_compat, "store_of", lambda group: store)
    monkeypatch.setattr(_compat, "own_store_of", lambda group: own if is_own else store)
    monkeypatch.setattr(_compat, "timeout_reader", lambda group: lambda: timeout)
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    by, of_all = agreement._store_of(group), store.timeout
    store.set(agreement._key(1, 1), b"there")
    assert agreement._exchange_by_store(b"here", 1, group, by) == [b"here", b"there"]
    timeout = timedelta(milliseconds=200)
    begin = time.monotonic()
    with pytest.raises(agreement._SilentRanksError) as error:
        agreement._exchange_by_store(b"here", 2, group, by)
    assert error.value.ranks == [1]
    assert time.monotonic() - begin < 10
    assert store.timeout == of_all
