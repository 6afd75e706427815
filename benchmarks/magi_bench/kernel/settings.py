"""What holds for all cells of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from magi_bench.kernel.timing import Protocol
from magi_bench.workloads.cells import PASSES


@dataclass
class Settings:
    """What holds for all cells of a run.

    Attributes:
        device: "cuda" or "cpu".
        command: how the run was started, for the record.
        passes: of `cells.PASSES`.
        protocol: how a call is timed.
        gate_seqlen: the longest sequence that numbers are checked at.
        cell_limit_s: after which a contender's cell is given up.
        time_limit_s: after which no further cell starts.
        jobs: how many contenders prove themselves at a time.
    """

    device: str
    command: list[str] = field(default_factory=list)
    passes: tuple[str, ...] = PASSES
    protocol: Protocol = field(default_factory=Protocol)
    gate_seqlen: int = 2048
    cell_limit_s: float = 120.0
    time_limit_s: float = float("inf")
    jobs: int = 1
