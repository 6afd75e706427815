"""What merges and sums of partial results must give, on whichever device and by whichever code."""

import torch

from magi_compile.kernels.base import ForwardOutput
from magi_compile.kernels.merge import merge_partials

SHAPES = [(1, 1, 8), (70, 3, 40), (13, 8, 128)]


def random_partials(shape, num_partials, dtype, device="cpu"):
    """Partial results with rows that see nothing in some or all partials."""
    num_rows, nheads, _ = shape
    generator = torch.Generator().manual_seed(num_partials)
    partials = []
    for i in range(num_partials):
        out = torch.randn(shape, generator=generator).to(dtype)
        lse = 20 * torch.randn(nheads, num_rows, generator=generator)
        rows = torch.arange(num_rows)
        is_empty = (rows % 3 == i) | (rows % 7 == 6)
        out[is_empty] = 0.0
        lse[:, is_empty] = -torch.inf
        partials.append(ForwardOutput(out.to(device), lse.to(device)))
    return partials


def check_merge(merge_prior, shape, num_partials, dtype, device="cpu"):
    """Partials merged one after another: in fp32 until the last."""
    partials = random_partials(shape, num_partials, dtype, device)
    merged = None
    for i, partial in enumerate(partials):
        merged = merge_prior(partial, merged, dtype if i == num_partials - 1 else torch.float32)
    out, lse = merged
    expected, expected_lse = merge_partials(
        [partial.out.double() for partial in partials],
        [partial.lse.double().t() for partial in partials],
    )
    assert out.dtype == dtype
    assert lse.is_contiguous()
    torch.testing.assert_close(out, expected.to(dtype))
    torch.testing.assert_close(lse, expected_lse.t().float())


def check_sum(add, shape, num_partials, dtype, device="cpu"):
    generator = torch.Generator().manual_seed(num_partials)
    partials = [
        torch.randn(shape, generator=generator).to(device, dtype) for _ in range(num_partials)
    ]
    total = add(partials)
    assert total.dtype == dtype
    torch.testing.assert_close(total, sum(partial.double() for partial in partials).to(dtype))
