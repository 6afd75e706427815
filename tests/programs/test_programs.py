"""What users write around a compiled model computes what dense attention does: each program in a process that has run
nothing else, or behind others that leave nothing behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT = 600

# One process for each line, in front of a quick compiler.
PROCESSES = {
    "quick": [
        [
            "plain",
            "module_compile",
            "accumulation",
            "several_forwards",
            "only_attention",
            "threads",
        ],
        ["inference_first", "evaluation", "autocast", "copies", "copy_of_an_optimized_module"],
        ["reentrant_around_blocks", "reentrant_inside", "non_reentrant_inside", "selective_inside"],
        ["non_reentrant_around_blocks", "selective_around_blocks"],
        ["fsdp2"],
    ],
}
SLOW_PROCESSES = {
    "quick": [["selective_policy_first"], ["ddp"]],
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
        ["fsdp2"],
    ],
}
GPU = ["cuda_graphs"]


def runs(processes, *marks):
    return [
        pytest.param(door, names, id=f"{door}-{names[0]}", marks=marks)
        for door, lines in processes.items()
        for names in lines
    ]


RUNS = [*runs(PROCESSES), *runs(SLOW_PROCESSES, pytest.mark.slow)]


@pytest.fixture(scope="session")
def compiled_code(tmp_path_factory):
    """A folder that the programs share, as those of one user do."""
    return tmp_path_factory.mktemp("inductor")


def failures(folder, door, names):
    """What went wrong in these programs, which run in one process."""
    command = [sys.executable, "-m", "tests.programs.programs", door, *names]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    try:
        ended = subprocess.run(command, timeout=TIMEOUT, **options)
        printed, error = ended.stdout, ended.stderr
    except subprocess.TimeoutExpired as expired:
        printed, error = (expired.stdout or b"").decode(), f"not done after {TIMEOUT} s"
    said = dict(line.partition(": ")[::2] for line in printed.splitlines())
    verdicts = {name: said.get(name, f"said nothing\n{error}") for name in names}
    return [
        f"{name}: {verdict}".replace("\x1f", "\n")
        for name, verdict in verdicts.items()
        if verdict != "ok"
    ]


@pytest.mark.parametrize(("door", "names"), RUNS)
def test_programs(compiled_code, door, names):
    failed = failures(compiled_code, door, names)
    assert not failed, "\n".join(failed)


@pytest.mark.gpu
@pytest.mark.parametrize("door", ["magi", "enable"])
def test_programs_on_a_gpu(compiled_code, door):
    failed = failures(compiled_code, door, GPU)
    assert not failed, "\n".join(failed)


def test_every_program_runs():
    from tests.programs.programs import programs

    given = [param.values for param in RUNS]
    of_doors = {
        door: {x for name, names in given if name == door for x in names}
        for door in ("quick", "magi")
    }
    assert set().union(*(names for _, names in given)) | {*GPU} == programs().keys()
    assert of_doors["magi"] - of_doors["quick"] == {"reduce_overhead"}  # of Inductor alone
