"""magi::mask_bits evaluates by a kernel where there is one, and asks for a second opinion of what that shows."""

import pytest
import torch

from magi_compile import MaskDataError
from magi_compile.functions.text import in_ops, mask_mod_of, names_of_captures
from magi_compile.kernels.select import MaskKernel
from magi_compile.masks.evaluation import verify
from magi_compile.masks.evaluation.bit_blocks import slices_with_bits
from magi_compile.ops.masks import mask_bits
from magi_compile.ops.masks.mask_call import MaskCall

DOCUMENT = torch.arange(300) % 7
TEXT = "mask;; def mask(b, h, q, kv, t0):;;     return (t0[q] & t0[kv]) + h > 2"
ARGUMENTS = ([DOCUMENT], [], TEXT, 1, 300, 200, 0, torch.device("cpu"), [], [], False, [2, 2])


def wanted():
    call = MaskCall.of(*ARGUMENTS)
    mask_mod = mask_mod_of(call.mask.functions["mask"], names_of_captures(call.tables, ()))
    with in_ops():
        return slices_with_bits(mask_mod, call.sizes, None, call.device)


@pytest.fixture
def evaluated(monkeypatch):
    """How often a kernel has evaluated; it is asked for a graph, too."""
    bits_of = pytest.importorskip("magi_compile.kernels.sm90.masks.mask_bits")
    monkeypatch.setattr(verify, "_verified", set())
    monkeypatch.setattr(bits_of, "load_function", lambda variant, device: variant)
    monkeypatch.setattr(mask_bits, "hand_over_to_launcher", lambda: None)
    runs = []

    def on_device(program, tables, symbols, sizes, listed, device):
        bits_of.prepare(program, tables, symbols, sizes, listed, device)
        slices = wanted()
        slices.bits[0] ^= -1 if runs == ["wrong"] else 0
        runs.append(sizes)
        return slices.q_ranges, slices.k_ranges, slices.mask_types, slices.bits

    monkeypatch.setattr(mask_bits, "mask_bits_kernel", lambda arch: MaskKernel(on_device, None))
    return runs


def test_a_kernel_evaluates(evaluated):
    q_ranges, k_ranges, mask_types, bits = torch.ops.magi.mask_bits(*ARGUMENTS)
    slices = wanted()
    assert len(evaluated) == 1
    assert torch.equal(q_ranges, slices.q_ranges)
    assert torch.equal(k_ranges, slices.k_ranges)
    assert torch.equal(mask_types, slices.mask_types)
    assert bits.shape == slices.bits.shape


def test_a_second_opinion_of_its_bits(evaluated):
    evaluated.append("wrong")
    with pytest.raises(MaskDataError, match="this is a bug of ours"):
        torch.ops.magi.mask_bits(*ARGUMENTS)


def test_tensor_operations_where_there_is_none(monkeypatch):
    monkeypatch.setattr(
        mask_bits, "mask_bits_kernel", lambda arch: MaskKernel(lambda *_: None, None)
    )
    q_ranges, _, mask_types, _ = torch.ops.magi.mask_bits(*ARGUMENTS)
    assert torch.equal(q_ranges, wanted().q_ranges)
    assert torch.equal(mask_types, wanted().mask_types)


def test_opcheck():
    """But for the values of bits that no slice has, which are not written."""
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.magi.mask_bits, ARGUMENTS, test_utils=checks)
