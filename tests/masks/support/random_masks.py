"""Parts of random masks, and the tables that they capture.

t0, t1: grouped ids [S], [B, S]; t2: sorted [S]; t3: bools [S]; t4: lengths [B]; t5: ids twice [S]; t6: sorted
in eights [S]; s0: an int.

Of masks by head: t7: lengths [H]; t8: lengths [B, H]; t9: sorted [H, S]; t10: grouped ids [B, H, S].
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
ROWS_BY_HEAD = ["h", "t7[h]", "t8[b, h]", "t9[h, q]", "q - t7[h] * 2", "t7[h - 1]", "q // (h + 1)"]
KEYS_BY_HEAD = ["kv - t7[h]", "kv * (h + 1)", "t9[h, kv]", "(kv + t8[b, h]) % 8", "kv - h * 3"]
LEAVES_BY_HEAD = [
    *LEAVES,
    "(h % 2 == {row} % 2)",
    "(abs(q - kv) <= t7[h])",
    "(t10[b, h, q] == t10[b, h, kv])",
    "(t0[q + h] == t0[kv])",
]


def random_mask(generator: random.Random, num_leaves: int, by_head: bool = False) -> str:
    """A mask of so many comparisons; not every one can be expressed by intervals."""
    pick = generator.choice
    if num_leaves == 1:
        rows, keys, leaves = ROWS, KEYS, LEAVES
        if by_head:
            rows, keys, leaves = ROWS + ROWS_BY_HEAD, KEYS + KEYS_BY_HEAD, LEAVES_BY_HEAD
        parts = {"key": pick(keys), "sign": pick(SIGNS), "row": pick(rows), "other": pick(rows)}
        return pick(leaves).format(**parts)
    left = generator.randint(1, num_leaves - 1)
    sizes = (left, num_leaves - left)
    x, y = (random_mask(generator, size, by_head) for size in sizes)
    return pick([f"({x} {pick('&|^')} {y})", f"({x} & ~{y})", f"where({x}, {y}, {x})"])


def tables_for(batch: int, length: int, seed: int, heads: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def ids(*shape):
        jumps = torch.rand(*shape, generator=generator) < 0.2
        return torch.randperm(length + 1, generator=generator)[jumps.cumsum(-1)]

    valid = torch.arange(length) >= int(torch.randint(length + 1, (), generator=generator))
    tables = [
        ids(length),
        ids(batch, length).to(torch.int32),
        torch.randint(0, 9, (length,), generator=generator).sort().values.to(torch.int16),
        valid if seed % 2 else ~valid,
        torch.randint(0, length + 1, (batch,), generator=generator),
        ids((length + 1) // 2).repeat(2)[:length],
        torch.arange(length) % 8 // 3,
    ]
    if heads:
        of_heads = [
            torch.randint(0, length + 1, (heads,), generator=generator).to(torch.int32),
            torch.randint(0, length + 1, (batch, heads), generator=generator),
            torch.randint(0, 9, (heads, length), generator=generator).sort().values,
            ids(batch, heads, length).to(torch.int32),
        ]
        tables += of_heads
    return tables
