"""Which tile sizes a kernel uses: the only place with tile numbers.

Pure functions of the problem: no environment, no globals, no second table in the device code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from magi_compile.kernels.base import AttnProblem


class PlanTiles(NamedTuple):
    """The tile sizes a plan is built for: the q walk (forward, dq) and the k walk (dk, dv)."""

    q_tile_rows: int
    q_block_cols: int
    k_tile_rows: int
    k_block_cols: int


@dataclass(frozen=True)
class ForwardConfig:
    """The shape of the Hopper forward kernel; each number is a template parameter of `csrc/sm90/fwd.cuh`.

    A thread block is one producer warpgroup and `num_consumers` consumer warpgroups of 64 query rows each.
    """

    tile_rows: int
    block_cols: int
    stages: int
    num_consumers: int
    producer_registers: int
    consumer_registers: int

    @property
    def num_threads(self) -> int:
        return 128 * (self.num_consumers + 1)


# The largest blocks whose Q tile and two stages of K and V fit in 227 KB, and whose accumulators fit in registers.
_FORWARD = {
    64: ForwardConfig(192, 128, 2, 3, 32, 160),
    96: ForwardConfig(128, 128, 2, 2, 24, 240),
    128: ForwardConfig(128, 128, 2, 2, 24, 240),
    192: ForwardConfig(128, 96, 2, 2, 24, 240),
    256: ForwardConfig(128, 80, 2, 2, 24, 240),
}

FORWARD_HEAD_DIMS = tuple(_FORWARD)


def forward_config(problem: AttnProblem) -> ForwardConfig:
    """The Hopper forward kernel for `problem`, whose `head_dim` is one of `FORWARD_HEAD_DIMS`."""
    return _FORWARD[problem.head_dim]


def plan_tiles(problem: AttnProblem, kernel: str = "cuda") -> PlanTiles:
    """The tile sizes of a plan for `problem`, as the kernel called `kernel` walks it ("cuda" or "triton")."""
    if kernel == "cuda":
        forward = forward_config(problem)
        return PlanTiles(forward.tile_rows, forward.block_cols, k_tile_rows=128, k_block_cols=64)
    if kernel == "triton":
        # Triton's blocks are powers of two.
        block_cols = 64 if problem.head_dim <= 128 else 32
        return PlanTiles(128, block_cols, k_tile_rows=block_cols, k_block_cols=64)
    raise ValueError(f'`kernel` must be "cuda" or "triton", got {kernel!r}')
