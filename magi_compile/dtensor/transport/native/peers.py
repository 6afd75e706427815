"""Finds out if the ranks of a group reach each other's memory: asked once, by all of them together."""

from __future__ import annotations

import platform
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from magi_compile.dtensor.transport.collectives import Collective, Route

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class RankDevice(NamedTuple):
    """The host and the device of a rank."""

    host: str
    gpu: str  # its UUID


def refusals(group: dist.ProcessGroup, device: torch.device, collective: Collective) -> list[str]:
    """Reasons why `collective` cannot serve `group`; the same on all ranks, which call it together.

    The last question is a cast of one row from every rank to every rank.
    """
    if device.type != "cuda":
        return [f"needs a GPU, got {device}"]
    with torch.cuda.device(device):
        places = _gather(group, RankDevice(_host(), _uuid(device.index)))
        return (
            conflicts(places)
            or _of_all_ranks(group, _unreachable(places, device))
            or _of_all_ranks(group, _failures_of_a_cast(group, device, collective))
        )


def conflicts(places: list[RankDevice]) -> list[str]:
    """Reasons in the places of all ranks that forbid reading each other's memory."""
    found = []
    hosts = sorted({place.host for place in places})
    if len(hosts) > 1:
        found.append(f"ranks must be on one host, got {', '.join(hosts)}")
    ranks_of_gpu = Counter(places)
    shared = [rank for rank, place in enumerate(places) if ranks_of_gpu[place] > 1]
    if shared:
        found.append(f"each rank must have a GPU of its own, but the ranks {shared} share one")
    return found


def _host() -> str:
    """Containers of one machine may have one name, and machines of one image too."""
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    return f"{platform.node()} ({boot})"


def _uuid(index: int | None) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _unreachable(places: list[RankDevice], device: torch.device) -> list[str]:
    """GPUs of peers that this process sees and cannot access."""
    seen = {_uuid(index): index for index in range(torch.cuda.device_count())}
    mine = seen[_uuid(device.index)]
    others = [(rank, seen.get(place.gpu, mine)) for rank, place in enumerate(places)]
    return [
        f"its GPU cannot access that of rank {rank}"
        for rank, other in others
        if other != mine and not torch.cuda.can_device_access_peer(mine, other)
    ]


def _failures_of_a_cast(
    group: dist.ProcessGroup, device: torch.device, collective: Collective
) -> list[str]:
    rank, size = group.rank(), group.size()
    try:
        route = Route.of_peers(rank, [range(size)] * size, 1, device)
        mine = torch.full((1, 16), rank, dtype=torch.int32, device=device)
        for cast in collective.casts([mine], [route], group):
            (got,) = cast.wait()
        if got[:, 0].tolist() != list(range(size)):
            return [f"read {got[:, 0].tolist()} from the memory of the ranks 0 to {size - 1}"]
    except Exception as error:
        return [f"symmetric memory fails: {error}"]
    return []


def _of_all_ranks(group: dist.ProcessGroup, mine: list[str]) -> list[str]:
    """The reasons that any rank has found, in the order of ranks."""
    everybody = _gather(group, mine)
    return [f"rank {rank}: {problem}" for rank, found in enumerate(everybody) for problem in found]


def _gather(group: dist.ProcessGroup, mine: object) -> list:
    everybody: list = [None] * group.size()
    dist.all_gather_object(everybody, mine, group)
    return everybody
