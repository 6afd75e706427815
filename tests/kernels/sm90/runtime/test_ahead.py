"""Kernels are compiled once, by whichever thread comes first, and an error shows where the kernel is needed."""

import os
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")

from magi_compile.kernels.sm90.runtime import ahead
from magi_compile.kernels.sm90.runtime.nvrtc import CompileError, Variant

VARIANTS = [Variant("source.cu", f"entry_{i}") for i in range(12)]


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that notes what it was asked, in which thread, and waits until it is `opened`."""

    class Compiler:
        def __init__(self):
            self.asked, self.threads = [], []
            self.opened = threading.Event()
            self.fails = False

        def __call__(self, variant):
            self.asked.append(variant)
            self.threads.append(threading.current_thread())
            assert self.opened.wait(10)
            if self.fails:
                raise CompileError(f"{variant.entry} does not compile")
            return variant.entry.encode()

    compiler = Compiler()
    monkeypatch.setattr(ahead, "compile_variant", compiler)
    yield compiler
    compiler.opened.set()


@pytest.fixture
def compilations():
    return ahead.Compilations()


def until(condition):
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("never")


def test_threads_compile_while_the_caller_goes_on(compiler, compilations):
    compilations.begin(VARIANTS)
    most = min(ahead.MOST_THREADS, os.cpu_count())
    until(lambda: len(compiler.asked) == most)
    compiler.opened.set()
    assert [compilations.cubin_of(x) for x in VARIANTS] == [x.entry.encode() for x in VARIANTS]
    assert sorted(compiler.asked, key=VARIANTS.index) == VARIANTS
    until(lambda: not any(thread.is_alive() for thread in compiler.threads[:most]))


def test_what_waits_for_a_thread_is_compiled_by_who_needs_it(compiler, compilations):
    compilations.begin(VARIANTS)
    until(lambda: compiler.asked)
    found = []
    needs = threading.Thread(target=lambda: found.append(compilations.cubin_of(VARIANTS[-1])))
    needs.start()
    until(lambda: needs in compiler.threads)
    compiler.opened.set()
    needs.join()
    assert found == [VARIANTS[-1].entry.encode()]
    until(lambda: len(compiler.asked) == len(VARIANTS))
    assert set(compiler.asked) == set(VARIANTS)


def test_what_nothing_needs_yet_waits_for_everything_else(compiler, compilations, monkeypatch):
    """One at a time, and not even that one holds up others."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    siblings, needed, sibling_needed = VARIANTS[:4], VARIANTS[4:], VARIANTS[3]
    compilations.begin(siblings, later=True)
    until(lambda: compiler.asked)
    compilations.begin(needed)
    compilations.begin([sibling_needed])
    until(lambda: len(compiler.asked) == 3)
    assert set(compiler.asked) == {siblings[0], *needed[:2]}
    compiler.opened.set()
    until(lambda: len(compiler.asked) == len(VARIANTS))
    assert compiler.asked[-2:] == siblings[1:3]
    assert {x.entry for x in VARIANTS} == {compilations.cubin_of(x).decode() for x in VARIANTS}


@pytest.mark.parametrize("is_needed_first", [False, True])
def test_one_thread_compiles_what_nothing_needs_yet(compiler, compilations, is_needed_first):
    needed = VARIANTS[:1] if is_needed_first else []
    compilations.begin(needed)
    compilations.begin(VARIANTS[1:6], later=True)
    compilations.begin(VARIANTS[6:], later=True)
    until(lambda: compiler.asked)
    time.sleep(0.05)
    assert len(compiler.asked) == 1
    compiler.opened.set()
    until(lambda: len(compiler.asked) == len([*needed, *VARIANTS[1:]]))
    assert compiler.asked == [*needed, *VARIANTS[1:]]
    assert len(set(compiler.threads)) == 1


def test_a_call_does_not_wait_for_what_nothing_needs_yet(compiler, compilations):
    compilations.begin(VARIANTS[:3], later=True)
    until(lambda: compiler.asked)
    needs = threading.Thread(target=lambda: compilations.cubin_of(VARIANTS[2]))
    needs.start()
    until(lambda: needs in compiler.threads)
    compiler.opened.set()
    needs.join()
    until(lambda: len(compiler.asked) == 3)
    assert sorted(compiler.asked, key=VARIANTS.index) == VARIANTS[:3]


@pytest.mark.parametrize("begins", [False, True])
def test_many_threads_ask_at_once(compiler, compilations, begins):
    found = []

    def work():
        if begins:
            compilations.begin(VARIANTS[:2])
        found.append([compilations.cubin_of(x) for x in VARIANTS[:2]])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    compiler.opened.set()
    for thread in threads:
        thread.join()
    assert found == [[x.entry.encode() for x in VARIANTS[:2]]] * 8
    assert sorted(compiler.asked, key=VARIANTS.index) == VARIANTS[:2]


def test_an_error_shows_where_the_kernel_is_needed(compiler, compilations):
    compiler.fails = True
    compiler.opened.set()
    compilations.begin(VARIANTS[:1])
    until(lambda: compilations._known[VARIANTS[0]].done())
    compilations.begin(VARIANTS[:1])
    with pytest.raises(CompileError, match="entry_0 does not compile"):
        compilations.cubin_of(VARIANTS[0])
    assert len(compiler.asked) == 1
    compiler.fails = False  # as where a disk was full: the next call tries again
    assert compilations.cubin_of(VARIANTS[0]) == b"entry_0"
    assert compilations.cubin_of(VARIANTS[0]) == b"entry_0"
    assert len(compiler.asked) == 2


def test_who_is_interrupted_while_another_thread_forks_may_ask_again(
    compiler, compilations, monkeypatch
):
    def interrupted(condition):
        raise KeyboardInterrupt

    compiler.opened.set()
    with monkeypatch.context() as patch:
        patch.setattr(compilations._changes, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compilations.cubin_of(VARIANTS[0])
    found = []
    asks = threading.Thread(
        target=lambda: found.append(compilations.cubin_of(VARIANTS[0])), daemon=True
    )
    asks.start()
    asks.join(10)
    assert found == [b"entry_0"]
    compilations.before_fork()  # which waits for nobody
    compilations.after_fork()


ENDS = """
import sys, time
from magi_compile import warm_up
from magi_compile.kernels.sm90.runtime import ahead
variants = list(warm_up.variants())
ahead.begin(variants)
time.sleep(0.1)
print(time.time(), flush=True)
sys.exit(3)
"""


def test_a_process_ends_while_threads_compile(tmp_path):
    """It waits for what they are at, not for the four CPU minutes of all kernels."""
    environment = {**os.environ, "MAGI_COMPILE_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", ENDS],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 3, done.stderr
    assert done.stderr == ""
    assert time.time() - float(done.stdout) < 30


FORKS = """
import os, sys, time
from magi_compile import warm_up
from magi_compile.kernels.sm90.runtime import ahead
variants = [x for x in warm_up.variants() if x.entry in ("ffa_backward_postprocess", "ffa_forward_merge")][:8]
ahead.begin(variants)
time.sleep(0.05)
children = []
for variant in variants[:3]:
    child = os.fork()
    if child == 0:
        ahead.begin(variants[:1])
        os._exit(not all(ahead.cubin_of(x).startswith(b"\\x7fELF") for x in (variant, variants[-1])))
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 3
assert all(ahead.cubin_of(x).startswith(b"\\x7fELF") for x in variants)
"""


def test_a_fork_while_threads_compile(tmp_path):
    """NVRTC's locks are free in the child, which compiles what the parent's threads were to."""
    environment = {**os.environ, "MAGI_COMPILE_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
