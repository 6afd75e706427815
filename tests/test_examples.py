"""The examples' command lines: wrong arguments are told apart from errors, and what runs on any machine is run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launched import launch

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train_gpt.py --steps 0", "--steps: must be a positive integer, got '0'"),
        ("train_gpt.py --heads 3", "--dim must be a multiple of --heads 3, got 256"),
        ("train_gpt.py --kv-heads 3", "--heads must be a multiple of --kv-heads 3, got 4"),
        ("train_gpt.py --device tpu", "--device must be one of cpu"),
        ("plot_masks.py one two", "unrecognized arguments: two"),
    ],
)
def test_bad_arguments(command, message):
    name, *arguments = command.split()
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True
    )
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["context_parallel.py", "trainer.py"])
def test_over_two_ranks(name):
    """Losses over two ranks are those of one process."""
    if name == "trainer.py":
        pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
    run = launch(2, EXAMPLES / name, CUDA_VISIBLE_DEVICES="")
    assert run.returncode == 0, run.stderr
    losses = re.findall(r"loss (\S+), on one process (\S+)", run.stdout)
    assert len(losses) == 8
    for ours, one in losses:
        assert float(ours) == pytest.approx(float(one), abs=1e-4)


@pytest.mark.slow
def test_transformers_packed():
    """Eager and compiled training end with the same loss."""
    pytest.importorskip("transformers")
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / "transformers_packed.py")],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert run.returncode == 0, run.stderr
    eager, compiled = re.findall(r"loss (\S+?)[, ]", run.stdout)
    assert float(compiled) == pytest.approx(float(eager), abs=1e-3)
    assert float(compiled) < 4.0  # log of 64 words is 4.16
    assert "2 of 2 FlexAttention calls lowered to cpu, 1 graph compiled" in run.stdout


@pytest.mark.slow
def test_shared_prefixes():
    """Prompts that are there once give the log-probs and gradients of repeated ones, with fewer tokens."""
    pytest.importorskip("transformers")
    options = ["--prompts", "2", "--rollouts", "4", "--prompt", "24", "--rollout", "8"]
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / "shared_prefixes.py"), *options, "--steps", "1"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert run.returncode == 0, run.stderr
    assert "prompts repeated: 256 tokens" in run.stdout
    assert "prompts once: 118 tokens" in run.stdout
    log_probs, gradients = re.search(
        r"log-probs differ by at most (\S+), gradients by (\S+) of", run.stdout
    ).groups()
    assert float(log_probs) < 1e-5
    assert float(gradients) < 1e-5


def long_sequences(processes, *options):
    """Runs the program at its small size; what it printed."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    run = launch(processes, EXAMPLES / "long_sequences.py", *options, CUDA_VISIBLE_DEVICES="")
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


FIRST_STEP = ("--check", "--steps", "1")


def check_first_step(printed, loss_off, gradients_off):
    loss, one = map(float, re.search(r"loss (\S+), on one process (\S+)", printed).groups())
    assert loss == pytest.approx(one, abs=loss_off)
    off, most = re.search(r"gradients differ by at most (\S+) of (\S+)", printed).groups()
    assert float(off) < gradients_off * float(most)
    assert "step 0: " in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (2, "--documents 4"),
        (2, "--documents 4 --keep-attention host --profile"),
        (4, "--keep-attention gpu"),
        (2, "--strategy transformers"),
    ],
)
def test_long_sequences(processes, options):
    """Sharded weights, checkpoints on the host and kept attention give the first step of one process."""
    printed = long_sequences(processes, *FIRST_STEP, *options.split())
    check_first_step(printed, 2e-5, 1e-5)
    assert ("attention " in printed) == ("--profile" in options)


@pytest.mark.slow
def test_long_sequences_in_bfloat16():
    """The number of labels stays exact where FSDP2 casts a model's arguments; rounded, the loss is off by 0.011."""
    options = ["--documents", "4", "--dtype", "bfloat16"]
    check_first_step(long_sequences(2, *FIRST_STEP, *options), 1e-3, 0.05)


@pytest.mark.slow
def test_long_sequences_with_liger(monkeypatch, tmp_path):
    """The tiled MLP, and the fused loss in Triton's interpreter; the result is a row of magi-bench."""
    pytest.importorskip("liger_kernel")
    pytest.importorskip("magi_bench")
    from magi_bench.results.rows import load

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    path = tmp_path / "rows.jsonl"
    options = ["--tiles", "3", "--fused", "loss", "--keep-attention", "--documents", "4"]
    check_first_step(long_sequences(2, *FIRST_STEP, *options, "--json", str(path)), 2e-5, 1e-5)
    (row,) = load([path]).ok_rows()
    assert row["contender"] == "magi-kept"
    assert row["passes"]["fwdbwd"]["tokens_per_s"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "off"), [("float32", 2e-4), ("bfloat16", 2e-3)])
@pytest.mark.parametrize("processes", [1, 2])
def test_long_sequences_by_trainer(processes, dtype, off):
    """Trainer's loop has the losses of the program's own; it does not count its first step."""

    def losses(processes, *options):
        printed = long_sequences(processes, "--documents", "4", "--dtype", dtype, *options)
        return [*map(float, re.findall(r"step \d+: .* loss (\S+),", printed))]

    _, *plain = losses(2, "--steps", "3")
    by_trainer = losses(processes, "--loop", "trainer", "--steps", "2")
    assert len(plain) == len(by_trainer) == 2
    assert by_trainer == pytest.approx(plain, abs=off)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--documents 3", "--tokens must be a multiple of --documents 3, got 2048"),
        ("--documents 2 --strategy transformers", "--documents must be 1 with --strategy"),
        ("--keep-attention --strategy transformers", "--keep-attention needs --strategy magi"),
        ("--loop trainer --check", "--check, --profile and --warm-up need --loop plain"),
        ("--loop trainer --strategy transformers", "--loop trainer needs GPUs with --strategy"),
        ("--tokens none", "must be a number such as 32, 8192 or 512K, got 'none'"),
        ("", "processes must be started by torchrun, got one alone"),
    ],
)
def test_bad_arguments_of_long_sequences(options, message):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    command = [sys.executable, str(EXAMPLES / "long_sequences.py"), *options.split()]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr
