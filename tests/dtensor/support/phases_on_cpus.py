"""A kernel for CPUs whose backward waits for keys when it needs them, and gives away their gradients before dq."""

from magi_compile.kernels.cpu import CpuKernel

steps: list[str] = []  # of all calls: what happened in which order


class PhasedCpuKernel(CpuKernel):
    name = "phased_cpu"

    def backward(self, *arguments):
        steps.append("one call")
        return super().backward(*arguments)

    def backward_in_phases(self, dout, dlse, q, arrive, depart, out, lse, slices, plan, problem):
        steps.append("before")
        k, v, *grads = arrive()
        assert len(k)
        steps.append("arrived")
        dq, *shares = super().backward(dout, dlse, q, k, v, out, lse, slices, plan, problem)
        for grad, share in zip(grads, shares, strict=True):
            assert grad.is_contiguous()
            grad.copy_(share)
        depart(*grads)
        steps.append("departed")
        return dq
