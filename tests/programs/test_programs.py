"""What users write around a compiled model trains as dense attention does: each program in a process that has run nothing
else, or beside others that leave nothing behind."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT = 200
# No pool of compilers beside every process, and no threads for sizes this small.
FRUGAL = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}

# One process for each line.
PROCESSES = {
    "magi": [
        ["plain", "module_compile", "reduce_overhead", "accumulation", "several_forwards"],
        ["inference_first", "evaluation", "autocast", "only_attention"],
        ["reentrant_around_blocks", "reentrant_inside", "non_reentrant_inside", "selective_inside"],
        ["copies", "copy_of_an_optimized_module"],
        ["non_reentrant_around_blocks", "selective_around_blocks"],
        ["selective_policy_first"],
        ["threads"],
        ["fsdp2", "ddp"],
    ],
    "enable": [
        ["plain", "module_compile", "only_attention", "evaluation", "autocast"],
        ["reentrant_around_blocks", "non_reentrant_inside", "selective_inside"],
        ["non_reentrant_around_blocks"],
        ["export", "aot_inductor"],
        ["threads"],
        ["fsdp2", "ddp"],
    ],
}
GPU = ["cuda_graphs"]

RUNS = [(door, name) for door, lines in PROCESSES.items() for line in lines for name in line]


@pytest.fixture(scope="session")
def verdicts(tmp_path_factory):
    """`verdicts(door, name, ...)`: what these programs print, by name; they share a folder of compiled code."""
    folder = tmp_path_factory.mktemp("inductor")

    @cache
    def run(door, *names):
        command = [sys.executable, "-m", "tests.programs.programs", door, *names]
        environment = {**os.environ, **FRUGAL, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
        try:
            ended = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
            )
            printed, error = ended.stdout, ended.stderr
        except subprocess.TimeoutExpired as expired:
            printed, error = (expired.stdout or b"").decode(), f"not done after {TIMEOUT} s"
        lines = (line.partition(": ") for line in printed.splitlines())
        said = {name: said.replace("\x1f", "\n") for name, _, said in lines}
        return {name: said.get(name, f"said nothing\n{error}") for name in names}

    return run


@pytest.mark.parametrize(("door", "name"), RUNS)
def test_program(verdicts, door, name):
    (names,) = (line for line in PROCESSES[door] if name in line)
    verdict = verdicts(door, *names)[name]
    assert verdict == "ok", verdict


@pytest.mark.gpu
@pytest.mark.parametrize("door", PROCESSES)
@pytest.mark.parametrize("name", GPU)
def test_program_on_a_gpu(verdicts, door, name):
    verdict = verdicts(door, name)[name]
    assert verdict == "ok", verdict


def test_every_program_runs():
    from tests.programs.programs import programs

    assert {name for _, name in RUNS} | {*GPU} == programs().keys()
