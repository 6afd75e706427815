"""Passes that do not end become errors: the clock, the events and the GPU are fakes, ranks and threads are not."""

import datetime
import os
import pickle
import signal
import sys
import threading
import time

import pytest
import torch

from magi_compile import _compat
from magi_compile.dtensor.ranks import watch
from magi_compile.dtensor.ranks.watch import Passes, Watch, raise_in_thread
from tests.dtensor.support.ranks import Ranks

TIMEOUT = 20.0
SHORT = datetime.timedelta(seconds=2)


class Event:
    is_done = False

    def query(self):
        return self.is_done


class Failed:
    def query(self):
        raise RuntimeError("CUDA error: unspecified launch failure")


class Scene:
    """Passes with fakes around them, and what becomes of these, in order."""

    def __init__(self, timeout=TIMEOUT):
        self.now, self.story = 100.0, []
        self.passes = Passes(
            *("cp", 0, lambda: timeout, self, lambda: self.story.append("release")),
            clock=lambda: self.now,
            raise_in=self.raise_in,
            end=lambda message: self.story.append("end"),
        )

    def raise_in(self, thread, message, is_taken):
        self.thread, self.is_taken = thread, is_taken
        self.story.append("raise")

    def wait_in(self, number, pause):
        self.story.append(("wait", number, pause))

    def leave(self):
        self.story.append("leave")

    def of_absent(self, number):
        return f"rank 1 is not in {number}"

    def enqueue(self, event, *, is_backward=False):
        self.passes.enqueued(self.passes.begin(is_backward=is_backward), event)
        return event

    def look(self, later=0.0):
        self.now += later
        self.story.clear()
        return self.passes.look()


def test_a_pass_that_ends():
    scene = Scene()
    event = scene.enqueue(Event())
    assert scene.look(1.5) == 1.0
    assert scene.story == []
    assert scene.look(2.0) == 1.0
    assert scene.story == [("wait", 1, 1.0)]  # it takes longer than others
    event.is_done = True
    assert scene.look(100.0) is None
    assert scene.story == ["leave"]
    assert scene.passes.error is None


def test_each_pass_has_a_timeout_of_its_own():
    scene = Scene()
    events = []
    for _ in range(10):
        events.append(scene.enqueue(Event()))
        assert scene.look(0.9 * TIMEOUT) is not None
        events[-1].is_done = True
    assert scene.passes.error is None
    scene.enqueue(Event())
    assert scene.look(0.99 * TIMEOUT) == pytest.approx(0.01 * TIMEOUT)  # to the moment
    scene.look(0.01 * TIMEOUT)
    assert "pass 11" in scene.passes.error


def test_looks_within_a_short_timeout():
    scene = Scene(timeout=1.0)
    scene.enqueue(Event())
    assert scene.look() == pytest.approx(0.1)


@pytest.mark.parametrize("is_backward", [False, True])
def test_a_pass_that_does_not_end(is_backward):
    scene = Scene()
    scene.enqueue(Event()).is_done = True
    scene.enqueue(Event(), is_backward=is_backward)
    event = scene.enqueue(Event())  # behind it
    scene.look(TIMEOUT)
    assert scene.passes.error == (
        "rank 0 of group 'cp', whose timeout is 20 s, has waited 20 s for the end of a "
        f"{'backward' if is_backward else 'forward'} across ranks, pass 2: rank 1 is not in 2"
    )
    assert scene.story == ["raise", "release"]  # nobody goes on before the error is there
    assert scene.thread == threading.get_ident()
    assert scene.look(1.0) < 0.1
    assert scene.story == ["release"]
    scene.is_taken.set()
    assert scene.look() < 0.1
    assert scene.story == ["release", "leave"]
    for x in scene.passes._pending:
        x.event.is_done = True
    assert event.is_done
    assert scene.look(100.0) is None
    assert scene.story == ["leave"]
    with pytest.raises(RuntimeError, match="pass 2: rank 1 is not in 2"):
        scene.passes.begin(is_backward=False)


def test_a_warning_comes_before(caplog):
    """NCCL may end the process in the moment of the error."""
    scene = Scene()
    for _ in range(2):
        event = scene.enqueue(Event())
        scene.look(TIMEOUT - 1.5)
        scene.look(0.6)
        scene.look(0.1)
        event.is_done = True
    assert ["whose timeout is 20 s, has waited 19 s for" in x for x in caplog.messages] == [
        True
    ] * 2
    assert caplog.messages[1].endswith(
        "for the end of a forward across ranks, pass 2: rank 1 is not in 2"
    )


def test_an_error_that_nobody_takes_ends_the_process():
    scene = Scene()
    scene.enqueue(Event())
    scene.look(TIMEOUT)
    scene.look(watch.SECONDS_TO_TAKE_AN_ERROR - 1)
    assert scene.story == ["release"]
    scene.look(1.0)
    assert scene.story == ["release", "end"]


