"""FlashMask for PyTorch (PaddlePaddle/flash-attention, csrc/flashmask_v2): which rows are hidden from each key."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from magi_bench.contenders.base import Attend, Kernel, Layout, import_error
from magi_bench.workloads.derive import row_intervals
from magi_bench.workloads.workload import Inputs, Workload
from magi_compile.masks.slices import AttnSlices


class FlashMask(Kernel):
    name = "flashmask"
    label = "FlashMask"
    dtypes = ("bfloat16",)
    layout = Layout.BATCHED

    def available(self) -> str | None:
        return import_error("flashmask_interface")

    def supports(self, workload: Workload, device: str) -> list[str]:
        if hidden_rows(workload.slices):
            return []
        return ["takes at most two stretches of hidden rows a key, one above and one below"]

    def prepare(self, workload: Workload, inputs: Inputs) -> Attend:
        from flashmask_interface import flashmask_attention

        hidden = hidden_rows(workload.slices)
        assert hidden is not None
        bounds, causal = hidden.bounds[None, None].to(inputs.q.device), hidden.causal
        return lambda q, k, v: flashmask_attention(
            q, k, v, startend_row_indices=bounds, causal=causal
        )


class HiddenRows(NamedTuple):
    """Rows of the score matrix that do not see a key.

    `bounds` is int32 `[seqlen_k, 1, 2 or 4]`. Where `causal`, all rows above a key's own do not see it, nor those of
    `[b0, b1)`, where b1 is the number of rows if there is no second column. Otherwise `[b0, b1)` lies below and
    `[b2, b3)` above; two columns are b0 and b3, and the others the ends of the matrix.
    """

    bounds: Tensor
    causal: bool


def hidden_rows(slices: AttnSlices) -> HiddenRows | None:
    """`slices` as FlashMask takes them; None if they hide more than that says."""
    size, key = slices.seqlen_q, torch.arange(slices.seqlen_k)
    seen = row_intervals(slices)
    seen = seen.masked_fill((seen[:, 0] >= seen[:, 1])[:, None], size)
    edge = torch.full_like(key, size)
    begin = torch.cat([torch.zeros_like(key)[None], seen[:, 1]])
    end = torch.cat([seen[:, 0], edge[None]])
    causal = bool((end[0] >= key).all())
    if causal:
        begin[0] = key
    is_hidden = begin < end
    is_above = is_hidden & (end <= key)
    is_below = is_hidden & ~is_above
    if int(is_above.sum(0).max()) > 1 or int(is_below.sum(0).max()) > 1:
        return None

    def the_one(which: Tensor, values: Tensor, otherwise: Tensor) -> Tensor:
        return torch.where(which.any(0), values.masked_fill(~which, 0).sum(0), otherwise)

    low, high = (the_one(is_below, x, edge) for x in (begin, end))
    top, bottom = (the_one(is_above, x, torch.zeros_like(key)) for x in (begin, end))
    columns = [low, high] if causal else [low, high, top, bottom]
    if bool((high == size).all()) and not bool(top.any()):
        columns = [low] if causal else [low, bottom]
    return HiddenRows(torch.stack(columns, -1).int(), causal)
