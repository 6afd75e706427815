"""`cudnn.flex_attention` of nvidia-cudnn-frontend: the keys of a row as a few intervals."""

from __future__ import annotations

from importlib.metadata import version

import torch

from magi_compile.bench.contenders.base import Attend, Contender, Layout, import_error
from magi_compile.bench.derive import key_intervals
from magi_compile.bench.workload import Inputs, Workload

MAX_INTERVALS = 8


class CudnnFlex(Contender):
    name = "cudnn-flex"
    label = "cudnn.flex_attention"
    layout = Layout.BATCHED

    def available(self) -> str | None:
        return import_error("cudnn.flex_attention")

    def versions(self) -> dict[str, str]:
        names = ("nvidia-cudnn-frontend", "nvidia-cutlass-dsl")
        return {name: version(name) for name in names}

    def supports(self, workload: Workload, device: str) -> list[str]:
        count = len(key_intervals(workload.slices))
        if count <= MAX_INTERVALS:
            return []
        return [f"rows of this mask see {count} intervals, more than {MAX_INTERVALS}"]

    def prepare(self, workload: Workload, inputs: Inputs) -> Attend:
        from cudnn.flex_attention import create_mask_plan, flex_attn_func

        # A row sees [0, F0) and [F1, F2) and [F3, F4) ...; F0 = 0 leaves all intervals to the pairs.
        pairs = key_intervals(workload.slices).flatten(0, 1)
        bounds = torch.cat([torch.zeros_like(pairs[:1]), pairs]).int()[None]
        batched = [x[None] for x in inputs[:3]]
        plan = create_mask_plan(bounds.to(inputs.q.device), *batched)
        return lambda q, k, v: flex_attn_func(q, k, v, mask_plan=plan)
