"""Group collectives in memory that all ranks of a host share: rows are read where they lie, over NVLink.

    cast      publish rows | tell peers | wait for theirs | read what the route names | tell them it is read
    reduce    the same with partial results, then add up what was read, in the order of ranks

Publishing is one copy into symmetric memory, and nothing is packed for a receiver. Ranks tell each other by flags in
that memory, set and awaited by the streams themselves: no thread of the GPU and none of the host waits.
"""

from magi_compile.dtensor.native.collective import NativeCollective

__all__ = ["NativeCollective"]