def test_what_was_released_waits_for_the_error_to_be_taken():
    scene = Scene()
    event = scene.enqueue(Event())
    scene.look(TIMEOUT)
    event.is_done = True
    assert scene.look(1.0) < 0.1
    assert scene.story == []
    with pytest.raises(RuntimeError, match="rank 1 is not in 1"):  # the next step
        scene.passes.begin(is_backward=False)
    assert scene.look(100.0) is None
    assert scene.story == ["leave"]


def test_a_device_that_has_failed_is_not_waited_for():
    scene = Scene()
    scene.enqueue(Failed())
    assert scene.look(10 * TIMEOUT) is None


class Driver:
    """A driver whose lock a blocked thread may hold: then no call of it comes back."""

    def __init__(self):
        self.is_free = threading.Event()
        self.calls = []

    def query(self):
        self.calls.append("query")
        self.is_free.wait(20)
        return self.is_free.is_set()

    def release(self):
        self.calls.append("release")
        self.is_free.wait(20)


def test_a_driver_that_does_not_answer(monkeypatch):
    """The thread that looks goes on, and says who is late."""
    monkeypatch.setattr(watch, "SECONDS_OF_AN_ANSWER", 0.05)
    scene, driver = Scene(), Driver()
    scene.enqueue(driver)
    for _ in range(3):
        assert scene.look(1.5) == 1.0
    assert driver.calls == ["query"]  # one call at a time
    assert scene.story == [("wait", 1, 1.0)]
    scene.look(TIMEOUT)
    assert scene.story == ["raise"]
    scene.look(watch.SECONDS_TO_TAKE_AN_ERROR)
    assert scene.story == ["end"]
    driver.is_free.set()


def test_a_driver_that_answers_late(monkeypatch):
    monkeypatch.setattr(watch, "SECONDS_OF_AN_ANSWER", 0.05)
    scene, driver = Scene(), Driver()
    scene.enqueue(driver)
    assert scene.look(0.9 * TIMEOUT) is not None
    driver.is_free.set()
    time.sleep(0.2)
    assert scene.look(0.2 * TIMEOUT) is None
    assert scene.passes.error is None


def test_a_release_that_does_not_come_back(monkeypatch):
    monkeypatch.setattr(watch, "SECONDS_OF_AN_ANSWER", 0.05)
    scene, driver = Scene(), Driver()
    scene.passes._release = driver.release
    scene.enqueue(Event())
    scene.look(TIMEOUT)
    scene.look(watch.SECONDS_TO_TAKE_AN_ERROR)
    assert scene.story == ["end"]
    assert driver.calls == ["release"]
    driver.is_free.set()


def test_a_host_that_stays_in_a_pass():
    """Because the driver holds it up, or because it compiles: only the former is for ever."""
    scene = Scene()
    scene.passes.begin(is_backward=False)
    scene.look(0.4 * TIMEOUT)
    assert scene.story == []  # others may wait for it
    scene.look(0.7 * TIMEOUT)
    assert scene.story == [("wait", 1, 1.0)]
    assert scene.passes.error is None
    scene.look(watch.SECONDS_OF_A_HOST - 0.2 * TIMEOUT)
    assert scene.passes.error is None
    scene.look(0.1 * TIMEOUT)
    assert "whose timeout is 20 s, has waited 80 s for" in scene.passes.error
    assert scene.story == [("wait", 1, 1.0), "raise", "release"][-2:]


def test_a_host_that_leaves_a_pass_late_waits_from_then_on():
    scene = Scene()
    begun = scene.passes.begin(is_backward=False)
    scene.look(2 * TIMEOUT)
    scene.passes.enqueued(begun, Event())
    assert scene.look(0.9 * TIMEOUT) is not None
    assert scene.passes.error is None
    scene.look(0.1 * TIMEOUT)
    assert "has waited 20 s" in scene.passes.error


def test_an_error_in_the_moment_in_which_a_pass_begins():
    """Such a pass never ends, and nothing is released all the time for it."""
    scene = Scene()
    scene.enqueue(Event())
    scene.passes.begin(is_backward=False)
    scene.look(TIMEOUT)
    scene.is_taken.set()
    assert scene.look() < 0.1
    scene.passes._pending[0].event.is_done = True
    assert scene.look() == 1.0


