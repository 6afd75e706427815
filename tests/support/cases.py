"""Named masks and head shapes that every kernel is tested on, on the CPU and on GPUs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.select import problem_on
from magi_compile.masks.slices import AttnSlices, MaskType

FULL, CAUSAL, INV_CAUSAL, BI_CAUSAL = MaskType

Rows = Sequence[tuple[int, int, int, int, int]]  # q_start, q_end, k_start, k_end, mask_type


class AttentionInputs(NamedTuple):
    """Random tensors of one case; `dlse` is `[nheads_q, seqlen_q]`, fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor


@dataclass(frozen=True)
class HeadShape:
    nheads_q: int
    nheads_kv: int
    head_dim: int
    head_dim_v: int

    @property
    def id(self) -> str:
        dims = f"{self.head_dim}"
        if self.head_dim_v != self.head_dim:
            dims += f"_{self.head_dim_v}"
        return f"h{self.nheads_q}_{self.nheads_kv}-d{dims}"


@dataclass(frozen=True)
class Case:
    """A mask, given by its slices, and the heads it is tried with."""

    name: str
    seqlen_q: int
    seqlen_k: int
    rows: Rows = field(repr=False)
    heads: HeadShape = HeadShape(4, 2, 64, 64)
    softcap: float = 0.0

    @property
    def id(self) -> str:
        softcap = f"-cap{self.softcap:g}" if self.softcap else ""
        return f"{self.name}-{self.heads.id}{softcap}"

    def slices(self, device: str | torch.device = "cpu") -> AttnSlices:
        table = torch.tensor(self.rows, dtype=torch.int32, device=device).view(-1, 5)
        return AttnSlices(
            table[:, 0:2].contiguous(),
            table[:, 2:4].contiguous(),
            table[:, 4].contiguous(),
            self.seqlen_q,
            self.seqlen_k,
        )

    def problem(self, dtype: torch.dtype, device: str | torch.device = "cpu") -> AttnProblem:
        """The case as a kernel sees it; 1/sqrt(head_dim) is moved a little so that no kernel can hard-code it."""
        heads = self.heads
        sizes = heads.nheads_q, heads.nheads_kv, heads.head_dim, heads.head_dim_v
        scale = 1.1 * heads.head_dim**-0.5
        return problem_on(torch.device(device), dtype, sizes, scale, self.softcap)

    def inputs(self, dtype: torch.dtype, device: str | torch.device = "cpu") -> AttentionInputs:
        """Standard normal tensors, the same on every device."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        heads = self.heads
        return AttentionInputs(
            q=normal(self.seqlen_q, heads.nheads_q, heads.head_dim),
            k=normal(self.seqlen_k, heads.nheads_kv, heads.head_dim),
            v=normal(self.seqlen_k, heads.nheads_kv, heads.head_dim_v),
            dout=normal(self.seqlen_q, heads.nheads_q, heads.head_dim_v),
            dlse=normal(heads.nheads_q, self.seqlen_q, dtype=torch.float32),
        )


def one(
    mask_type: MaskType, seqlen_q: int, seqlen_k: int | None = None, name: str | None = None
) -> Case:
    """A single slice over everything."""
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    name = name or f"{mask_type.name.lower()}_{seqlen_q}x{seqlen_k}"
    return Case(name, seqlen_q, seqlen_k, [(0, seqlen_q, 0, seqlen_k, mask_type)])


def varlen(name: str, lengths: Sequence[int], mask_type: MaskType) -> Case:
    """Packed documents, each attending to itself."""
    rows, start = [], 0
    for length in lengths:
        rows.append((start, start + length, start, start + length, mask_type))
        start += length
    return Case(name, start, start, rows)


def sliding_window(seqlen: int, left: int) -> Case:
    """Row q sees the keys [q - left, q]: a causal head, then a band."""
    head = min(left, seqlen)
    rows = [(0, head, 0, head, CAUSAL), (head, seqlen, head - left, seqlen, BI_CAUSAL)]
    return Case(f"window_{seqlen}_left{left}", seqlen, seqlen, rows)


def windows(name: str, lengths: Sequence[int], left: int, right: int) -> Case:
    """Packed documents with a window each: while both edges stand still, while one moves, and while both do."""
    ends = [0, *itertools.accumulate(lengths)]
    slices = AttnSlices.from_cu_seqlens(ends, window=(left, right))
    rows = [(*item.q_range, *item.k_range, item.mask_type) for item in slices]
    return Case(name, ends[-1], ends[-1], rows)


def steps(name: str, lengths: Sequence[int]) -> Case:
    """One document of blocks, each of which sees those before it."""
    ends = list(itertools.accumulate(lengths))
    rows = [(end - n, end, 0, end, FULL) for n, end in zip(lengths, ends, strict=True)]
    return Case(name, ends[-1], ends[-1], rows)


def block_diffusion(name: str, lengths: Sequence[int], block: int) -> Case:
    """Documents twice, noisy ones first: a noisy block sees itself and the clean blocks before it,
    a clean one those up to it."""
    total, rows, start = sum(lengths), [], 0
    for length in lengths:
        for begin in range(start, start + length, block):
            end = min(begin + block, start + length)
            rows.append((begin, end, begin, end, FULL))
            rows.append((begin, end, total + start, total + begin, FULL))
            rows.append((total + begin, total + end, total + start, total + end, FULL))
        start += length
    return Case(name, 2 * total, 2 * total, [row for row in rows if row[2] < row[3]])


def random_disjoint(seqlen_q: int, seqlen_k: int, seed: int, num_cuts: int = 5) -> Case:
    """A random grid of cells, one in four invisible and the others of a random type, in random order."""
    rng = random.Random(seed)
    rows = []
    q_cuts = _cuts(rng, seqlen_q, num_cuts)
    for q_start, q_end in itertools.pairwise(q_cuts):
        k_cuts = _cuts(rng, seqlen_k, num_cuts)
        for k_start, k_end in itertools.pairwise(k_cuts):
            if rng.random() < 0.75:
                rows.append((q_start, q_end, k_start, k_end, rng.choice(list(MaskType))))
    rng.shuffle(rows)
    return Case(f"random_{seqlen_q}x{seqlen_k}_seed{seed}", seqlen_q, seqlen_k, rows)


def padded(case: Case, capacity: int) -> Case:
    """The same mask with empty slices up to `capacity`, as a compiled graph makes them."""
    empty = [(0, 0, 0, 0, FULL)] * (capacity - len(case.rows))
    return replace(case, name=f"{case.name}_padded", rows=[*case.rows, *empty])


def _cuts(rng: random.Random, length: int, num_cuts: int) -> list[int]:
    return sorted({0, length, *(rng.randrange(length + 1) for _ in range(num_cuts))})


LIGHT = HeadShape(2, 1, 64, 64)  # for long masks: the oracle is slow

RAGGED = [1, 63, 129, 300, 7, 128, 1, 52]

MASKS: list[Case] = [
    *(one(mask_type, seqlen) for mask_type in (FULL, CAUSAL) for seqlen in (1, 63, 129, 512)),
    *(one(mask_type, 200, 333) for mask_type in MaskType),
    *(one(mask_type, 333, 200) for mask_type in MaskType),
    one(INV_CAUSAL, 129),
    one(BI_CAUSAL, 129, name="diagonal_129"),
    replace(one(CAUSAL, 1521), heads=LIGHT),
    varlen("varlen_full", RAGGED, FULL),
    varlen("varlen_causal", RAGGED, CAUSAL),
    varlen("varlen_causal_equal", [128] * 5, CAUSAL),
    varlen("tiny_documents", [1, 2, 3, 4, 5, 6, 7] * 20, CAUSAL),
    replace(sliding_window(1521, 100), heads=LIGHT),
    sliding_window(512, 300),
    windows("windows", RAGGED, 50, 20),
    steps("steps", RAGGED),
    block_diffusion("block_diffusion", [150, 7, 230], 20),
    padded(varlen("varlen_causal", RAGGED, CAUSAL), 20),
    Case("sees_nothing", 130, 70, []),
    Case("holes", 300, 300, [(17, 90, 30, 31, FULL), (100, 101, 0, 300, FULL)]),
    Case("shared_prefix", 400, 400, [(0, 400, 0, 50, FULL), (50, 400, 50, 400, CAUSAL)]),
    *(random_disjoint(257, 391, seed) for seed in range(4)),
    replace(random_disjoint(1521, 700, seed=4), heads=LIGHT),
]

HEADS: list[HeadShape] = [
    HeadShape(2, 2, 64, 64),
    HeadShape(4, 1, 128, 128),
    HeadShape(8, 1, 32, 32),
    HeadShape(6, 2, 80, 48),
    HeadShape(2, 1, 192, 128),
    HeadShape(2, 2, 256, 256),
]

_NAMED = {case.name: case for case in MASKS}

# Every mask with the same heads, then other heads and soft-caps with a few masks.
CASES: list[Case] = [
    *MASKS,
    *(
        replace(_NAMED[name], heads=heads)
        for heads in HEADS
        for name in ("varlen_causal", "block_diffusion", "random_257x391_seed0")
    ),
    *(
        replace(_NAMED[name], softcap=5.0)
        for name in (
            "varlen_causal",
            "window_512_left300",
            "block_diffusion",
            "random_257x391_seed1",
        )
    ),
]
