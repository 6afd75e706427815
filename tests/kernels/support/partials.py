"""What merges and sums of partial results must give, on whichever device and by whichever code."""

import torch

from magi_compile.kernels.base import ForwardOutput
from magi_compile.kernels.merge import merge_partials

SHAPES = [(1, 1, 8), (70, 3, 40), (13, 8, 128)]


def random_parts(shape, num_parts, dtype, device="cpu"):
    """Partial results with rows that see nothing in some or all parts."""
    num_rows, nheads, _ = shape
    generator = torch.Generator().manual_seed(num_parts)
    parts = []
    for i in range(num_parts):
        out = torch.randn(shape, generator=generator).to(dtype)
        lse = 20 * torch.randn(nheads, num_rows, generator=generator)
        rows = torch.arange(num_rows)
        is_empty = (rows % 3 == i) | (rows % 7 == 6)
        out[is_empty] = 0.0
        lse[:, is_empty] = -torch.inf
        parts.append(ForwardOutput(out.to(device), lse.to(device)))
    return parts


def check_merge(merge_prior, shape, num_parts, dtype, device="cpu"):
    """Parts merged one after another: in fp32 until the last."""
    parts = random_parts(shape, num_parts, dtype, device)
    merged = None
    for i, part in enumerate(parts):
        merged = merge_prior(part, merged, dtype if i == num_parts - 1 else torch.float32)
    out, lse = merged
    expected, expected_lse = merge_partials(
        [part.out.double() for part in parts], [part.lse.double().t() for part in parts]
    )
    assert out.dtype == dtype
    assert lse.is_contiguous()
    torch.testing.assert_close(out, expected.to(dtype))
    torch.testing.assert_close(lse, expected_lse.t().float())


def check_sum(add, shape, num_parts, dtype, device="cpu"):
    generator = torch.Generator().manual_seed(num_parts)
    parts = [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(num_parts)]
    total = add(parts)
    assert total.dtype == dtype
    torch.testing.assert_close(total, sum(part.double() for part in parts).to(dtype))
