"""A q walk with tiles in splits, for those who look at it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from magi_compile.kernels.sm90.forward.split_kv import CUT_FIELDS, SplitLayout
from magi_compile.plan.tiles import RUN_FIELDS, TILE_FIELDS


class SplitWalk(NamedTuple):
    """What lies in the tensor of a plan."""

    tiles: Tensor
    runs: Tensor
    shifts: Tensor
    cuts: Tensor  # int32 `[num_cuts, 4]`: the tiles that are cut, then zeros
    num_splits: int  # that there is room for

    @classmethod
    def of(cls, q_tiles: Tensor, q_runs: Tensor, splits: Tensor) -> SplitWalk:
        """What the kernel of `cut_launch` has made of such tiles and runs."""
        at = SplitLayout.of_size(q_tiles.shape[0], q_runs.shape[0], splits.shape[0])
        assert at.size == splits.shape[0]
        runs, tiles = splits[: at.tiles], splits[at.tiles : at.cuts]
        cuts, shifts = splits[at.cuts : at.shifts], splits[at.shifts :]
        tables = (
            x.view(-1, len(fields))
            for x, fields in ((tiles, TILE_FIELDS), (runs, RUN_FIELDS), (cuts, CUT_FIELDS))
        )
        tiles, runs, cuts = tables
        return cls(tiles, runs, shifts, cuts, at.num_splits)

    @property
    def splits_of_cuts(self) -> list[int]:
        """How many splits each cut tile has, sorted."""
        return sorted(num for *_, num in self.cuts.tolist() if num > 0)
