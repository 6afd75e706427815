"""The custom ops and the public functions over them. Knows nothing of graphs."""

from magi_compile.ops import library  # noqa: F401  (defines the ops)
