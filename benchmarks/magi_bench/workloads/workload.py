"""The workload of a case: one slices object, from which every contender's input and all FLOPs are derived."""

from __future__ import annotations

import ctypes
import hashlib
import random
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from magi_bench.cases import Case
from magi_bench.workloads import block_masks, lengths
from magi_bench.workloads.block_masks import DrawnBlocks
from magi_compile.masks.library import MASKS as NAMED_MASKS
from magi_compile.masks.library import MaskMod, NamedMask
from magi_compile.masks.slices import AttnSlices

SPARSE_MASKS = ("uniform_blocks", "causal_blocks", "variable_blocks")
MASKS = (*NAMED_MASKS, *SPARSE_MASKS)


class Inputs(NamedTuple):
    """Standard normal `[seqlen, nheads, head_dim]`; v and dout have that of v.
    Sparse cases keep the tokens of a head together in memory."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


@dataclass(frozen=True)
class Workload:
    """A case with its documents and its mask on the host."""

    case: Case  # what it is made from
    documents: list[int]  # lengths of the packed documents
    mask_mod: MaskMod  # the mask as FlexAttention takes it; its tensors are on `device`
    # of a kernel case: `[seqlen, seqlen]`, for all heads. Of a sparse case: over the rows and keys of all query heads
    # one after the other, `[nheads_q * seqlen, nheads_kv * seqlen]`
    slices: AttnSlices
    block_map: DrawnBlocks | None = None  # of a sparse case

    @property
    def blocks(self) -> DrawnBlocks:
        """`block_map`, of a sparse case."""
        assert self.block_map is not None
        return self.block_map

    @cached_property
    def pairs(self) -> int:
        """Visible (query, key) pairs of all query heads."""
        area = self.slices.area()
        return area if self.block_map else area * self.case.nheads_q

    def flops(self, which: str) -> int:
        """2 matrix products forward, 5 backward, over the visible pairs, as FlashAttention counts."""
        dim, dim_v = self.case.head_dims
        forward, backward = 2 * (dim + dim_v), 2 * (3 * dim + 2 * dim_v)
        flops = {"fwd": forward, "bwd": backward, "fwdbwd": forward + backward}[which]
        return flops * self.pairs

    @cached_property
    def mask_hash(self) -> str:
        """Hashes the slices: equal masks of two runs have equal hashes."""
        digest = hashlib.sha256()
        for part in self.slices.lists:
            part = part.contiguous()
            digest.update(ctypes.string_at(part.data_ptr(), part.nbytes))
        return digest.hexdigest()[:12]

    def head_slices(self, kv_head: int) -> AttnSlices:
        """The slices of a query head of `kv_head`: `[seqlen, seqlen]`."""
        return self.block_map.head_slices(kv_head) if self.block_map else self.slices

    def inputs(self, device: str) -> Inputs:
        """Random tensors, the same for every contender."""
        case = self.case
        generator = torch.Generator(device).manual_seed(case.seed)
        dtype = getattr(torch, case.dtype)

        def draw(nheads: int, head_dim: int) -> Tensor:
            shape = (case.seqlen, nheads, head_dim)
            if case.level == "sparse":
                shape = (nheads, case.seqlen, head_dim)
            x = torch.randn(shape, generator=generator, device=device, dtype=dtype)
            return x.transpose(0, 1) if case.level == "sparse" else x

        dim, dim_v = case.head_dims
        return Inputs(
            draw(case.nheads_q, dim),
            draw(case.nheads_kv, dim),
            draw(case.nheads_kv, dim_v),
            draw(case.nheads_q, dim_v),
        )


def cost(case: Case) -> float:
    """Visible pairs of all query heads, times head_dim: what the time of a case goes with.
    Sparse masks are not drawn."""
    if case.mask in SPARSE_MASKS:
        share = case.density / (2 if case.mask == "causal_blocks" else 1)
        return share * case.seqlen**2 * case.nheads_q * case.head_dim
    return build(case).pairs * case.head_dim


def build(case: Case, device: str = "cpu") -> Workload:
    """Makes the workload of `case`; the tensors that its `mask_mod` captures are on `device`. A ValueError if there
    is no such mask."""
    if case.mask not in MASKS:
        raise ValueError(f"`mask` must be one of {', '.join(MASKS)}, got {case.mask!r}")
    if case.mask in SPARSE_MASKS:
        block_map = block_masks.draw(case)
        slices = block_map.stacked_slices()
        return Workload(case, [case.seqlen], block_map.mask_mod(device), slices, block_map)
    documents = lengths.sample(case.lengths, case.seqlen, case.seed)
    mask = _named_mask(case, documents, device)
    return Workload(case, documents, mask.mask_mod, mask.slices.to("cpu"))


def _named_mask(case: Case, documents: list[int], device: str) -> NamedMask:
    """A mask of the library, with LongCA-bench's random parameters where it has any."""
    rng = random.Random(case.seed)
    parameters: dict[str, int] = {}
    if case.mask == "global_sliding_window":
        parameters["window"] = rng.randint(1, max(case.seqlen // 3 - 1, 1))
    elif case.mask == "prefix_lm_causal":
        parameters["prefix"] = rng.randint(1, case.seqlen)
    elif case.mask == "prefix_lm_document":
        parameters["prefix"] = rng.randint(1, documents[0])
    return NAMED_MASKS[case.mask](documents, **parameters, device=device)
