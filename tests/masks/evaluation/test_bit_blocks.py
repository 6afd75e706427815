"""Bit blocks say what the mask_mod says, whatever it is, and take no more memory than blocks with bits have."""

import random

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from magi_compile._checks import MaskDataError
from magi_compile.masks.bits import BLOCK, FIRST_BITS, WORDS, pack, unpack
from magi_compile.masks.evaluation.bit_blocks import (
    Listed,
    slices_with_bits,
    visible_blocks,
    without_padding,
)
from magi_compile.masks.evaluation.block_lists import BlockLists
from magi_compile.masks.evaluation.sizes import Heads, MaskSizes

CPU = torch.device("cpu")
NUMBERS = torch.randint(0, 4, (2, 4, 300), generator=torch.Generator().manual_seed(0))
NONE, NONE_OF_MANY = torch.zeros(0), torch.zeros(200, 0, dtype=torch.bool)


def mixed(b, h, q, kv):
    """Some blocks full, some empty, some neither, others for each entry and head."""
    same = NUMBERS[b, h, q] == NUMBERS[b, h, kv]
    return (same & (q >= kv) & (kv < 256)) | ((kv < 128) & (q > 120))


def test_packing():
    shown = torch.rand(3, BLOCK, BLOCK) < 0.5
    bits = pack(shown)
    assert bits.shape == (3, BLOCK, WORDS)
    assert torch.equal(unpack(bits), shown)
    word, row = 2, 7
    wanted = sum(int(shown[1, row, 32 * word + j]) << j for j in range(32))
    assert int(bits[1, row, word]) & 0xFFFFFFFF == wanted


