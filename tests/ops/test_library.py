"""The custom ops pass torch's own checks: schema, fakes, autograd, dynamic shapes."""

import pytest
import torch

import magi_compile.ops  # defines the ops
from magi_compile import AttnSlices

LISTS = ("q_ranges", "k_ranges", "mask_types")


@pytest.fixture
def arguments():
    torch.manual_seed(0)
    slices = AttnSlices.from_lists([(0, 20), (20, 40)], [(0, 20), (20, 40)], [1, 0], 48, 48)
    lists = [getattr(slices, name) for name in LISTS]
    return [torch.randn(48, heads, 16) for heads in (4, 2, 2)], lists


def test_forward(arguments):
    tensors, lists = arguments
    tensors = [tensor.requires_grad_() for tensor in tensors]
    torch.library.opcheck(torch.ops.magi.attention, (*tensors, list(lists), [], 0.25, 0.0, ""))


def test_forward_with_a_plan(arguments):
    """A plan travels as a list of tensors that have no gradients."""
    tensors, lists = arguments
    tensors = [tensor.requires_grad_() for tensor in tensors]
    plan = [torch.zeros(1, dtype=torch.int32)]
    arguments = (*tensors, list(lists), plan, 0.25, 0.0, "reference")
    torch.library.opcheck(torch.ops.magi.attention, arguments)


def test_values_alone(arguments):
    tensors, lists = arguments
    torch.library.opcheck(torch.ops.magi.ffa_fwd, (*tensors, list(lists), [], 0.25, 0.0, ""))


@pytest.mark.parametrize("with_dlse", [True, False])
def test_backward(arguments, with_dlse):
    (q, k, v), lists = arguments
    out, lse = torch.ops.magi.ffa_fwd(q, k, v, list(lists), [], 0.25, 0.0, "")
    dlse = torch.randn_like(lse) if with_dlse else None
    torch.library.opcheck(
        torch.ops.magi.ffa_bwd,
        (torch.randn_like(out), dlse, q, k, v, out, lse, list(lists), [], 0.25, 0.0, "", False),
    )


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
