"""Masks that look up the block of a query and that of a key together: what is read of them, and their tables."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from magi_compile.masks.evaluation.block_table import block_table
from magi_compile.masks.evaluation.sizes import Heads, MaskSizes
from magi_compile.masks.program.read import read_mask_mod
from tests.plan.torch_walks import pairs_of

BATCH, HEADS, LENGTH_Q, LENGTH_K = 2, 4, 60, 50
CPU = torch.device("cpu")
GENERATOR = torch.Generator().manual_seed(0)
LISTED = torch.rand(BATCH, HEADS // 2, 5, 7, generator=GENERATOR) < 0.5
OF_Q = torch.randint(0, 5, (BATCH, LENGTH_Q), generator=GENERATOR)
OF_K = torch.randint(0, 7, (LENGTH_K,), generator=GENERATOR)
TURNED = LISTED[0, 0].T.contiguous()
INTS = LISTED.int()
HEAD_OF = torch.randint(0, 5, (HEADS, LENGTH_Q), generator=GENERATOR)


def of_heads(b, h, q, kv):
    return LISTED[b, h // 2, OF_Q[b, q], OF_K[kv]]


def of_one(b, h, q, kv):
    return LISTED[0, 1, OF_Q[0, q], OF_K[kv]]


def one_index_after_another(b, h, q, kv):
    return LISTED[b][h // 2][OF_Q[b, q]][OF_K[kv]]


def of_even_blocks(b, h, q, kv):
    return LISTED[b, 0, q // 12, kv // 8]


def keys_first(b, h, q, kv):
    return TURNED[OF_K[kv], OF_Q[b, q]]


def from_the_end(b, h, q, kv):
    return LISTED[b, h // 2, OF_Q[b, q] - 5, OF_K[kv] - 7]


def beside_a_window(b, h, q, kv):
    return (kv <= q) & LISTED[b, h // 2, OF_Q[b, q], OF_K[kv]] & (q - kv < 30)


TABLES = (
    *(of_heads, of_one, one_index_after_another, of_even_blocks, from_the_end),
    *(keys_first, beside_a_window),
)


@pytest.mark.parametrize("mask_mod", TABLES)
def test_tables(mask_mod):
    traced = read_mask_mod(mask_mod, CPU)
    found = traced.program.block_look_up
    sizes = MaskSizes(BATCH, LENGTH_Q, LENGTH_K, Heads(HEADS, HEADS))
    table, checks = block_table(traced.program, traced.tables, (), sizes, CPU)
    assert all(bool(check.ok) for check in checks)
    seen = pairs_of(table).expand(BATCH, HEADS, -1, -1)
    wanted = create_mask(mask_mod, BATCH, HEADS, LENGTH_Q, LENGTH_K, device="cpu")
    if mask_mod is beside_a_window:
        pairs = torch.ones(LENGTH_Q, LENGTH_K, dtype=torch.bool)
        seen = seen & pairs.tril() & pairs.triu(-29)
        assert not found.beside.is_always_true
        assert not found.beside.is_verifiable
    else:
        assert found.beside.is_always_true
    assert torch.equal(seen, wanted.expand_as(seen))
    density = pairs_of(table).double().mean().item()
    assert table.density() == pytest.approx(density)


@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, h, q, kv: q >= kv,
        lambda b, h, q, kv: LISTED[b, 0, OF_Q[b, q], OF_K[kv]] | (q >= kv),
        lambda b, h, q, kv: LISTED[b, 0, OF_Q[b, q], (OF_K[kv] + OF_Q[0, q]) % 7],
        lambda b, h, q, kv: LISTED[b, 0, HEAD_OF[h, q], OF_K[kv]],
        lambda b, h, q, kv: ~LISTED[b, 0, OF_Q[b, q], OF_K[kv]],
        lambda b, h, q, kv: LISTED[b, 0, OF_Q[b, q], OF_K[kv]] & LISTED[b, 1, OF_Q[b, q], OF_K[kv]],
        lambda b, h, q, kv: LISTED[b, 0, OF_Q[b, q], OF_K[kv]] & (kv <= q + h),
        lambda b, h, q, kv: INTS[b, 0, OF_Q[b, q], OF_K[kv]] > 0,
        lambda b, h, q, kv: (INTS > 0)[b, 0, OF_Q[b, q], OF_K[kv]],
        lambda b, h, q, kv: INTS.bool()[b, 0, OF_Q[b, q], OF_K[kv]],
        lambda b, h, q, kv: LISTED.mT[b, 0, OF_K[kv], OF_Q[b, q]],
    ],
)
def test_other_masks(mask_mod):
    assert read_mask_mod(mask_mod, CPU).program.block_look_up is None


def test_a_block_that_there_is_not():
    of_k = OF_K.clone()
    of_k[9] = 7
    traced = read_mask_mod(lambda b, h, q, kv: LISTED[0, 0, OF_Q[0, q], of_k[kv]], CPU)
    sizes = MaskSizes(BATCH, LENGTH_Q, LENGTH_K, Heads(HEADS, HEADS))
    table, checks = block_table(traced.program, traced.tables, (), sizes, CPU)
    (broken,) = [check for check in checks if not bool(check.ok)]
    with pytest.raises(ValueError, match="it looks up 7 at position 9 of batch entry 0"):
        broken.raise_if_broken()
    assert table.of_keys.max() < 7
