"""What moving rows must do, on whichever device and by whichever code."""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.dtensor.transport import rows


def check_moves(move, dtype, device="cpu"):
    """`move` against plain indexing, also of rows with holes between them and into a part of a row."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(30, 3, 2, 40, generator=generator).to(device, dtype)
    some, order = (
        torch.randperm(n, generator=generator)[:20].to(device, torch.int32) for n in (30, 25)
    )
    narrow = wide[:, 0, 1]
    for source in (wide[:, :, 0], wide[:, :2, 1], wide.transpose(1, 2)):
        for source_rows, target_rows in itertools.product((None, some), (None, order)):
            num = 30 if source_rows is None and target_rows is None else 20
            packed = torch.randn(30, 350, generator=generator).to(device)
            expected = packed.clone()
            sources, targets = [source, narrow], []
            for x, first in zip(sources, (7, 303), strict=True):
                flat = x.flatten(1)
                values = flat[:num] if source_rows is None else flat[some.long()]
                to = slice(num) if target_rows is None else order.long()
                columns = slice(first, first + flat.shape[1])
                expected[to, columns] = values.float()
                targets.append(packed[:num, columns] if target_rows is None else packed[:, columns])
            sources = [x[:num] for x in sources] if source_rows is None else sources
            move(sources, source_rows, targets, target_rows)
            assert torch.equal(packed, expected)
    before = wide.clone()
    move([wide], some[:0], [wide], order[:0])
    assert torch.equal(wide, before)


NUM_ROWS, SHAPES = 20, [(2, 20), (30,)]


class Summands(NamedTuple):
    """Home rows 0 to 7 get values from several of four ranks, rows 5 to 11 some of the rank's own, as row 0 does. With
    groups of ranks, some are added up first."""

    sums: rows.Sums
    prior: list[Tensor]
    buffers: list[Tensor]
    arrived: list[Tensor]

    def outs(self, dtype):
        return [torch.full_like(x, torch.nan, dtype=dtype) for x in self.prior]


GROUPS = [None, [[2], [0, rows.OWN], [3, 1]], [[3, rows.OWN, 2, 0, 1]]]


def summands(dtype, device="cpu", with_own=True, order=None):
    generator = torch.Generator().manual_seed(1)
    counts = [5, 0, 7, 3]
    home = torch.cat([torch.randperm(8, generator=generator)[:n].sort().values for n in counts])
    own_home = torch.tensor([0, *range(5, 12)][: 8 * with_own], dtype=torch.int32)
    own_buffer = torch.randperm(9, generator=generator)[: len(own_home)].int()

    def made(num, dtype):
        return [torch.randn(num, *x, generator=generator).to(device, dtype) for x in SHAPES]

    index = (x.to(device) for x in (own_home, own_buffer))
    sums = rows.Sums(home.int().to(device), NUM_ROWS, counts, *index, order)
    prior, buffers = made(NUM_ROWS, torch.float32), made(9, dtype)
    # Side by side, as they travel.
    packed = torch.cat([x.flatten(1) for x in made(15, dtype)], 1)
    return Summands(sums, prior, buffers, rows.split(packed, buffers))


def expected_sums(with_prior, dtype, out_dtype, with_own, order=None):
    """Bit by bit in the order of ranks, from the rank's own on, or in that of groups."""
    sums, prior, buffers, arrived = summands(dtype, with_own=with_own, order=order)
    totals = [x.clone() if with_prior else torch.zeros_like(x) for x in prior]
    begins = [0, *itertools.accumulate(sums._counts)]
    for total, buffer, rows_there in zip(totals, buffers, arrived, strict=True):
        for group in order or [[rows.OWN], [0], [1], [2], [3]]:
            of_group = torch.zeros_like(total)
            for rank in group:
                if rank == rows.OWN:
                    for row, at in zip(sums._own_home_rows, sums._own_buffer_rows, strict=True):
                        of_group[row] += buffer[at].float()
                    continue
                for i in range(begins[rank], begins[rank + 1]):
                    of_group[sums._rows[i]] += rows_there[i].float()
            total += of_group.to(dtype).float()
    return [x.to(out_dtype) for x in totals]


def check_sums(write, dtype, device="cpu", out_dtypes=(torch.bfloat16, torch.float32)):
    for with_prior, with_own, order in itertools.product((False, True), (False, True), GROUPS):
        for out_dtype in out_dtypes:
            given = summands(dtype, device, with_own, order)
            outs = given.outs(out_dtype)
            prior = given.prior if with_prior else None
            write(given.sums, outs, prior, given.buffers, given.arrived)
            expected = expected_sums(with_prior, dtype, out_dtype, with_own, order)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(outs, expected, strict=True))
    given = summands(dtype, device)
    write(given.sums, given.prior, given.prior, given.buffers, given.arrived)
    expected = expected_sums(True, dtype, torch.float32, True)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(given.prior, expected, strict=True))
    # Rows with holes between them, as in what travels.
    given = summands(dtype, device, order=GROUPS[1])
    wide = torch.full((NUM_ROWS, 90), torch.nan, dtype=dtype, device=device)
    outs = [
        wide[:, first : first + x.flatten(1).shape[1]]
        for x, first in zip(given.prior, (3, 50), strict=True)
    ]
    outs = [x.unflatten(1, y.shape[1:]) for x, y in zip(outs, given.prior, strict=True)]
    write(given.sums, outs, None, given.buffers, given.arrived)
    in_groups = expected_sums(False, dtype, dtype, True, GROUPS[1])
    assert all(torch.equal(a.cpu(), b) for a, b in zip(outs, in_groups, strict=True))
    apart = summands(dtype, device)
    buffers = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in apart.buffers]
    write(apart.sums, apart.prior, apart.prior, buffers, apart.arrived)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(apart.prior, expected, strict=True))
