"""What moving rows must do, on whichever device and by whichever code."""

import torch

from magi_compile.dtensor import rows


def check_moves(code, dtype, device="cpu"):
    """`code.gather` and `code.scatter` against plain indexing, also of tensors with holes between rows."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(30, 3, 2, 40, generator=generator).to(device, dtype)
    tensors = [wide[:, :, 0], wide[:, :2, 1]]
    index = torch.randint(0, 30, (53,), generator=generator, dtype=torch.int32).to(device)
    packed = code.gather(tensors, index)
    expected = torch.cat([x.flatten(1)[index.long()] for x in tensors], 1)
    assert torch.equal(packed, expected)
    order = torch.randperm(53, generator=generator).to(device, torch.int32)
    for buffer, x in zip(code.scatter(packed, order, tensors), tensors, strict=True):
        assert torch.equal(buffer[order.long()], x[index.long()])
    nothing = index[:0]
    assert code.gather(tensors, nothing).shape == (0, 200)
    assert [x.shape[0] for x in code.scatter(packed[:0], nothing, tensors)] == [0, 0]


def sums_and_inputs(dtype, device="cpu"):
    """Rows 3 to 7 of 20 get values from several of four ranks; totals are not zero before."""
    generator = torch.Generator().manual_seed(1)
    counts = [5, 0, 7, 3]
    home = torch.cat([torch.randperm(8, generator=generator)[:n].sort().values for n in counts])
    packed = torch.randn(15, 70, generator=generator).to(device, dtype)
    totals = [torch.randn(20, 2, 20, generator=generator), torch.randn(20, 30, generator=generator)]
    return rows.Sums(home.int().to(device), 20, counts), [x.to(device) for x in totals], packed


def check_sums(dtype, device="cpu"):
    """Bit by bit the sums in the order of ranks."""
    sums, totals, packed = sums_and_inputs(dtype)
    expected = [x.clone() for x in totals]
    home = sums._rows.tolist()
    for i, row in enumerate(home):
        expected[0][row] += packed[i, :40].float().view(2, 20)
        expected[1][row] += packed[i, 40:].float()
    sums, totals, packed = sums_and_inputs(dtype, device)
    sums.add_to(totals, packed)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(totals, expected, strict=True))
