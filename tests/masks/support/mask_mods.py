"""Masks as users write them. Each function makes a mask_mod for given sizes; tables differ between batch entries
where the mask says so. `MASK_MODS` is what the conversion must get right bit for bit."""

import functools

import torch
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks


def causal(b, h, q, kv):
    return q >= kv


def ids(length: int, average: int, seed: int = 0) -> torch.Tensor:
    """Document ids of random documents; not sorted, each in one place."""
    generator = torch.Generator().manual_seed(seed)
    jumps = torch.rand(length, generator=generator) < 1 / average
    runs = jumps.cumsum(0)
    return torch.randperm(length + 1, generator=generator)[runs]


def batched(make, batch: int) -> torch.Tensor:
    return torch.stack([make(seed) for seed in range(batch)])


def bottom_right(batch, seqlen_q, seqlen_k):
    shift = seqlen_k - seqlen_q
    return lambda b, h, q, kv: q + shift >= kv


def strictly_causal(batch, seqlen_q, seqlen_k):
    return lambda b, h, q, kv: kv < q


def future(batch, seqlen_q, seqlen_k):
    return lambda b, h, q, kv: ~causal(b, h, q, kv)


def window(batch, seqlen_q, seqlen_k):
    return lambda b, h, q, kv: (q - kv <= 31) & (kv - q < 5)


def abs_window(batch, seqlen_q, seqlen_k):
    return lambda b, h, q, kv: torch.abs(q - kv) <= 17


def outside_window(batch, seqlen_q, seqlen_k):
    return lambda b, h, q, kv: ~((q - kv <= 31) & (q >= kv))


def sink_and_window(batch, seqlen_q, seqlen_k):
    return lambda b, h, q, kv: ((q - kv <= 31) | (kv < 4)) & (q >= kv)


def window_tensor(batch, seqlen_q, seqlen_k):
    size = torch.tensor(9)
    return lambda b, h, q, kv: (q - kv <= size) & (q >= kv)


def strided_keys(batch, seqlen_q, seqlen_k):
    stride = torch.tensor(3)
    return lambda b, h, q, kv: (kv * stride + 1 >= q) & (kv * stride <= q + 40)


