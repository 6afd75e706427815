"""`explain` tells slices, kernels and reasons of every attention of a model."""

import re

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import magi_compile
from magi_compile import explain
from magi_compile.kernels.cpu import CpuKernel
from magi_compile.lowering.explain import AttentionCall
from magi_compile.lowering.report import Decision

from .conftest import BATCH, Attention, block_mask, document_causal


def causal(b, h, q, kv):
    return q >= kv


def not_pointwise(score, b, h, q, kv):
    return score + 0.1 * torch.stack([q, kv]).sum()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Attention(), Attention(not_pointwise)

    def forward(self, x, masks):
        return self.second(x + self.first(x, masks[0])[0], masks[1])[0]


def test_explain_counts_slices_and_lists_reasons():
    document = torch.arange(96) // 48
    masks = (document_causal(document.expand(BATCH, -1).contiguous()), causal)
    result = explain(Model(), torch.randn(BATCH, 96, 32), [block_mask(m, 96) for m in masks])
    first, second = result.calls
    assert first.decision.kernel == "cpu"
    assert len(first.slices) == 2 * BATCH
    assert first.slices.area() == 2 * BATCH * 48 * 49 // 2
    assert first.density == 2 * (48 * 49 // 2) / 96**2
    assert second.slices is None
    assert "score_mod" in second.decision.reasons[0]
    text = str(result)
    assert "slices   4 (4 CAUSAL)" in text
    assert "not hopper:" in text
    assert "stays on FlexAttention because" in text
    assert "test_explain" not in text or "conftest.py" in text
    assert text.endswith("1 of 2 FlexAttention calls lowered to cpu, 1 graph compiled")


def test_explain_tells_what_the_kernel_leaves_to_another(monkeypatch):
    monkeypatch.setattr(CpuKernel, "notes", lambda self, problem: ["backward by somebody else"])
    mask = block_mask(lambda b, h, q, kv: q >= kv, 96)
    result = explain(Attention(), torch.randn(BATCH, 96, 32), mask)
    assert result.calls[0].decision.notes == ("backward by somebody else",)
    assert "kernel   cpu\n             backward by somebody else\n" in str(result)


def test_places_are_those_of_the_user():
    x = torch.randn(BATCH, 2, 96, 16)
    for attend in (flex_attention, magi_compile.flex_attention):
        (call,) = explain(lambda x, attend=attend: attend(x, x, x), x).calls
        assert re.search(r"test_explain\.py:\d+ in <lambda>$", call.decision.location)


def test_something_else():
    with pytest.raises(TypeError, match="`fn` must be a model or a function, got int"):
        explain(3)


def test_kernels_that_refuse_alike_share_a_line():
    refused = (("cuda", ("no GPU",)), ("fa4", ("no GPU",)), ("triton", ("not here",)))
    decision = Decision("", (1, 2, 96, 16), (1, 2, 96, 16), "", "cpu", (), refused)
    lines = str(AttentionCall(decision, None)).splitlines()
    assert lines[2:] == ["         not cuda, fa4: no GPU", "         not triton: not here"]


def test_a_run_that_fails_is_told_behind_what_was_decided():
    x = torch.randn(BATCH, 2, 96, 16)

    def attend(x):
        out = flex_attention(x, x, x, not_pointwise)
        return out.sum() + torch.linalg.cholesky(-torch.eye(3)).sum()

    result = explain(attend, x)
    (call,) = result.calls
    assert call.decision.kernel is None
    assert "score_mod" in call.decision.reasons[0]
    assert result.failure is not None
    assert "the run itself failed: " in str(result)
    with pytest.raises(ZeroDivisionError):
        explain(lambda x: x / (1 // 0), x)


def test_a_model_without_flex_attention():
    assert str(explain(lambda x: x + 1, torch.zeros(3))) == "no FlexAttention call was compiled"
