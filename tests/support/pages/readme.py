"""What the README takes for granted, and whether its formula is what the op computes."""

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: F401

from magi_compile import AttnSlices, flex_flash_attention

model = torch.nn.Linear(8, 8)
q, k, v = (torch.randn(1, 2, 128, 64) for _ in range(3))
block_mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 128, 128, device="cpu")


def check(line, names):
    """Before the formula: packed tensors. Behind it: the op."""
    if "lse" not in names:
        names.update(nheads_q=4, nheads_kv=2, softmax_scale=0.125)
        names["slices"] = AttnSlices.from_cu_seqlens([0, 20, 48], causal=True)
        names["q"] = torch.randn(48, 4, 64)
        names["k"], names["v"] = (torch.randn(48, 2, 64) for _ in range(2))
        names["packed"] = (names["q"], names["k"], names["v"])
        return
    out, lse, _ = flex_flash_attention(*names["packed"], names["slices"])
    torch.testing.assert_close(names["out"], out)
    torch.testing.assert_close(names["lse"], lse)
