"""Cells, lengths, workloads and what is derived from their slices, against dense masks."""

import itertools
from dataclasses import asdict, replace

import pytest
import torch

from magi_bench.cases import Case, format_length, parse_length
from magi_bench.contenders.cudnn_flex import endpoints
from magi_bench.masks import to_text
from magi_bench.workloads import block_masks, derive, lengths
from magi_bench.workloads.workload import MASKS, SPARSE_MASKS, build
from magi_compile.masks.evaluation.block_lists import counts_and_order
from magi_compile.masks.slices import AttnSlices

SEQLEN = 520


def make_cell(mask: str, seqlen: int = SEQLEN, sampler: str = "pile") -> Case:
    if mask in SPARSE_MASKS:
        return Case("sparse", mask, seqlen, 4, 2, 16, "float32", block=64, density=0.3)
    return Case("kernel", mask, seqlen, 4, 2, 16, "float32", lengths=sampler)


def dense_of_mask_mod(workload, head: int) -> torch.Tensor:
    index = torch.arange(workload.case.seqlen)
    visible = workload.mask_mod(torch.tensor(0), torch.tensor(head), index[:, None], index[None, :])
    return visible.expand(len(index), len(index))


@pytest.mark.parametrize("mask", MASKS)
def test_slices_are_the_mask_mod(mask):
    workload = build(make_cell(mask))
    for head in range(4):
        dense = workload.head_slices(head // 2).to_dense()
        assert torch.equal(dense, dense_of_mask_mod(workload, head))


@pytest.mark.parametrize("mask", MASKS)
def test_derived_inputs_are_the_slices(mask):
    slices = build(make_cell(mask)).head_slices(1)
    dense, key = slices.to_dense(), torch.arange(SEQLEN)
    intervals = derive.key_intervals(slices)
    begin, end = intervals[:, 0, :, None], intervals[:, 1, :, None]
    assert torch.equal(((begin <= key) & (key < end)).sum(0), dense.long())
    (edges,) = endpoints(slices)
    assert (edges.diff(dim=0) >= 0).all()
    begin, end = edges[1::2, :, None], edges[2::2, :, None]
    assert torch.equal(((begin <= key) & (key < end)).any(0), dense)
    assert not edges[0].any()
    padded = torch.nn.functional.pad(dense.long(), (0, 120, 0, 120)).view(5, 128, 5, 128)
    assert torch.equal(derive.block_areas(slices, 128), padded.sum((1, 3)))


def test_stacked_slices_of_sparse_masks_are_those_of_the_heads():
    workload = build(make_cell("variable_blocks"))
    stacked = workload.slices.to_dense().view(4, SEQLEN, 2, SEQLEN)
    for head in range(4):
        expected = workload.head_slices(head // 2).to_dense()
        assert torch.equal(stacked[head, :, head // 2], expected)
        assert not stacked[head, :, 1 - head // 2].any()
    assert workload.pairs == int(stacked.sum())


@pytest.mark.parametrize("mask", SPARSE_MASKS)
def test_tile_areas_of_block_maps(mask):
    workload = build(make_cell(mask))
    for head, areas in enumerate(workload.blocks.areas(128)):
        assert torch.equal(areas, derive.block_areas(workload.head_slices(head), 128))


def test_density_is_the_share_of_blocks_kept():
    visible = block_masks.draw(replace(make_cell("uniform_blocks", 640), density=0.3)).visible
    assert visible.sum(-1).eq(3).all()


@pytest.mark.parametrize(
    ("slices", "window"),
    [
        (AttnSlices.full(9), (None, None)),
        (AttnSlices.causal(9), (None, 0)),
        (AttnSlices.sliding_window(9, None, (3, 0)), (3, 0)),
        (AttnSlices.sliding_window(9, None, (2, 4)), (2, 4)),
        (AttnSlices.from_cu_seqlens([0, 4, 9]), None),
        (AttnSlices.full(3, 9), None),
    ],
)
def test_windows(slices, window):
    assert derive.window_of(slices) == window


@pytest.mark.parametrize(
    ("slices", "documents"),
    [
        (AttnSlices.from_cu_seqlens([0, 4, 9]), ([0, 4, 9], 5, None, None)),
        (AttnSlices.from_cu_seqlens([0, 4, 5, 9], causal=True), ([0, 4, 5, 9], 4, None, 0)),
    ],
)
def test_documents(slices, documents):
    found = derive.packing_of(slices)
    assert (found.cu_seqlens.tolist(), *found[1:]) == documents


def test_block_lists():
    listed = torch.tensor([[False, True, True], [True, False, False]])
    count, index = counts_and_order(listed)
    assert count.tolist() == [2, 1]
    assert index[0, :2].tolist() == [1, 2]
    assert index[1, :1].tolist() == [0]
    transposed = counts_and_order(listed.mT)
    assert [x.tolist() for x in transposed] == [[1, 1, 1], [[1, 0], [0, 1], [0, 1]]]
    assert all(x.is_contiguous() for x in transposed)


def test_long_documents_have_their_share():
    total = 8 * 65536
    drawn = lengths.sample("longca-long", total, 3)
    of_long = sum(x for x in drawn if x >= lengths.LONG[0])
    assert 0.55 * total < of_long < 0.8 * total  # ProLong has long ones, too
    assert len(drawn) > 50


@pytest.mark.parametrize("sampler", lengths.SAMPLERS)
def test_documents_fill_the_sequence(sampler):
    drawn = lengths.sample(sampler, 20000, seed=1)
    assert sum(drawn) == 20000
    assert min(drawn) > 0
    assert drawn == lengths.sample(sampler, 20000, seed=1)
    assert sampler == "whole" or drawn != lengths.sample(sampler, 20000, seed=2)


def test_seeds_documents_are_bin_middles_or_quarters():
    middles = {5, 30, 75, 150, 350, 762, 1536, 3072, 6144, 12288, 24576, 49152, 98304, 163840}
    drawn = lengths.sample("seeds", 2**20, seed=3)[:-1]
    assert set(drawn) <= middles | {m % 2**18 for m in middles} | {2**18}


def test_tables_are_histograms():
    for name in ("seeds", "pile", "prolong64k", "prolong512k"):
        table = lengths.load_table(name)
        assert sum(item.share for item in table) == pytest.approx(1, abs=1e-3)
        assert all(a.end == b.begin for a, b in itertools.pairwise(table))


def test_unknown_sampler():
    with pytest.raises(ValueError, match=r"`sampler` must be one of seeds, .*, got 'x'"):
        lengths.sample("x", 10, 0)


def test_unknown_mask():
    with pytest.raises(ValueError, match=r"`mask` must be one of full, .*, got 'x'"):
        build(make_cell("x"))


def test_flops():
    workload = build(make_cell("causal", 8))
    assert workload.pairs == 4 * 36
    assert [workload.flops(x) for x in ("fwd", "bwd", "fwdbwd")] == [9216, 23040, 32256]


def test_equal_masks_have_equal_hashes():
    case = make_cell("document_causal")
    assert build(case).mask_hash == build(case).mask_hash
    assert build(case).mask_hash != build(replace(case, seed=7)).mask_hash


def test_inputs_are_the_same_for_everybody():
    first, second = (build(make_cell("causal", 16)).inputs("cpu") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first.q.shape == (16, 4, 16)
    sparse = build(make_cell("uniform_blocks", 64)).inputs("cpu")
    assert sparse.q.shape == (64, 4, 16)
    assert sparse.q.transpose(0, 1).is_contiguous()


def test_cells_by_key():
    case = make_cell("uniform_blocks")
    assert Case(**asdict(case)) == case
    assert case.key == "sparse/uniform_blocks/b64/p0.3/seeds/s520/4:2/d16/float32/seed42"
    assert case.key != replace(case, density=0.5).key


@pytest.mark.parametrize(("text", "value"), [("8192", 8192), ("8K", 8192), ("1m", 2**20)])
def test_lengths_as_text(text, value):
    assert parse_length(text) == value
    assert parse_length(format_length(value)) == value


@pytest.mark.parametrize("text", ["", "K", "-1", "8.5K", "0"])
def test_bad_length(text):
    with pytest.raises(ValueError, match="`seqlen` must be a number of tokens"):
        parse_length(text)


def test_drawing():
    lines = to_text(AttnSlices.from_cu_seqlens([0, 2, 4])).splitlines()
    assert lines == ["@@@@", "@@@@", "    @@@@", "    @@@@", "2 slices, area 8, density 50.0%"]
