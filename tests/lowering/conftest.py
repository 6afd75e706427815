"""A small attention model and its dense twin."""

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    create_block_mask,
    create_mask,
    flex_attention,
)

import magi_compile
from magi_compile.lowering.backend import make_backend
from magi_compile.lowering.report import REPORT

BATCH, HEADS_Q, HEADS_KV, HEAD_DIM = 2, 4, 2, 16


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    REPORT.clear()
    torch.manual_seed(0)
    yield
    magi_compile.disable()


@pytest.fixture(params=["eager", "aot_eager"])
def backend(request):
    """The lowering in front of a compiler that is quick on a CPU; Inductor has tests of its own."""
    return make_backend(inner=request.param)


class Attention(nn.Module):
    """Projections around one flex_attention call; returns the output and the log-sum-exp."""

    def __init__(self, score_mod=None):
        super().__init__()
        sizes = (HEADS_Q, HEADS_KV, HEADS_KV)
        self.proj = nn.ModuleList(nn.Linear(32, heads * HEAD_DIM) for heads in sizes)
        self.out = nn.Linear(HEADS_Q * HEAD_DIM, 32)
        self.score_mod = score_mod

    def qkv(self, x):
        return [proj(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for proj in self.proj]

    def forward(self, x, block_mask):
        y, aux = flex_attention(
            *self.qkv(x),
            score_mod=self.score_mod,
            block_mask=block_mask,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )
        return self.out(y.transpose(1, 2).flatten(2)), aux.lse

    def dense(self, x, mask_mod, softcap=0.0):
        """The same, with the score matrix. Rows that see nothing give 0 and -inf."""
        q, k, v = self.qkv(x)
        k, v = (t.repeat_interleave(HEADS_Q // HEADS_KV, 1) for t in (k, v))
        scores = q @ k.mT * HEAD_DIM**-0.5
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        length = x.shape[1]
        mask = create_mask(mask_mod, len(x), None, length, length, device="cpu")
        scores = scores.masked_fill(~mask, -torch.inf)
        y = scores.softmax(-1).nan_to_num(0.0) @ v
        return self.out(y.transpose(1, 2).flatten(2)), scores.logsumexp(-1)


def documents(seqlen, count, seed=0):
    """Document numbers `[BATCH, seqlen]`, another layout for each batch entry."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, count, (BATCH, seqlen), generator=generator).sort(-1)[0]


def document_causal(document):
    def mask_mod(b, h, q, kv):
        return (document[b, q] == document[b, kv]) & (q >= kv)

    return mask_mod


def block_mask(mask_mod, seqlen, batch=BATCH):
    return create_block_mask(mask_mod, batch, None, seqlen, seqlen, device="cpu", BLOCK_SIZE=64)


def values_and_grads(model, out, lse):
    """Everything to compare: outputs, and gradients of a loss that uses both."""
    model.zero_grad()
    loss = out.square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).sin().sum()
    loss.backward()
    return [out, lse, *(parameter.grad.clone() for parameter in model.parameters())]


def assert_same(ours, dense):
    torch.testing.assert_close(ours, dense, atol=2e-5, rtol=2e-4)
