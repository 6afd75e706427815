"""The documents of a measurement: packs drawn without replacement,
so that tokens have the lengths of the table "seeds"."""

import torch

from magi_bench.workloads.lengths import load_table


def document_packs(total, num_packs, seed=42):
    """`num_packs` lists of document lengths with the sum `total`, none longer than a quarter of it.

    Every document has the midpoint length of its bin; one longer than a quarter is cut into quarters and a rest, and
    one that crosses the end of a pack is cut there.
    """
    generator = torch.Generator().manual_seed(seed)
    table = load_table("seeds")
    shares = torch.tensor([100 * item.share for item in table])
    middles = [(item.begin + item.end) // 2 for item in table]
    longest = max(total // 4, 1)
    pieces, drawn = [], 0
    while drawn < total * num_packs:
        for index in torch.multinomial(shares, 1024, True, generator=generator).tolist():
            whole, rest = divmod(middles[index], longest)
            pieces += [longest] * whole + [rest] * (rest > 0)
            drawn += middles[index]
    packs, pack, room = [], [], total
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
