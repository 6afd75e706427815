"""Triton's CPU interpreter: which one runs is settled when Triton is first imported, hence a process of its own."""

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def run_interpreted(path: Path) -> None:
    """Runs the test file `path` in the interpreter; all its tests must pass."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    """Mends Triton's interpreter, in whose process a test file imports this."""
    from triton.runtime import interpreter

    patch_tensor, patch_lang = interpreter._patch_lang_tensor, interpreter._patch_lang
    patched = set()

    def patch_tensor_and_index(tensor, scope):
        """Triton 3.6 calls int() on arrays of one element, which numpy 2.4 refuses."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: scalar.handle.data.item())

    def patch_once(function):
        """Once a launch: Triton replaces all of its language again for every function that a kernel calls, which takes
        a third of the time."""
        names = {x.__name__ for x in function.__globals__.values() if inspect.ismodule(x)}
        seen = names & {"triton.language", "triton.language.core"}
        if seen <= patched:
            return interpreter._LangPatchScope()
        scope = patch_lang(function)
        patched.update(seen)
        restore = scope.restore
        scope.restore = lambda: (restore(), patched.clear())
        return scope

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_tensor_and_index)
    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
