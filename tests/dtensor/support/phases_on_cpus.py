"""A kernel for CPUs whose backward waits for keys when it needs them, and gives away their gradients before dq."""

from magi_compile.kernels.base import Saved
from magi_compile.kernels.cpu import CpuKernel

steps: list[str] = []  # of all calls: what happened in which order


class PhasedCpuKernel(CpuKernel):
    name = "phased_cpu"

    def backward(self, *arguments, **options):
        steps.append("one call")
        return super().backward(*arguments, **options)

    def phased_backward(self, grads, saved, *rest):
        return Pass(super(), grads, saved, rest)


class Pass:
    def __init__(self, kernel, grads, saved, rest):
        self.kernel, self.grads, self.saved, self.rest = kernel, grads, saved, rest

    def begin(self):
        steps.append("begin")

    def main(self, keys):
        assert len(keys.k)
        steps.append("main")
        q, out, lse = self.saved
        saved = Saved(q, keys.k, keys.v, out, lse)
        self.dq, dk, dv = self.kernel.backward(self.grads, saved, *self.rest)
        for room, grad in ((keys.dk, dk), (keys.dv, dv)):
            assert room.is_contiguous()
            room.copy_(grad)

    def finish(self):
        steps.append("finish")
        return self.dq
