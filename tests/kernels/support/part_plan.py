"""A q walk with tiles in parts, for those who look at it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from magi_compile.kernels.sm90.forward.split_kv import CUT_FIELDS, PartLayout
from magi_compile.plan.tiles import RUN_FIELDS, TILE_FIELDS


class PartPlan(NamedTuple):
    """What lies in the tensor of a plan."""

    tiles: Tensor
    runs: Tensor
    shifts: Tensor
    cuts: Tensor  # int32 `[num_cuts, 4]`: the tiles that are cut, then zeros
    num_parts: int  # that there is room for

    @classmethod
    def of(cls, q_tiles: Tensor, q_runs: Tensor, parts: Tensor) -> PartPlan:
        """What the kernel of `cut_launch` has made of such tiles and runs."""
        at = PartLayout.of_size(q_tiles.shape[0], q_runs.shape[0], parts.shape[0])
        assert at.size == parts.shape[0]
        runs, tiles = parts[: at.tiles], parts[at.tiles : at.cuts]
        cuts, shifts = parts[at.cuts : at.shifts], parts[at.shifts :]
        tables = (
            x.view(-1, len(fields))
            for x, fields in ((tiles, TILE_FIELDS), (runs, RUN_FIELDS), (cuts, CUT_FIELDS))
        )
        tiles, runs, cuts = tables
        return cls(tiles, runs, shifts, cuts, at.num_parts)

    @property
    def parts_of_cuts(self) -> list[int]:
        """How many parts each cut tile has, sorted."""
        return sorted(num for *_, num in self.cuts.tolist() if num > 0)
