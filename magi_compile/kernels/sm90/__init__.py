from magi_compile.kernels.sm90.kernel import CudaKernel, NarrowCudaKernel, padded_cuda_kernel

__all__ = ["CudaKernel", "NarrowCudaKernel", "padded_cuda_kernel"]
