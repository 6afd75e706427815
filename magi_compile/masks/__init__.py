"""Masks: the keys that each query may attend to. Knows nothing of tiles, kernels or torch.compile."""

# What is not in `__all__` is for the other layers of this package.
from magi_compile._checks import MaskCheck  # noqa: F401
from magi_compile.masks import library
from magi_compile.masks.block_mask import create_block_mask, slices_from_block_mask
from magi_compile.masks.errors import UnsupportedMaskError
from magi_compile.masks.evaluation.row_intervals import RowIntervals, row_intervals  # noqa: F401
from magi_compile.masks.evaluation.to_slices import (  # noqa: F401
    padded_slices_from_intervals,
    slices_from_intervals,
)
from magi_compile.masks.picture import plot
from magi_compile.masks.program.program import MaskProgram  # noqa: F401
from magi_compile.masks.program.read import TracedMask, trace_mask_mod  # noqa: F401
from magi_compile.masks.selection import select_blocks
from magi_compile.masks.shared_prefixes import PackedPrefixes, pack_shared_prefixes
from magi_compile.masks.slices import AttnSlice, AttnSlices, MaskType

__all__ = [
    "AttnSlice",
    "AttnSlices",
    "MaskType",
    "PackedPrefixes",
    "UnsupportedMaskError",
    "create_block_mask",
    "library",
    "pack_shared_prefixes",
    "plot",
    "select_blocks",
    "slices_from_block_mask",
]
