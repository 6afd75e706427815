"""What is not lowered stays on FlexAttention with all reasons, or raises where nothing else can run it."""

import logging
import re

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from magi_compile import LoweringRefusedError
from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.heuristics import plan_tiles
from magi_compile.lowering.backend import make_backend
from magi_compile.lowering.options import LoweringOptions
from magi_compile.lowering.report import REPORT
from magi_compile.masks import row_intervals, slices_from_intervals, trace_mask_mod
from magi_compile.masks.evaluation.block_lists import visible_blocks
from magi_compile.plan.tiles import RUN_FIELDS, build_tile_plan

from .conftest import BATCH, Attention, assert_same, block_mask


def causal(b, h, q, kv):
    return q >= kv


SEQLEN = 130


def not_pointwise(score, b, h, q, kv):
    return score + 0.1 * torch.stack([q, kv]).sum()


def attend(x, mask, score_mod=None, **options):
    return flex_attention(x, x, x, block_mask=mask, score_mod=score_mod, **options)


def compiled(strict=False):
    backend = make_backend("eager", LoweringOptions(strict=strict))
    return torch.compile(attend, backend=backend, fullgraph=True)


CASES = {
    "score_mod": (
        dict(mask=causal, score_mod=not_pointwise),
        "score_mod is no pointwise function: `.*` gives a tensor of shape",
    ),
    "backend": (dict(mask=causal, kernel_options={"BACKEND": "TRITON"}), "BACKEND='TRITON'"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_calls_stay_exact(name, caplog):
    options, reason = CASES[name]
    x = torch.randn(BATCH, 2, SEQLEN, 16)
    arguments = dict(options, mask=block_mask(options["mask"], SEQLEN))
    with caplog.at_level(logging.WARNING, "magi_compile"), torch.no_grad():
        ours = compiled()(x, **arguments)
        compiled()(x, **arguments)
    stock = torch.compile(attend, backend="eager", fullgraph=True)(x, **arguments)
    assert_same(ours, stock)
    assert not REPORT.lowered
    (warning,) = (r.getMessage() for r in caplog.records if r.name == "magi_compile")
    assert "kept on FlexAttention" in warning
    assert re.search(reason, warning)


@pytest.mark.parametrize("name", CASES)
def test_strict_raises_with_the_reason(name):
    options, reason = CASES[name]
    x = torch.randn(BATCH, 2, SEQLEN, 16)
    with pytest.raises(Exception, match=reason) as error:
        compiled(strict=True)(x, **dict(options, mask=block_mask(options["mask"], SEQLEN)))
    assert isinstance(getattr(error.value, "inner_exception", error.value), LoweringRefusedError)


def test_all_reasons_are_listed():
    x = torch.randn(BATCH, 2, SEQLEN, 16)
    with torch.no_grad():
        mask = block_mask(causal, SEQLEN)
        compiled()(x, mask, score_mod=not_pointwise, kernel_options={"BACKEND": "TRITON"})
    (decision,) = REPORT.refused
    wanted = ("BACKEND", "score_mod")
    assert len(decision.reasons) == len(wanted)
    for reason, pattern in zip(decision.reasons, wanted, strict=True):
        assert re.search(pattern, reason)


def test_training_on_a_cpu_cannot_fall_back():
    x = torch.randn(BATCH, 2, SEQLEN, 16, requires_grad=True)
    with pytest.raises(Exception, match="kept on FlexAttention"):
        compiled()(x, block_mask(causal, SEQLEN), score_mod=not_pointwise)


def test_what_short_periods_would_cost():
    """A neighbourhood of 13 by 13 pixels in lines of 128: what Hopper kernels would visit, and a BlockMask,
    over what it shows."""

    def around(b, h, q, kv):
        row, column = (torch.clamp(x, 6, 127 - 6) for x in (q // 128, q % 128))
        return (torch.abs(row - kv // 128) <= 6) & (torch.abs(column - kv % 128) <= 6)

    program, *_ = trace_mask_mod(around)
    intervals = row_intervals(program, batch=1, seqlen_q=128**2, seqlen_k=128**2)
    slices = slices_from_intervals(intervals)
    sizes = plan_tiles(AttnProblem("cuda", (9, 0), torch.bfloat16, 64, 8, 128, 128, 1.0))
    plan = build_tile_plan(slices, **sizes._asdict())
    num_blocks = RUN_FIELDS.index("num_blocks")
    forward, backward = (int(runs[:, num_blocks].sum()) for runs in (plan.q_runs, plan.k_runs))
    blocks = int(visible_blocks(intervals, 128, 128)[0].sum())
    visited = (
        forward * sizes.q_tile_rows * sizes.q_block_cols,
        backward * sizes.k_tile_rows * sizes.k_block_cols,
        blocks * 128 * 128,
    )
    assert [round(pairs / slices.area()) for pairs in visited] == [31, 20, 10]


def test_lowered_and_refused_calls_mix():
    lowered, refused = Attention(), Attention(not_pointwise)

    def model(x, mask):
        return lowered(x, mask)[0] + refused(x, mask)[0]

    x = torch.randn(BATCH, 96, 32)
    mask = block_mask(causal, 96)
    with torch.no_grad():
        ours = torch.compile(model, backend=make_backend("eager"), fullgraph=True)(x, mask)
        stock = torch.compile(model, backend="eager", fullgraph=True)(x, mask)
    assert_same(ours, stock)
    assert (len(REPORT.lowered), len(REPORT.refused)) == (1, 1)
    assert str(REPORT) == "1 of 2 FlexAttention calls lowered to cpu, 1 graph compiled"
