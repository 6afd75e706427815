"""Bit blocks: what slices cannot say, as a bit for each query and key of 128 by 128.

A list of slices may carry `bits`, int32 `[num_blocks, BLOCK, WORDS]`: bit j of word w of row i is the pair of the i-th
query and the key `32 * w + j` of a block. A slice whose type is `FIRST_BITS + n` shows what is set in block n, which
begins at the first query and the first key of the slice.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128  # queries and keys of a block
WORDS = BLOCK // 32
FIRST_BITS = 4  # behind the values of `MaskType`


def pack(shown: Tensor) -> Tensor:
    """Bits of `shown`, bool `[..., BLOCK, BLOCK]`: int32 `[..., BLOCK, WORDS]`."""
    in_bytes = shown.unflatten(-1, (BLOCK // 8, 8)).to(torch.uint8) << _places(shown.device)
    return in_bytes.sum(-1, dtype=torch.uint8).view(torch.int32)


def unpack(bits: Tensor) -> Tensor:
    """The inverse of `pack`."""
    in_bytes = bits.contiguous().view(torch.uint8)
    return ((in_bytes[..., None] >> _places(bits.device)) & 1).bool().flatten(-2)


def _places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
