"""A kernel for CPUs that begins before far keys are there: near keys first, then both results merged."""

import torch

from magi_compile.dtensor.transport.all_to_all import AllToAll
from magi_compile.dtensor.transport.collectives import KernelSignals
from magi_compile.kernels.cpu import CpuKernel
from magi_compile.masks.slices import AttnSlices

free: list[int] = []  # the SMs that each forward call was asked to leave free
steps: list[str] = []  # of all backward calls
may_be_early = True  # what the kernel says of its backward


class EarlyCpuKernel(CpuKernel):
    name = "early_cpu"

    def early_plan(self, slices, problem, far_begin):
        is_far = slices.k_ranges[:, 0] >= far_begin
        assert bool((is_far | (slices.k_ranges[:, 1] < far_begin)).all())
        near, far = (
            AttnSlices(
                slices.q_ranges[index],
                slices.k_ranges[index] - shift,
                slices.mask_types[index],
                slices.seqlen_q,
                seqlen_k,
            )
            for index, shift, seqlen_k in (
                (~is_far, 0, far_begin - 1),
                (is_far, far_begin, slices.seqlen_k - far_begin),
            )
        )
        return near, far

    def forward_early(self, q, k, v, far_keys, arrive, plan, problem, *, free_sms=0):
        near, far = plan
        free.append(free_sms)
        wide = torch.promote_types(q.dtype, torch.float32)
        plans = [self.plan(slices, problem) for slices in (near, far)]
        first = self.forward(q, k, v, near, plans[0], problem, out_dtype=wide)
        assert all(x is y for x, y in zip(arrive(), far_keys, strict=True))
        return self.forward(q, *far_keys, far, plans[1], problem, prior=first)

    def backward_may_be_early(self):
        return may_be_early

    def early_backward_plan(self, plan, is_near, problem):
        return plan, is_near

    def backward_early(self, dout, dlse, q, keys, signals, arrive, depart, out, lse, plan, problem):
        assert signals.are_complete - signals.have_arrived == 4
        plan, is_near = plan
        steps.append(f"near {int(is_near.sum())}")
        arrive()
        steps.append("arrived")
        # The plan says all that this kernel wants to know of the slices.
        dq, dk, dv = self.backward(dout, dlse, q, keys.k, keys.v, out, lse, None, plan, problem)
        for room, grad in ((keys.dk, dk), (keys.dv, dv)):
            assert room.is_contiguous()
            room.copy_(grad)
        depart()
        steps.append("departed")
        return dq


class Signalling(AllToAll):
    """Says that it has signals, and gives none."""

    name = "signalling"

    def signals(self, group, device):
        return KernelSignals(torch.zeros(2, dtype=torch.int32), None)
