"""The backward kernels, as they are, on a CPU: instructions of Hopper GPUs stand in `ptx_on_a_cpu.cuh`, and the host's
code launches them there. Slow, so masks are small; what depends on registers, only a GPU can tell."""

import ctypes
import struct
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile.kernels.base import Grads, Saved
from magi_compile.kernels.heuristics import (
    BackwardPasses,
    backward_config,
    hopper_head_dim,
    plan_tiles,
)
from magi_compile.kernels.overlap import KeyTensors, SavedQueries
from magi_compile.kernels.reference import exact_forward
from magi_compile.kernels.sm90.backward import launch as module
from magi_compile.kernels.sm90.runtime.driver import SHARED_BYTES
from magi_compile.kernels.sm90.runtime.structs import TENSOR_MAP_BYTES
from magi_compile.masks.slices import MaskType
from magi_compile.plan.tiles import build_tile_plan
from tests.kernels.support.bits import BIT_CASES
from tests.kernels.support.dq_additions import additions_of_tiles
from tests.kernels.support.on_a_cpu import compile_once, launching
from tests.support.cases import (
    Case,
    HeadShape,
    block_diffusion,
    random_disjoint,
    sliding_window,
    varlen,
    windows,
)
from tests.support.numerics import assert_attention_close
from tests.support.pairwise import pairwise

NUM_SMS = 4
BIT_CASE = {case.name: case for case in BIT_CASES}
DQ_ITEMS, AGENDA = (7 * TENSOR_MAP_BYTES + at for at in (16, 128))  # in BackwardParams
LATE, AT_RANDOM = 0, 7  # when copies are done, and in which turns threads get on
DOCUMENTS = varlen("documents", [110, 1, 90, 36], MaskType.CAUSAL)
NEIGHBOURS = varlen("neighbours", [150, 200], MaskType.CAUSAL)  # each has a short tile at its end
# The first 20 keys, and with them their tile, are seen by all; queries 100 to 129 see nothing else.
SINK = Case(
    "sink", 400, 300, [(0, 400, 0, 20, MaskType.FULL), (130, 160, 140, 180, MaskType.CAUSAL)]
)
# Four tiles of keys that all queries see, and one that half of them do.
PREFIX = Case(
    "prefix", 256, 640, [(0, 256, 0, 512, MaskType.FULL), (128, 256, 512, 640, MaskType.FULL)]
)
WINDOW = sliding_window(290, 250)  # three tiles add to some rows, in an order that matters then
# Six tiles of one head that all queries see: the last two, of a second wave, walk the other way.
TWO_WAYS = Case("two_ways", 400, 768, [(0, 400, 0, 768, MaskType.FULL)])
# Rows in front, between and behind see nothing, and keys are seen by nobody.
HOLES = Case(
    "holes", 150, 290, [(17, 60, 5, 40, MaskType.FULL), (77, 131, 30, 84, MaskType.INV_CAUSAL)]
)


class Launches:
    """Launches happen on this CPU, with a timing; what the tiles were divided into, and what became of dq."""

    def __init__(self):
        self.timing = LATE
        self.num_at_once = NUM_SMS  # thread blocks of the main kernel
        self.entries = None
        self.dq_sums = b""  # rounding hides the order of additions
        self.done = ()  # additions to each 16 rows of each head
        self.wanted = ()  # the same of any head, where somebody asks
        self.more_head_by_head = 0  # tiles that walk so
        self.left = {}  # how many of these are for the last kernel, by timing
        self.are_all_drawn = {}  # unless many warps have gone before, by timing

    def launch(
        self,
        function,
        grid,
        block,
        params,
        stream,
        options,
    ):
        is_main = options.shared_bytes == SHARED_BYTES
        if is_main:
            self.entries = entries(params)
        function(
            grid, block, params, self.num_at_once if is_main else 1, self.timing, options.cluster
        )
        if is_main:
            self.look_at_dq(params)

    def look_at_dq(self, params):
        """What the main kernel leaves behind, as it lies in memory."""
        at = struct.unpack_from("<Qi4xQ3if4Q", params, DQ_ITEMS)
        at_sums, row_groups, _, _, num_heads, _, _, at_done, at_wanted, _, at_progress = at
        count = row_groups * num_heads
        self.dq_sums = ctypes.string_at(at_sums, 4 * 64 * 16 * count)
        self.done = integers(at_done, count)
        self.wanted = integers(at_wanted, row_groups) if at_wanted else ()
        drawn, end, self.more_head_by_head, *_, left = integers(at_progress, 7)
        self.left[self.timing] = left + count - min(drawn, end, count)
        self.are_all_drawn[self.timing] = end >= count


def integers(address: int, count: int) -> tuple[int, ...]:
    return struct.unpack(f"<{count}i", ctypes.string_at(address, 4 * count))


