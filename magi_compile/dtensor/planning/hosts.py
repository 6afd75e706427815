"""Ranks that share a host: as a caller says it, or the launcher of the job does.

A host stands for any ranks that reach each other by links much faster than those to other ranks: a machine, or a rack
whose links are as fast.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import groupby


def check_hosts(hosts: int | Sequence[int] | None) -> None:
    """Raises where `hosts` is not what `ContextParallelOptions` takes."""
    if hosts is None:
        return
    listed = [hosts] if isinstance(hosts, int) else hosts
    if isinstance(hosts, (str, bytes)) or not isinstance(listed, Sequence):
        raise TypeError(
            f"`hosts` must be None, a number of ranks or the host of each rank, got {hosts!r}"
        )
    for x in listed:
        if isinstance(x, bool) or not isinstance(x, int):
            raise TypeError(f"`hosts` must be integers, got {x!r}")
    if min(listed, default=0) < (1 if isinstance(hosts, int) else 0):
        least = "1 rank of a host or more" if isinstance(hosts, int) else "numbers from 0 on"
        raise ValueError(f"`hosts` must be {least}, got {hosts}")


def hosts_of(hosts: int | Sequence[int] | None, cp_size: int) -> tuple[int, ...] | None:
    """The host of each rank, numbered from 0 on in the order of ranks; None where all are on one. `hosts` as in
    `ContextParallelOptions`; raises ValueError if they are not as many as ranks."""
    if hosts is None:
        return None
    if isinstance(hosts, int):
        hosts = [rank // hosts for rank in range(cp_size)]
    if len(hosts) != cp_size:
        raise ValueError(f"`hosts` must be the host of each of {cp_size} ranks, got {len(hosts)}")
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return tuple(numbers[host] for host in hosts) if len(numbers) > 1 else None


def launched_ranks() -> int:
    """The ranks that torchrun says are on each host, neighbours; 0 where nobody says it, or hosts do not have equally
    many."""
    names = ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE")
    given = {name: os.environ[name] for name in names if os.environ.get(name, "").isdecimal()}
    local, total = (int(given.get(name, 0)) for name in names[:2])
    if not local or total % local or int(given.get(names[2], total // local)) * local != total:
        return 0
    return local


def launched_hosts(ranks: Sequence[int]) -> tuple[int, ...] | None:
    """The host of each of `ranks`, numbers in the job, as `hosts_of` has it, by `launched_ranks`; None too where that
    is not known."""
    local = launched_ranks()
    return hosts_of([rank // local for rank in ranks], len(ranks)) if local else None


def neighbours_on_hosts(hosts: Sequence[int] | None) -> int:
    """How many neighbours share a host wherever ranks are cut into groups of so many; 1 where all are on one host."""
    if hosts is None:
        return 1
    return math.gcd(*(len(list(ranks)) for _, ranks in groupby(hosts)))
