from magi_compile.kernels.sm90.kernel import HopperKernel

__all__ = ["HopperKernel"]
