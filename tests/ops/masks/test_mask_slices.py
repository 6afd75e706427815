"""magi::mask_slices passes torch's own checks; block lists that contradict the program are reported."""

import pytest
import torch

import magi_compile.ops  # defines the ops
from magi_compile import AttnSlices


def test_mask_slices():
    document = torch.arange(64) // 20
    program = "(q >= kv) & (t0[q] == t0[kv])"
    options = (1, 64, 64, 16, torch.device("cpu"))
    arguments = ([document], [], program, *options, [], [])
    torch.library.opcheck(torch.ops.magi.mask_slices, arguments)
    q_ranges, k_ranges, mask_types = torch.ops.magi.mask_slices(*arguments)
    found = AttnSlices(q_ranges, k_ranges, mask_types, 64, 64).compact()
    assert [tuple(s) for s in found] == [
        ((a, b), (a, b), 1) for a, b in ((0, 20), (20, 40), (40, 60), (60, 64))
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("num_blocks", [4, 3])
def test_mask_slices_with_block_lists_on_the_gpu(num_blocks):
    """Lists that leave out what the program shows are reported, and nothing of the mask remains."""
    counts = torch.full((1, 1, 4), num_blocks, dtype=torch.int32, device="cuda")
    indices = torch.arange(4, dtype=torch.int32, device="cuda").expand(1, 1, 4, 4).contiguous()
    device = torch.device("cuda", torch.cuda.current_device())
    options = (1, 64, 64, 16, device)
    lists = torch.ops.magi.mask_slices([], [], "q >= kv", *options, [counts, indices], [16, 16])
    if num_blocks == 4:
        magi_compile.synchronize_checks()
        assert [x[0].tolist() for x in lists] == [[0, 64], [0, 64], 1]
        return
    with pytest.raises(magi_compile.MaskDataError, match="leave out kv block 3 of q block 3"):
        magi_compile.synchronize_checks()
    assert not any(x.any() for x in lists)
