"""The custom ops pass torch's own checks: schema, fakes, autograd, dynamic shapes."""

import pytest
import torch

import magi_compile.ops  # noqa: F401  (defines the ops)
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
