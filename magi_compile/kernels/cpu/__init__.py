from magi_compile.kernels.cpu.kernel import CpuKernel

__all__ = ["CpuKernel"]