@pytest.mark.parametrize("sizes", [(300, 260), (1, 300), (128, 128), (129, 1)], ids=str)
def test_slices_are_the_mask(sizes):
    """Of every batch entry and head; two heads of q read one of k."""
    seqlen_q, seqlen_k = sizes
    slices = slices_with_bits(mixed, MaskSizes(2, *sizes, Heads(4, 2)), None, CPU)
    wanted = create_mask(mixed, 2, 4, *sizes, device="cpu")
    dense = slices.to_dense().view(2, 4, seqlen_q, 2, 2, seqlen_k)
    for b in range(2):
        for h in range(4):
            assert torch.equal(dense[b, h, :, b, h // 2], wanted[b, h])
    assert slices.area() == int(wanted.sum())
    fewer = without_padding(slices)
    assert torch.equal(fewer.to_dense(), slices.to_dense())
    assert fewer.bits.shape[0] == int((slices.mask_types >= FIRST_BITS).sum())


def _everything(b, h, q, kv):
    return q >= 0


def _only_partial(b, h, q, kv):
    return q % 3 >= kv % 2


def test_random_lists():
    generator = random.Random(0)
    for _ in range(20):
        rows, keys = generator.choice([16, 48, 100, 128, 200]), generator.choice([32, 80, 256])
        seqlen_q, seqlen_k = generator.randint(1, 400), generator.randint(1, 400)
        shape = (2, generator.choice([1, 2]), -(-seqlen_q // rows), -(-seqlen_k // keys))
        is_listed, is_full = torch.rand(shape) < 0.4, torch.rand(shape) < 0.5
        kinds = [is_listed & ~is_full, is_listed & is_full]
        lists = [
            x
            for kind in kinds
            for x in (kind.sum(-1).int(), kind.int().argsort(dim=-1, descending=True).int())
        ]
        sizes = MaskSizes(2, seqlen_q, seqlen_k, Heads(2, 2))
        listed = Listed.of(BlockLists(*lists), rows, keys, sizes)
        grid_mod = _only_partial if (has_mask := generator.random() < 0.5) else _everything
        if has_mask:
            listed = Listed.of(BlockLists(*lists[:2]), rows, keys, sizes)
            is_listed = kinds[0]
        slices = slices_with_bits(grid_mod, sizes, listed, CPU)
        wanted = is_listed.repeat_interleave(rows, 2).repeat_interleave(keys, 3)
        wanted = wanted.expand(-1, 2, -1, -1)[:, :, :seqlen_q, :seqlen_k].flatten(0, 1)
        if has_mask:
            wanted = wanted & (torch.arange(seqlen_q)[:, None] % 3 >= torch.arange(seqlen_k) % 2)
        dense = slices.to_dense().view(4, seqlen_q, 4, seqlen_k)
        assert all(torch.equal(dense[i, :, i], wanted[i]) for i in range(4))


@pytest.mark.parametrize("block", [(128, 128), (48, 80)], ids=str)
def test_visible_blocks(block):
    rows, keys = block
    seen, full = visible_blocks(mixed, MaskSizes(2, 300, 260, Heads(4)), rows, keys, CPU)
    dense = create_mask(mixed, 2, 4, 300, 260, device="cpu")
    for i in range(seen.shape[2]):
        for j in range(seen.shape[3]):
            part = dense[:, :, rows * i : rows * (i + 1), keys * j : keys * (j + 1)].flatten(2)
            assert torch.equal(seen[:, :, i, j], part.any(2))
            assert torch.equal(full[:, :, i, j], part.all(2))


@pytest.mark.parametrize(
    ("mask_mod", "found"),
    [
        (lambda b, h, q, kv: NUMBERS[0, 0, q + kv] == 0, r"look up dimension 2 of NUMBERS at indices in "
         r"\[-300, 300\), but it looks up 300 at q = 101, kv = 199"),
        (lambda b, h, q, kv: q // (kv - 5) > 0, "not divide by zero, but it divides by 0 at q = 0, kv = 5"),
        (lambda b, h, q, kv: NUMBERS[0, 4, q * kv] > 0, "index 4 is out of bounds for dimension 1 of NUMBERS"),
        (lambda b, h, q, kv: NONE[q * kv] > 0, r"look up tensors that have entries, NONE has shape \[0\]"),
        (lambda b, h, q, kv: NONE_OF_MANY[q, b + kv], r"NONE_OF_MANY has shape \[200, 0\]"),
    ],
    ids=["index", "divisor", "number", "nothing", "nothing in a dimension"],
)  # fmt: skip
def test_data_that_mean_nothing(mask_mod, found):
    with pytest.raises(MaskDataError, match=f"the mask_mod must .*{found}"):
        slices_with_bits(mask_mod, MaskSizes(1, 200, 200), None, CPU)


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="must match the size") as error:
        slices_with_bits(
            lambda b, h, q, kv: torch.ones(2) == torch.ones(3), MaskSizes(1, 4, 4), None, CPU
        )
    assert not isinstance(error.value, MaskDataError)


def test_numbers_are_true_where_they_are_not_0():
    """As FlexAttention's kernels read them: 2 shows as much as 1."""
    sizes = MaskSizes(1, 200, 200)
    numbers = slices_with_bits(lambda b, h, q, kv: (q + kv) % 4 & 2, sizes, None, CPU)
    wanted = slices_with_bits(lambda b, h, q, kv: ((q + kv) % 4 & 2) != 0, sizes, None, CPU)
    assert torch.equal(numbers.to_dense(), wanted.to_dense())
    assert 0 < int(wanted.to_dense().sum()) < 200 * 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_floats_are_no_truth_values(dtype):
    message = (
        f"`mask_mod` must return a bool tensor, got one of {dtype}; return the condition itself"
    )
    with pytest.raises(TypeError, match=message):
        slices_with_bits(lambda b, h, q, kv: (q - kv).to(dtype), MaskSizes(1, 9, 9), None, CPU)


def test_a_mask_mod_that_returns_no_tensor():
    with pytest.raises(TypeError, match="`mask_mod` must return a bool tensor, got a tuple"):
        slices_with_bits(lambda b, h, q, kv: (q > 3, kv > 3), MaskSizes(1, 9, 9), None, CPU)
