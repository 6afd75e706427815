from magi_compile.kernels.cuda.kernel import CudaKernel

__all__ = ["CudaKernel"]
