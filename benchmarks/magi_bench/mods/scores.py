"""Score_mods that users of FlexAttention write. What a model learns is fp32, as an optimizer keeps it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from magi_bench.mods import masks
from magi_bench.mods.mod import Made, Place, ScoreMod

BUCKETS, FARTHEST = 32, 128  # of T5, in one direction
ROPE_DIM = 16
DOCUMENTS = 8


def alibi(place: Place) -> Made:
    """Minus the distance, times a slope of the head; causal."""
    numbers = torch.arange(1, place.nheads + 1, device=place.device)
    slopes = torch.exp2(-8.0 * numbers / place.nheads)
    return Made(masks.causal(place), lambda: lambda s, b, h, q, kv: s - slopes[h] * (q - kv))


def relative_bias(place: Place) -> Made:
    """A learned bias of each head and distance; everything is visible."""
    last = place.seqlen - 1
    bias = place.normal(place.nheads, 2 * last + 1)
    return Made(None, lambda x: lambda s, b, h, q, kv: s + x[h, q - kv + last], {"bias": bias})


def t5_buckets(place: Place) -> Made:
    """A learned bias of each head and bucket of distances, wider the further away; documents, causal.

    Distances are counted from a half, so that none lies on the edge of a bucket, where the last bit of a logarithm
    decides.
    """
    near = BUCKETS // 2
    wide = near / math.log(FARTHEST / near)

    def of(table: Tensor) -> ScoreMod:
        def score_mod(score, b, h, q, kv):
            distance = (q - kv).clamp(min=0)
            far = near + (torch.log((distance + 0.5) / near) * wide).to(torch.int32)
            bucket = torch.where(distance < near, distance, far.clamp(max=BUCKETS - 1))
            return score + table[bucket, h]

        return score_mod

    return Made(masks.documents(place), of, {"table": place.normal(BUCKETS, place.nheads)})


def tanh_softcap(place: Place) -> Made:
    """20 tanh(score / 20); causal."""
    return Made(masks.causal(place), lambda: lambda s, b, h, q, kv: 20 * torch.tanh(s / 20))


def document_bias(place: Place) -> Made:
    """A learned bias of each head and of the distance between two of eight documents; causal."""
    document = torch.arange(place.seqlen, device=place.device) * DOCUMENTS // place.seqlen

    def of(bias: Tensor) -> ScoreMod:
        return lambda s, b, h, q, kv: s + bias[h, (document[q] - document[kv]).abs()]

    return Made(masks.causal(place), of, {"bias": place.normal(place.nheads, DOCUMENTS)})


def head_temperature(place: Place) -> Made:
    """The score times a learned number of the head; causal."""
    temperature = 1 + place.normal(place.nheads, scale=0.2)
    learned = {"temperature": temperature}
    return Made(masks.causal(place), lambda x: lambda s, b, h, q, kv: s * x[h], learned)


def latent_positions(place: Place) -> Made:
    """Multi-head latent attention: the product of two vectors of positions is added; causal."""
    of_keys = place.normal(place.seqlen, ROPE_DIM, scale=ROPE_DIM**-0.5)
    of_queries = place.normal(place.nheads, place.seqlen, ROPE_DIM, scale=ROPE_DIM**-0.5)

    def score_mod(score, b, h, q, kv):
        return score + (of_queries[h, q] * of_keys[kv]).sum(-1)

    return Made(masks.causal(place), lambda: score_mod)


SCORES = (
    alibi,
    relative_bias,
    t5_buckets,
    tanh_softcap,
    document_bias,
    head_temperature,
    latent_positions,
)
