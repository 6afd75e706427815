"""The examples' command lines: wrong arguments are told apart from errors."""

import subprocess
import sys
from pathlib import Path

import pytest

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
