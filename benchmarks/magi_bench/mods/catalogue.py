"""Masks and scores that users of FlexAttention write, at any length that is a multiple of 128.

What depends on rows and keys is written as models write it; no function here is written for what our compiler likes.
What a model learns is fp32, as an optimizer keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from magi_bench.workloads import lengths
from magi_bench.workloads.llama import document_of
from magi_compile.masks.evaluation.block_lists import counts_and_order

#: Of queries and keys: those of a BlockMask.
BLOCK = 128
SAMPLER = "short"
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Place:
    """The sizes and the device that a mod is made for. Everything random is the same for equal places."""

    seqlen: int  # queries, and keys
    nheads: int  # of queries
    device: str  # of all tensors
    seed: int  # of documents, tables and biases

    def generator(self) -> torch.Generator:
        """On the CPU, so that all devices draw the same."""
        return torch.Generator().manual_seed(self.seed)

    def chance(self, share: float, *sizes: int) -> Tensor:
        """Bool of these sizes, on the CPU: a share of it is True."""
        return torch.rand(sizes, generator=self.generator()) < share

    def normal(self, *sizes: int, scale: float = 1.0) -> Tensor:
        """fp32 of these sizes, on the device."""
        return (torch.randn(sizes, generator=self.generator()) * scale).to(self.device)

    def documents(self) -> Tensor:
        """Int `[seqlen]` on the CPU: the document of each token, in order."""
        return document_of(lengths.sample(SAMPLER, self.seqlen, self.seed))

    def block_mask(self, mask_mod: MaskMod, is_by_head: bool = False) -> BlockMask:
        """By PyTorch, in eager code."""
        nheads, seqlen = self.nheads if is_by_head else None, self.seqlen
        return create_block_mask(mask_mod, None, nheads, seqlen, seqlen, self.device, BLOCK)


class Made(NamedTuple):
    """A mod at a place."""

    block_mask: Any  # of the mask, or its mask_mod; None shows everything
    # makes the score_mod of the tensors of `learned`; None where there is none
    score_mod_of: Callable[..., ScoreMod] | None = None
    # fp32 tensors that the score_mod captures and whose gradients are wanted, by their names
    learned: dict[str, Tensor] = {}  # noqa: RUF012  (never written to)

    def score_mod(self, learned: Sequence[Tensor]) -> ScoreMod | None:
        """With these in place of the tensors of `learned`."""
        return self.score_mod_of(*learned) if self.score_mod_of else None


@dataclass(frozen=True)
class Mod:
    """One entry of the catalogue, with the function that builds it: a mask_mod, a BlockMask, or `Made`."""

    kind: str  # "mask" or "score"
    of_place: Callable[[Place], Any]

    def build(self, place: Place) -> Made:
        """The mod at a place, with a BlockMask."""
        result = self.of_place(place)
        made = result if isinstance(result, Made) else Made(result)
        if made.block_mask is None or isinstance(made.block_mask, BlockMask):
            return made
        return made._replace(block_mask=place.block_mask(made.block_mask))

    @property
    def facts(self) -> dict[str, str]:
        """The fields of a row that describe it."""
        return {"about": (self.of_place.__doc__ or "").strip().split("\n")[0], "of": self.kind}


KERNEL = 13  # of a neighbourhood, in pixels along each side
TILE = 8  # of a canvas, in pixels along each side
IMAGE = 64  # tokens


def causal(place: Place) -> MaskMod:
    """Tokens see what is not behind them."""
    return lambda b, h, q, kv: q >= kv


def sliding_window(place: Place) -> MaskMod:
    """The last eighth of the sequence, causal."""
    window = place.seqlen // 8
    return lambda b, h, q, kv: (q >= kv) & (q - kv <= window)


def sink_window(place: Place) -> MaskMod:
    """The first 16 tokens and the last eighth, causal (streaming)."""
    window = place.seqlen // 8
    return lambda b, h, q, kv: (q >= kv) & ((kv < 16) | (q - kv <= window))


def prefix_lm(place: Place) -> MaskMod:
    """The first quarter for all, the rest causal."""
    prefix = torch.tensor([place.seqlen // 4], device=place.device)
    return lambda b, h, q, kv: (kv < prefix[b]) | (q >= kv)


def documents(place: Place) -> MaskMod:
    """Packed documents, causal."""
    document = place.documents().to(place.device)
    return lambda b, h, q, kv: (document[q] == document[kv]) & (q >= kv)


def shuffled_documents(place: Place) -> MaskMod:
    """Documents in pieces of 16 tokens that lie in any order, causal."""
    count = max(place.seqlen // 512, 2)
    owner = torch.randint(count, (place.seqlen // 16,), generator=place.generator())
    document = owner.repeat_interleave(16).to(place.device)
    return lambda b, h, q, kv: (document[q] == document[kv]) & (q >= kv)


def packed_positions(place: Place) -> MaskMod:
    """Packed documents, causal by positions that begin anew in each."""
    document = place.documents()
    position = torch.arange(place.seqlen) - torch.searchsorted(document, document)
    document, position = document.to(place.device), position.to(place.device)
    return lambda b, h, q, kv: (document[q] == document[kv]) & (position[q] >= position[kv])


def permuted_causal(place: Place) -> MaskMod:
    """Causal by positions, of chunks from the head and the tail in turn."""
    chunks = torch.arange(place.seqlen).chunk(8)
    order = [at for pair in zip(range(4), range(7, 3, -1), strict=True) for at in pair]
    position = torch.cat([chunks[at] for at in order]).to(place.device)
    return lambda b, h, q, kv: position[q] >= position[kv]


def batched(place: Place) -> MaskMod:
    """Four sequences of one length behind one another, causal."""
    length = place.seqlen // 4
    return lambda b, h, q, kv: (q // length == kv // length) & (q % length >= kv % length)


def images_in_text(place: Place) -> MaskMod:
    """Causal text; tokens of an image of 64 see the whole image."""
    index = torch.arange(place.seqlen)
    image = torch.where(index % 200 < IMAGE, index // 200, -1).to(place.device)
    return lambda b, h, q, kv: (q >= kv) | ((image[q] == image[kv]) & (image[q] >= 0))


def flamingo(place: Place) -> MaskMod:
    """Text (queries) sees the images (keys) of its part, the second one a little later."""
    image = torch.arange(place.seqlen) // IMAGE
    count = place.seqlen // IMAGE
    part, length = torch.arange(count) // 2, 2 * IMAGE
    first = part * length + torch.arange(count) % 2 * 8
    last = (part + 1) * length
    image, first, last = (x.to(place.device) for x in (image, first, last))
    return lambda b, h, q, kv: (q >= first[image[kv]]) & (q < last[image[kv]])


def shared_prefixes(place: Place) -> MaskMod:
    """A tree of 15 prefixes: tokens see their own node and its ancestors, causal."""
    count = 15
    node = torch.arange(place.seqlen) * count // place.seqlen
    ancestor = torch.eye(count, dtype=torch.bool)
    for child in range(1, count):
        ancestor[child] |= ancestor[(child - 1) // 2]
    node, ancestor = node.to(place.device), ancestor.to(place.device)
    return lambda b, h, q, kv: ancestor[node[q], node[kv]] & (q >= kv)


def longformer(place: Place) -> MaskMod:
    """A window on both sides, and scattered tokens that see all and are seen by all."""
    window = place.seqlen // 16
    is_global = place.chance(1 / 256, place.seqlen).to(place.device)
    return lambda b, h, q, kv: ((q - kv).abs() <= window) | is_global[q] | is_global[kv]


def dilated_window(place: Place) -> MaskMod:
    """Every fourth token up to an eighth of the sequence away, on both sides."""
    window = place.seqlen // 8

    def mask_mod(b, h, q, kv):
        distance = (q - kv).abs()
        return (distance <= window) & (distance % 4 == 0)

    return mask_mod


def block_diffusion(place: Place) -> MaskMod:
    """Noisy tokens and then clean ones, in blocks of 32."""
    half = place.seqlen // 2

    def mask_mod(b, h, q, kv):
        is_noisy_q, is_noisy_kv = q < half, kv < half
        block_q, block_kv = q % half // 32, kv % half // 32
        own = (block_q == block_kv) & (is_noisy_q == is_noisy_kv)
        before = (block_q > block_kv) & ~is_noisy_kv
        return own | before

    return mask_mod


def window_by_head(place: Place) -> BlockMask:
    """Causal windows, of another length for each head."""
    longest = torch.linspace(16, place.seqlen // 4, place.nheads)
    window = longest.round().int().to(place.device)

    def mask_mod(b, h, q, kv):
        return (q >= kv) & (q - kv <= window[h])

    return place.block_mask(mask_mod, is_by_head=True)


def canvas(seqlen: int) -> tuple[int, int]:
    """Width and height of the smallest canvas of powers of two with at least so many pixels, almost a square."""
    bits = (seqlen - 1).bit_length()
    return 1 << (bits + 1) // 2, 1 << bits // 2


def _is_near(q: tuple[Tensor, Tensor], kv: tuple[Tensor, Tensor], seqlen: int) -> Tensor:
    """True if pixels lie in the square around others, which is pushed inside at the edges of the canvas."""
    margin = KERNEL // 2
    near = [
        (x.clamp(margin, size - 1 - margin) - y).abs() <= margin
        for x, y, size in zip(q, kv, canvas(seqlen), strict=True)
    ]
    return near[0] & near[1]


def neighbourhood(place: Place) -> MaskMod:
    """Pixels line by line: 13 by 13 around each."""
    width, _ = canvas(place.seqlen)

    def pixel(index):
        return index % width, index // width

    return lambda b, h, q, kv: _is_near(pixel(q), pixel(kv), place.seqlen)


def tiled_neighbourhood(place: Place) -> MaskMod:
    """Pixels tile by tile, 8 by 8: 13 by 13 around each."""
    across = canvas(place.seqlen)[0] // TILE

    def pixel(index):
        tile, inside = index // TILE**2, index % TILE**2
        return tile % across * TILE + inside % TILE, tile // across * TILE + inside // TILE

    return lambda b, h, q, kv: _is_near(pixel(q), pixel(kv), place.seqlen)


def morton_neighbourhood(place: Place) -> MaskMod:
    """Pixels along a Morton curve, by operations on bits: 13 by 13 around each."""
    digits = ((place.seqlen - 1).bit_length() + 1) // 2

    def every_second_bit(index):
        return sum(((index >> 2 * digit) & 1) << digit for digit in range(digits))

    def pixel(index):
        return every_second_bit(index), every_second_bit(index >> 1)

    return lambda b, h, q, kv: _is_near(pixel(q), pixel(kv), place.seqlen)


def sliding_tiles(place: Place) -> MaskMod:
    """Video in tiles of 64 tokens, four by four in a layer: the tiles around each."""

    def coordinates(index):
        tile = index // 64
        return tile // 16, tile % 16 // 4, tile % 4

    def mask_mod(b, h, q, kv):
        (t, y, x), (s, v, u) = coordinates(q), coordinates(kv)
        return ((t - s).abs() <= 1) & ((y - v).abs() <= 1) & ((x - u).abs() <= 1)

    return mask_mod


def temporal_heads(place: Place) -> MaskMod:
    """Video behind a prompt of 64 tokens: places near one's own in all frames."""
    prompt, frame = 64, place.seqlen // 8

    def mask_mod(b, h, q, kv):
        near = ((q - prompt) % frame - (kv - prompt) % frame).abs() < frame // 8
        return near | (q < prompt) | (kv < prompt)

    return mask_mod


