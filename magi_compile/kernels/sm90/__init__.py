from magi_compile.kernels.sm90.kernel import CudaKernel

__all__ = ["CudaKernel"]
