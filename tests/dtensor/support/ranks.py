"""A few processes on this machine that run one function together: over gloo, or over NCCL with a GPU each."""

from __future__ import annotations

import datetime
import gc
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = datetime.timedelta(seconds=40)
# Each group of gloo's has a thread that looks a hundred times a second for what has arrived, also when nobody uses it.
MANY_GROUPS = 32
# By tests, and by the first graph of a process: each rank would take two seconds for it.
_IMPORTED = [
    *("pytest", "magi_compile.dtensor.attention", "torch._dynamo.backends.inductor"),
    *("torch._inductor.compile_fx", "torch.distributed.tensor.experimental._attention"),
    *("magi_compile.lowering.backend", "magi_compile.kernels.sm90.kernel"),
    *("torch.export._trace", "networkx"),
]


class Ranks:
    """`size` worker processes; each call runs `function(group, *arguments)` on all of them.

    With the backend "nccl" each has a GPU of its own, which is its current device.
    """

    def __init__(
        self,
        size: int,
        backend: str = "gloo",
        timeout: datetime.timedelta = TIMEOUT,
        *,
        uses_gpus: bool = False,
    ) -> None:
        self.size, self._timeout = size, timeout
        self._directory = tempfile.TemporaryDirectory()
        if uses_gpus or backend == "nccl":
            # What the server imports starts CUDA where there is one, and a fork cannot use that.
            context = mp.get_context("spawn")
        else:
            # Workers are forks of one server, which has only imported what takes long to import.
            context = mp.get_context("forkserver")
            context.set_forkserver_preload(_IMPORTED)
        self._pipes, self._processes = [], []
        self._num_groups = 1
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, backend, timeout, f"{self._directory.name}/store", theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that a dead worker's pipe is at its end
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    @property
    def is_worn(self) -> bool:
        """Whether functions have left so many process groups behind that new workers are cheaper."""
        return self._num_groups > MANY_GROUPS

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        expect_dead: frozenset[int] | set[int] = frozenset(),
    ) -> list[Any]:
        """What the function returned on each rank; fails with the tracebacks of the ranks that raised.

        Ranks of `expect_dead` must end their process instead; their result is None.
        """
        self.start(function, *arguments)
        results, failures, silent = [], [], False
        deadline = time.monotonic() + self._timeout.total_seconds() + 20
        for rank, pipe in enumerate(self._pipes):
            error, result = None, None
            if not pipe.poll(max(deadline - time.monotonic(), 1)):
                error, silent = "did not answer", True  # perhaps because another one raised
            else:
                try:
                    error, result, self._num_groups = pipe.recv()
                except (EOFError, ConnectionResetError):
                    error = "its process ended"
            if rank in expect_dead:
                error = None if error == "its process ended" else "its process is alive"
            results.append(result)
            if error:
                failures.append(f"rank {rank} of {self.size}:\n{error}")
        if silent:
            self.close()
        if failures:
            raise AssertionError("\n".join(failures))
        return results

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Begins what `run` does, where not all ranks are to answer."""
        for pipe in self._pipes:
            pipe.send((function, arguments))

    def result_of(self, rank: int, seconds: float) -> Any:
        """The answer of one rank after `start`, which must come within so many seconds."""
        if not self._pipes[rank].poll(seconds):
            raise AssertionError(f"rank {rank} of {self.size} did not answer within {seconds:g} s")
        try:
            error, result, _ = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            raise AssertionError(f"the process of rank {rank} of {self.size} ended") from None
        if error:
            raise AssertionError(f"rank {rank} of {self.size}:\n{error}")
        return result

    def exit_code_of(self, rank: int, seconds: float) -> int | None:
        """That of the process of one rank, which must end within so many seconds; None if it lives on."""
        self._processes[rank].join(seconds)
        return self._processes[rank].exitcode

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._directory.cleanup()


def _serve(
    rank: int, size: int, backend: str, timeout: datetime.timedelta, store: str, pipe: Any
) -> None:
    gc.freeze()  # what is imported stays until the end
    torch.set_num_threads(1)
    device = None
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=device,
    )
    while True:
        function, arguments = pipe.recv()
        try:
            error, result = None, function(dist.group.WORLD, *arguments)
        except Exception:
            error, result = traceback.format_exc(), None
        pipe.send((error, result, len(dist.distributed_c10d._world.pg_map)))
