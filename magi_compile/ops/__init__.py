"""The custom ops and the public functions over them. Knows nothing of graphs."""

from magi_compile.ops import checked_slices, library, mask_slices  # noqa: F401  (define the ops)
