"""The custom ops and the public functions over them. Knows nothing of graphs."""

import sys

from magi_compile.ops import (  # noqa: F401  (define the ops)
    checked_slices,
    library,
    mask_bits,
    mask_slices,
    scored,
)
from magi_compile.ops.sharding import register_rules

if (
    "torch.distributed.tensor" in sys.modules
):  # otherwise with the first DTensor that one of our functions is given
    register_rules()
