"""Slices with bit blocks, for kernels that take them."""

from dataclasses import dataclass, field, replace

import torch

from magi_compile.masks.evaluation.bit_blocks import slices_with_bits
from magi_compile.masks.evaluation.sizes import Heads, MaskSizes
from magi_compile.masks.slices import AttnSlices, MaskType
from tests.support.cases import MASKS, Case, HeadShape, varlen
from tests.support.numerics import assert_attention_close, run_kernel

MASK = {case.name: case for case in MASKS}


def shown(b, h, q, kv):
    """A prefix of everything, and of what is behind it, not in order: some rows see nothing."""
    return ((q * kv % 7 < 2) & (q >= kv) & (q % 11 > 0)) | ((kv < 128) & (q < 128) & (b == 0))


def bit_slices(batch, seqlen_q, seqlen_k, device="cpu"):
    device = torch.device(device)
    slices = slices_with_bits(shown, MaskSizes(batch, seqlen_q, seqlen_k), None, device)
    assert (slices.mask_types > 3).any()
    return slices


def check_bits(kernel, dtype, device, heads=None, softcap=0.0):
    """Values and gradients of one batch entry, and of three that share tiles, against the oracle."""
    heads = heads or HeadShape(2, 1, 16, 16)
    case = replace(MASK["causal_129x129"], heads=heads, softcap=softcap)
    total = case.slices().seqlen_q
    assert total == 129
    for sizes in ((1, total, total), (3, total // 3, total // 3)):
        slices = bit_slices(*sizes, device)
        inputs = case.inputs(dtype, device)
        problem = replace(case.problem(dtype, device), has_bits=True)
        results = run_kernel(kernel, inputs, slices, problem, True)
        assert_attention_close(results, inputs, slices, problem, True)


@dataclass(frozen=True)
class BitCase(Case):
    """A random mask of each batch entry and head, bool `[batch, masks, seqlen_q, seqlen_k]`,
    behind the slices of another case.

    Entries and heads with masks of their own are rows of one head, so `heads` are those that share a mask.
    """

    table: torch.Tensor = field(default=None, repr=False, compare=False)
    in_front: Case = field(default=None, repr=False)

    @staticmethod
    def of(name, table, in_front=None):
        batch, masks, seqlen_q, seqlen_k = table.shape
        before_q, before_k = (in_front.seqlen_q, in_front.seqlen_k) if in_front else (0, 0)
        totals = (before_q + batch * masks * seqlen_q, before_k + batch * masks * seqlen_k)
        return BitCase(name, *totals, [], table=table, in_front=in_front)

    def slices(self, device="cpu"):
        batch, masks, seqlen_q, seqlen_k = self.table.shape
        table = self.table.to(device)
        sizes = MaskSizes(batch, seqlen_q, seqlen_k, Heads(masks, masks))
        found = slices_with_bits(
            lambda b, h, q, kv: table[b, h, q, kv], sizes, None, torch.device(device)
        )
        if self.in_front is None:
            return found
        others = self.in_front.slices(device)
        is_there = found.q_ranges[:, :1] < found.q_ranges[:, 1:]
        moved = [
            torch.where(is_there, x + before, 0)
            for x, before in ((found.q_ranges, others.seqlen_q), (found.k_ranges, others.seqlen_k))
        ]
        lists = [
            torch.cat(pair)
            for pair in (
                (others.q_ranges, moved[0]),
                (others.k_ranges, moved[1]),
                (others.mask_types, found.mask_types),
            )
        ]
        return AttnSlices.unchecked(*lists, self.seqlen_q, self.seqlen_k, found.bits)

    def problem(self, dtype, device="cpu"):
        return replace(super().problem(dtype, device), has_bits=True)


def random_table(batch, masks, seqlen_q, seqlen_k, seed):
    """Most pairs at random; rows that see nothing, rows that see all,
    and pieces of blocks that are visible or hidden as a whole."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(batch, masks, seqlen_q, seqlen_k, generator=generator) < 0.3
    table[..., 7::29, :] = False
    table[..., 11::31, :] = True
    table[..., 128:192, :128] = False
    table[..., :64, 128:256] = True
    table[..., :64, 192:256] = False
    return table


BIT_CASES = [
    BitCase.of("one_block", random_table(1, 1, 128, 128, 0)),
    BitCase.of("ragged", random_table(1, 1, 300, 270, 1)),
    BitCase.of("by_head", random_table(1, 3, 75, 90, 2)),
    BitCase.of("entries", random_table(2, 1, 150, 131, 3)),
    BitCase.of(
        "behind_stairs",
        random_table(1, 1, 140, 150, 4),
        varlen("short", [1, 30, 2, 50, 9, 40, 100, 3, 20], MaskType.CAUSAL),
    ),
    BitCase.of(
        "behind_a_document", random_table(1, 2, 70, 70, 5), varlen("one", [90], MaskType.CAUSAL)
    ),
]
