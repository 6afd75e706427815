"""A kernel for CPUs that begins before far keys are there: near keys first, then both results merged."""

from contextlib import nullcontext

import torch

from magi_compile.kernels.cpu import CpuKernel
from magi_compile.masks.slices import AttnSlices

free: list[int] = []  # the SMs that each forward call was asked to leave free


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

    def early_forward(self, q, keys, remote, plan, problem, *, free_sms=0, max_scores=None):
        free.append(free_sms)
        return ForwardPass(self, q, keys, remote, plan, problem, max_scores)


class ForwardPass:
    def __init__(self, kernel, q, keys, remote, plans, problem, max_scores):
        self.kernel, self.q, self.keys, self.remote = kernel, q, keys, remote
        self.max_scores = max_scores
        self.walks = [(slices, kernel.plan(slices, problem), problem) for slices in plans]

    def begin(self):
        wide = torch.promote_types(self.q.dtype, torch.float32)
        self.first = self.kernel.forward(
            *(self.q, *self.keys, *self.walks[0]), out_dtype=wide, max_scores=self.max_scores
        )

    def beside(self):
        return nullcontext()

    def main(self):
        remote = (self.q, *self.remote, *self.walks[1])
        self.result = self.kernel.forward(*remote, prior=self.first, max_scores=self.max_scores)

    def finish(self):
        return self.result
