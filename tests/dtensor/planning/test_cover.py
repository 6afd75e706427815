"""Covers: what the ranks show together is the mask, pair by pair, and rows travel only where a block needs them."""

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from magi_compile.dtensor.call.entries import Packing
from magi_compile.dtensor.call.execution import unpack
from magi_compile.dtensor.planning import cover, rank_plan
from magi_compile.dtensor.planning.cover import Entries
from magi_compile.dtensor.planning.rank_plan import (
    ContextParallelOptions,
    plan_rank,
    plan_rank_together,
)
from magi_compile.dtensor.sequence.make_plan import _converted

HEADS = 4


def random_mask(seed):
    """Dense, bool `[batch or 1, heads or 1, rows, keys]`: scattered, with rows and stretches that show nothing or
    all."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    batch, heads = ((1, 1), (2, 1), (1, HEADS), (2, HEADS))[seed % 4]
    rows, keys = integer(1, 400), integer(1, 400)
    if seed % 3:
        keys = rows
    shape = (batch, heads, rows, keys)
    dense = torch.rand(shape, generator=generator) < (0.02, 0.5, 0.98)[integer(0, 3)]
    for _ in range(4):
        top, left = integer(0, rows), integer(0, keys)
        dense[..., top : top + integer(1, 300), left : left + integer(1, 300)] = integer(0, 2)
    return dense


def planned_mask(dense):
    batch, heads, rows, keys = dense.shape

    def mask_mod(b, h, q, kv):
        # Of what does not matter it reads nothing.
        if heads > 1:
            return dense[b, h, q, kv] if batch > 1 else dense[0, h, q, kv]
        return dense[b, 0, q, kv] if batch > 1 else dense[0, 0, q, kv]

    sizes = (batch if batch > 1 else None, heads if heads > 1 else None)
    mask = flex.create_block_mask(mask_mod, *sizes, rows, keys, device="cpu")
    return _converted("mask", mask, None, torch.device("cpu")).slices


def staircase(steps):
    """Blocks that are visible as a whole, of which neighbours are bounded like a causal mask; one has bits."""
    at = torch.arange(128 * steps + 1) // 128
    dense = at[:, None] >= at[None]
    dense[0, 0] = False
    return dense[None, None]


@pytest.mark.parametrize(
    "options", [ContextParallelOptions(chunk_size=100), ContextParallelOptions()]
)
def test_a_staircase_of_blocks(options):
    dense = staircase(3)
    found = torch.zeros_like(dense[0, 0], dtype=torch.int64)
    for rank in range(2):
        planned = plan_rank(planned_mask(dense), 2, rank, options)
        on_device = unpack(*planned.tensors("cpu"))
        for stage in on_device.forward:
            row, key = stage.slices.to_dense().nonzero().unbind(1)
            place = on_device.positions()[row].long(), on_device.positions(stage)[key].long()
            found.index_put_(place, torch.ones_like(row), accumulate=True)
    torch.testing.assert_close(found, dense[0, 0].long())


def test_a_permutation_of_single_tokens():
    dense = torch.rand(1, 1, 320, 320, generator=torch.Generator().manual_seed(1)) < 0.3
    rows = dense.shape[2]
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    found = torch.zeros(rows, rows, dtype=torch.int64)
    for rank in range(4):
        (planned,) = plan_rank_together([planned_mask(dense)], 4, rank, permutation=order)
        assert len(planned.forward[0].slices) <= 3 * 3
        on_device = unpack(*planned.tensors("cpu"))
        torch.testing.assert_close(on_device.positions().long(), order.view(4, -1)[rank])
        for stage in on_device.forward:
            row, key = stage.slices.to_dense().nonzero().unbind(1)
            place = on_device.positions()[row].long(), on_device.positions(stage)[key].long()
            found.index_put_(place, torch.ones_like(row), accumulate=True)
    torch.testing.assert_close(found, dense[0, 0].long())


def entries_of(mask):
    return getattr(mask, "entries", Entries())


OPTIONS = [
    ContextParallelOptions(chunk_size=16, degree=1, backward_degree=2),
    ContextParallelOptions(chunk_size=5, degree=0, backward_degree=0),
    ContextParallelOptions(),
]


def entry_of_keys(plan, stage, packing, heads):
    """The number of the entry of each key that a kernel has, and the position of each."""
    positions = plan.positions(stage)
    if packing.apart == 1:
        whose = torch.arange(packing.keys).repeat_interleave(len(positions))
        return whose, positions.repeat(packing.keys)
    if stage.route is None:
        batch = torch.arange(packing.apart).repeat_interleave(len(positions) // packing.apart)
    else:
        counts = torch.tensor(stage.rows_before[plan.rank]).diff()
        batch = torch.arange(packing.apart).repeat_interleave(counts)
    whose = torch.cat([batch * heads + head for head in range(packing.keys_together)])
    return whose, positions.repeat(packing.keys_together)


@pytest.mark.parametrize("seed", range(48))
def test_ranks_show_the_mask_together(seed):
    dense, cp_size = random_mask(seed), 1 + seed % 5
    batch, heads, rows, keys = dense.shape
    mask = planned_mask(dense)
    # Rows of queries see keys of their batch entry, and no more than those of blocks of 128 by 128.
    needed = torch.zeros(batch, rows, keys, dtype=torch.bool)
    for row in range(0, rows, 128):
        for key in range(0, keys, 128):
            here = dense[..., row : row + 128, key : key + 128]
            needed[:, row : row + 128, key : key + 128] = here.any(3).any(2).any(1)[:, None, None]
    entries = batch * heads
    packing = Packing.of(entries_of(mask), batch, (heads, heads), (), has_score=False)
    found = torch.zeros(2, entries, rows, keys, dtype=torch.int64)
    for rank in range(cp_size):
        planned = plan_rank(mask, cp_size, rank, OPTIONS[seed % 3])
        on_device = unpack(*planned.tensors("cpu"))
        at_rows = on_device.positions().long()
        is_row = planned.dispatch.positions(rank) < rows
        owned = planned.dispatch.keys.positions(rank)
        for number, stages in enumerate((on_device.forward, on_device.backward)):
            for stage in stages:
                slices = stage.slices_of(packing)
                whose, at_keys = entry_of_keys(on_device, stage, packing, heads)
                if stage.route is not None:
                    arrived = ~torch.isin(at_keys, owned)
                    seen = needed[:, at_rows[is_row]].any(1)
                    assert bool(seen[whose[arrived] // heads, at_keys[arrived].long()].all())
                place, key = slices.to_dense().nonzero().unbind(1)
                entry, row = place // len(at_rows), place % len(at_rows)
                torch.testing.assert_close(entry, whose[key])  # nothing between entries
                at = (torch.full_like(entry, number), entry, at_rows[row], at_keys[key].long())
                found.index_put_(at, torch.ones_like(entry), accumulate=True)
    torch.testing.assert_close(found, dense.flatten(0, 1).long().expand(2, -1, -1, -1))


def test_other_bits_are_another_plan():
    dense = torch.rand(1, 1, 256, 256, generator=torch.Generator().manual_seed(0)) < 0.5
    other = dense.clone()
    other[0, 0, 200, 3] ^= True
    digests = {plan_rank(planned_mask(x), 2, 0).digest for x in (dense, other, dense)}
    assert len(digests) == 2


def test_a_share_of_the_masks():
    dense = torch.rand(2, HEADS, 60, 60, generator=torch.Generator().manual_seed(0)) < 0.5
    whole = unpack(*plan_rank(planned_mask(dense), 1, 0).tensors("cpu"))
    stage = whole.of_share(1, 1).forward[0]
    packing = Packing.of(entries_of(planned_mask(dense)), 1, (2, 1), (1, 2, 2, 4), has_score=False)
    slices = stage.slices_of(packing)
    rows, keys = slices.seqlen_q // 2, slices.seqlen_k  # two heads that read the same keys
    shown = slices.to_dense().view(2, rows, keys)[:, :60, :60]
    torch.testing.assert_close(shown, dense[1, 2:])


@pytest.mark.parametrize(
    ("share", "message"),
    [
        ((0, 2, 1, HEADS), "`q` must have the 2 batch entries that have masks of their own, got 1"),
        ((0, 2, 2, 8), f"`q` must have the {HEADS} heads that have masks of their own, got 8"),
    ],
)
def test_a_share_of_other_masks(share, message):
    """However few this rank has of both."""
    with pytest.raises(ValueError, match=message):
        Packing.of(Entries(2, HEADS), 1, (2, 1), share, has_score=False)


def test_blocks_are_hashed_once(monkeypatch):
    dense = torch.rand(1, 1, 256, 256, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = planned_mask(dense)
    first = plan_rank(mask, 2, 0)
    monkeypatch.setattr(cover, "bytes_of", None)
    assert plan_rank(mask, 2, 1).digest == first.digest


def test_no_more_bits_are_kept_than_there_is_room_for(monkeypatch):
    masks = [
        planned_mask(torch.rand(1, 1, 300, 300, generator=torch.Generator().manual_seed(i)) < 0.5)
        for i in range(4)
    ]
    plans = rank_plan.OrderedDict()
    monkeypatch.setattr(rank_plan._plans, "plans", plans)
    monkeypatch.setattr(rank_plan, "MOST_BITS", 40 << 10)  # 2 of 9 blocks of 2 KB each
    for mask in masks:
        plan_rank(mask, 1, 0)
    assert len(plans) == 2
    assert plan_rank_together(masks[:1], 1, 0)[0].bits is not None


@pytest.mark.parametrize("share", [(2, 0, 2, HEADS), (0, HEADS - 1, 2, HEADS), (-1, 0, 2, HEADS)])
def test_a_share_ends_where_all_entries_do(share):
    """Masks behind the last one would be somebody else's memory."""
    with pytest.raises(ValueError, match=r"`share` must place the [12] .* of `q` among the \d+ of"):
        Packing.of(Entries(2, HEADS), 1, (2, 1), share, has_score=False)
