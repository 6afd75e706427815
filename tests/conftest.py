import gc
import hashlib
import os
from pathlib import Path

# One thread for each process: workers of pytest and the ranks that tests start would wait for each other's threads.
# Read when PyTorch is imported; a variable of the shell wins.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Likewise Inductor: no pool of compilers beside each worker and each program that tests start.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Programs that tests start find magi_bench, which is not installed with magi_compile.
# Inductor's cache on disk may have code that was compiled around an op of ours with other strides.
os.environ.setdefault(
    "TORCH_COMPILE_CACHE_KEY_TAG",
    hashlib.sha256(
        b"".join(
            x.read_bytes() for x in sorted(Path(__file__).parents[1].glob("magi_compile/**/*.py"))
        )
    ).hexdigest()[:16],
)
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1] / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

import pytest
import torch

# Some virtual machines announce AMX and fault on its first instruction, in PyTorch's own bf16 matmul. Results do not
# depend on it, so tests run without; oneDNN reads this at its first use.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


def pytest_collection_modifyitems(items):
    """GPU tests skip with a reason where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What collection leaves behind stays until the end: a million objects of modules and tests, which would cost every
    garbage collection of the run two thirds of a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_unconfigure():
    """A library that counts its objects at its end would miss frozen ones, and say so."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A half of the tests for each of two workers, and who is done takes from the other: neighbours share fixtures, and
    nobody idles at the end."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)
