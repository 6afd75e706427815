"""A forward pass in two launches: who does what, and on a GPU that it is right however late the far keys are."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile.kernels.base import EarlyKernel
from magi_compile.kernels.cuda.early import NOT_A_PART, TILES_OF_A_PART, split_plan
from magi_compile.kernels.cuda.kernel import CudaKernel
from magi_compile.masks.slices import AttnSlices, MaskType
from magi_compile.plan.tiles import build_tile_plan
from magi_compile.testing.cases import MASKS, Heads, one, random_disjoint, varlen
from magi_compile.testing.numerics import assert_attention_close

CASES = [
    *(case for case in MASKS if case.seqlen_q and case.seqlen_k > 1),
    *(random_disjoint(700, 900, seed, num_cuts=9) for seed in range(3)),
    varlen("documents", [700, 1, 90, 1257, 300], MaskType.CAUSAL),
]
FEW = CASES[-3:]
HEADS = [Heads(4, 2, 64, 64), Heads(4, 1, 128, 128), Heads(2, 1, 192, 192)]
SPIN_CYCLES = 2_000_000
FREE_SMS = 32


def near_and_far(slices: AttnSlices, cut: int) -> AttnSlices:
    """The same mask, with the keys from `cut` on a column further on."""
    near, far = slices.restrict_k(0, cut), slices.restrict_k(cut, slices.seqlen_k)
    parts = [(x.q_ranges, x.k_ranges + shift, x.mask_types) for x, shift in ((near, 0), (far, 1))]
    fields = (torch.cat(x) for x in zip(*parts, strict=True))
    return AttnSlices(*fields, slices.seqlen_q, slices.seqlen_k + 1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_column_between_near_and_far_keys_is_none(case):
    cut, dense = case.seqlen_k // 2, case.slices().to_dense()
    between = dense.new_zeros(case.seqlen_q, 1)
    expected = torch.cat([dense[:, :cut], between, dense[:, cut:]], 1)
    assert torch.equal(near_and_far(case.slices(), cut).to_dense(), expected)


def seen(walk, seqlen_q, seqlen_k):
    """How often a walk computes each pair of row and column, and how often it visits each row."""
    pairs = torch.zeros(seqlen_q, seqlen_k, dtype=torch.int32)
    visits = torch.zeros(seqlen_q, dtype=torch.int32)
    cols = torch.arange(seqlen_k)
    for row_begin, row_end, run_begin, run_end in walk.tiles.tolist():
        visits[row_begin:row_end] += 1
        for run in walk.runs[run_begin:run_end].tolist() if row_end > row_begin else []:
            begin, end, col_begin, col_end, lo, hi = run[:6]
            assert row_begin <= begin < end <= row_end
            rows = torch.arange(begin, end)[:, None]
            live = (cols >= col_begin) & (cols < col_end) & (cols >= rows + lo) & (cols < rows + hi)
            pairs[begin:end] += live
    return pairs, visits


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "padded"])
@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_walks_make_up_the_plan(case, share, exact):
    slices = near_and_far(case.slices(), case.seqlen_k // 2)
    far_begin, (rows, cols) = case.seqlen_k // 2 + 1, (slices.seqlen_q, slices.seqlen_k)
    plan = build_tile_plan(
        slices, q_tile_rows=64, q_block_cols=32, k_tile_rows=64, k_block_cols=32, exact=exact
    )
    split = split_plan(plan.q_tiles, plan.q_runs, 64, far_begin, share)
    early, early_visits = seen(split.early, rows, cols)
    late, late_visits = seen(split.late, rows, cols)
    assert torch.equal(early + late, slices.to_dense().int())
    assert not early[:, far_begin:].any()
    assert share > 0 or not early.any()
    # Tiles in both walks are parts in both, at the same place; the others are in one.
    parts = []
    for walk in (split.early, split.late):
        pairs = zip(walk.tiles.tolist(), walk.part_shifts.tolist(), strict=True)
        parts.append(
            {tuple(t[:2]): shift for t, shift in pairs if shift != NOT_A_PART and t[0] < t[1]}
        )
        assert [begin < end for begin, end, *_ in walk.tiles.tolist()] == sorted(
            (begin < end for begin, end, *_ in walk.tiles.tolist()), reverse=True
        )
    assert parts[0] == parts[1]
    is_part = torch.zeros(rows, dtype=torch.int32)
    for (begin, end), shift in parts[0].items():
        is_part[begin:end] = 1
        assert 0 <= begin + shift <= end + shift <= split.num_part_rows
    starts = [begin + shift for (begin, _), shift in parts[0].items()]
    assert len(set(starts)) == len(starts) <= len(plan.q_tiles) // TILES_OF_A_PART + 1
    assert all(start % 64 == 0 for start in starts)
    assert torch.equal(early_visits + late_visits, 1 + is_part)


def test_early_work_is_as_much_as_asked_for_and_no_more():
    slices = near_and_far(AttnSlices.full(6400), 3200)
    plan = build_tile_plan(slices, q_tile_rows=64, q_block_cols=32, k_tile_rows=64, k_block_cols=32)
    split = split_plan(plan.q_tiles, plan.q_runs, 64, 3201, share=0.1)
    # A part is half of a tile, so a fifth of the tiles are in two parts.
    assert (split.early.part_shifts != NOT_A_PART).sum() == 20


def test_whole_tiles_come_before_parts():
    # Rows of the second document see near keys alone, more than enough for what is asked for.
    slices = AttnSlices.from_lists(
        [(0, 640), (0, 640), (640, 1280)],
        [(0, 640), (1281, 1921), (640, 1280)],
        [0] * 3,
        seqlen_k=2000,
    )
    plan = build_tile_plan(slices, q_tile_rows=64, q_block_cols=32, k_tile_rows=64, k_block_cols=32)
    split = split_plan(plan.q_tiles, plan.q_runs, 64, 1281, share=0.2)
    assert (split.early.part_shifts == NOT_A_PART).all()
    assert split.early.tiles[0, 0] >= 640


def test_the_kernel_says_that_it_can():
    assert isinstance(CudaKernel(), EarlyKernel)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of compute capability 9.0",
)
@pytest.mark.parametrize(
    ("case", "share"),
    [
        *((replace(case, heads=HEADS[1]), 0.2) for case in [*CASES, one(MaskType.CAUSAL, 4097)]),
        *(
            (replace(case, heads=heads), share)
            for case in FEW
            for heads in HEADS
            for share in (0.0, 1.0)
        ),
        (replace(CASES[-1], heads=HEADS[1], softcap=5.0), 0.2),
    ],
    ids=lambda x: getattr(x, "id", x),
)
def test_matches_the_oracle(case, share):
    kernel = CudaKernel()
    problem, inputs = case.problem(torch.bfloat16, "cuda"), case.inputs(torch.bfloat16, "cuda")
    cut = case.seqlen_k // 2
    slices = near_and_far(case.slices(), cut).to("cuda")
    plan = kernel.early_plan(slices, problem, cut + 1, share)
    far = [torch.full_like(x[cut:], torch.nan) for x in (inputs.k, inputs.v)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SPIN_CYCLES)
        for x, late in zip((inputs.k, inputs.v), far, strict=True):
            late.copy_(x[cut:])

    def arrive():
        torch.cuda.current_stream().wait_stream(stream)
        return far

    near = (inputs.k[:cut], inputs.v[:cut])
    out, lse = kernel.forward_early(inputs.q, *near, arrive, plan, problem, free_sms=FREE_SMS)
    assert_attention_close((out, lse), inputs, case.slices("cuda"), problem)
