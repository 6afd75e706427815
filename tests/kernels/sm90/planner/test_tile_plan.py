"""The planner of the GPU gives what `build_tile_plan` gives: compiled for the CPU here, as it is on a GPU."""

import ctypes
from functools import partial
from itertools import pairwise

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_bench.cases import Case
from magi_bench.workloads.workload import SPARSE_MASKS, build
from magi_compile import MaskDataError
from magi_compile._checks import raise_pending, synchronize_checks
from magi_compile.kernels.heuristics import PlanTiles
from magi_compile.kernels.plan import pack
from magi_compile.kernels.sm90.planner import tile_plan as planner
from magi_compile.kernels.sm90.planner.tile_plan import plan_on_device, planner_variant
from magi_compile.masks import library, padded_slices_from_intervals, row_intervals
from magi_compile.masks.evaluation.bit_blocks import slices_with_bits
from magi_compile.masks.evaluation.sizes import Heads, MaskSizes
from magi_compile.masks.slices import AttnSlice, AttnSlices, MaskType
from magi_compile.plan.tiles import build_tile_plan, padded_sizes
from tests.kernels.support import idle_driver
from tests.kernels.support.one_thread import compile_for_one_thread
from tests.support.cases import block_diffusion, random_disjoint

SMALL, HOPPER = PlanTiles(16, 8, 8, 4), PlanTiles(128, 128, 128, 64)
LENGTHS = {
    "one": [1000],
    "one_token": [1],
    "documents": [300, 1, 17, 128, 129, 500, 3, 3, 3],
    "equal": [384] * 4,
    "different": [256, 700, 384, 1024, 300, 256],
    "tiny": [1, 2, 3, 1, 5, 1, 1, 2] * 30,
}
MASKS = {
    f"{name}-{lengths}": getattr(library, name)(LENGTHS[lengths]).slices
    for name in ("full", "causal", "document_causal", "share_question", "global_sliding_window")
    for lengths in LENGTHS
}
MASKS |= {f"random{seed}": random_disjoint(257, 391, seed).slices() for seed in range(4)}
# Hundreds of short slices in a tile, far more than `MAX_OVERLAP` across a border of key tiles.
MASKS |= {
    f"{name}-{density}": build(
        Case("sparse", name, 1024, 16, 2, 64, block=32, density=density)
    ).slices
    for name in SPARSE_MASKS
    for density in (0.2, 0.4)
}
MASKS |= {
    f"{name}-{lengths}": getattr(library, name)(LENGTHS[lengths], window=100).slices
    for name in ("sliding_window_causal", "sliding_window_full")
    for lengths in ("one", "one_token")
}
# Chains of slices that are one rectangle, of 1 to 100.
ROWS = [0, 1, 3, 35, 66, 166, 167]
MASKS["chains"] = AttnSlices.from_slices(
    [
        AttnSlice((row, row + 1), (i, i + 50), MaskType.FULL)
        for i, chain in enumerate(pairwise(ROWS))
        for row in range(*chain)
    ],
    seqlen_q=167,
    seqlen_k=100,
)
# Staircases, of 1 to 40 steps, two of which end where 32 slices do.
STEPS = [1, 31, 40, 3, 2, 30, 1]
MASKS["stairs"] = AttnSlices.from_slices(
    [
        AttnSlice(
            (5 * (sum(STEPS[:i]) + step), 5 * (sum(STEPS[:i]) + step + 1)),
            (i, i + 3 * step + 2),
            MaskType.FULL,
        )
        for i, steps in enumerate(STEPS)
        for step in range(steps)
    ],
    seqlen_q=5 * sum(STEPS),
    seqlen_k=200,
)
MASKS |= {
    f"block_causal_document-{lengths}": library.block_causal_document(
        LENGTHS[lengths], block=50
    ).slices
    for lengths in LENGTHS
}
MASKS |= {
    f"block_diffusion-{lengths}": block_diffusion("", LENGTHS[lengths], 12).slices()
    for lengths in LENGTHS
}
# Chains of steps that cross, of which one more than a tile has lanes for are stairs.
MASKS["diagonal_blocks"] = AttnSlices.from_slices(
    [
        AttnSlice((8 * i + j, 8 * i + j + 1), (60 * lane + j, 60 * lane + j + 40), MaskType.FULL)
        for i in range(40)
        for j in range(8)
        for lane in range(6)
    ],
    seqlen_q=320,
    seqlen_k=400,
)
# Far more room than slices, also between them.
GAPPED = [MASKS["random1"].q_ranges, MASKS["random1"].k_ranges, MASKS["random1"].mask_types]
GAPPED = [torch.cat([x[:3], x.new_zeros(7, *x.shape[1:]), x[3:]]) for x in GAPPED]
MASKS["room"] = AttnSlices(
    *(torch.cat([x, x.new_zeros(4000, *x.shape[1:])]) for x in GAPPED), seqlen_q=257, seqlen_k=391
)
# Heads with masks of their own: rows of one, of which those of a group see the same keys. With the room of a graph.
MASKS |= {
    f"heads-{name}": padded_slices_from_intervals(
        row_intervals(text, batch=2, seqlen_q=300, seqlen_k=260, heads=Heads(8, 2)), 2000
    )[0]
    for name, text in {
        "window": "(q >= kv) & (q - kv <= h * 30)",
        "documents": "(q // (20 + h * 9) == kv // (20 + h * 9)) | (h == 7)",
        "prefix": "(q >= kv) | (kv < 40 * h)",
    }.items()
}
MASKS["nothing"] = AttnSlices.from_slices([], 100, 0)