def random_blocks(place: Place) -> MaskMod:
    """A quarter of all blocks of 128, by a table."""
    count = place.seqlen // BLOCK
    table = place.chance(0.25, count, count) | torch.eye(count, dtype=torch.bool)
    table = table.to(place.device)
    return lambda b, h, q, kv: table[q // BLOCK, kv // BLOCK]


def variable_blocks(place: Place) -> BlockMask:
    """Blocks of 16 to 64 tokens; each head chooses a quarter of all pairs, by a table."""
    ends = torch.randint(16, 65, (place.seqlen // 16,), generator=place.generator()).cumsum(0)
    block = torch.searchsorted(ends, torch.arange(place.seqlen), right=True)
    count = int(block[-1]) + 1
    chosen = place.chance(0.25, place.nheads, count, count) | torch.eye(count, dtype=torch.bool)
    block, chosen = block.to(place.device), chosen.to(place.device)

    def mask_mod(b, h, q, kv):
        return chosen[h, block[q], block[kv]]

    return place.block_mask(mask_mod, is_by_head=True)


def _listed(place: Place, nheads: int) -> BlockMask:
    """Lists of a quarter of all blocks, without a mask_mod."""
    count = place.seqlen // BLOCK
    is_listed = place.chance(0.25, 1, nheads, count, count) | torch.eye(count, dtype=torch.bool)
    return BlockMask.from_kv_blocks(*counts_and_order(is_listed.to(place.device)))


def block_lists(place: Place) -> BlockMask:
    """Lists of a quarter of all blocks of 128, under a mask_mod that shows everything."""
    return _listed(place, 1)


def block_lists_by_head(place: Place) -> BlockMask:
    """Lists of each head, of a quarter of all blocks of 128, under a mask_mod that shows everything."""
    return _listed(place, place.nheads)


MASKS = (
    causal,
    sliding_window,
    sink_window,
    prefix_lm,
    documents,
    shuffled_documents,
    packed_positions,
    permuted_causal,
    batched,
    images_in_text,
    flamingo,
    shared_prefixes,
    longformer,
    dilated_window,
    block_diffusion,
    window_by_head,
    neighbourhood,
    tiled_neighbourhood,
    morton_neighbourhood,
    sliding_tiles,
    temporal_heads,
    random_blocks,
    variable_blocks,
    block_lists,
    block_lists_by_head,
)


BUCKETS, FARTHEST = 32, 128  # of T5, in one direction
ROPE_DIM = 16
DOCUMENTS = 8


def alibi(place: Place) -> Made:
    """Minus the distance, times a slope of the head; causal."""
    numbers = torch.arange(1, place.nheads + 1, device=place.device)
    slopes = torch.exp2(-8.0 * numbers / place.nheads)
    return Made(causal(place), lambda: lambda s, b, h, q, kv: s - slopes[h] * (q - kv))


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

    return Made(documents(place), of, {"table": place.normal(BUCKETS, place.nheads)})


def tanh_softcap(place: Place) -> Made:
    """20 tanh(score / 20); causal."""
    return Made(causal(place), lambda: lambda s, b, h, q, kv: 20 * torch.tanh(s / 20))


def softcap_of_some_heads(place: Place) -> Made:
    """20 tanh(score / 20) in the second half of the heads; causal."""
    first = place.nheads // 2

    def score_mod(score, b, h, q, kv):
        return torch.where(h < first, score, 20 * torch.tanh(score / 20))

    return Made(causal(place), lambda: score_mod)


def document_bias(place: Place) -> Made:
    """A learned bias of each head and of the distance between two of eight documents; causal."""
    document = torch.arange(place.seqlen, device=place.device) * DOCUMENTS // place.seqlen

    def of(bias: Tensor) -> ScoreMod:
        return lambda s, b, h, q, kv: s + bias[h, (document[q] - document[kv]).abs()]

    return Made(causal(place), of, {"bias": place.normal(place.nheads, DOCUMENTS)})


def head_temperature(place: Place) -> Made:
    """The score times a learned number of the head; causal."""
    temperature = 1 + place.normal(place.nheads, scale=0.2)
    learned = {"temperature": temperature}
    return Made(causal(place), lambda x: lambda s, b, h, q, kv: s * x[h], learned)


def latent_positions(place: Place) -> Made:
    """Multi-head latent attention: the product of two vectors of positions is added; causal."""
    of_keys = place.normal(place.seqlen, ROPE_DIM, scale=ROPE_DIM**-0.5)
    of_queries = place.normal(place.nheads, place.seqlen, ROPE_DIM, scale=ROPE_DIM**-0.5)

    def score_mod(score, b, h, q, kv):
        return score + (of_queries[h, q] * of_keys[kv]).sum(-1)

    return Made(causal(place), lambda: score_mod)


SCORES = (
    alibi,
    relative_bias,
    t5_buckets,
    tanh_softcap,
    softcap_of_some_heads,
    document_bias,
    head_temperature,
    latent_positions,
)
