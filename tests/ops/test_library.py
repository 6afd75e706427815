"""The custom ops pass torch's own checks: schema, fakes, autograd, dynamic shapes."""

import subprocess
import sys
import textwrap

import pytest
import torch

import magi_compile.ops  # noqa: F401  (defines the ops)
from magi_compile import AttnSlices
from magi_compile.kernels.plan import Plan, pack
from magi_compile.ops.layout import packed

LISTS = ("q_ranges", "k_ranges", "mask_types")
SCORE = "score;; def score(score):;;     return score;; def d_score(g):;;     return g"


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
    plan = pack(Plan(others=(torch.zeros(1, dtype=torch.int32),)))
    arguments = (*tensors, list(lists), plan, 0.25, 0.0, "reference")
    torch.library.opcheck(torch.ops.magi.attention, arguments)


def test_values_alone(arguments):
    tensors, lists = arguments
    torch.library.opcheck(torch.ops.magi.ffa_fwd, (*tensors, list(lists), [], 0.25, 0.0, ""))


@pytest.mark.parametrize("with_dlse", [True, False])
def test_backward(arguments, with_dlse):
    (q, k, v), lists = arguments
    out, lse, _ = torch.ops.magi.ffa_fwd(q, k, v, list(lists), [], 0.25, 0.0, "")
    dlse = torch.randn_like(lse) if with_dlse else None
    torch.library.opcheck(
        torch.ops.magi.ffa_bwd,
        (torch.randn_like(out), dlse, q, k, v, out, lse, list(lists), [], 0.25, 0.0, "", False),
    )


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("given", ["by entry", "packed"])
def test_tensors_by_entries_of_the_batch(given, by_head):
    """With the largest scores."""
    torch.manual_seed(0)
    batch, nheads, seqlen = 2, 4, 12
    tensors = [torch.randn(batch, nheads, seqlen, 16, requires_grad=True) for _ in range(3)]
    if given == "packed":
        tensors[0] = packed(tensors[0].detach(), by_head=by_head).requires_grad_()
    ranges = [(i * seqlen, (i + 1) * seqlen) for i in range(batch * (nheads if by_head else 1))]
    total = ranges[-1][1]
    slices = AttnSlices.from_lists(ranges, ranges, [1] * len(ranges), total, total)
    numbering = (batch, nheads, seqlen, seqlen, int(by_head))
    options = (
        [getattr(slices, x) for x in LISTS],
        [],
        0.25,
        0.0,
        "",
        None,
        None,
        [],
        "",
        numbering,
    )
    arguments = (*tensors, *options, True, True)
    torch.library.opcheck(torch.ops.magi.attention, arguments)
    out, lse, max_scores = torch.ops.magi.attention(*arguments)
    q, k, v = (packed(x, by_head=by_head) for x in tensors)
    expected = torch.ops.magi.attention(
        q, k, v, *options[:5], *[None, None, [], "", [], False, True]
    )
    assert out.shape == (batch, nheads, seqlen, 16)
    torch.testing.assert_close(packed(out, by_head=by_head), expected[0])
    torch.testing.assert_close((lse, max_scores), expected[1:])
    found, wanted = (torch.autograd.grad(x[0].square().sum(), tensors) for x in ((out,), expected))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"slices": 4}, r"`slices` must be \[q_ranges, k_ranges, mask_types\], got 4 tensors; bit blocks are `bits`"),
        ({"numbering": [1, 2], "by_entry": True}, r"`numbering` must be \[batch, nheads, .*\], got \[1, 2\]"),
        ({"by_entry": True}, r"`numbering` must be \[batch, nheads, .*\], got \[\]"),
        ({"score": SCORE}, r"`numbering` must be \[batch, nheads, .*\], got \[\]"),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments, given, message):
    tensors, lists = arguments
    given = dict(given)
    slices = (lists * 2)[: given.pop("slices", 3)]
    with pytest.raises(ValueError, match=message):
        torch.ops.magi.ffa_fwd(*tensors, slices, [], 0.25, 0.0, "", **given)


def test_an_import_of_ops_defines_them_all():
    """Graphs that a cache kept name ops whose modules nothing has imported in this process."""
    code = """
        import importlib, pkgutil, torch, magi_compile.ops as ops

        def defined():
            return {x for x in torch._C._dispatch_get_all_op_names() if x.startswith("magi::")}

        before = defined()
        for module in pkgutil.walk_packages(ops.__path__, ops.__name__ + "."):
            importlib.import_module(module.name)
        assert before and defined() == before, defined() - before
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)
