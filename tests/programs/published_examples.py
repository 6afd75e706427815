"""The examples of FlexAttention that PyTorch has published: its two blog posts, its notebook and its documentation.

    python -m tests.programs.published_examples

lowers all of them, compares them with dense attention, and prints the tables of docs/published.md; `inductor` behind it
compiles them too, which takes ten times as long.
"""

from __future__ import annotations

import functools

import torch
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, or_masks

from tests.programs.variants import BATCH, HEADS, Variant, print_tables

LENGTH = 300
LENGTHS = torch.tensor([100, 37, 1, 162])
OFFSETS = torch.nn.functional.pad(LENGTHS.cumsum(0), (1, 0))
DOCUMENT = torch.repeat_interleave(torch.arange(4), LENGTHS)
PREFIX = torch.tensor([70, 120])
PAGE, NUM_PAGES = 32, 12
INFINITY = float("inf")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return q_idx - kv_idx <= 50


def prefix(b, h, q_idx, kv_idx):
    return kv_idx < PREFIX[b]


def document(b, h, q_idx, kv_idx):
    return DOCUMENT[q_idx] == DOCUMENT[kv_idx]


def within_documents(mask_mod):
    """A mask of positions within documents, for packed sequences."""

    def packed(b, h, q_idx, kv_idx):
        q = q_idx - OFFSETS[DOCUMENT[q_idx]]
        kv = kv_idx - OFFSETS[DOCUMENT[kv_idx]]
        return document(b, h, q_idx, kv_idx) & mask_mod(b, h, q, kv)

    return packed


def padding(lengths, b, h, q_idx, kv_idx):
    return (q_idx < lengths[b]) & (kv_idx < lengths[b])


def at_offset(mask_mod, offset):
    """What a token sees while it is decoded: it comes after `offset` others."""

    def shifted(b, h, q_idx, kv_idx):
        return mask_mod(b, h, q_idx + offset, kv_idx)

    return shifted


