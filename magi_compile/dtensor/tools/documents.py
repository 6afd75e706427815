"""The document lengths of a long-context training corpus, and packs drawn from them.

Real text is mostly short documents that hold few of the tokens, so a mask's balance and traffic depend on
the whole distribution. This one is a histogram over 13.5 million documents (24 billion tokens, mean 1782).
"""

from __future__ import annotations

import torch

# (shortest, longest, share of the documents in percent)
LENGTH_HISTOGRAM: tuple[tuple[int, int, float], ...] = (
    (0, 10, 0.22),
    (11, 50, 2.91),
    (51, 100, 5.20),
    (101, 200, 10.23),
    (201, 500, 28.19),
    (501, 1024, 24.64),
    (1025, 2048, 15.65),
    (2049, 4096, 7.34),
    (4097, 8192, 3.05),
    (8193, 16384, 1.29),
    (16385, 32768, 0.85),
    (32769, 65536, 0.14),
    (65537, 131072, 0.17),
    (131073, 196608, 0.14),
)


def document_packs(total: int, num_packs: int, seed: int = 42) -> list[list[int]]:
    """Packs of `total` tokens each, as lists of document lengths.

    Every document has the midpoint length of its bin; one longer than a quarter of a pack is cut into
    quarters and a rest, and one that crosses the end of a pack is cut there.

    Args:
        total: tokens of a pack.
        num_packs: how many packs to draw.
        seed: the same seed draws the same packs.

    Returns:
        `num_packs` lists, each with the sum `total`.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    shares = torch.tensor(
        [share for _, _, share in LENGTH_HISTOGRAM], dtype=torch.float32, device="cpu"
    )
    middles = [(low + high) // 2 for low, high, _ in LENGTH_HISTOGRAM]
    longest = max(total // 4, 1)
    pieces: list[int] = []
    drawn = 0
    while drawn < total * num_packs:
        for index in torch.multinomial(shares, 1024, True, generator=generator).tolist():
            whole, rest = divmod(middles[index], longest)
            pieces += [longest] * whole + [rest] * (rest > 0)
            drawn += middles[index]
    order = torch.randperm(len(pieces), generator=generator, device="cpu").tolist()
    packs: list[list[int]] = []
    pack: list[int] = []
    room = total
    for index in order:
        length = pieces[index]
        while length:
            taken = min(length, room)
            pack.append(taken)
            length, room = length - taken, room - taken
            if not room:
                packs.append(pack)
                pack, room = [], total
                if len(packs) == num_packs:
                    return packs
    raise AssertionError("not enough documents were drawn")
