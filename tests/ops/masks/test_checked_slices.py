"""Slices that a compiled function makes itself are checked when it runs, others are not."""

import pytest
import torch

from magi_compile import AttnSlices, MaskDataError, flex_flash_attention
from magi_compile.kernels.reference import exact_forward
from magi_compile.masks.evaluation.slice_checks import NEIGHBOURS, slice_checks

TOTAL = 64


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


GOOD = ([[0, 30], [30, 64]], [[0, 64], [10, 64]], [0, 1])
BROKEN = {
    "q": (([[0, 30], [30, 65]], *GOOD[1:]), r"`q_ranges\[1\]` must .* got \[30, 65\]"),
    "k": ((GOOD[0], [[-4, 64], [10, 64]], GOOD[2]), r"`k_ranges\[0\]` must .* got \[-4, 64\]"),
    "type": ((*GOOD[:2], [0, 7]), r"`mask_types\[1\]` must be .* got 7"),
    "overlap": (([[0, 31], [30, 64]], *GOOD[1:]), "slices must not overlap"),
}


def attend(q, k, v, q_ranges, k_ranges, mask_types):
    slices = AttnSlices(q_ranges, k_ranges, mask_types, q.shape[0], k.shape[0])
    return flex_flash_attention(q, k, v, slices)


def inputs():
    return [torch.randn(TOTAL, 2, 16) for _ in range(3)]


@pytest.mark.parametrize("backend", ["aot_eager", "magi"])
def test_in_a_graph(backend):
    q, k, v = inputs()
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    out, lse, _ = compiled(q, k, v, *(int32(*x) for x in GOOD))
    exact = exact_forward(q, k, v, AttnSlices.from_lists(*GOOD, TOTAL, TOTAL), 0.25)
    torch.testing.assert_close(out.double(), exact.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), exact.lse, atol=1e-5, rtol=1e-5)
    for lists, message in BROKEN.values():
        with pytest.raises(MaskDataError, match=message):
            compiled(q, k, v, *(int32(*x) for x in lists))


def test_slices_from_outside_are_not_checked_again():
    graphs = []

    def keep(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    torch.compile(flex_flash_attention, backend=keep, fullgraph=True)(
        *inputs(), AttnSlices.from_lists(*GOOD, TOTAL, TOTAL)
    )
    lists = [int32(*x) for x in GOOD]
    torch.compile(attend, backend=keep, fullgraph=True)(*inputs(), *lists)
    found = [[node.target for node in gm.graph.nodes] for gm in graphs]
    assert [torch.ops.magi.checked_slices in targets for targets in found] == [False, True]


@pytest.mark.parametrize("name", BROKEN)
def test_what_a_check_on_a_device_says(name):
    lists, _ = BROKEN[name]
    slices = AttnSlices.unchecked(*(int32(*x) for x in lists), TOTAL, TOTAL)
    expected = {
        "q": r"`q_ranges` must satisfy 0 <= start <= end <= seqlen_q, but `q_ranges\[1\]` is \[30, 65\]",
        "k": r"`k_ranges` must .*, but `k_ranges\[0\]` is \[-4, 64\]",
        "type": r"`mask_types` must hold values of MaskType .*, but `mask_types\[1\]` is 7",
        "overlap": "slices must not overlap, but those at 0 and 1 do",
    }
    broken = [check for check in slice_checks(slices) if not check.ok]
    with pytest.raises(MaskDataError, match=expected[name]):
        broken[0].raise_if_broken()


def test_no_slices_need_no_check():
    assert slice_checks(AttnSlices.from_lists([], [], [], 8, 8)) == []


def test_many_slices():
    """Each of them twice as long as it may be, far more than are compared with one another."""
    begin = torch.arange(0, 40 * NEIGHBOURS, 4)
    for length in (4, 8):
        ranges = torch.stack([begin, begin + length], 1).int()
        slices = AttnSlices.unchecked(ranges, ranges, int32(*[1] * len(begin)), 1 << 20, 1 << 20)
        assert all(bool(check.ok) for check in slice_checks(slices)) == (length == 4)


def test_the_op():
    lists = [int32(*x) for x in GOOD]
    torch.library.opcheck(torch.ops.magi.checked_slices, (*lists, TOTAL, TOTAL))


@pytest.mark.gpu
@pytest.mark.parametrize("name", BROKEN)
def test_on_a_gpu_nothing_waits_and_no_kernel_meets_broken_slices(name):
    import magi_compile

    lists = [int32(*x).cuda() for x in BROKEN[name][0]]
    found = torch.ops.magi.checked_slices(*lists, TOTAL, TOTAL)
    assert not any(x.any() for x in found)
    with pytest.raises(MaskDataError):
        magi_compile.synchronize_checks()
