"""Parts of random masks, and the tables that they capture.

t0, t1: grouped ids [S], [B, S]; t2: sorted [S]; t3: bools [S]; t4: lengths [B]; t5: ids twice [S]; t6: sorted
in eights [S]; s0: an int.
"""

import random

import torch

ROWS = ["q", "q + 3", "q * 2 - 5", "t2[q]", "t4[b]", "4", "q // 3", "b * 5 + 2", "s0"]
KEYS = [
    *("kv", "kv - 2", "3 - kv", "kv // 4", "kv * 2 + 1", "t2[kv]", "kv // s0", "-t2[kv]"),
    *("kv * s0 - 3", "9 - kv * s0", "kv * s0 - kv", "t2[kv] * s0"),
    *(
        "kv % 8",
        "(kv + 3) % 16 // 4",
        "(kv - q) % 12",
        "(q - kv) % 12",
        "kv // 4 % 3",
        "kv % 24 % 6",
    ),
    *("(kv - t4[b]) % 9", "(kv + s0) % (s0 * 4)", "kv // s0 % 4", "abs(q - kv) % 7", "5 - kv % 10"),
    *("kv % 18 // 2 % 3", "kv % 9 * 2 - 3", "t2[kv % 20]", "kv - t2[kv]", "t2[kv] - 3 * kv"),
]
SIGNS = ["<", "<=", ">", ">=", "==", "!="]
LEAVES = [
    "({key} {sign} {row})",
    "({row} {sign} {other})",
    "(min(q, {key}) {sign} {row})",
    "(max(q, {key}) {sign} {row})",
    "(abs({row} - {key}) {sign} {other})",
    "(where({row} < 4, {key}, {other}) {sign} {row})",
    "(({key} {sign} {row}) {sign} ({other} < 4))",
    "(({row} < 4) * 3 + {key} {sign} {other})",
    "(t0[q] == t0[kv])",
    "(t1[b, q] == t1[b, kv])",
    "(t5[q] == t5[kv])",
    "((t5[q] == t5[kv]) & ({key} {sign} {row}))",
    "((kv // 8 == q // 8) & (t6[kv] {sign} {row}))",
    "((kv // 16 == q // 16) & (kv % 16 {sign} q % 16))",
    "((abs(kv // 7 - q // 7) <= 1) & (abs(kv % 7 - q % 7) <= {other}))",
    "(t5[kv % 20] == t5[q % 20])",
    "(t0[kv] == 1)",
    "t3[kv]",
    "t3[q]",
]


def random_mask(generator: random.Random, num_leaves: int) -> str:
    """A mask of so many comparisons; not every one can be expressed by intervals."""
    pick = generator.choice
    if num_leaves == 1:
        parts = {"key": pick(KEYS), "sign": pick(SIGNS), "row": pick(ROWS), "other": pick(ROWS)}
        return pick(LEAVES).format(**parts)
    left = generator.randint(1, num_leaves - 1)
    x, y = random_mask(generator, left), random_mask(generator, num_leaves - left)
    return pick([f"({x} {pick('&|^')} {y})", f"({x} & ~{y})", f"where({x}, {y}, {x})"])


def tables_for(batch: int, length: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def ids(*shape):
        jumps = torch.rand(*shape, generator=generator) < 0.2
        return torch.randperm(length + 1, generator=generator)[jumps.cumsum(-1)]

    valid = torch.arange(length) >= int(torch.randint(length + 1, (), generator=generator))
    return [
        ids(length),
        ids(batch, length).to(torch.int32),
        torch.randint(0, 9, (length,), generator=generator).sort().values.to(torch.int16),
        valid if seed % 2 else ~valid,
        torch.randint(0, length + 1, (batch,), generator=generator),
        ids((length + 1) // 2).repeat(2)[:length],
        torch.arange(length) % 8 // 3,
    ]
