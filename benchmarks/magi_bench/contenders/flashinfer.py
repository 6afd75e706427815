"""FlashInfer's block-sparse attention: blocks of any size, forward only."""

from __future__ import annotations

from importlib.metadata import version

import torch
from torch import Tensor

from magi_bench.contenders.base import Attend, Kernel, import_error
from magi_bench.workloads.workload import Inputs, Workload

WORKSPACE_BYTES = 128 * 2**20


class FlashInfer(Kernel):
    name = "flashinfer"
    label = "FlashInfer"
    levels = ("sparse",)
    has_backward = False
    compiles_slowly = True

    def available(self) -> str | None:
        return import_error("flashinfer.sparse")

    def versions(self) -> dict[str, str]:
        return {"flashinfer-python": version("flashinfer-python")}

    def supports(self, workload: Workload, device: str) -> list[str]:
        if workload.blocks.is_causal:
            return ["takes blocks that are visible as a whole"]
        return ["fails where every block is visible"] if workload.case.density >= 1 else []

    def prepare(self, workload: Workload, inputs: Inputs) -> Attend:
        from flashinfer.sparse import VariableBlockSparseAttentionWrapper

        case, blocks, device = workload.case, workload.blocks, inputs.q.device
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        wrapper = VariableBlockSparseAttentionWrapper(workspace)
        q_sizes, k_sizes = (
            torch.tensor(sizes, dtype=torch.int32, device=device).expand(case.nheads_kv, -1)
            for sizes in (blocks.q_sizes, blocks.k_sizes)
        )
        wrapper.plan(
            blocks.visible.to(device),
            q_sizes.contiguous(),
            k_sizes.contiguous(),
            case.nheads_q,
            case.nheads_kv,
            case.head_dim,
            q_data_type=inputs.q.dtype,
        )

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return wrapper.run(*(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1)

        return attend
