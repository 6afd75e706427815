"""A process for one tree: JSON requests on stdin, a JSON line each on stdout.

Run by its path, with a tree in front of PYTHONPATH: what it imports of `magi_compile` is that tree's, old or new. So it
uses public names, and `_compat.spin_gpu`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from magi_bench.process import serve
from magi_compile import _compat, flex_flash_attention
from magi_compile.masks import AttnSlices

BLOCK_ROWS = 256  # of which a fingerprint has two numbers for each head
SPIN_CYCLES = 2_000_000  # behind which launches queue up, and as many again for each call


class Call:
    """One case: the tensors of a call, and its passes."""

    def __init__(self, case: dict[str, Any]):
        self.is_backward = case["which"] == "bwd"
        device = torch.device(case["device"])
        slices = torch.tensor(case["slices"], dtype=torch.int32, device=device)
        ranges = slices[:, :2].contiguous(), slices[:, 2:4].contiguous(), slices[:, 4].contiguous()
        self.slices = AttnSlices(*ranges, case["seqlen"], case["seqlen"])
        generator = torch.Generator(device).manual_seed(case["seed"])

        def tensor(nheads: int) -> Tensor:
            shape = (case["seqlen"], nheads, case["head_dim"])
            dtype = getattr(torch, case["dtype"])
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        nheads = case["nheads_q"], case["nheads_kv"], case["nheads_kv"], case["nheads_q"]
        q, k, v, self.dout = map(tensor, nheads)
        self.qkv = q, k, v
        for x in self.qkv:
            x.requires_grad_(self.is_backward)
        self.out = flex_flash_attention(*self.qkv, self.slices).out

    def __call__(self) -> list[Tensor]:
        if self.is_backward:
            return list(torch.autograd.grad(self.out, self.qkv, self.dout, retain_graph=True))
        return [flex_flash_attention(*self.qkv, self.slices).out]

    def milliseconds(self, calls: int) -> float:
        """The milliseconds of a call: on a GPU behind a spinning kernel, so that the host takes no part in it."""
        self()
        if self.dout.device.type == "cpu":
            begin = time.perf_counter()
            for _ in range(calls):
                self()
            return (time.perf_counter() - begin) * 1e3 / calls
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        _compat.spin_gpu(SPIN_CYCLES * (1 + calls))
        start.record()
        for _ in range(calls):
            self()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / calls


def fingerprint(x: Tensor) -> list[float]:
    """Two numbers for each head and each `BLOCK_ROWS` rows of `[rows, heads, columns]`: the logarithm of the mean size,
    and a sum with random signs, in units of what numbers of that size add up to. A wrong row changes the sum by about
    0.09, other rounding by some thousandths."""
    signs = torch.Generator(x.device).manual_seed(0)
    sizes, sums = [], []
    # Sums of rounding errors alone say nothing.
    least = 1e-2 * torch.linalg.vector_norm(x, dtype=torch.float64) / x.numel() ** 0.5 + 1e-30
    for rows in x.split(BLOCK_ROWS):
        size = rows.double().square().mean((0, 2)).sqrt().maximum(least)
        sign = torch.randint(0, 2, rows.shape, generator=signs, device=x.device) * 2 - 1
        count = rows.shape[0] * rows.shape[2]
        sums.append((rows.double() * sign).sum((0, 2)) / (size * count**0.5))
        sizes.append(size.log())
    return [round(number, 4) for number in torch.cat(sizes + sums).tolist()]


def start() -> Callable[[dict[str, Any]], tuple[Any, bool]]:
    """Answers with the fingerprints of a case's results, or with the time of a turn of calls."""
    calls: list[Call] = []

    def answer(request: dict[str, Any]) -> tuple[Any, bool]:
        if request["op"] == "time":
            return calls[0].milliseconds(request["calls"]), False
        calls.clear()  # memory goes before there is another
        calls.append(Call(request["case"]))
        return [fingerprint(x.detach()) for x in (calls[0].out, *calls[0]())], False

    return answer


if __name__ == "__main__":
    serve(start)
