"""The custom ops and the public functions over them. Knows nothing of graphs."""

import sys

from magi_compile.ops import library  # noqa: F401  (defines the ops)
from magi_compile.ops.masks import (  # noqa: F401  (the same)
    checked_slices,
    mask_bits,
    mask_intervals,
    mask_slices,
    mask_table,
    plan_lists,
)
from magi_compile.ops.sharding import register_rules

if (
    "torch.distributed.tensor" in sys.modules
):  # otherwise with the first DTensor that one of our functions is given
    register_rules()