@pytest.mark.parametrize("can_record", [True, False])
def test_a_pass_that_raises_midway(monkeypatch, can_record):
    """What it has enqueued is looked after until it is done, and is no late pass afterwards."""
    scene, gpu, group = Scene(), Gpu(), Group()
    if not can_record:
        gpu.record_event = lambda: 1 / 0
    monkeypatch.setattr(_compat, "current_stream", lambda device: gpu)
    monkeypatch.setattr(watch, "is_recorded", lambda device: False)
    monkeypatch.setattr(watch, "_watch", Watch())
    monkeypatch.setattr(watch, "_passes", {group: scene.passes})

    def run():
        with watch.watched(group, torch.device("cuda"), is_backward=False):
            assert [x.event for x in scene.passes._pending] == [None]
            raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        run()
    assert [x.event for x in scene.passes._pending] == [gpu] * can_record
    gpu.is_free.set()
    assert scene.look(10 * TIMEOUT) is None
    assert scene.passes.error is None
    assert not scene.passes._pending


def test_the_error_of_a_backward_is_raised_where_the_forward_was_called():
    scene = Scene()
    scene.enqueue(Event()).is_done = True
    thread = threading.Thread(target=scene.enqueue, args=(Event(),), kwargs={"is_backward": True})
    thread.start()
    thread.join()
    scene.look(TIMEOUT)
    assert scene.thread == threading.get_ident()


def test_a_forward_that_a_backward_computes_again_is_not_called_there(monkeypatch):
    scene = Scene()
    scene.enqueue(Event()).is_done = True
    monkeypatch.setattr(_compat, "is_in_backward", lambda: True)
    thread = threading.Thread(target=scene.enqueue, args=(Event(),))
    thread.start()
    thread.join()
    scene.look(TIMEOUT)
    assert scene.thread == threading.get_ident()


def test_an_error_in_a_thread():
    taken, found = threading.Event(), []

    def run():
        try:
            while True:
                time.sleep(0.01)
        except RuntimeError as error:
            found.extend([error, pickle.loads(pickle.dumps(error))])

    thread = threading.Thread(target=run)
    thread.start()
    raise_in_thread(thread.ident, "late", taken)
    thread.join(10)
    assert [str(x) for x in found] == ["late", "late"]
    assert taken.is_set()


def test_two_groups_wait_for_the_same_rank():
    """A thread raises one error for both, which ends nothing and comes once."""
    taken, found, is_free = [threading.Event() for _ in range(3)], [], threading.Lock()
    is_free.acquire()

    def run():
        for _ in range(6):
            try:
                is_free.acquire(timeout=0.5)  # without Python
            except RuntimeError as error:
                found.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.1)
    for number, is_taken in enumerate(taken):
        raise_in_thread(thread.ident, f"late in {number}", is_taken)
    time.sleep(1)
    assert found == ["late in 0\nlate in 1\nlate in 2"]
    assert all(x.is_set() for x in taken)
    raise_in_thread(thread.ident, "late again", again := threading.Event())
    thread.join(20)
    assert found[1:] == ["late again"]
    assert again.is_set()


def test_an_error_of_a_backward_comes_once():
    """What a thread of autograd raises comes out of the call of `backward`, and no second one behind it."""
    now, found, is_over = [0.0], [], threading.Lock()
    passes = Passes("cp", 0, lambda: TIMEOUT, Scene(), lambda: None, clock=lambda: now[0])
    is_over.acquire()

    def autograd():
        passes.enqueued(passes._pending[0], Event())
        now[0] = TIMEOUT
        passes.look()
        try:
            passes.begin(is_backward=True)
        except RuntimeError as error:
            found.append(str(error))
        is_over.release()

    def run():
        passes.begin(is_backward=False)
        threading.Timer(0.1, autograd).start()
        try:
            is_over.acquire()  # without Python, as in `backward`
            for _ in range(20):
                time.sleep(0.01)
        except RuntimeError:
            found.append("again")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert len(found) == 1
    assert "pass 1: rank 1 is not in 1" in found[0]


def test_a_process_that_was_stopped_waits_once_more():
    """As under a scheduler that suspends a job: others go on a moment later than this rank."""
    scene = Scene()
    scene.enqueue(Event())
    scene.now += 10 * TIMEOUT
    scene.passes.was_stopped()
    assert scene.look(0.9 * TIMEOUT) is not None
    assert scene.passes.error is None
    scene.look(0.1 * TIMEOUT)
    assert "has waited 20 s" in scene.passes.error


def test_a_late_look_says_that_the_process_was_stopped(monkeypatch):
    stopped = []

    class Late:
        def look(self):
            return None if stopped else 0.1

        def was_stopped(self):
            stopped.append(1)

    late, watcher = Late(), Watch()
    monkeypatch.setattr(watch, "SECONDS_OF_A_STOP", -0.05)
    watcher.add(late)
    watcher.wake()
    time.sleep(0.5)
    watcher.stop()
    watcher._thread.join(10)
    assert stopped == [1]


