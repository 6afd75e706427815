"""The workload of a cell: one slices object, from which every contender's input and all FLOPs are derived."""

from __future__ import annotations

import ctypes
import hashlib
import random
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from magi_bench.workloads import block_masks, lengths
from magi_bench.workloads.block_masks import BlockMap
from magi_bench.workloads.cells import Cell
from magi_compile.masks.library import MASKS as NAMED_MASKS
from magi_compile.masks.library import MaskMod, NamedMask
from magi_compile.masks.slices import AttnSlices

SPARSE_MASKS = ("uniform_blocks", "variable_blocks")
MASKS = (*NAMED_MASKS, *SPARSE_MASKS)


class Inputs(NamedTuple):
    """Standard normal `[seqlen, nheads, head_dim]`; v and dout have that of v. Sparse cells keep the tokens of a head together in memory."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


@dataclass(frozen=True)
class Workload:
    """A cell with its documents and its mask on the host.

    Attributes:
        cell: what it is made from.
        documents: lengths of the packed documents.
        mask_mod: the mask as FlexAttention takes it; its tensors are on `device`.
        slices: of a kernel cell: `[seqlen, seqlen]`, for all heads. Of a sparse cell: over the rows and keys of all
            query heads one after the other, `[nheads_q * seqlen, nheads_kv * seqlen]`.
        block_map: of a sparse cell.
    """

    cell: Cell
    documents: list[int]
    mask_mod: MaskMod
    slices: AttnSlices
    block_map: BlockMap | None = None

    @property
    def blocks(self) -> BlockMap:
        """`block_map`, of a sparse cell."""
        assert self.block_map is not None
        return self.block_map

    @cached_property
    def pairs(self) -> int:
        """Visible (query, key) pairs of all query heads."""
        area = self.slices.area()
        return area if self.block_map else area * self.cell.nheads_q

    def flops(self, which: str) -> int:
        """2 matrix products forward, 5 backward, over the visible pairs, as FlashAttention counts."""
        dim, dim_v = self.cell.head_dims
        forward, backward = 2 * (dim + dim_v), 2 * (3 * dim + 2 * dim_v)
        flops = {"fwd": forward, "bwd": backward, "fwdbwd": forward + backward}[which]
        return flops * self.pairs

    @cached_property
    def mask_hash(self) -> str:
        """Of the slices: equal masks of two runs have equal hashes."""
        digest = hashlib.sha256()
        for part in (self.slices.q_ranges, self.slices.k_ranges, self.slices.mask_types):
            part = part.contiguous()
            digest.update(ctypes.string_at(part.data_ptr(), part.nbytes))
        return digest.hexdigest()[:12]

    def head_slices(self, kv_head: int) -> AttnSlices:
        """What a row of a query head of `kv_head` sees: `[seqlen, seqlen]`."""
        return self.block_map.head_slices(kv_head) if self.block_map else self.slices

    def inputs(self, device: str) -> Inputs:
        """Random tensors, the same for every contender."""
        cell = self.cell
        generator = torch.Generator(device).manual_seed(cell.seed)
        dtype = getattr(torch, cell.dtype)

        def draw(nheads: int, head_dim: int) -> Tensor:
            shape = (cell.seqlen, nheads, head_dim)
            if cell.level == "sparse":
                shape = (nheads, cell.seqlen, head_dim)
            x = torch.randn(shape, generator=generator, device=device, dtype=dtype)
            return x.transpose(0, 1) if cell.level == "sparse" else x

        dim, dim_v = cell.head_dims
        return Inputs(
            draw(cell.nheads_q, dim),
            draw(cell.nheads_kv, dim),
            draw(cell.nheads_kv, dim_v),
            draw(cell.nheads_q, dim_v),
        )


def cost(cell: Cell) -> float:
    """Visible pairs of all query heads, times head_dim: what the time of a cell goes with. Sparse masks are not drawn."""
    if cell.mask in SPARSE_MASKS:
        return cell.density * cell.seqlen**2 * cell.nheads_q * cell.head_dim
    return build(cell).pairs * cell.head_dim


def build(cell: Cell, device: str = "cpu") -> Workload:
    """Makes the workload of `cell`.

    Args:
        cell: mask, sizes and seed.
        device: of the tensors that `mask_mod` captures.

    Returns:
        The mask and all that contenders ask of it.

    Raises:
        ValueError: the cell names no mask.
    """
    if cell.mask not in MASKS:
        raise ValueError(f"`mask` must be one of {', '.join(MASKS)}, got {cell.mask!r}")
    if cell.mask in SPARSE_MASKS:
        block_map = block_masks.draw(cell)
        slices = block_map.stacked_slices()
        return Workload(cell, [cell.seqlen], block_map.mask_mod(device), slices, block_map)
    documents = lengths.sample(cell.lengths, cell.seqlen, cell.seed)
    mask = _named_mask(cell, documents, device)
    return Workload(cell, documents, mask.mask_mod, mask.slices.to("cpu"))


def _named_mask(cell: Cell, documents: list[int], device: str) -> NamedMask:
    """A mask of the library, with LongCA-bench's random parameters where it has any."""
    rng = random.Random(cell.seed)
    parameters: dict[str, int] = {}
    if cell.mask == "global_sliding_window":
        parameters["window"] = rng.randint(1, max(cell.seqlen // 3 - 1, 1))
    elif cell.mask == "prefix_lm_causal":
        parameters["prefix"] = rng.randint(1, cell.seqlen)
    elif cell.mask == "prefix_lm_document":
        parameters["prefix"] = rng.randint(1, documents[0])
    return NAMED_MASKS[cell.mask](documents, **parameters, device=device)
