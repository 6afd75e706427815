"""What moving rows must do, on whichever device and by whichever code."""

import torch

from magi_compile.dtensor import rows


def check_moves(move, dtype, device="cpu"):
    """`move` against plain indexing, also of rows with holes between them and into a part of a row."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(30, 3, 2, 40, generator=generator).to(device, dtype)
    some, order = (
        torch.randperm(n, generator=generator)[:20].to(device, torch.int32) for n in (30, 25)
    )
    for source in (wide[:, :, 0], wide[:, :2, 1], wide.transpose(1, 2)):
        flat = source.flatten(1)
        for source_rows in (None, some):
            for target_rows in (None, order):
                num = 30 if source_rows is None and target_rows is None else 20
                for add in (False, True):
                    packed = torch.randn(30, 300, generator=generator).to(device)
                    expected = packed.clone()
                    values = flat[:num] if source_rows is None else flat[some.long()]
                    to = slice(num) if target_rows is None else order.long()
                    part = expected[:, 7 : 7 + flat.shape[1]]
                    part[to] = values.float() + (part[to] if add else 0)
                    target = packed[:, 7 : 7 + flat.shape[1]]
                    target = target[:num] if target_rows is None else target
                    move(
                        source[:num] if source_rows is None else source,
                        source_rows,
                        target,
                        target_rows,
                        add=add,
                    )
                    assert torch.equal(packed, expected)
    before = wide.clone()
    move(wide, some[:0], wide, order[:0])
    assert torch.equal(wide, before)


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