def entries(params: bytes) -> list[tuple[int, int, int]]:
    """(tile, part, number of parts) of the agenda, where the main kernel reads it."""
    at_entries, at_count = struct.unpack_from("<2Q", params, AGENDA)
    count = ctypes.c_int.from_address(at_count).value
    read = struct.Struct("<i6h").iter_unpack(ctypes.string_at(at_entries, 16 * count))
    return [(tile, part, num_parts) for tile, _, part, num_parts, *_ in read]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return compile_once(tmp_path_factory)


@pytest.fixture
def launches(compiled, monkeypatch):
    found = Launches()
    with launching(monkeypatch, compiled, NUM_SMS, found.launch):
        yield found


def check(launches, case, with_dlse=False, deterministic=False):
    """Compares the gradients with the oracle's, and a second run with the first; the parts of tiles."""
    slices = case.slices()
    problem = replace(case.problem(torch.bfloat16), device_type="cuda", device_arch=(9, 0))
    inputs = case.inputs(torch.bfloat16)
    q, k, v, dout, dlse = inputs
    forward = exact_forward(q, k, v, slices, problem.softmax_scale, problem.softcap)
    out, lse = forward.out.bfloat16(), forward.lse.float()
    plan = build_tile_plan(slices, **plan_tiles(problem)._asdict(), exact=False)
    runs = []
    for launches.timing in (LATE, AT_RANDOM):
        grads = module.backward(
            Grads(dout, dlse if with_dlse else None),
            *(Saved(q, k, v, out, lse), plan.k_walk, problem),
            bits=slices.bits,
            deterministic=deterministic,
        )
        assert_attention_close((None, None, *grads), inputs, slices, problem, with_dlse)
        row_groups = len(launches.done) // problem.nheads_q
        wanted = tuple(additions_of_tiles(plan, row_groups).sum(0).tolist())
        is_rounded = hopper_head_dim(problem) > 64 and not deterministic
        assert launches.wanted == (wanted if is_rounded else ())
        if is_rounded or deterministic:
            per_tile = backward_config(problem).num_ctas
            assert launches.done == tuple(per_tile * x for x in wanted) * problem.nheads_q
        runs.append((grads, launches.dq_sums))
    (first, first_sums), (second, second_sums) = runs
    assert torch.equal(first.dk, second.dk)
    assert torch.equal(first.dv, second.dv)
    if deterministic:
        assert first_sums == second_sums
    return launches.entries


@pytest.mark.parametrize(
    ("heads_q", "head_dim"),
    [
        *[(1, 64), (1, 192), (4, 128), (4, 256)],
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in ((1, 128), (1, 256), (4, 64), (4, 192))
        ),
    ],
)
def test_documents(heads_q, head_dim, launches):
    check(launches, replace(DOCUMENTS, heads=HeadShape(heads_q, 1, head_dim, head_dim)))


@pytest.mark.parametrize(
    ("case", "heads", "deterministic"),
    [
        *[(DOCUMENTS, HeadShape(4, 1, 80, 80), False), (PREFIX, HeadShape(1, 1, 72, 128), True)],
        *[(SINK, HeadShape(2, 1, 192, 128), False), (HOLES, HeadShape(2, 1, 48, 56), False)],
        (BIT_CASE["ragged"], HeadShape(2, 1, 16, 72), False),
    ],
    ids=lambda x: getattr(x, "id", None),
)
def test_head_dimensions_in_between(case, heads, deterministic, launches):
    """TMA reads zeros behind the last column, and what leaves has as many columns as there are."""
    check(launches, replace(case, heads=heads), with_dlse=True, deterministic=deterministic)


def test_dq_is_rounded_while_the_main_kernel_runs_or_behind_it(launches):
    """At head_dim 96 and 128 all of it, or what is complete before a thread block stops waiting; else nothing."""
    check(launches, replace(DOCUMENTS, heads=HeadShape(4, 1, 128, 128)))
    count = len(launches.done)
    assert launches.left[LATE] == 0
    assert launches.are_all_drawn == {LATE: True, AT_RANDOM: True}
    launches.num_at_once = 1
    check(launches, replace(DOCUMENTS, heads=HeadShape(4, 1, 128, 128)))
    assert 0 < launches.left[LATE] < count
    assert 0 < launches.left[AT_RANDOM] < count
    check(launches, replace(DOCUMENTS, heads=HeadShape(8, 1, 128, 128)))
    # When half of all warps have gone, the others stop too.
    assert launches.are_all_drawn == {LATE: False, AT_RANDOM: False}
    check(launches, replace(DOCUMENTS, heads=HeadShape(4, 1, 64, 64)))
    assert launches.left == {LATE: count, AT_RANDOM: count}


