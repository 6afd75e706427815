"""Slices with bit blocks, for kernels that take them."""

from dataclasses import replace

import torch

from magi_compile.masks.evaluation.bit_blocks import Grid, Heads, slices_with_bits
from magi_compile.testing.cases import MASKS
from magi_compile.testing.cases import Heads as HeadSizes
from magi_compile.testing.numerics import assert_attention_close, run_kernel

MASK = {case.name: case for case in MASKS}


def shown(b, h, q, kv):
    """A prefix of everything, and of what is behind it, not in order: some rows see nothing."""
    return ((q * kv % 7 < 2) & (q >= kv) & (q % 11 > 0)) | ((kv < 128) & (q < 128) & (b == 0))


def bit_slices(batch, seqlen_q, seqlen_k, device="cpu"):
    device = torch.device(device)
    slices = slices_with_bits(shown, Grid(batch, Heads(), seqlen_q, seqlen_k), None, device)
    assert (slices.mask_types > 3).any()
    return slices


def check_bits(kernel, dtype, device, heads=None, softcap=0.0):
    """Values and gradients of one batch entry, and of three that share tiles, against the oracle."""
    heads = heads or HeadSizes(2, 1, 16, 16)
    case = replace(MASK["causal_129x129"], heads=heads, softcap=softcap)
    total = case.slices().seqlen_q
    assert total == 129
    for sizes in ((1, total, total), (3, total // 3, total // 3)):
        slices = bit_slices(*sizes, device)
        inputs = case.inputs(dtype, device)
        problem = replace(case.problem(dtype, device), has_bits=True)
        results = run_kernel(kernel, inputs, slices, problem, True)
        assert_attention_close(results, inputs, slices, problem, True)
