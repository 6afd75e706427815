"""Chosen blocks against loops that choose them one by one."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from magi_compile import select_blocks
from magi_compile.masks.evaluation.block_lists import BlockLists

BATCH, NHEADS, NHEADS_KV, HEAD_DIM = 2, 4, 2, 8
SIZES = {"even": (96, 96, 16), "ragged": (90, 75, 16), "tall": (70, 130, (32, 16))}
SIZES |= {"wide": (130, 70, (16, 24))}
CHOICES = {
    "plain": {},
    "init": {"init_blocks": 2},
    "local": {"local_blocks": 3},
    "even local": {"local_blocks": 2, "init_blocks": 1},
    "group": {"heads": "group"},
    "all": {"heads": "all", "init_blocks": 1},
    "first": {"by": "first", "local_blocks": 1},
}


def inputs(seqlen_q, seqlen_k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(BATCH, NHEADS, seqlen_q, HEAD_DIM, generator=generator)
    return q, torch.randn(BATCH, NHEADS_KV, seqlen_k, HEAD_DIM, generator=generator)


def score(q, k, entry, head, heads, row, key, by):
    """Of two blocks, ranges of queries and keys, for the heads that choose together."""
    group = NHEADS // NHEADS_KV
    together = {"each": [head], "all": range(NHEADS)}
    together["group"] = range(head // group * group, (head // group + 1) * group)
    total = 0.0
    for h in together[heads]:
        queries = q[entry, h, row.start : row.stop].double()
        query = queries[0] if by == "first" else queries.mean(0)
        total += query @ k[entry, h // group, key.start : key.stop].double().mean(0)
    return total


def chosen_by_loops(
    q, k, topk, size, causal=False, init_blocks=0, local_blocks=0, heads="each", by="mean"
):
    """bool `[BATCH, NHEADS, q blocks, kv blocks]`."""
    rows, keys = size if isinstance(size, tuple) else (size, size)
    q_blocks, k_blocks = (
        [range(at, min(at + step, x.shape[2])) for at in range(0, x.shape[2], step)]
        for x, step in ((q, rows), (k, keys))
    )
    found = torch.zeros(BATCH, NHEADS, len(q_blocks), len(k_blocks), dtype=torch.bool)
    for entry, head, i in torch.cartesian_prod(*map(torch.arange, found.shape[:3])).tolist():
        row = q_blocks[i]
        allowed = [j for j, key in enumerate(k_blocks) if not causal or key.start <= row[-1]]
        own = max(j for j, key in enumerate(k_blocks) if key.start <= row[-1])
        first = own - local_blocks // 2
        local = (
            range(own - local_blocks + 1, own + 1) if causal else range(first, first + local_blocks)
        )
        always = [j for j in allowed if j < init_blocks or j in local]
        others = [j for j in allowed if j not in always]
        others.sort(key=lambda j: -score(q, k, entry, head, heads, row, k_blocks[j], by))
        found[entry, head, i, (always + others)[:topk]] = True
    return found


def pairs(grid, size, seqlen_q, seqlen_k):
    rows, keys = size if isinstance(size, tuple) else (size, size)
    pairs = grid.repeat_interleave(rows, 2).repeat_interleave(keys, 3)
    return pairs[:, :, :seqlen_q, :seqlen_k]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", SIZES)
def test_as_loops_choose(name, choice, causal):
    seqlen_q, seqlen_k, size = SIZES[name]
    q, k = inputs(seqlen_q, seqlen_k)
    mask = select_blocks(q, k, 3, size, causal=causal, **CHOICES[choice])
    wanted = chosen_by_loops(q, k, 3, size, causal, **CHOICES[choice])
    assert mask.seq_lengths == (seqlen_q, seqlen_k)
    assert torch.equal(mask.to_dense().bool().expand_as(wanted), wanted)
    assert mask.shape[1] == (1 if choice == "all" else NHEADS)
    listed = pairs(wanted, size, seqlen_q, seqlen_k)
    shown = create_mask(mask.mask_mod, BATCH, NHEADS, seqlen_q, seqlen_k, device="cpu")
    assert torch.equal(shown & listed, listed.tril() if causal else listed)
    if causal:
        lists = BlockLists(*(getattr(mask, name) for name in BlockLists._fields))
        full = lists.grids(*wanted.shape[2:])[1].expand_as(wanted)
        full = pairs(full, size, seqlen_q, seqlen_k)
        assert full.any()
        assert not (full & ~shown).any()


def test_as_many_as_there_are():
    q, k = inputs(96, 96)
    assert select_blocks(q, k, 100, 16).kv_num_blocks.unique().tolist() == [6]
    mask = select_blocks(q, k, 4, 16, causal=True)
    counts = mask.kv_num_blocks + mask.full_kv_num_blocks
    assert (counts == torch.tensor([1, 2, 3, 4, 4, 4])).all()


def test_highest_score_first():
    q, k = inputs(96, 96)
    scores = torch.randn(BATCH, NHEADS, 6, 6)
    mask = select_blocks(q, k, 4, 16, by=lambda q, k: scores)
    assert torch.equal(mask.kv_indices[..., :4].long(), scores.topk(4).indices)


def test_scores_of_a_function():
    """Blocks of -inf are not chosen, unless others ask for them."""
    q, k = inputs(96, 96)
    hidden = torch.ones(6, 6).triu().bool()

    def before(q, k):
        return (q[:, :, ::16] @ k[:, :, ::16].repeat_interleave(2, 1).mT).masked_fill(
            hidden, -torch.inf
        )

    counts = select_blocks(q, k, 2, 16, by=before).kv_num_blocks
    assert (counts == torch.tensor([0, 1, 2, 2, 2, 2])).all()
    mask = select_blocks(q, k, 2, 16, by=before, local_blocks=1)
    assert (mask.kv_num_blocks == torch.tensor([1, 2, 2, 2, 2, 2])).all()
    assert (mask.kv_indices[..., 0] == torch.arange(6)).all()


def test_first_looks_at_nothing_behind():
    q, k = inputs(96, 96)
    others = inputs(96, 96, seed=1)

    def choose(q, k, **options):
        return select_blocks(q, k, 3, 16, causal=True, local_blocks=1, **options).to_dense()

    for at in range(1, 96, 7):
        changed = [
            torch.cat([x[:, :, :at], y[:, :, at:]], 2) for x, y in zip((q, k), others, strict=True)
        ]
        rows = -(-at // 16)  # those with a query before `at`
        found = (choose(*x, by="first")[:, :, :rows] for x in ((q, k), changed))
        assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_means_are_in_fp32(dtype):
    q, k = (100 * x for x in inputs(96, 96))
    q, k = q.to(dtype), k.to(dtype)
    found = select_blocks(q, k, 3, 16).to_dense()
    assert torch.equal(found, select_blocks(q.float(), k.float(), 3, 16).to_dense())


WRONG = {
    "topk": (ValueError, {"topk": 0}, r"`topk` must be at least 1, got 0"),
    "no int": (TypeError, {"topk": 2.0}, r"`topk` must be an int, got 2.0"),
    "room": (
        ValueError,
        {"init_blocks": 2, "local_blocks": 2},
        r"`topk` must have room for `init_blocks` and `local_blocks`, 2 \+ 2, got 3",
    ),
    "init": (ValueError, {"init_blocks": -1}, r"`init_blocks` must be at least 0, got -1"),
    "local": (TypeError, {"local_blocks": True}, r"`local_blocks` must be an int, got True"),
    "size": (ValueError, {"block_size": 0}, r"`block_size` must be at least 1, got 0"),
    "sizes": (
        ValueError,
        {"block_size": (1, 2, 3)},
        r"`block_size` must be one number or two, got \(1, 2, 3\)",
    ),
    "causal": (TypeError, {"causal": 1}, r"`causal` must be True or False, got 1"),
    "heads": (ValueError, {"heads": "kv"}, r"`heads` must be one of \(.*\), got 'kv'"),
    "by": (ValueError, {"by": "max"}, r"`by` must be one of \(.*\) or a function .*, got 'max'"),
    "scores": (
        ValueError,
        {"by": lambda q, k: q},
        r"`by` must return scores of shape \[2, 4, 2, 2\], got \[2, 4, 96, 8\]",
    ),
    "no scores": (TypeError, {"by": lambda q, k: None}, "`by` must return a tensor, got NoneType"),
    "no function": (TypeError, {"by": lambda: 3}, "`by` must be a function of q and k: too many"),
    "q": (TypeError, {"q": None}, r"`q` must be a tensor, got NoneType"),
    "dims": (ValueError, {"k": torch.ones(2, 2, 8)}, r"`k` must have shape .*, got \[2, 2, 8\]"),
    "batch": (
        ValueError,
        {"k": torch.ones(1, 3, 8, 8)},
        r"`k` must have q's batch size 2 and head_dim 8, .* divides 4, got \[1, 3, 8, 8\]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    error, arguments, message = WRONG[name]
    q, k = inputs(96, 96)
    with pytest.raises(error, match=message):
        select_blocks(**{"q": q, "k": k, "topk": 3, **arguments})