def bits_of(mask_mod, batch, seqlen_q, seqlen_k, heads=(1, 1)):
    sizes = MaskSizes(batch, seqlen_q, seqlen_k, Heads(*heads))
    return slices_with_bits(mask_mod, sizes, None, torch.device("cpu"))


def beside_intervals(slices, bits):
    """Slices of intervals among slices with bits of other rows, in any order."""
    lists = [
        torch.cat([x, y + (shift if x.dim() == 2 else 0)])
        for x, y, shift in zip(
            slices.lists,
            bits.lists,
            (slices.seqlen_q, slices.seqlen_k, 0),
            strict=True,
        )
    ]
    order = torch.randperm(len(lists[2]), generator=torch.Generator().manual_seed(2))
    totals = (slices.seqlen_q + bits.seqlen_q, slices.seqlen_k + bits.seqlen_k)
    return AttnSlices.unchecked(*(x[order] for x in lists), *totals, bits.bits)


IDS = torch.randint(0, 4, (700,), generator=torch.Generator().manual_seed(3))
MASKS |= {
    "bits-dilated": bits_of(lambda b, h, q, kv: (q >= kv) & ((q - kv) % 3 == 0), 1, 700, 700),
    "bits-entries": bits_of(lambda b, h, q, kv: (q + b - kv).abs() % 50 < 7, 3, 300, 200),
    "bits-heads": bits_of(lambda b, h, q, kv: (q >= kv) & (q - kv < 90 * h), 1, 384, 384, (4, 2)),
    "bits-ids": bits_of(lambda b, h, q, kv: IDS[q] == IDS[kv], 1, 700, 700),
    "bits-none": bits_of(lambda b, h, q, kv: q < 0, 1, 200, 200),
}
MASKS |= {
    f"bits-beside-{name}": beside_intervals(MASKS[name], MASKS["bits-dilated"])
    for name in ("document_causal-different", "stairs", "random1", "block_diffusion-different")
}


