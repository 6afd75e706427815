"""The processes of a run: started here or by torchrun, and what they tell each other."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from magi_bench.clock import Alone

#: How long ranks wait for one that raised or crashed by itself.
TIMEOUT = datetime.timedelta(minutes=5)


class World(Alone):
    """All ranks in a `mesh` of one dimension, seen from one of them with its `device`. A group is there already."""

    def __init__(self, kind: str):
        self.kind = kind
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.mesh: DeviceMesh = init_device_mesh(kind, (self.size,))
        self.group = self.mesh.get_group()
        index = torch.cuda.current_device() if kind == "cuda" else None
        self.device = torch.device(kind) if index is None else torch.device(kind, index)

    def meet(self) -> None:
        self.total(torch.zeros(1, device=self.device))
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def slowest(self, number: float) -> float:
        return max(self.all_of(number))

    def all_of(self, thing: Any) -> list[Any]:
        """The values of all ranks, in their order; anything that can be pickled."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, thing, self.group)
        return found

    def total(self, x: Tensor) -> Tensor:
        """`x` becomes the sum over ranks."""
        dist.all_reduce(x, group=self.group)
        return x


def is_launched() -> bool:
    """True if torchrun has started this process, as one of several."""
    return dist.is_torchelastic_launched()


def start(function: Callable[..., int], num_ranks: int, kind: str, *arguments: Any) -> int:
    """Runs `function(world, *arguments)`, which gives an exit code, on all ranks: those that torchrun has started, or
    else `num_ranks` new processes. Gives the largest; a rank that raised raises here."""
    if is_launched():
        local, size = (int(os.environ[f"LOCAL_{x}"]) for x in ("RANK", "WORLD_SIZE"))
        return _run(local, None, size, kind, function, arguments)
    # By TCP, as torchrun's: a store in a file asks it every 10 ms, which a rank with a new plan would wait for.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    results = mp.get_context("spawn").SimpleQueue()
    rest = (store.port, num_ranks, kind, function, arguments, results)
    mp.spawn(_run, rest, nprocs=num_ranks)  # type: ignore[no-untyped-call]
    return max(results.get() for _ in range(num_ranks))


def _run(
    rank: int,
    port: int | None,
    num_ranks: int,
    kind: str,
    function: Callable[..., int],
    arguments: tuple[Any, ...],
    results: Any = None,
) -> int:
    """One rank, from its beginning to its end; `rank` and `num_ranks` are those of its machine."""
    device = None
    if kind == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    threads = (os.cpu_count() or 1) // num_ranks if kind == "cpu" else 1  # as torchrun has it
    torch.set_num_threads(max(threads, 1))
    where: dict[str, Any] = {}
    if port is not None:
        where = {"store": dist.TCPStore("localhost", port), "rank": rank, "world_size": num_ranks}
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT, device_id=device, **where)
    try:
        result = function(World(kind), *arguments)
    finally:
        dist.destroy_process_group()
    if results is not None:
        results.put(result)
    return result