def test_a_watch_that_fails_says_so_and_keeps_no_events(monkeypatch, caplog):
    def prepare():
        raise ImportError("no bindings")

    watcher, stream = Watch(prepare), Gpu()
    group = torch.distributed.HashStore()  # anything that can be referred to
    passes = Passes("cp", 0, lambda: TIMEOUT, Scene(), lambda: None)
    monkeypatch.setattr(_compat, "current_stream", lambda device: stream)
    monkeypatch.setattr(watch, "is_recorded", lambda device: False)
    monkeypatch.setattr(watch, "_watch", watcher)
    monkeypatch.setattr(watch, "_passes", {group: passes})
    for _ in range(3):
        with watch.watched(group, torch.device("cuda"), is_backward=False):
            pass
        if watcher._thread is not None:
            watcher._thread.join(10)
    assert len(passes._pending) <= 1
    assert "nobody looks after ranks that are late" in caplog.text


def test_the_thread_sleeps_and_wakes():
    looks = []

    class Three:
        def look(self):
            looks.append(1)
            return 0.001 if len(looks) % 3 else None

    three, watcher = Three(), Watch()
    watcher.add(three)
    for number in (3, 6):
        watcher.wake()
        time.sleep(0.3)
        assert len(looks) == number
    watcher.stop()
    watcher._thread.join(10)
    assert not watcher._thread.is_alive()


class Group:
    """As much of a process group as a watch asks."""

    group_name = "cp"

    def rank(self):
        return 0

    size = rank


def test_groups_that_nobody_waits_for_are_not_released(monkeypatch):
    """Their next uses would begin early, and nothing would say so."""
    released, cp, gradients, other = [], Group(), Group(), Group()
    monkeypatch.setattr(_compat, "current_stream", lambda device: Gpu())
    monkeypatch.setattr(watch, "is_recorded", lambda device: False)
    monkeypatch.setattr(watch, "_watch", Watch())
    monkeypatch.setattr(watch, "release", released.append)
    monkeypatch.setattr(_compat, "timeout_of", lambda group, device: SHORT)
    for group, reduce_group in ((cp, gradients), (other, None)):
        for is_backward in (False, True):
            with watch.watched(group, torch.device("cuda"), reduce_group, is_backward=is_backward):
                pass
    watch._passes[cp]._release()
    assert set(released) == {cp, gradients}
    watch._watch.stop()


# Whole processes, of which one ends or stops


class Gpu:
    """Whoever waits for it is held as by `torch.cuda.synchronize`, until what it waits for is released."""

    def __init__(self):
        self.is_free = threading.Event()

    def record_event(self):
        return self

    query = property(lambda self: self.is_free.is_set)


def wait_for_a_rank(group, how, can_be_released, path):
    """Rank 1 takes part in one pass and then ends or stops; rank 0 waits for it."""
    patch, gpu, device = pytest.MonkeyPatch(), Gpu(), torch.device("cuda")
    patch.setattr(_compat, "current_stream", lambda device: gpu)
    patch.setattr(watch, "is_recorded", lambda device: False)
    patch.setattr(watch, "_watch", Watch())
    patch.setattr(watch, "release", lambda group: gpu.is_free.set() if can_be_released else None)
    patch.setattr(watch, "SECONDS_TO_TAKE_AN_ERROR", 1.0)
    patch.setattr(_compat, "timeout_of", lambda group, device: SHORT)
    gpu.is_free.set()
    with watch.watched(group, device, is_backward=False):
        pass
    while watch._passes[group]._pending:  # has been seen to be done
        time.sleep(0.01)
    torch.distributed.barrier(group)
    if group.rank() == 1:
        os.kill(os.getpid(), how)
    gpu.is_free.clear()
    if not can_be_released:
        sys.stderr = open(path, "w")  # noqa: SIM115

    def synchronize():
        gpu.is_free.wait(60)
        time.sleep(60)

    begin = time.monotonic()
    with watch.watched(group, device, is_backward=True):
        pass
    with pytest.raises(RuntimeError, match=r"for the end of a backward .* pass 2: rank 1 did not"):
        synchronize()
    waited = time.monotonic() - begin
    with (
        pytest.raises(RuntimeError, match="pass 2: rank 1 did not"),
        watch.watched(group, device, is_backward=False),
    ):
        pass
    return waited


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_is_gone(how):
    ranks = Ranks(2)
    try:
        ranks.start(wait_for_a_rank, how, True, "")
        assert 2.0 <= ranks.result_of(0, 30) < 10.0
    finally:
        ranks.close()


def test_a_process_that_cannot_be_released_ends(tmp_path):
    path = tmp_path / "stderr"
    ranks = Ranks(2)
    try:
        ranks.start(wait_for_a_rank, signal.SIGKILL, False, path)
        assert ranks.exit_code_of(0, 30) == 1
        assert "pass 2: rank 1 did not take part in time" in path.read_text()
    finally:
        ranks.close()
