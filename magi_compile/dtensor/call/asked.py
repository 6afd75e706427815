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
from magi_compile.dtensor.call.arguments import BackwardOptions, Options
from magi_compile.dtensor.call.entries import PLAIN, Packing
from magi_compile.dtensor.planning.cover import Entries
from magi_compile.kernels.base import AttnProblem, CompiledKernel, Kernel
from magi_compile.kernels.overlap import EarlyKernel
from magi_compile.kernels.scored import ScoreNeeds
from magi_compile.kernels.select import problem_on, select
from magi_compile.score.program import ScoreProgram


class KernelChoice(NamedTuple):
    """The kernel of a call, and how it is called.

    Attributes:
        kernel: the kernel.
        problem: what it is asked for.
        packing: of heads into entries.
        compiled: the kernel, if it is one that is compiled.
        is_early: whether it may begin before remote keys are there.
    """

    kernel: Kernel
    problem: AttnProblem
    packing: Packing
    compiled: CompiledKernel | None
    is_early: bool


class Asked(NamedTuple):
    """The demands of a call.

    Attributes:
        device: of the tensors.
        dtype: of q, k and v.
        heads: of q, of k, head_dim and head_dim_v, with those of all entries of the batch.
        softmax_scale: as kernels take it.
        softcap: 0.0 for none.
        kernel: its name; "" where it is to be chosen.
        batch_entries: how many are among the heads.
        has_max_scores: whether the largest score of each row is asked for.
        score: the text of the score program; "" for none.
        tables: dtypes and numbers of dimensions of the tensors that it captures.
        wants_table_gradients: whether these need gradients.
        share: see `Packing.of`.
        deterministic: whether equal inputs have to give equal bits.
    """

    device: torch.device
    dtype: torch.dtype
    heads: tuple[int, int, int, int]
    softmax_scale: float
    softcap: float
    kernel: str
    batch_entries: int
    has_max_scores: bool
    score: str
    tables: tuple[tuple[torch.dtype, int], ...]
    wants_table_gradients: bool
    share: tuple[int, ...]
    deterministic: bool

    @classmethod
    def of(
        cls,
        options: Options | BackwardOptions,
        softmax_scale: float,
        qkv: Sequence[Tensor],
        wanted: Sequence[int],
    ) -> Asked:
        """The demands of a call of tensors, real ones or fakes; of fakes the sizes at hand.

        Args:
            options: those of the op.
            softmax_scale: as kernels take it.
            qkv: `[rows, heads, head_dim]`, three tensors.
            wanted: the numbers of the captured tensors whose gradients are asked for.

        Returns:
            What is asked for.
        """
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
            wants_table_gradients=bool(wanted),
            share=tuple(options.share or ()),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )

    def choice(self, entries: Entries, *, has_bits: bool) -> KernelChoice:
        """The kernel that runs it by a plan, and how.

        Args:
            entries: those of the plan's masks.
            has_bits: whether the plan has blocks of bits.

        Returns:
            The kernel, what it is asked for, and the packing.

        Raises:
            ValueError: if the entries do not fit those of the call.
            NotImplementedError: if no kernel runs it.
        """
        return _choice(self, entries, has_bits)

    def needs(self) -> ScoreNeeds | None:
        """The score program and what a kernel has to know of its tensors; None without one."""
        if not self.score:
            return None
        dtypes, ranks = (
            (tuple(column) for column in zip(*self.tables, strict=True))
            if self.tables
            else ((), ())
        )
        return ScoreNeeds(ScoreProgram.parse(self.score), dtypes, ranks, self.wants_table_gradients)


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
    problem = replace(
        problem,
        has_bits=has_bits,
        has_score=has_score,
        has_max_scores=asked.has_max_scores,
    )
    kernel = select(problem, asked.kernel or None, asked.needs(), may_be_slower=True).kernel
    compiled = kernel if isinstance(kernel, CompiledKernel) else None
    is_early = not asked.score and isinstance(kernel, EarlyKernel)
    return KernelChoice(kernel, problem, packing, compiled, is_early)
