"""Programs under torchrun, in processes that leave when their program has ended.

While the interpreter is torn down, a thread of gloo that lets go of a tensor aborts its process. That happens at times,
after `destroy_process_group` too, where PyTorch keeps the group (pytorch/pytorch#190489). Nothing is left to do then.
"""

import atexit
import os
import runpy
import subprocess
import sys
from pathlib import Path


def launch(
    processes: int, program: Path, *words: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program with these words in so many processes, for at most 300 s; the result has what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), __file__, str(program), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


class _Process:
    """This process, which ends with code 1 until its program has come to its end."""

    def __init__(self) -> None:
        self._code = 1
        atexit.register(self._leave)  # the first to be registered is the last to be called

    def run(self, program: str) -> None:
        sys.path[0] = str(Path(program).parent)
        try:
            runpy.run_path(program, run_name="__main__")
        except SystemExit as error:
            self._code = error.code if isinstance(error.code, int) else int(error.code is not None)
            raise
        self._code = 0

    def _leave(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self._code)


if __name__ == "__main__":
    del sys.argv[0]
    _Process().run(sys.argv[0])