def assert_same_plan(actual, expected):
    """Equal, but for the runs behind the last one of any tile, and edges where none look."""
    for tiles in (0, 3):
        torch.testing.assert_close(actual[tiles].cpu(), expected[tiles].cpu(), rtol=0, atol=0)
        num_runs = int(expected[tiles][:, 3].max()) if expected[tiles].numel() else 0
        actual_runs, expected_runs = actual[tiles + 1].cpu(), expected[tiles + 1].cpu()
        assert actual_runs.shape == expected_runs.shape
        torch.testing.assert_close(actual_runs[:num_runs], expected_runs[:num_runs], rtol=0, atol=0)
        actual_edges, expected_edges = actual[tiles + 2].cpu(), expected[tiles + 2].cpu()
        assert actual_edges.shape == expected_edges.shape
        is_seen = (expected_edges[..., 0] < expected_edges[..., 1])[..., None]
        torch.testing.assert_close(actual_edges * is_seen, expected_edges, rtol=0, atol=0)


def walks_of(plan):
    """The tiles, runs and edges of both walks."""
    return [*plan.q_walk, *plan.k_walk]


@pytest.fixture(scope="module")
def run_on_host(tmp_path_factory):
    """The kernels without bits and with them, by variant."""
    body = "ffa::Planner(*params, 0).run(); ffa::Planner(*params, 1).run();"
    return {
        variant: compile_for_one_thread(tmp_path_factory, variant, "TilePlanParams", body)
        for variant in (planner_variant(), planner_variant(has_bits=True))
    }


@pytest.fixture
def on_host(run_on_host, monkeypatch):
    """The planner's kernel runs on this CPU."""

    def launch(variant, grid, block, params, stream, options):
        run_on_host[variant]((ctypes.c_char * len(params)).from_buffer_copy(params))

    idle_driver.fake_hopper(
        monkeypatch,
        num_sms=132,
        load_function=lambda variant, _: variant,
        launch=launch,
        encode=None,
    )
    yield
    idle_driver.clear_caches()


@pytest.mark.parametrize("sizes", [SMALL, HOPPER], ids=["small", "hopper"])
@pytest.mark.parametrize("mask", MASKS)
def test_the_source_on_the_host(mask, sizes, on_host):
    plan = walks_of(plan_on_device(MASKS[mask], sizes))
    raise_pending()
    assert_same_plan(plan, build_tile_plan(MASKS[mask], **sizes._asdict(), exact=False))


def test_more_runs_than_there_is_room_for(on_host, monkeypatch):
    """The host learns of it by a flag, and no tile has a run."""
    monkeypatch.setattr(planner, "padded_sizes", partial(padded_sizes, max_overlap=1))
    columns = [(i, i + 1) for i in range(40)]
    slices = AttnSlices.from_lists([(0, 400)] * 40, columns, [0] * 40)
    q_tiles = plan_on_device(slices, SMALL).q_walk.tiles
    with pytest.raises(MaskDataError, match="room for 1 slices across the average border"):
        raise_pending()
    assert torch.equal(q_tiles[:, 2], q_tiles[:, 3])


def test_a_plan_is_in_one_piece_of_memory(on_host):
    slices = MASKS["stairs"]
    plan = plan_on_device(slices, SMALL)
    memory, _ = pack(plan)
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    for x in (*plan.q_walk, plan.splits, *plan.k_walk):
        assert not x.numel() or begin <= x.data_ptr() < end


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [SMALL, HOPPER], ids=["small", "hopper"])
@pytest.mark.parametrize("mask", MASKS)
def test_on_the_gpu(mask, sizes):
    plan = walks_of(plan_on_device(MASKS[mask].to("cuda"), sizes))
    synchronize_checks()
    assert_same_plan(plan, build_tile_plan(MASKS[mask], **sizes._asdict(), exact=False))


@pytest.mark.gpu
def test_a_million_tokens():
    for lengths in ([1 << 20], torch.randint(1, 500, (4000,)).tolist()):
        slices = library.document_causal(lengths).slices
        plan = walks_of(plan_on_device(slices.to("cuda"), HOPPER))
        assert_same_plan(plan, build_tile_plan(slices, **HOPPER._asdict(), exact=False))
