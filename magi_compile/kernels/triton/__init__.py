from magi_compile.kernels.triton.kernel import TritonKernel

__all__ = ["TritonKernel"]