def padding(batch, seqlen_q, seqlen_k):
    lengths = torch.tensor([min(seqlen_q, seqlen_k) // (i + 1) for i in range(batch)])
    return lambda b, h, q, kv: (q >= kv) & (kv < lengths[b]) & (q < lengths[b])


def prefix_lm(batch, seqlen_q, seqlen_k):
    prefix = torch.arange(batch) * 11 + 7
    return lambda b, h, q, kv: (kv < prefix[b]) | (q >= kv)


def prefix_lm_document(batch, seqlen_q, seqlen_k):
    length = max(seqlen_q, seqlen_k)
    prefix = torch.arange(batch) * 11 + 7
    document = batched(lambda seed: ids(length, 30, seed), batch)

    def mask_mod(b, h, q, kv):
        return ((kv < prefix[b]) | (q >= kv)) & (document[b, q] == document[b, kv])

    return mask_mod


def chunked(batch, seqlen_q, seqlen_k):
    return lambda b, h, q, kv: (q // 32 == kv // 32) & (q >= kv)


def block_causal(batch, seqlen_q, seqlen_k):
    return lambda b, h, q, kv: q // 16 >= kv // 16


def block_start(batch, seqlen_q, seqlen_k):
    return lambda b, h, q, kv: (kv // 16 * 16 <= q) & (2 * kv + 1 != q)


def document(batch, seqlen_q, seqlen_k):
    table = ids(max(seqlen_q, seqlen_k), 20)
    return lambda b, h, q, kv: table[q] == table[kv]


def document_per_entry(batch, seqlen_q, seqlen_k):
    table = batched(lambda seed: ids(max(seqlen_q, seqlen_k), 25, seed), batch).to(torch.int32)
    return lambda b, h, q, kv: (table[b][q] == table[b][kv]) & (q >= kv)


def cross_document(batch, seqlen_q, seqlen_k):
    table = ids(max(seqlen_q, seqlen_k), 20)
    return lambda b, h, q, kv: (table[q] != table[kv]) & (q >= kv)


def other_tables(batch, seqlen_q, seqlen_k):
    of_rows, of_keys = ids(seqlen_q, 20, 1) % 7, torch.arange(seqlen_k) // 9
    return lambda b, h, q, kv: of_rows[q] == of_keys[kv]


def document_with_padding(batch, seqlen_q, seqlen_k):
    """Every document ends in padding tokens of id -1: that id is in several places, but no row asks for it."""
    length = max(seqlen_q, seqlen_k)
    table = torch.arange(length) // 20
    table[torch.arange(length) % 20 > 16] = -1
    return lambda b, h, q, kv: (table[q] == table[kv]) & (table[q] >= 0) & (q >= kv)


def valid_keys(batch, seqlen_q, seqlen_k):
    valid = torch.arange(max(seqlen_q, seqlen_k)) < 3 * seqlen_k // 4
    return lambda b, h, q, kv: valid[kv] & valid[q] & (q >= kv)


def valid_keys_of_document(batch, seqlen_q, seqlen_k):
    """Padding ends each document: many gaps in all, none within a document."""
    position = torch.arange(max(seqlen_q, seqlen_k))
    valid, table = position % 20 < 17, position // 20
    return lambda b, h, q, kv: (table[q] == table[kv]) & valid[kv]


def integer_flags(batch, seqlen_q, seqlen_k):
    """Flags kept as integers, and as bools where a truth value is asked for by name."""
    flags = (torch.arange(max(seqlen_q, seqlen_k)) < seqlen_k // 2).long() * 3
    of_rows = flags == 0

    def mask_mod(b, h, q, kv):
        return torch.logical_and(flags[kv], of_rows[q]) | (
            flags[kv].bool() & (of_rows[q].int() < 1)
        )

    return mask_mod


def chosen_flags(batch, seqlen_q, seqlen_k):
    """A truth value of a table in one arm, of a comparison in the other."""
    valid = torch.arange(max(seqlen_q, seqlen_k)) < seqlen_k // 3

    def mask_mod(b, h, q, kv):
        chosen = torch.where(q < 9, valid[kv], q < 30)
        return torch.logical_or(chosen, kv == q) & (chosen.int() + kv <= q + 1)

    return mask_mod


def same_validity(batch, seqlen_q, seqlen_k):
    valid = torch.arange(max(seqlen_q, seqlen_k)) < seqlen_k // 3
    return lambda b, h, q, kv: valid[q] == valid[kv]


def images(batch, seqlen_q, seqlen_k):
    """Causal text, and images (ids other than 0) that see themselves as a whole."""
    position = torch.arange(max(seqlen_q, seqlen_k))
    image = torch.where(position % 50 < 30, position // 50 + 1, 0)
    return lambda b, h, q, kv: (q >= kv) | ((image[q] == image[kv]) & (image[q] != 0))


def starts(batch, seqlen_q, seqlen_k):
    table = torch.arange(seqlen_q) // 23 * 23
    return lambda b, h, q, kv: (kv >= table[q]) & (q >= kv)


def nested_look_up(batch, seqlen_q, seqlen_k):
    length = max(seqlen_q, seqlen_k)
    table = torch.arange(length) // 23
    ends = (torch.arange(length // 23 + 1) + 1) * 23
    return lambda b, h, q, kv: (kv < ends[table[q]]) & (ends[table[kv]] > q)


def positions(batch, seqlen_q, seqlen_k):
    length = max(seqlen_q, seqlen_k)
    table = batched(lambda seed: ids(length, 4, seed).sort().values, batch)
    return lambda b, h, q, kv: table[b, kv] <= table[b, q]


def coarse_look_up(batch, seqlen_q, seqlen_k):
    table = ids(max(seqlen_q, seqlen_k) // 8 + 1, 3)
    return lambda b, h, q, kv: table[q // 8] == table[kv // 8]


def last_entry(batch, seqlen_q, seqlen_k):
    """Negative indices count from the end."""
    table = torch.arange(seqlen_q) * 3
    return lambda b, h, q, kv: kv <= table[q - 1]


def pooled_keys(batch, seqlen_q, seqlen_k):
    return lambda b, h, q, kv: kv * 4 + 3 <= q


def mirrored(batch, seqlen_q, seqlen_k):
    return lambda b, h, q, kv: (-3 * kv + 100) // 7 > q - 20


def row_switch(batch, seqlen_q, seqlen_k):
    return lambda b, h, q, kv: torch.where(q < 30, kv < 10, q >= kv)


def key_switch(batch, seqlen_q, seqlen_k):
    return lambda b, h, q, kv: torch.where(kv < 10, q < 30, q - kv < 40)


def number_switch(batch, seqlen_q, seqlen_k):
    return lambda b, h, q, kv: torch.where(kv < 10, kv * 2, kv - 5) == q


def bounds(batch, seqlen_q, seqlen_k):
    def mask_mod(b, h, q, kv):
        lower = torch.maximum(q - 20, torch.clamp(kv - 7, max=12))
        return (torch.minimum(q, kv) >= 3) & (kv >= lower)

    return mask_mod


def symmetric_difference(batch, seqlen_q, seqlen_k):
    return lambda b, h, q, kv: (q >= kv) ^ (kv < 20)


def even_rows(batch, seqlen_q, seqlen_k):
    return lambda b, h, q, kv: (q % 2 == 0) & (q >= kv)


def shifts(batch, seqlen_q, seqlen_k):
    return lambda b, h, q, kv: (kv >> 3) <= (q >> 3)


def named_functions(batch, seqlen_q, seqlen_k):
    table = ids(max(seqlen_q, seqlen_k), 20)

    def mask_mod(b, h, q, kv):
        same = torch.eq(table[q], table[kv])
        near = torch.le(torch.sub(q, kv), 12).logical_or(torch.lt(kv, 2))
        return torch.logical_and(same, torch.ge(q, kv)).logical_and(near).to(torch.bool)

    return mask_mod


def partial(batch, seqlen_q, seqlen_k):
    def mask_mod(b, h, q, kv, size, table):
        return ((q - kv).abs() <= size) & (table[q] == table[kv])

    return functools.partial(mask_mod, size=21, table=ids(max(seqlen_q, seqlen_k), 30))


class _Padding:
    def __init__(self, lengths):
        self.lengths = lengths

    def __call__(self, b, h, q, kv):
        return kv < self.lengths[b]


def composed(batch, seqlen_q, seqlen_k):
    callable_object = _Padding(torch.arange(batch) * 40 + 20)
    table = ids(max(seqlen_q, seqlen_k), 20)

    def same(b, h, q, kv):
        return table[q] == table[kv]

    def sink(b, h, q, kv):
        return kv < 5

    return and_masks(causal, or_masks(same, sink), callable_object)


def block_diffusion(batch, seqlen_q, seqlen_k):
    """Noisy blocks, then clean ones, with flags compared as numbers."""

    def mask_mod(b, h, q, kv, block_size, n):
        clean_q, clean_kv = q >= n, kv >= n
        block_q = torch.where(clean_q == 1, (q - n) // block_size, q // block_size)
        block_kv = torch.where(clean_kv == 1, (kv - n) // block_size, kv // block_size)
        same_block = (block_q == block_kv) & (clean_q == clean_kv)
        blocks_before = (block_q > block_kv) & (clean_kv == 1) & (clean_q == 0)
        clean_blocks = (block_q >= block_kv) & (clean_kv == 1) & (clean_q == 1)
        return same_block | blocks_before | clean_blocks

    return functools.partial(mask_mod, block_size=12, n=min(seqlen_q, seqlen_k) // 2)


def block_diffusion_of_documents(batch, seqlen_q, seqlen_k):
    half = max(seqlen_q, seqlen_k) // 2 + 1
    document = ids(half, 30).repeat(2)
    blocks = block_diffusion(batch, 2 * half, 2 * half)

    def same(b, h, q, kv):
        return document[q] == document[kv]

    return and_masks(same, blocks)


def packed_positions(batch, seqlen_q, seqlen_k):
    """As Hugging Face's transformers mask packed sequences: positions begin anew in each,
    causal and a window by them."""
    length = max(seqlen_q, seqlen_k)
    document = batched(lambda seed: ids(length, 30, seed), batch)
    starts = torch.ones_like(document, dtype=torch.bool)
    starts[:, 1:] = document[:, 1:] != document[:, :-1]
    index = torch.arange(length)
    position = index - torch.where(starts, index, 0).cummax(-1).values

    def window(b, h, q, kv):
        return kv > q - 19

    def at_positions(b, h, q, kv):
        return and_masks(window, causal)(b, h, position[b, q], position[b, kv])

    def same(b, h, q, kv):
        return document[b, q] == document[b, kv]

    return and_masks(same, at_positions)


def saw_teeth(batch, seqlen_q, seqlen_k):
    """A table that falls, but not among the keys that a row may see."""
    tooth = torch.arange(max(seqlen_q, seqlen_k)) % 25 // 2
    return lambda b, h, q, kv: (
        (kv // 25 == q // 25)
        & torch.where(q < 40, tooth[kv] >= 5, (tooth[kv] <= tooth[q]) | (kv % 1 > 0))
    )


def positions_from_starts(batch, seqlen_q, seqlen_k):
    """Positions in documents, computed from where the document of a key begins."""
    length = max(seqlen_q, seqlen_k)
    document = (torch.rand(length, generator=torch.Generator().manual_seed(4)) < 0.05).cumsum(0)
    starts = torch.searchsorted(document, torch.arange(int(document[-1]) + 1))

    def mask_mod(b, h, q, kv):
        position_q, position_kv = q - starts[document[q]], kv - starts[document[kv]]
        near = (position_q >= position_kv) & (position_q - position_kv < 11)
        return (document[q] == document[kv]) & (near | (position_kv < 3))

    return mask_mod


def batchified(batch, seqlen_q, seqlen_k):
    """A mask of 50 rows, once for each 50 rows of the sequence."""

    def mask_mod(b, h, q, kv):
        row, key = q % 50, kv % 50
        return (q // 50 == kv // 50) & ((key < 5) | ((row - key).abs() < 9))

    return mask_mod


def halves(batch, seqlen_q, seqlen_k):
    """Noised blocks in front of clean ones, by what is left of a position."""
    n = max(seqlen_q, seqlen_k) // 2 + 1
    document = ids(n, 30)

    def mask_mod(b, h, q, kv):
        is_noised_q, is_noised_kv = q < n, kv < n
        block_q, block_kv = q % n // 12, kv % n // 12
        same = (block_q == block_kv) & (is_noised_q == is_noised_kv)
        before = (block_q > block_kv) & is_noised_q & ~is_noised_kv
        clean = (block_q >= block_kv) & ~is_noised_q & ~is_noised_kv
        return (same | before | clean) & (document[q % n] == document[kv % n])

    return mask_mod


def all_copies(batch, seqlen_q, seqlen_k):
    """Rows see the keys in front of them in all five copies of a sequence, behind a prompt."""
    n = max(seqlen_q, seqlen_k) // 5 + 1
    return lambda b, h, q, kv: (kv < 6) | (q < 6) | (((q - 6) % n - (kv - 6) % n).abs() < 4)


def neighbourhood(batch, seqlen_q, seqlen_k):
    """Pixels in lines of 17, and a square around each, pushed inside at the edges."""
    last = max(seqlen_q, seqlen_k) // 17 - 1

    def mask_mod(b, h, q, kv):
        line = (q // 17).clamp(2, max(last - 2, 2))
        column = (q % 17).clamp(3, 16 - 3)
        return ((line - kv // 17).abs() <= 2) & ((column - kv % 17).abs() <= 3)

    return mask_mod


def video_tiles(batch, seqlen_q, seqlen_k):
    """Tiles of eight tokens, three in a line and four lines in a frame: those around a tile,
    but for text at the end."""
    text = max(seqlen_q, seqlen_k) - 9

    def coordinates(index):
        tile = index // 8
        return tile // 12, tile % 12 // 3, tile % 3

    def mask_mod(b, h, q, kv):
        centres = zip(coordinates(q), coordinates(kv), strict=True)
        near = [(x - y).abs() <= 1 for x, y in centres]
        is_seen = near[0] & near[1] & near[2] & (q < text) & (kv < text)
        return is_seen | (q >= text) | (kv >= text)

    return mask_mod


def dilated_window(batch, seqlen_q, seqlen_k):
    def mask_mod(b, h, q, kv):
        distance = torch.abs(q - kv)
        return (distance <= 24) & (distance % 4 == 0)

    return mask_mod


def drafts(batch, seqlen_q, seqlen_k):
    """Queries are blocks of eight that follow a prefix; each sees it, and of its own block what is not behind it."""
    prefix = max(seqlen_k - seqlen_q, 0)

    def mask_mod(b, h, q, kv):
        key = kv - prefix
        own = (kv >= prefix) & (q // 8 == key // 8) & (key % 8 <= q % 8)
        return (kv < prefix) | own

    return mask_mod


def backwards(batch, seqlen_q, seqlen_k):
    """Numbers of keys that fall, and repeat."""
    return lambda b, h, q, kv: ((40 - kv) % 25 < q % 25) & (kv // 40 == q // 40)


def numbers_from_truth(batch, seqlen_q, seqlen_k):
    return lambda b, h, q, kv: (q >= 30) * 8 + kv <= torch.where(kv < 20, q < 9, q + 4)


def everything(batch, seqlen_q, seqlen_k):
    return noop_mask


def nothing(batch, seqlen_q, seqlen_k):
    return lambda b, h, q, kv: (q < 0) | (kv > 1 << 20)


MASK_MODS = {
    make.__name__: make
    for make in (
        bottom_right,
        strictly_causal,
        future,
        window,
        abs_window,
        outside_window,
        sink_and_window,
        window_tensor,
        strided_keys,
        padding,
        prefix_lm,
        prefix_lm_document,
        chunked,
        block_causal,
        block_start,
        document,
        document_per_entry,
        cross_document,
        other_tables,
        document_with_padding,
        valid_keys,
        valid_keys_of_document,
        integer_flags,
        chosen_flags,
        same_validity,
        images,
        starts,
        nested_look_up,
        positions,
        coarse_look_up,
        last_entry,
        pooled_keys,
        mirrored,
        row_switch,
        key_switch,
        number_switch,
        bounds,
        symmetric_difference,
        even_rows,
        shifts,
        named_functions,
        partial,
        composed,
        block_diffusion,
        block_diffusion_of_documents,
        packed_positions,
        saw_teeth,
        positions_from_starts,
        batchified,
        halves,
        all_copies,
        neighbourhood,
        video_tiles,
        dilated_window,
        drafts,
        backwards,
        numbers_from_truth,
        everything,
        nothing,
    )
}
