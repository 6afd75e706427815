"""A call of attention across ranks, whatever its plan: which kernel runs it follows from that and from the
kind of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile import _compat
from magi_compile.dtensor.call.arguments import Options
from magi_compile.dtensor.call.entries import PLAIN, Packing
from magi_compile.dtensor.planning.cover import Entries
from magi_compile.kernels.base import AttnProblem, Kernel
from magi_compile.kernels.scored import ScoreNeeds
from magi_compile.kernels.select import problem_on, select
from magi_compile.score.program import ScoreProgram


class Asked(NamedTuple):
    """The demands of a pass."""

    device: torch.device
    dtype: torch.dtype  # of q, k and v
    heads: tuple[
        int, int, int, int
    ]  # of q, of k, head_dim, head_dim_v; of all entries of the batch
    softmax_scale: float  # as kernels take it
    softcap: float  # 0.0 for none
    kernel: str  # "" where it is to be chosen
    batch_entries: int  # among the heads
    has_max_scores: bool
    score: str  # the text of the score program; "" for none
    tables: tuple[
        tuple[torch.dtype, int], ...
    ]  # dtype and number of dimensions of each that it captures
    wanted: tuple[int, ...]  # the numbers of those whose gradients are asked for
    share: tuple[int, ...]  # see `Packing.of`
    deterministic: bool  # equal inputs have to give equal bits
    is_backward: bool

    @classmethod
    def of(
        cls,
        options: Options,
        softmax_scale: float,
        qkv: Sequence[Tensor],
        *,
        is_backward: bool = False,
    ) -> Asked:
        """The demands of a call of `[rows, heads, head_dim]` tensors, real ones or fakes; of fakes the sizes at hand.
        `softmax_scale` as kernels take it."""
        q, k, v = qkv
        at_hand = _compat.size_at_hand
        sizes = (q.shape[1], k.shape[1], q.shape[2], v.shape[2])
        nheads_q, nheads_kv, head_dim, head_dim_v = map(at_hand, sizes)
        return cls(
            device=q.device,
            dtype=q.dtype,
            heads=(nheads_q, nheads_kv, head_dim, head_dim_v),
            softmax_scale=softmax_scale,
            softcap=options.softcap,
            kernel=options.kernel,
            batch_entries=at_hand(options.batch_entries),
            has_max_scores=options.return_max_scores,
            score=options.score,
            tables=tuple((x.dtype, x.dim()) for x in options.tables or ()),
            wanted=tuple(options.wanted),
            share=tuple(options.share or ()),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            is_backward=is_backward,
        )

    def choice(self, entries: Entries, has_bits: bool) -> KernelChoice:
        """The kernel that runs it by a plan whose masks have these entries, and blocks of bits or none, and how it is
        called. Raises ValueError if the entries do not fit those of the call, and NotImplementedError if no kernel runs
        it."""
        return _choice(self, entries, has_bits)

    def needs(self) -> ScoreNeeds | None:
        """The score program and what a kernel has to know of its tensors; None without one."""
        if not self.score:
            return None
        dtypes, ranks = tuple(x for x, _ in self.tables), tuple(x for _, x in self.tables)
        return ScoreNeeds(ScoreProgram.parse(self.score), dtypes, ranks, bool(self.wanted))


class KernelChoice(NamedTuple):
    """The kernel of a call, what it is asked for, and the packing of heads into entries."""

    kernel: Kernel
    problem: AttnProblem
    packing: Packing


@lru_cache(maxsize=1024)
def _choice(asked: Asked, entries: Entries, has_bits: bool) -> KernelChoice:
    """`Asked.choice`: refusals of kernels depend on these alone. A slower kernel will do, because a rank has no
    FlexAttention to stay on."""
    nheads_q, nheads_kv, head_dim, head_dim_v = asked.heads
    heads = nheads_q // asked.batch_entries, nheads_kv // asked.batch_entries
    packing, has_score = PLAIN, bool(asked.score)
    if has_score or has_bits or entries.number > 1:
        of_call = (entries, asked.batch_entries, heads, asked.share)
        packing = Packing.of(*of_call, has_score=has_score)
    in_kernel = nheads_q // packing.queries, nheads_kv // packing.keys, head_dim, head_dim_v
    problem = problem_on(asked.device, asked.dtype, in_kernel, asked.softmax_scale, asked.softcap)
    has_max_scores = asked.has_max_scores
    problem = replace(
        problem, has_bits=has_bits, has_score=has_score, has_max_scores=has_max_scores
    )
    kernel = select(problem, asked.kernel or None, asked.needs(), may_be_slower=True).kernel
    return KernelChoice(kernel, problem, packing)
