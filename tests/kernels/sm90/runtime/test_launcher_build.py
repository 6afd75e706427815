"""The compiler of the launcher runs beside the process, whose calls go through Python until it is done."""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile import _warnings
from magi_compile.kernels.sm90.runtime import launcher_build, native
from magi_compile.ops import repeatable

LIBRARY = bytes(range(256)) * 100
COMPILER = """#!/bin/sh
echo asked >> {place}/asked
while [ -e {place}/wait ]; do sleep 0.01; done
while [ "$1" != "-o" ]; do shift; done
cp {place}/library "$2"
"""
NO_COMPILER = "#!/bin/sh\necho no such option >&2\nexit 1\n"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A compiler that notes that it was asked, waits while a file is there, and writes something."""
    monkeypatch.setenv("MAGI_COMPILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("MAGI_COMPILE_LAUNCHER", raising=False)
    monkeypatch.setattr(_warnings, "_said", set())
    (tmp_path / "library").write_bytes(LIBRARY)
    use_compiler(monkeypatch, tmp_path, COMPILER.format(place=tmp_path))
    launcher_build._begun.cache_clear()
    yield tmp_path
    launcher_build._begun.cache_clear()
    native._loaded.cache_clear()


def use_compiler(monkeypatch, place, text):
    compiler = place / "compiler"
    compiler.write_text(text)
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))


def num_asked(place):
    return len((place / "asked").read_text().splitlines())


def built():
    with os.fdopen(launcher_build.build(), "rb") as library:
        return library.read()[: len(LIBRARY)]


def test_a_launcher_is_built_once(place):
    assert [built(), built()] == [LIBRARY] * 2
    assert num_asked(place) == len(list((place / "cache").iterdir())) == 1


@pytest.mark.parametrize(
    "damage", [lambda x: x[: len(x) // 2], lambda x: b"", lambda x: b"\0" * len(x)]
)
def test_a_broken_launcher_is_built_again(place, damage):
    built()
    (kept,) = (place / "cache").glob("launcher-*.so")
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    assert built() == LIBRARY
    assert kept.read_bytes() == whole
    assert num_asked(place) == 2


def test_a_launcher_without_a_cache(place, caplog):
    (place / "cache").write_text("a file")
    assert [built(), built()] == [LIBRARY] * 2
    assert num_asked(place) == 2
    (record,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert f"kernels are not kept in {place / 'cache'}, so" in record.message


def test_a_compiler_that_fails(place, monkeypatch):
    use_compiler(monkeypatch, place, NO_COMPILER)
    with pytest.raises(OSError, match=r"-ldl failed: no such option"):
        launcher_build.build()
    monkeypatch.setenv("CXX", "")
    monkeypatch.setattr(launcher_build.shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="there is no C"):
        launcher_build.build()


def test_the_verified_file_is_loaded(place, monkeypatch):
    """Whatever its name leads to by now: a file that is cut off ends the process that loads it."""
    loaded = []

    def load(path):
        loaded.append(Path(path).read_bytes()[: len(LIBRARY)])
        raise OSError("no library")

    monkeypatch.setattr(native.ctypes, "CDLL", load)
    library = launcher_build.build()
    (kept,) = (place / "cache").iterdir()
    kept.unlink()
    kept.write_bytes(b"broken")
    with pytest.raises(OSError, match="no library"):
        native.Launcher(library)
    assert loaded == [LIBRARY]
    os.close(library)


@pytest.fixture
def loaded(monkeypatch):
    """What became of libraries: in place of a launcher, one that notes what it takes over."""
    taken = []

    class Loaded:
        def __init__(self, library):
            os.close(library)

        def register(self, name, *how):
            taken.append(name)

    monkeypatch.setattr(native, "Launcher", Loaded)
    repeatable._register.cache_clear()
    yield taken
    repeatable._register.cache_clear()


def until(condition):
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("never")


def test_no_call_waits_for_the_compiler(place, loaded):
    (place / "wait").touch()
    for _ in range(3):
        repeatable.hand_over_to_launcher()
        assert native.launcher() is None
    until((place / "asked").exists)
    assert loaded == []
    (place / "wait").unlink()
    until(native.launcher)
    for _ in range(2):
        repeatable.hand_over_to_launcher()
    assert sorted(loaded) == sorted(repeatable.REPEATABLE)
    assert num_asked(place) == 1
    assert native.launcher() is native.launcher()


@pytest.mark.parametrize("text", [NO_COMPILER, None])
def test_without_a_compiler_it_is_said_once(place, loaded, monkeypatch, caplog, text):
    caplog.set_level(logging.INFO)
    if text is None:
        monkeypatch.setenv("CXX", str(place / "no-such-compiler"))
    else:
        use_compiler(monkeypatch, place, text)
    build = launcher_build.begin()
    until(lambda: build is None or build.is_done())
    for _ in range(3):
        repeatable.hand_over_to_launcher()
    assert loaded == []
    (record,) = (record for record in caplog.records if "no launcher: " in record.message)
    assert record.levelno == logging.INFO


def test_a_launcher_that_is_switched_off_is_not_built(place, loaded, monkeypatch):
    monkeypatch.setenv("MAGI_COMPILE_LAUNCHER", "0")
    repeatable.hand_over_to_launcher()
    assert loaded == []
    assert not (place / "asked").exists()


ENDS = """
import os, sys
from magi_compile.kernels.sm90.runtime import launcher_build
build = launcher_build.begin()
child = os.fork()
if child == 0:  # which has nothing to do with that compiler, and ends first
    sys.exit(launcher_build._begun.cache_info().currsize != 1)
_, status = os.waitpid(child, 0)
assert status == 0 and not build.is_done()
print(build._compiler._directory, build._compiler._process.pid)
print(build._compiler._directory.is_dir())
"""


def test_the_compiler_ends_with_the_process(place):
    (place / "wait").touch()
    done = subprocess.run(
        [sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60, check=True
    )
    told, was_there = done.stdout.splitlines()
    directory, process = told.split()
    assert was_there == "True"
    assert not Path(directory).exists()
    assert not Path(f"/proc/{process}").exists()