@pytest.mark.parametrize(
    ("head_dim", "num_parts"), [(128, 4), pytest.param(192, 2, marks=pytest.mark.slow), (256, 2)]
)
def test_parts_of_a_tile(head_dim, num_parts, launches):
    parts = check(launches, replace(SINK, heads=HeadShape(8, 1, head_dim, head_dim)))
    assert [x for x in parts if x[2] > 1] == [(0, i, num_parts) for i in range(num_parts)]


HANDED_ON = [
    *[(SINK, HeadShape(4, 2, 64, 64), 1), (HOLES, HeadShape(6, 2, 96, 96), 1)],
    *[(SINK, HeadShape(4, 1, 128, 128), 2), (NEIGHBOURS, HeadShape(2, 1, 192, 192), 1)],
    *[
        (SINK, HeadShape(2, 1, 256, 256), 1),
        (replace(SINK, softcap=5.0), HeadShape(4, 1, 64, 64), 2),
    ],
]


@pytest.mark.parametrize(
    ("case", "heads", "heads_of_pass", "num_at_once"),
    [
        pytest.param(*row, num_at_once, marks=pytest.mark.slow if (i + j) % 2 else ())
        for i, row in enumerate(HANDED_ON)
        for j, num_at_once in enumerate((1, NUM_SMS))
    ],
    ids=lambda x: getattr(x, "name", getattr(x, "id", None)),
)
def test_gradients_handed_on(case, heads, heads_of_pass, num_at_once, launches, monkeypatch):
    """From some query heads to others, also where some thread blocks do not run before others end."""
    passes = heads.nheads_q // heads.nheads_kv // heads_of_pass
    most = BackwardPasses(heads_of_pass, cached_blocks=4 * (heads_of_pass - 1))
    monkeypatch.setattr(module, "backward_passes", lambda *_: most)
    launches.num_at_once = num_at_once
    entries = check(launches, replace(case, heads=heads), with_dlse=True)
    num_tiles = len({tile for tile, *_ in entries})
    assert {num_parts for *_, num_parts in entries} == {passes}
    assert len(entries) % (num_tiles * passes) == 0
    parts = [part for _, part, _ in entries[::num_tiles]]
    assert parts == [*reversed(range(passes))] * (len(parts) // passes)


@pytest.mark.parametrize(
    ("case", "head_dim"),
    [
        *((WINDOW, head_dim) for head_dim in (64, 128, 192, 256)),
        *[(PREFIX, 64), (TWO_WAYS, 64), (TWO_WAYS, 192)],
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                *((PREFIX, head_dim) for head_dim in (128, 192, 256)),
                *[(TWO_WAYS, 128), (TWO_WAYS, 256)],
            )
        ),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_tiles_that_add_to_the_same_rows(case, head_dim, launches):
    check(launches, replace(case, heads=HeadShape(2, 2, head_dim, head_dim)))


@pytest.mark.parametrize("head_dim", [96, 128, pytest.param(192, marks=pytest.mark.slow), 256])
def test_a_window_head_by_head(head_dim, launches):
    """Tiles tell what they have added after each of three heads."""
    check(launches, replace(sliding_window(290, 60), heads=HeadShape(3, 1, head_dim, head_dim)))
    assert launches.more_head_by_head > 0
    check(launches, replace(DOCUMENTS, heads=HeadShape(3, 1, head_dim, head_dim)))
    assert launches.more_head_by_head < 0


@pytest.mark.parametrize(
    ("window", "head_dim", "deterministic"),
    pairwise([(70, 0), (70, 30), (0, 40)], (64, 128, 256), (False, True), others_are_slow=True),
    ids=str,
)
def test_a_window_of_several_slices(window, head_dim, deterministic, launches):
    """One band, which both begins and ends with a key in the middle of a tile."""
    case = windows("windows", [30, 210, 90], *window)
    check(
        launches,
        replace(case, heads=HeadShape(2, 1, head_dim, head_dim)),
        deterministic=deterministic,
    )


STAIRS = [
    varlen("short", [1, 30, 2, 50, 9, 40, 100, 3, 20], MaskType.CAUSAL),
    block_diffusion("block_diffusion", [70, 7, 110], 12),
]


@pytest.mark.parametrize(
    ("case", "head_dim", "deterministic"),
    pairwise(STAIRS, (64, 128, 192, 256), (False, True), others_are_slow=True),
    ids=lambda x: getattr(x, "name", x),
)
def test_stairs(case, head_dim, deterministic, launches):
    """Keys look up which queries see them."""
    check(
        launches,
        replace(case, heads=HeadShape(2, 1, head_dim, head_dim)),
        deterministic=deterministic,
    )


@pytest.mark.parametrize(
    ("case", "head_dim"),
    [
        *((case, 128) for case in BIT_CASES),
        *[(BIT_CASE["ragged"], 192), (BIT_CASE["behind_stairs"], 64)],
        (BIT_CASE["behind_stairs"], 256),
        *(
            pytest.param(BIT_CASE[name], n, marks=pytest.mark.slow)
            for name, n in (("ragged", 64), ("ragged", 256), ("behind_stairs", 192))
        ),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_bits(case, head_dim, launches):
    """Blocks of bits, alone and beside others in one tile."""
    check(launches, replace(case, heads=HeadShape(2, 1, head_dim, head_dim)), with_dlse=True)


@pytest.mark.parametrize("head_dim", [128, 192])
def test_bits_where_dq_has_an_order(head_dim, launches):
    case = replace(BIT_CASE["by_head"], heads=HeadShape(1, 1, head_dim, head_dim))
    check(launches, case, deterministic=True)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_bits_of_capped_scores(head_dim, launches):
    case = replace(BIT_CASE["by_head"], heads=HeadShape(1, 1, head_dim, head_dim), softcap=5.0)
    check(launches, case)


@pytest.mark.parametrize("head_dim", [64, 192, 256])
def test_a_window_where_dq_has_an_order(head_dim, launches):
    check(launches, replace(WINDOW, heads=HeadShape(1, 1, head_dim, head_dim)), deterministic=True)


@pytest.mark.parametrize(
    ("num_at_once", "head_dim"),
    [
        *[(1, 128), (2, 192)],
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((2, 128), (1, 192))),
    ],
)
def test_additions_in_order_wait_for_no_thread_block_that_does_not_run(
    num_at_once, head_dim, launches
):
    """Some start when others end: another kernel may have their SMs."""
    launches.num_at_once = num_at_once
    case = replace(PREFIX, heads=HeadShape(2, 2, head_dim, head_dim))
    check(launches, case, deterministic=True)


RANDOM = [
    *[HeadShape(2, 1, 64, 64), HeadShape(2, 2, 96, 96), HeadShape(3, 1, 128, 128)],
    *[HeadShape(1, 1, 192, 192), HeadShape(2, 1, 256, 256), HeadShape(1, 1, 256, 256)],
]


@pytest.mark.parametrize(
    ("seed", "heads", "deterministic"),
    [
        pytest.param(seed, heads, is_set, marks=() if is_set == seed % 2 else pytest.mark.slow)
        for seed, heads in enumerate(RANDOM)
        for is_set in (False, True)
    ],
    ids=lambda x: {False: "any order", True: "order"}.get(x) if isinstance(x, bool) else None,
)
def test_random_masks(seed, heads, deterministic, launches):
    case = replace(random_disjoint(290, 200, seed, num_cuts=5), heads=heads)
    check(launches, case, with_dlse=seed % 2 == 0, deterministic=deterministic)


@pytest.mark.parametrize("head_dim", [128, 192, 256])
def test_rows_that_see_nothing_and_dlse(head_dim, launches):
    check(launches, replace(HOLES, heads=HeadShape(2, 1, head_dim, head_dim)), with_dlse=True)


@pytest.mark.parametrize("head_dim", [64, pytest.param(192, marks=pytest.mark.slow), 256])
def test_softcap(head_dim, launches):
    check(launches, replace(DOCUMENTS, heads=HeadShape(1, 1, head_dim, head_dim), softcap=5.0))


def test_keys_arrive_and_gradients_leave_between_launches(launches):
    case = replace(DOCUMENTS, heads=HeadShape(4, 1, 64, 64))
    slices, inputs = case.slices(), case.inputs(torch.bfloat16)
    problem = replace(case.problem(torch.bfloat16), device_type="cuda", device_arch=(9, 0))
    q, k, v, dout, _ = inputs
    forward = exact_forward(q, k, v, slices, problem.softmax_scale, problem.softcap)
    results = forward.out.bfloat16(), forward.lse.float()
    plan = build_tile_plan(slices, **plan_tiles(problem)._asdict(), exact=False)
    walk, grads_of_results = (plan.k_walk, problem), Grads(dout, None)
    expected = module.backward(grads_of_results, Saved(q, k, v, *results), *walk)
    keys = [torch.full_like(x, torch.nan) for x in (k, v)]
    grads = [torch.full_like(x, torch.nan) for x in (k, v)]
    saved = SavedQueries(q, *results)
    steps = module.BackwardPass(grads_of_results, saved, *walk, deterministic=False)
    steps.begin()
    for there, x in zip(keys, (k, v), strict=True):
        there.copy_(x)
    steps.main(KeyTensors(*keys, *grads))
    left = [x.clone() for x in grads]
    for x in (*keys, *grads):
        x.fill_(torch.nan)
    dq = steps.finish()
    for found, right in zip((dq, *left), expected, strict=True):
        assert torch.equal(found, right)
