"""One attention over the tokens of all ranks: mask, tensors, and the truth that every contender is held to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from magi_bench.gate import RESULTS, Check, weigh
from magi_bench.settings import Settings
from magi_bench.workloads import workload
from magi_bench.workloads.workload import Inputs, Workload
from magi_bench.world import World

# Rows of queries whose scores are in memory at a time.
ROWS = 256


class Truth(NamedTuple):
    """Out, dq, dk and dv of the first and the last key-value head and their queries, `[tokens, heads, head_dim]`."""

    exact: list[Tensor]  # in fp64
    # the relative error of each: twice that of plain PyTorch in the dtype of the inputs, and one rounding step
    allowed: dict[str, float]


class Problem:
    """A mask and tensors over a whole sequence, the same on all ranks. If it `is_alone`, the sequence is as long as
    one rank's tokens, so that every rank has one of its own."""

    def __init__(
        self, settings: Settings, world: World, mask: str, tokens: int, is_alone: bool = False
    ):
        self.settings, self.world, self.tokens = settings, world, tokens
        self.total = tokens if is_alone else tokens * world.size
        case = settings.case("kernel", mask, self.total)
        self.workload: Workload = workload.build(case, str(world.device))

    @cached_property
    def inputs(self) -> Inputs:
        """The tensors of the whole sequence, on every rank."""
        return self.workload.inputs(str(self.world.device))

    def flops(self, which: str) -> float:
        """The mean over ranks."""
        flops = self.workload.flops(which)
        return flops * self.tokens / self.total

    @cached_property
    def truth(self) -> Truth:
        """Computed by all ranks together: each has some of the rows."""
        exact, plain = self._dense(torch.float64), self._dense(getattr(torch, self.settings.dtype))
        plain = [self.world.total(x.double()) for x in plain]
        exact = [self.world.total(x) for x in exact]
        errors = {
            name: float((x - truth).norm() / truth.norm())
            for name, x, truth in zip(RESULTS, plain, exact, strict=True)
        }
        step = torch.finfo(getattr(torch, self.settings.dtype)).eps
        return Truth(exact, {name: 2 * error + step for name, error in errors.items()})

    def check(self, results: Sequence[Tensor], positions: Tensor) -> Check:
        """Holds `results`, packed, of the tokens `positions` of this rank, to the truth;
        the same answer on all ranks."""
        kept = self._heads
        errors = {}
        for name, x, truth in zip(RESULTS, results, self.truth.exact, strict=False):
            heads = kept[0] if name in ("out", "dq") else kept[1]
            mine = truth[positions]
            off = (x.detach()[:, heads].double() - mine).square().sum()
            squares = self.world.total(torch.stack([off, mine.square().sum()]))
            error = float((squares[0] / squares[1]).sqrt())
            errors[name] = error if error == error else float("inf")
        return Check(self.total, errors, {name: self.truth.allowed[name] for name in errors})

    @property
    def _heads(self) -> tuple[list[int], list[int]]:
        """The heads of queries and of keys whose results are checked."""
        group = self.settings.nheads_q // self.settings.nheads_kv
        of_keys = sorted({0, self.settings.nheads_kv - 1})
        return [x * group + i for x in of_keys for i in range(group)], of_keys

    def _dense(self, dtype: torch.dtype) -> list[Tensor]:
        """This rank's share of out, dq, dk and dv, all in `dtype`; their sums over ranks are the results."""
        group = self.settings.nheads_q // self.settings.nheads_kv
        of_queries, of_keys = self._heads
        q, k, v, dout = (
            x[:, heads].transpose(0, 1).to(dtype)
            for x, heads in zip(
                self.inputs, (of_queries, of_keys, of_keys, of_queries), strict=True
            )
        )
        sums = [torch.zeros_like(x, dtype=torch.float64) for x in (q, q, k, v)]
        keys = torch.arange(self.total, device=q.device)
        zero = keys.new_zeros(())
        for begin in range(ROWS * self.world.rank, self.total, ROWS * self.world.size):
            rows = slice(begin, begin + ROWS)
            visible = self.workload.mask_mod(zero, zero, keys[rows, None], keys)
            visible = visible.expand(-1, self.total)  # of a mask that looks at queries alone, too
            seen = visible.any(0).nonzero()
            columns = slice(int(seen[0]), int(seen[-1]) + 1)
            for head in range(len(of_keys)):
                heads = slice(head * group, (head + 1) * group)
                parts = attend_rows(
                    *(q[heads, rows], k[head, columns], v[head, columns], dout[heads, rows]),
                    visible[:, columns],
                )
                out, dq, dk, dv = sums
                places = (out[heads, rows], dq[heads, rows], dk[head, columns], dv[head, columns])
                for place, part in zip(places, parts, strict=True):
                    place += part
        return [x.transpose(0, 1) for x in sums]


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, visible: Tensor
) -> tuple[Tensor, ...]:
    """Out of some rows `[heads, rows, head_dim]` of q, by the keys `[keys, head_dim]` of the one head that they share,
    and their share of dq, dk and dv; everything in the dtype of the arguments."""
    q, k, v = leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = weigh(q @ k.T * q.shape[-1] ** -0.5, visible, v)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))
