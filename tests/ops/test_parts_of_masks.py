"""Parts of BlockMasks, those of a rank's heads and entries: the same object until the BlockMask says something else."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from magi_compile.ops.dtensors import Shards, block_mask_of


def by_head(limit):
    return lambda b, h, q, kv: q - kv < limit + h


@pytest.mark.parametrize(
    "change",
    [
        lambda mask: setattr(mask, "mask_mod", by_head(9)),
        lambda mask: setattr(mask, "kv_indices", mask.kv_indices.clone()),
        lambda mask: setattr(mask, "seq_lengths", (32, 64)),
        lambda mask: setattr(mask.kv_indices, "data", mask.kv_indices.clone()),
    ],
    ids=["mask_mod", "list", "lengths", "memory of a list"],
)
def test_a_part_follows_its_block_mask(change):
    mask = create_block_mask(by_head(3), None, 4, 64, 64, device="cpu", BLOCK_SIZE=32)
    shards = Shards(*[torch.empty(0)] * 3, None, (), entries=None, heads=(2, 2), whole=(1, 4))
    part = block_mask_of(mask, shards)
    assert block_mask_of(mask, shards) is part
    change(mask)
    other = block_mask_of(mask, shards)
    assert other is not part
    assert other.seq_lengths == mask.seq_lengths
    torch.testing.assert_close(other.kv_indices, mask.kv_indices[:, 2:])
    zero = torch.tensor(0)
    for gap in range(16):
        index = (torch.tensor(gap), zero)
        assert other.mask_mod(zero, zero, *index) == mask.mask_mod(zero, zero + 2, *index)
