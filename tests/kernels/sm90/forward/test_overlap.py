"""A forward pass that begins early: what its lists hold,
and on a GPU that it is right however late the remote keys are."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile.kernels.heuristics import PlanTiles
from magi_compile.kernels.overlap import EarlyKernel
from magi_compile.kernels.sm90.forward.overlap import NO_SPLIT, TILES_OF_A_SPLIT
from magi_compile.kernels.sm90.kernel import HopperKernel
from magi_compile.masks.slices import AttnSlices, MaskType
from magi_compile.plan.tiles import build_tile_plan
from tests.kernels.support.early_lists import early_plan_on_cpu
from tests.kernels.support.on_a_cpu import compile_once
from tests.plan.walked import seen
from tests.support.cases import MASKS, HeadShape, one, random_disjoint, varlen
from tests.support.deterministic import deterministic_algorithms
from tests.support.numerics import assert_attention_close

CASES = [
    *(case for case in MASKS if case.seqlen_q and case.seqlen_k > 1),
    *(random_disjoint(700, 900, seed, num_cuts=9) for seed in range(3)),
    varlen("documents", [700, 1, 90, 1257, 300], MaskType.CAUSAL),
]
FEW = CASES[-3:]
SIZES = PlanTiles(64, 32, 64, 32)
HEADS = [HeadShape(4, 2, 64, 64), HeadShape(4, 1, 128, 128), HeadShape(2, 1, 192, 192)]
SPIN_CYCLES = 2_000_000
FREE_SMS = 32


def local_and_remote(slices: AttnSlices, cut: int) -> AttnSlices:
    """The same mask, with the keys from `cut` on a column further on."""
    local, remote = slices.restrict_k(0, cut), slices.restrict_k(cut, slices.seqlen_k)
    parts = [
        (x.q_ranges, x.k_ranges + shift, x.mask_types) for x, shift in ((local, 0), (remote, 1))
    ]
    fields = (torch.cat(x) for x in zip(*parts, strict=True))
    return AttnSlices(*fields, slices.seqlen_q, slices.seqlen_k + 1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_column_between_local_and_remote_keys_is_none(case):
    cut, dense = case.seqlen_k // 2, case.slices().to_dense()
    between = dense.new_zeros(case.seqlen_q, 1)
    expected = torch.cat([dense[:, :cut], between, dense[:, cut:]], 1)
    assert torch.equal(local_and_remote(case.slices(), cut).to_dense(), expected)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return compile_once(tmp_path_factory)


def computed(tiles, runs, edges, seqlen_q, seqlen_k):
    """How often a list computes each pair of row and column, and how often it visits each row."""
    pairs = torch.zeros(seqlen_q, seqlen_k, dtype=torch.int32)
    visits = torch.zeros(seqlen_q, dtype=torch.int32)
    is_filled = [begin < end for begin, end, *_ in tiles.tolist()]
    assert is_filled == sorted(is_filled, reverse=True)
    for row_begin, row_end, run_begin, run_end in tiles[: sum(is_filled)].tolist():
        visits[row_begin:row_end] += 1
        for run in runs[run_begin:run_end].tolist():
            begin, end = run[:2]
            assert row_begin <= begin < end <= row_end
            pairs[begin:end] += seen(run, torch.arange(begin, end), seqlen_k, edges)
    return pairs, visits


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "padded"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_lists_make_up_the_plan(case, exact, compiled):
    slices = local_and_remote(case.slices(), case.seqlen_k // 2)
    remote_begin, sizes = case.seqlen_k // 2 + 1, (slices.seqlen_q, slices.seqlen_k)
    plan = build_tile_plan(slices, **SIZES._asdict(), exact=exact)
    split = early_plan_on_cpu(compiled, plan.q_walk, SIZES, remote_begin)
    local, local_visits = computed(split.local_tiles, split.runs, split.edges, *sizes)
    remote, remote_visits = computed(split.remote_tiles, split.runs, split.edges, *sizes)
    splits, split_visits = computed(split.split_tiles, split.runs, split.edges, *sizes)
    dense = slices.to_dense().int()
    assert torch.equal(local + remote, dense)
    assert (local_visits + remote_visits == 1).all()
    assert not local[:, remote_begin:].any()
    # A split is all that its tile sees of local keys, and no tile has two.
    assert (split_visits <= remote_visits).all()
    assert torch.equal(splits[:, :remote_begin], remote[:, :remote_begin] * split_visits[:, None])
    assert not splits[:, remote_begin:].any()

    # Each tile with a split knows which it is, and from where on it sees remote keys.
    found = []
    tiles = zip(split.remote_tiles.tolist(), split.remote_splits.tolist(), strict=True)
    for (row_begin, row_end, run_begin, run_end), (run_mid, number) in tiles:
        if row_begin == row_end:
            assert number == NO_SPLIT
            continue
        cols = split.runs[run_begin:run_end, 2] >= remote_begin
        assert cols.tolist() == sorted(cols.tolist())
        assert run_mid == run_end - int(cols.sum())
        if number != NO_SPLIT:
            assert split.split_tiles[number].tolist() == [row_begin, row_end, run_begin, run_mid]
            found.append(number)
    num_splits = len(plan.q_tiles) // TILES_OF_A_SPLIT + 1
    assert len(split.split_tiles) == min(num_splits, len(plan.q_tiles))
    is_split = split.split_tiles[:, 0] < split.split_tiles[:, 1]
    assert sorted(found) == list(range(int(is_split.sum())))


def test_the_longest_splits_come_first(compiled):
    # The later a row, the more local keys it sees; all see the same remote ones.
    slices = AttnSlices.from_lists(
        [(0, 640), (0, 640)], [(0, 640), (641, 700)], [1, 0], seqlen_k=700
    )
    plan = build_tile_plan(slices, **SIZES._asdict())
    split = early_plan_on_cpu(compiled, plan.q_walk, SIZES, 641)
    assert split.split_tiles[:, 0].tolist() == [576, 512, 448, 384, 320, 256]


def test_the_kernel_says_that_it_can():
    assert isinstance(HopperKernel(), EarlyKernel)


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of compute capability 9.0",
)


def late_keys(inputs, cut, spin_cycles):
    """The keys and values from `cut` on, which come after so many cycles, and what waits for them."""
    remote = [torch.full_like(x[cut:], torch.nan) for x in (inputs.k, inputs.v)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(spin_cycles)
        for x, late in zip((inputs.k, inputs.v), remote, strict=True):
            late.copy_(x[cut:])
    return remote, lambda: torch.cuda.current_stream().wait_stream(stream)


def in_steps(steps, arrive):
    """The results of a pass whose remote keys are there once `arrive` has been called."""
    steps.begin()
    with steps.beside():
        arrive()
        steps.main()
    return steps.finish()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    "case",
    [
        *(replace(case, heads=HEADS[1]) for case in [*CASES, one(MaskType.CAUSAL, 4097)]),
        *(replace(case, heads=heads) for case in FEW for heads in HEADS),
        replace(CASES[-1], heads=HEADS[1], softcap=5.0),
    ],
    ids=lambda case: case.id,
)
@pytest.mark.parametrize("spin_cycles", [0, 20_000, SPIN_CYCLES])
def test_matches_the_oracle(case, spin_cycles):
    kernel = HopperKernel()
    problem, inputs = case.problem(torch.bfloat16, "cuda"), case.inputs(torch.bfloat16, "cuda")
    cut = case.seqlen_k // 2
    slices = local_and_remote(case.slices(), cut).to("cuda")
    plan = kernel.early_plan(slices, problem, cut + 1)
    local, (remote, arrive) = (inputs.k[:cut], inputs.v[:cut]), late_keys(inputs, cut, spin_cycles)
    steps = kernel.early_forward(inputs.q, local, remote, plan, problem, free_sms=FREE_SMS)
    out, lse = in_steps(steps, arrive)
    assert_attention_close((out, lse), inputs, case.slices("cuda"), problem)


@pytest.mark.gpu
@needs_hopper
def test_deterministic_results_do_not_depend_on_when_remote_keys_come():
    case = replace(one(MaskType.CAUSAL, 4097), heads=HeadShape(16, 2, 128, 128))
    kernel, problem = HopperKernel(), case.problem(torch.bfloat16, "cuda")
    inputs, cut = case.inputs(torch.bfloat16, "cuda"), 1500
    slices = local_and_remote(case.slices(), cut).to("cuda")
    plan = kernel.early_plan(slices, problem, cut + 1)
    found = []
    with deterministic_algorithms():
        for step in range(100):
            remote, arrive = late_keys(inputs, cut, 3000 * step)
            local = (inputs.k[:cut], inputs.v[:cut])
            steps = kernel.early_forward(inputs.q, local, remote, plan, problem)
            found.append(in_steps(steps, arrive))
    assert_attention_close(found[0], inputs, case.slices("cuda"), problem)
    for out, lse in found[1:]:
        assert torch.equal(out, found[0].out)
        assert torch.equal(lse, found[0].lse)
