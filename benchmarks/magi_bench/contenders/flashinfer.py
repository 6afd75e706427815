"""FlashInfer's block-sparse attention, forward only: blocks of any sizes, and its kernels of blocks of 64 on Hopper."""

from __future__ import annotations

import torch

from magi_bench.contenders.base import Attend, Kernel, Layout
from magi_bench.workloads.workload import Inputs, Workload

WORKSPACE_BYTES = 128 * 2**20
# Of `cake`.
BLOCK = 64  # tokens
MOST_BLOCKS = 64  # of keys, for a block of queries


class FlashInfer(Kernel):
    name = "flashinfer"
    label = "FlashInfer"
    levels = ("sparse",)
    layout = Layout.HEADS
    has_backward = False
    compiles_slowly = True
    module = "flashinfer.sparse"
    distributions = ("flashinfer-python", "apache-tvm-ffi")
    backend = "auto"

    def supports(self, workload: Workload, device: str) -> list[str]:
        if workload.blocks.is_causal:
            return ["takes blocks that are visible as a whole"]
        return []

    def prepare(self, workload: Workload, inputs: Inputs) -> Attend:
        from flashinfer.sparse import VariableBlockSparseAttentionWrapper

        case, blocks, device = workload.case, workload.blocks, inputs.q.device
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        wrapper = VariableBlockSparseAttentionWrapper(workspace, backend=self.backend)
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
        return wrapper.run  # type: ignore[no-any-return]


class FlashInferCake(FlashInfer):
    name = "flashinfer-cake"
    label = "FlashInfer (cake)"
    dtypes = ("bfloat16",)
    backend = "cake"

    def supports(self, workload: Workload, device: str) -> list[str]:
        case, blocks = workload.case, workload.blocks
        reasons = []
        if not blocks.is_uniform or blocks.is_causal or blocks.q_sizes[0] != BLOCK:
            reasons.append(f"takes uniform blocks of {BLOCK}, visible as a whole")
        if case.head_dim != 128:
            reasons.append(f"takes head_dim 128, not {case.head_dim}")
        if blocks.group not in (1, 2, 4, 8):
            reasons.append(f"takes groups of 1, 2, 4 or 8 heads, not {blocks.group}")
        counts = blocks.visible.sum(-1)
        if not reasons and not 1 <= int(counts.min()) <= int(counts.max()) <= MOST_BLOCKS:
            reasons.append(
                f"takes 1 to {MOST_BLOCKS} blocks of keys for a block of queries, not {int(counts.min())} to "
                f"{int(counts.max())}"
            )
        return reasons
