"""`cudnn.flex_attention` of nvidia-cudnn-frontend: the keys of a row as a few intervals."""

from __future__ import annotations

import torch
from torch import Tensor

from magi_bench.contenders.base import Attend, Kernel, Layout
from magi_bench.workloads.derive import key_intervals
from magi_bench.workloads.workload import Inputs, Workload
from magi_compile.masks.slices import AttnSlices

MAX_INTERVALS = 8


class CudnnFlex(Kernel):
    name = "cudnn-flex"
    label = "cudnn.flex_attention"
    layout = Layout.BATCHED
    module = "cudnn.flex_attention"
    distributions = ("nvidia-cudnn-frontend", "nvidia-cutlass-dsl")

    def supports(self, workload: Workload, device: str) -> list[str]:
        count = len(key_intervals(workload.slices))
        if count <= MAX_INTERVALS:
            return []
        return [f"rows of this mask see {count} intervals, more than {MAX_INTERVALS}"]

    def prepare(self, workload: Workload, inputs: Inputs) -> Attend:
        from cudnn.flex_attention import create_mask_plan, flex_attn_func

        bounds = endpoints(workload.slices).to(inputs.q.device)
        batched = [x[None] for x in inputs[:3]]
        plan = create_mask_plan(bounds, *batched, build_backward=True)
        return lambda q, k, v: flex_attn_func(q, k, v, mask_plan=plan)


def endpoints(slices: AttnSlices) -> Tensor:
    """The mask as the package takes it: int32 `[1, 1 + 2 * num_intervals, seqlen_q]`.

    A row sees `[0, F0)` and `[F1, F2)` and `[F3, F4)` ...; F0 = 0 leaves all intervals to the pairs. The endpoints of a
    row may not decrease, so the empty intervals of a row that has fewer stay where its last one ends.
    """
    pairs = key_intervals(slices).flatten(0, 1).cummax(0).values
    return torch.cat([torch.zeros_like(pairs[:1]), pairs]).int()[None]
