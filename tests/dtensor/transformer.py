"""A small transformer over packed tokens, and the masks that it is trained with, for tests across ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import magi_compile

VOCABULARY, NHEADS_Q, NHEADS_KV, HEAD_DIM = 40, 4, 2, 8
DIM = NHEADS_Q * HEAD_DIM


def document_of(cuts, seqlen):
    """The number of the document of each token, for documents that begin at 0 and at `cuts`."""
    borders = torch.zeros(seqlen, dtype=torch.int64)
    borders[cuts] = 1
    return borders.cumsum(0)


def mask_mod(name, document):
    return {
        "documents": lambda b, h, q, kv: (document[q] == document[kv]) & (q >= kv),
        "window": lambda b, h, q, kv: (q >= kv) & (q - kv < 37),
        "frames": lambda b, h, q, kv: q // 24 >= kv // 24,
        "prefix": lambda b, h, q, kv: (kv < 50) | (q >= kv),
        "causal": lambda b, h, q, kv: q >= kv,
    }[name]


def block_mask(name, document):
    seqlen = len(document)
    mod = mask_mod(name, document)
    return flex.create_block_mask(mod, None, None, seqlen, seqlen, device="cpu")


# How attention is called: a function of q, k, v [B, H, S, D] and the mask.


def dense(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def flex_attention(q, k, v, mask):
    return flex.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def our_flex_attention(q, k, v, mask):
    return magi_compile.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def flex_flash_attention(q, k, v, mask):
    out, *_ = magi_compile.flex_flash_attention(*(x[0].transpose(0, 1) for x in (q, k, v)), mask)
    return out.transpose(0, 1)[None]


def causal_sdpa(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def imported_sdpa(q, k, v, mask):
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def planned(q, k, v, mask):
    return mask.attention(q, k, v)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(DIM, (NHEADS_Q + 2 * NHEADS_KV) * HEAD_DIM)
        self.out = nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x, angles, attention, mask):
        qkv = self.qkv(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        q, k, v = qkv.split((NHEADS_Q, NHEADS_KV, NHEADS_KV), dim=1)
        a, b = torch.cat((q, k), 1).chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        q, k = torch.cat((a * cos - b * sin, a * sin + b * cos), -1).split(
            (NHEADS_Q, NHEADS_KV), dim=1
        )
        x = x + self.out(attention(q, k, v, mask).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Transformer(nn.Module):
    """The sum of the losses of all tokens that predict something."""

    def __init__(self, attention, checkpointing=None):
        super().__init__()
        self.attention, self.checkpointing = attention, checkpointing
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens, positions, labels, mask):
        x = self.embedding(tokens)
        angles = positions[:, None] * 0.5 ** torch.arange(HEAD_DIM // 2)
        for layer in self.layers:
            arguments = (x, angles, self.attention, mask)
            if self.checkpointing is None:
                x = layer(*arguments)
            else:
                x = checkpoint(layer, *arguments, use_reentrant=self.checkpointing == "reentrant")
        logits = F.linear(x, self.embedding.weight).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction="sum")


def make(attention, checkpointing=None):
    """The same weights on every rank and for every way of attention."""
    torch.manual_seed(0)
    return Transformer(attention, checkpointing)


def tokens_of(batch, seqlen):
    return torch.randint(VOCABULARY, (batch, seqlen), generator=torch.Generator().manual_seed(1))


def labels_of(tokens, document):
    """The next token of the same document."""
    labels = torch.full_like(tokens, -100)
    goes_on = document[1:] == document[:-1]
    labels[:, :-1] = torch.where(goes_on, tokens[:, 1:], -100)
    return labels


def on_one_process(name, document, tokens):
    """Loss and gradients with the whole sequence and a dense mask."""
    model, seqlen = make(dense), len(document)
    at = torch.arange(seqlen)
    mask = mask_mod(name, document)(0, 0, at[:, None], at[None])
    loss = model(tokens, at, labels_of(tokens, document), mask)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]
