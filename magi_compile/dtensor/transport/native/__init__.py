"""Group collectives in memory that all ranks of a host share: rows are read where they lie, over NVLink.

    cast      publish rows; meet; read what the route names
    reduce    publish partial results; meet; read what the route names; add it up, in the order of ranks

Publishing is one copy into symmetric memory, and nothing is packed for a receiver. Ranks meet by flags in that
memory, set and awaited by the streams themselves: no thread of the GPU and none of the host waits.
"""

from magi_compile.dtensor.transport.native.collective import NativeCollective

__all__ = ["NativeCollective"]
