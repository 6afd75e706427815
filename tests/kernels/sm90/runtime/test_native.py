"""The launcher in C++ hands the driver what Python does: on a CPU, with a driver that does nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

SUPPORT = Path(__file__).parents[2] / "support"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    path = tmp_path_factory.mktemp("driver") / "idle_driver.so"
    source = SUPPORT / "idle_driver.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(path), str(source)], check=True)
    return path


def run(driver, what, cache_dir):
    """In a process of its own: an op that was taken over stays so."""
    command = [sys.executable, "-m", "tests.kernels.support.launcher_program", str(driver), what]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=SUPPORT.parents[2],
        env={**os.environ, "MAGI_COMPILE_CACHE_DIR": str(cache_dir)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cache") / "magi_compile"


@pytest.mark.parametrize(
    "what",
    [
        "same_launches",
        "masks",
        "bit_blocks",
        "mask_bits",
        "other_shapes",
        "same_tensors",
        "other_devices",
        "errors",
        "nothing_is_lost",
    ],
)
def test_launcher(what, driver, cache_dir):
    assert run(driver, what, cache_dir) == "right\n"
