"""A kernel for CPUs that begins before far keys are there: near keys first, then both results merged."""

from contextlib import nullcontext

import torch

from magi_compile.dtensor.transport.all_to_all import AllToAll
from magi_compile.dtensor.transport.collectives import KernelSignals
from magi_compile.kernels.base import Saved
from magi_compile.kernels.cpu import CpuKernel
from magi_compile.masks.slices import AttnSlices

free: list[int] = []  # the SMs that each forward call was asked to leave free
steps: list[str] = []  # of all backward calls
may_be_early = True  # what the kernel says of its backward


class EarlyCpuKernel(CpuKernel):
    name = "early_cpu"

    def early_plan(self, slices, problem, remote_begin):
        is_far = slices.k_ranges[:, 0] >= remote_begin
        assert bool((is_far | (slices.k_ranges[:, 1] < remote_begin)).all())
        near, far = (
            AttnSlices(
                slices.q_ranges[index],
                slices.k_ranges[index] - shift,
                slices.mask_types[index],
                slices.seqlen_q,
                seqlen_k,
            )
            for index, shift, seqlen_k in (
                (~is_far, 0, remote_begin - 1),
                (is_far, remote_begin, slices.seqlen_k - remote_begin),
            )
        )
        return near, far

    def early_forward(self, q, keys, remote, plan, problem, *, free_sms=0):
        free.append(free_sms)
        return ForwardPass(self, q, keys, remote, plan, problem)

    def backward_may_be_early(self):
        return may_be_early

    def early_backward_plan(self, plan, is_local, problem):
        return plan, is_local

    def early_backward(self, grads, saved, signals, plan, problem):
        assert signals.are_complete - signals.have_arrived == 4
        return BackwardPass(self, grads, saved, plan, problem)


class ForwardPass:
    def __init__(self, kernel, q, keys, remote, plans, problem):
        self.kernel, self.q, self.keys, self.remote = kernel, q, keys, remote
        self.walks = [(slices, kernel.plan(slices, problem), problem) for slices in plans]

    def begin(self):
        wide = torch.promote_types(self.q.dtype, torch.float32)
        self.first = self.kernel.forward(self.q, *self.keys, *self.walks[0], out_dtype=wide)

    def beside(self):
        return nullcontext()

    def main(self):
        remote = (self.q, *self.remote, *self.walks[1])
        self.result = self.kernel.forward(*remote, prior=self.first)

    def finish(self):
        return self.result


class BackwardPass:
    def __init__(self, kernel, grads, saved, plan, problem):
        self.kernel, self.grads, self.saved, self.problem = kernel, grads, saved, problem
        self.plan, self.is_local = plan
        self.tensors = None

    def begin(self):
        steps.append(f"local {int(self.is_local.sum())}")

    def main(self, keys):
        if self.tensors is None:
            self.tensors = keys
            return
        assert all(x is y for x, y in zip(keys, self.tensors, strict=True))
        steps.append("main")
        q, out, lse = self.saved
        saved = Saved(q, keys.k, keys.v, out, lse)
        # The plan says all that this kernel wants to know of the slices.
        self.dq, dk, dv = self.kernel.backward(self.grads, saved, None, self.plan, self.problem)
        for room, grad in ((keys.dk, dk), (keys.dv, dv)):
            assert room.is_contiguous()
            room.copy_(grad)

    def finish(self):
        steps.append("finish")
        return self.dq


class Signalling(AllToAll):
    """Says that it has signals, and gives none."""

    name = "signalling"

    def signals(self, group, device):
        return KernelSignals(torch.zeros(2, dtype=torch.int32), None)
