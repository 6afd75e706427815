from magi_compile.kernels.fa4.kernel import Fa4Kernel

__all__ = ["Fa4Kernel"]
