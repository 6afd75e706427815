from magi_compile.kernels.sm90.kernel import CudaKernel, padded_cuda_kernel

__all__ = ["CudaKernel", "padded_cuda_kernel"]
