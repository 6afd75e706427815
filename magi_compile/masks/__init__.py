"""What may attend to what. Knows nothing of tiles, kernels or torch.compile."""

from magi_compile._checks import MaskCheck
from magi_compile.masks.block_mask import create_block_mask, slices_from_block_mask
from magi_compile.masks.evaluation.row_intervals import RowIntervals, row_intervals
from magi_compile.masks.evaluation.to_slices import (
    padded_slices_from_intervals,
    slices_from_intervals,
)
from magi_compile.masks.plot import plot
from magi_compile.masks.program.program import MaskProgram
from magi_compile.masks.program.trace import TracedMask, trace_graph, trace_mask_mod
from magi_compile.masks.slices import AttnSlice, AttnSlices, MaskType
from magi_compile.masks.solver.solve import UnsupportedMaskError

__all__ = [
    "AttnSlice",
    "AttnSlices",
    "MaskCheck",
    "MaskProgram",
    "MaskType",
    "RowIntervals",
    "TracedMask",
    "UnsupportedMaskError",
    "create_block_mask",
    "padded_slices_from_intervals",
    "plot",
    "row_intervals",
    "slices_from_block_mask",
    "slices_from_intervals",
    "trace_graph",
    "trace_mask_mod",
]
