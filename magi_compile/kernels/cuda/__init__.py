from magi_compile.kernels.cuda.kernel import CudaKernel, padded_cuda_kernel

__all__ = ["CudaKernel", "padded_cuda_kernel"]
