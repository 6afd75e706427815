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


PROGRAMS = [
    *(
        "same_launches",
        "masks",
        "bit_blocks",
        "by_entry",
        "mask_bits",
        "block_tables",
        "other_shapes",
        "same_tensors",
    ),
    *("other_devices", "errors", "nothing_is_lost", "it_comes_late"),
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