def neighbourhood(b, h, q_idx, kv_idx):
    """5 by 5 pixels around each of 16 by 16."""
    y, x = (q_idx // 16).clamp(2, 13), (q_idx % 16).clamp(2, 13)
    return ((y - kv_idx // 16).abs() <= 2) & ((x - kv_idx % 16).abs() <= 2)


class Pages:
    """Keys of a batch in pages of one cache: `logical[b, page]` is which page of its sequence a page of the cache
    holds, or -1."""

    def __init__(self):
        order = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(0))
        self.physical = order.view(BATCH, -1)  # of each sequence, in order
        self.logical = torch.full((BATCH, NUM_PAGES), -1)
        self.logical.scatter_(1, self.physical, torch.arange(NUM_PAGES // BATCH).expand(BATCH, -1))

    def place(self, b, kv_idx):
        page = self.logical[b, kv_idx // PAGE]
        return page >= 0, page * PAGE + kv_idx % PAGE

    def mask_mod(self, mask_mod):
        def converted(b, h, q_idx, kv_idx):
            is_there, kv = self.place(b, kv_idx)
            return torch.where(is_there, mask_mod(b, h, q_idx, kv), False)

        return converted

    def score_mod(self, score_mod):
        def converted(score, b, h, q_idx, kv_idx):
            is_there, kv = self.place(b, kv_idx)
            return torch.where(is_there, score_mod(score, b, h, q_idx, kv), -INFINITY)

        return converted

    def block_mask(self, mask_mod, seqlen):
        """The lists of a mask of sequences, as those of the cache."""
        sizes = {"device": "cpu", "BLOCK_SIZE": (PAGE, PAGE)}
        of = create_block_mask(mask_mod, BATCH, None, seqlen, NUM_PAGES // BATCH * PAGE, **sizes)

        def moved(indices):
            pages = self.physical.gather(1, indices.flatten(1).long()).view(indices.shape)
            missing = NUM_PAGES - indices.shape[-1]
            return torch.nn.functional.pad(pages.to(torch.int32), (0, missing))

        return BlockMask.from_kv_blocks(
            of.kv_num_blocks,
            moved(of.kv_indices),
            of.full_kv_num_blocks,
            moved(of.full_kv_indices),
            (PAGE, PAGE),
            self.mask_mod(mask_mod),
            seq_lengths=(seqlen, NUM_PAGES * PAGE),
        )


def masks():
    pages, paged = Pages(), {"lengths": (NUM_PAGES // BATCH * PAGE, NUM_PAGES * PAGE)}
    lengths = functools.partial(padding, torch.tensor([300, 170]))
    return [
        Variant("full attention", None),
        Variant("causal", causal),
        Variant("sliding window", and_masks(causal, window)),
        Variant("prefix LM", or_masks(prefix, causal), batch=BATCH),
        Variant("documents", document),
        Variant("documents, causal", and_masks(document, causal)),
        Variant("packed sequences: prefix LM", within_documents(or_masks(window, causal))),
        Variant("packed sequences: window", within_documents(and_masks(causal, window))),
        Variant("padding", and_masks(lengths, causal), batch=BATCH),
        Variant("NATTEN", neighbourhood, lengths=(256, 256)),
        Variant("decoding at an offset", at_offset(causal, 250), lengths=(1, 300)),
        Variant("paged: causal", pages.mask_mod(causal), batch=BATCH, **paged),
        Variant(
            "paged: causal, converted block lists",
            pages.mask_mod(causal),
            block_mask=lambda: pages.block_mask(causal, paged["lengths"][0]),
            batch=BATCH,
            **paged,
        ),
    ]


def scores():
    slopes = torch.exp2(-8 * (torch.arange(HEADS) + 1) / HEADS)
    bias = random(HEADS, 2 * LENGTH).requires_grad_()
    weight = random(LENGTH, seed=1).requires_grad_()
    pages, paged = Pages(), {"lengths": (NUM_PAGES // BATCH * PAGE, NUM_PAGES * PAGE)}

    def alibi(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    def relative(score, b, h, q_idx, kv_idx):
        return score + (q_idx - kv_idx)

    def learned(score, b, h, q_idx, kv_idx):
        return score + bias[h, q_idx - kv_idx + LENGTH]

    def gated(score, b, h, q_idx, kv_idx):
        return score + weight[kv_idx]

    def soft_cap(score, b, h, q_idx, kv_idx):
        return 2 * torch.tanh(score / 2)

    def causal_score(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, score, -INFINITY)

    def same_document(score, b, h, q_idx, kv_idx):
        return torch.where(DOCUMENT[q_idx] == DOCUMENT[kv_idx], score, -INFINITY)

    def nothing(score, b, h, q_idx, kv_idx):
        return score

    def checkerboard(score, b, h, q_idx, kv_idx):
        score = torch.where(torch.abs(kv_idx - q_idx) % 2 == 1, score * 0.5, score)
        return torch.where(kv_idx % 2 == 0, score * 2.0, score)

    return [
        Variant("no change", None, nothing),
        Variant("causal as a score_mod", None, causal_score),
        Variant("documents as a score_mod", None, same_document),
        Variant("relative positions", None, relative, lengths=(40, 40)),
        Variant("relative positions, learned", causal, learned, leaves=(bias,)),
        Variant("ALiBi", causal, alibi),
        Variant("soft-cap", causal, soft_cap),
        Variant("a learned weight of each key", causal, gated, leaves=(weight,)),
        Variant("checkerboard", None, checkerboard),
        Variant(
            "paged: ALiBi", pages.mask_mod(causal), pages.score_mod(alibi), batch=BATCH, **paged
        ),
    ]


MASKS, SCORES = masks(), scores()

if __name__ == "__main__":
    print_tables({"mask": MASKS, "score_mod": SCORES})
