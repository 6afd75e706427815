"""The launcher in C++ hands the driver what Python does: on a CPU, with a driver that does nothing."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile import _warnings
from magi_compile.kernels.sm90.runtime import native

SUPPORT = Path(__file__).parents[2] / "support"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    path = tmp_path_factory.mktemp("driver") / "idle_driver.so"
    source = SUPPORT / "idle_driver.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(path), str(source)], check=True)
    return path


PROGRAMS = [
    *(
        "same_launches",
        "masks",
        "bit_blocks",
        "by_entry",
        "mask_bits",
        "other_shapes",
        "same_tensors",
    ),
    *("other_devices", "errors", "nothing_is_lost"),
]


def test_launcher(driver, tmp_path):
    command = [sys.executable, "-m", "tests.kernels.support.launcher_program", str(driver)]
    done = subprocess.run(
        [*command, *PROGRAMS],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=SUPPORT.parents[2],
        env={**os.environ, "MAGI_COMPILE_CACHE_DIR": str(tmp_path / "magi_compile")},
    )
    assert done.stdout.splitlines() == [f"{name}: right" for name in PROGRAMS], done.stderr[-5000:]


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """The directory, and how often the compiler was asked: one that writes something at once."""
    monkeypatch.setenv("MAGI_COMPILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(_warnings, "_said", set())
    asked = []

    def compiler(command, **_):
        asked.append(command)
        Path(command[command.index("-o") + 1]).write_bytes(LIBRARY)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(native.subprocess, "run", compiler)
    return tmp_path / "cache", asked


LIBRARY = bytes(range(256)) * 100


def built():
    file = native.build()
    with os.fdopen(file, "rb") as library:
        return library.read()[: len(LIBRARY)]


def test_a_launcher_is_built_once(compiled):
    directory, asked = compiled
    assert [built(), built()] == [LIBRARY] * 2
    assert len(asked) == len(list(directory.iterdir())) == 1


@pytest.mark.parametrize(
    "damage", [lambda x: x[: len(x) // 2], lambda x: b"", lambda x: b"\0" * len(x)]
)
def test_a_broken_launcher_is_built_again(compiled, damage):
    directory, asked = compiled
    built()
    (kept,) = directory.glob("launcher-*.so")
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    assert built() == LIBRARY
    assert kept.read_bytes() == whole
    assert len(asked) == 2


def test_a_launcher_without_a_cache(compiled, caplog):
    directory, asked = compiled
    directory.write_text("a file")
    assert [built(), built()] == [LIBRARY] * 2
    assert len(asked) == 2
    (record,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert f"kernels are not kept in {directory}, so" in record.message


def test_a_compiler_that_fails(compiled, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "no such option")
    monkeypatch.setattr(native.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(OSError, match=r"-ldl failed: no such option"):
        native.build()
    monkeypatch.setenv("CXX", "")
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="there is no C"):
        native.build()


def test_the_verified_file_is_loaded(compiled, monkeypatch):
    """Whatever its name leads to by now: a file that is cut off ends the process that loads it."""
    loaded = []

    def load(path):
        loaded.append(Path(path).read_bytes()[: len(LIBRARY)])
        raise OSError("no library")

    monkeypatch.setattr(native.ctypes, "CDLL", load)
    library = native.build()
    (kept,) = compiled[0].iterdir()
    kept.unlink()
    kept.write_bytes(b"broken")
    with pytest.raises(OSError, match="no library"):
        native.Launcher(library)
    assert loaded == [LIBRARY]
    os.close(library)
