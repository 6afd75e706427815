"""Packs of documents with the lengths of a corpus, which placements were measured with."""

import torch

from magi_bench.workloads.lengths import SEEDS_CAP, load_table


def packs_of_corpus(total: int, num_packs: int, seed: int = 42) -> list[list[int]]:
    """Packs drawn without replacement, so that tokens have the lengths of the table "seeds": the documents of the
    measurements up to 2026-11-23.

    Every document has the midpoint length of its bin; one longer than a quarter of a pack is cut into quarters and a
    rest, and one that crosses the end of a pack is cut there.

    Args:
        total: tokens of a pack.
        num_packs: how many to draw.
        seed: equal seeds draw equal packs.

    Returns:
        `num_packs` lists of lengths with the sum `total`.
    """
    generator = torch.Generator().manual_seed(seed)
    table = load_table("seeds")
    shares = torch.tensor([100 * item.share for item in table])
    middles = [(item.begin + item.end) // 2 for item in table]
    longest = max(total // SEEDS_CAP, 1)
    pieces: list[int] = []
    drawn = 0
    while drawn < total * num_packs:
        for index in torch.multinomial(shares, 1024, True, generator=generator).tolist():
            whole, rest = divmod(middles[index], longest)
            pieces += [longest] * whole + [rest] * (rest > 0)
            drawn += middles[index]
    packs: list[list[int]] = []
    pack: list[int] = []
    room = total
    for index in torch.randperm(len(pieces), generator=generator).tolist():
        length = pieces[index]
        while length:
            taken = min(length, room)
            pack.append(taken)
            length, room = length - taken, room - taken
            if not room:
                packs.append(pack)
                pack, room = [], total
    return packs[:num_packs]
