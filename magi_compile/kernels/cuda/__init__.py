from magi_compile.kernels.cuda.kernel import CudaKernel
from magi_compile.kernels.heuristics import CUDA_HEAD_DIMS
from magi_compile.kernels.padded import PaddedKernel


def padded_cuda_kernel() -> PaddedKernel:
    """The Hopper kernels for head dimensions that they do not have."""
    return PaddedKernel("cuda_padded", CudaKernel(), CUDA_HEAD_DIMS)


__all__ = ["CudaKernel", "padded_cuda_kernel"]
