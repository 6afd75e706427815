"""The plan of block lists by kernels gives what operations of torch give: compiled for the CPU here, as on a GPU."""

import ctypes

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile._checks import MaskDataError
from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.mapped import block_map_of, walk_shapes
from magi_compile.kernels.sm90.planner import block_map as planner
from magi_compile.masks.evaluation.block_lists import BlockLists
from magi_compile.masks.evaluation.block_table import BlockTable
from magi_compile.plan.block_map import ListShape
from tests.kernels.support import idle_driver
from tests.kernels.support.cpp import compile_library
from tests.plan.torch_walks import plan_of_lists
from tests.support.pairwise import pairwise

CPU = torch.device("cpu")
MAIN = """
#include "planner/block_map.cu"
static const auto& params_of(const char* params) { return *reinterpret_cast<const ffa::BlockMapParams*>(params); }
int memory[1 << 16];
extern "C" void lists(const char* params, int num_blocks) {
    for (blockIdx.x = num_blocks - 1; blockIdx.x >= 0; --blockIdx.x) {
        ffa::ListReader(params_of(params), reinterpret_cast<unsigned*>(memory)).run();
    }
}
extern "C" void table(const char* params, int num_blocks) {
    for (blockIdx.x = num_blocks - 1; blockIdx.x >= 0; --blockIdx.x) {
        ffa::TableReader(params_of(params)).run();
    }
}
extern "C" void cells(const char* params, int num_blocks) {
    for (blockIdx.x = num_blocks - 1; blockIdx.x >= 0; --blockIdx.x) {
        ffa::CellWriter(params_of(params), memory).run();
    }
}
extern "C" void lines(const char* params, int) { ffa::LineWriter(params_of(params)).run(); }
extern "C" void tiles(const char* params, int num_blocks) {
    for (blockIdx.x = 0; blockIdx.x < num_blocks; ++blockIdx.x) {
        bool is_last;
        ffa::TileWriter(params_of(params)).run(memory, is_last);
    }
}
"""
# batch, heads, seqlen_q, seqlen_k, rows and keys of a block.
SHAPES = {
    "one block": (1, 1, 64, 64, 64, 64),
    "small": (1, 1, 640, 640, 64, 64),
    "heads": (1, 4, 640, 640, 128, 128),
    "entries": (3, 2, 320, 208, 64, 64),
    "ragged": (1, 2, 700, 1001, 128, 128),
    "ragged, small": (1, 1, 65, 4300, 64, 64),
    "tall": (2, 1, 1024, 512, 256, 64),
    "wide": (1, 3, 512, 2048, 64, 512),
    "uneven": (1, 2, 1000, 1000, 192, 320),
    "many lists": (1, 2, 5000, 300, 64, 64),
    "many tiles": (1, 1, 140000, 256, 128, 128),
}


def listed_of(shape, seed=0, density=0.3):
    """Which blocks are listed, `[batch, heads, num_q, num_k]`: some of them, with rows and columns of none and all."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.rand(shape.batch, shape.heads, shape.num_q, shape.num_k, generator=generator)
    listed = grid < density
    listed[..., shape.num_q // 2, :] = False
    listed[..., -1, :] = True
    listed[..., :, shape.num_k // 3] &= torch.arange(shape.num_q) > shape.num_q // 2
    return listed


def lists_of(listed, seed=0, full_share=0.5):
    """Block lists of what is listed: partial and full, out of order, some twice, with nonsense behind their ends."""
    generator = torch.Generator().manual_seed(seed)
    full = listed & (torch.rand(listed.shape, generator=generator) < full_share)
    kinds = []
    for grid in (listed & ~full, full):
        order = torch.rand(grid.shape, generator=generator).masked_fill(~grid, 2).argsort(-1)
        counts = grid.sum(-1)
        twice = (counts > 0) & (counts < grid.shape[-1])
        order = order.scatter(
            -1,
            counts.clamp(max=grid.shape[-1] - 1)[..., None],
            torch.where(
                twice[..., None],
                order[..., :1],
                order.gather(-1, counts.clamp(max=grid.shape[-1] - 1)[..., None]),
            ),
        )
        counts = counts + twice
        behind = torch.arange(grid.shape[-1]) >= counts[..., None]
        nonsense = torch.randint(-(2**31), 2**31, order.shape, generator=generator)
        kinds += [counts.int(), torch.where(behind, nonsense, order).int()]
    return BlockLists(*kinds)


INTERVALS = ("causal", "any", "two")


def intervals_of(shape, kind, seed=0):
    """Those of queries, of columns of all entries, `[batch * seqlen_q, shape.intervals, 2]`: some of them empty."""
    generator = torch.Generator().manual_seed(seed)
    size = shape.batch, shape.seqlen_q, shape.intervals
    row = torch.arange(shape.seqlen_q)[None, :, None].expand(size)
    begin, end = row * 0, (row + 1).clamp(max=shape.seqlen_k)
    if kind != "causal":
        edges = torch.randint(0, shape.seqlen_k + 1, (2, *size), generator=generator)
        begin, end = edges.sort(0).values
        begin[:, ::7], end[:, ::7] = 0, 0
        begin[:, : shape.seqlen_q // 2], end[:, : shape.seqlen_q // 2] = 0, shape.seqlen_k
    first = torch.arange(shape.batch)[:, None, None] * shape.seqlen_k
    is_empty = begin >= end
    edges = torch.stack([begin + first, end + first], -1).masked_fill(is_empty[..., None], 0)
    return edges.flatten(0, 1).int().contiguous()


def problem_of(shape, head_dim=128, nheads_kv=None):
    heads = 12, nheads_kv or 12, head_dim, head_dim
    return AttnProblem("cuda", (9, 0), torch.bfloat16, *heads, 1.0, block_map=block_map_of(shape))


@pytest.fixture(scope="module")
def on_host_kernels(tmp_path_factory):
    replaced = {"common/block.cuh": "one_thread.cuh"}
    options = "-O1 -fsanitize=undefined -fno-sanitize-recover"
    return compile_library(tmp_path_factory, MAIN, options, replaced)


@pytest.fixture
def on_host(on_host_kernels, monkeypatch):
    """The kernels run on this CPU."""

    def launch(variant, grid, block, params, stream, options):
        name = variant.entry.removeprefix("ffa_block_").split("_")[-1]
        run = getattr(on_host_kernels, "lists" if name == "map" else name)
        run((ctypes.c_char * len(params)).from_buffer_copy(params), grid)

    idle_driver.fake_hopper(
        monkeypatch,
        num_sms=132,
        load_function=lambda variant, _: variant,
        launch=launch,
        encode=None,
    )
    yield
    idle_driver.clear_caches()


def assert_same(actual, expected, shapes):
    """Equal, but for what is behind words and intervals."""
    for x, y, shape in zip(
        (actual.q_walk, actual.k_walk), (expected.q_walk, expected.k_walk), shapes, strict=True
    ):
        lists = shape.lists
        num_lines = lists.heads * lists.batch * shape.num_tiles * shape.num_lines
        num_words = num_lines * shape.num_words
        torch.testing.assert_close(x.tiles, y.tiles, rtol=0, atol=0)
        torch.testing.assert_close(x.runs, y.runs, rtol=0, atol=0)
        kinds = [slice(0, num_words)]
        if lists.may_ask:
            count = 0 if shape.is_by_keys else 2 * lists.intervals * lists.batch * lists.seqlen_q
            asks = slice(num_words, num_words + num_words // shape.num_lines)
            kinds += [asks, slice(shape.first_interval, shape.first_interval + count)]
        if lists.has_table:
            ways = slice(shape.first_table, shape.first_table + lists.batch * shape.rows)
            num_lines = lists.heads * lists.batch * shape.num_blocks
            end = shape.first_line + num_lines * shape.words_of_line
            kinds += [ways, slice(shape.first_line, end)]
        for kind in kinds:
            words = (walk.edges.flatten()[kind] for walk in (x, y))
            torch.testing.assert_close(*words, rtol=0, atol=0)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", SHAPES)
def test_the_source_on_the_host(name, head_dim, on_host):
    shape = ListShape(*SHAPES[name])
    problem, lists = problem_of(shape, head_dim), lists_of(listed_of(shape))
    plan = planner.plan_of_lists(lists, shape, problem)
    assert plan.block_map == problem.block_map
    assert_same(plan, plan_of_lists(lists, shape, problem), walk_shapes(shape, problem))


@pytest.mark.parametrize("kind", INTERVALS)
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "many tiles"])
def test_the_source_on_the_host_beside_intervals(name, kind, on_host):
    shape = ListShape(*SHAPES[name], intervals=2 if kind == "two" else 1)
    intervals = intervals_of(shape, kind)
    problem, lists = problem_of(shape), lists_of(listed_of(shape), full_share=0)
    plan = planner.plan_of_lists(lists, shape, problem, intervals)
    assert_same(plan, plan_of_lists(lists, shape, problem, intervals), walk_shapes(shape, problem))
    planner.raise_pending()


# batch, heads, seqlen_q, seqlen_k, blocks of queries and of keys.
TABLES = {
    "one block": (1, 1, 64, 64, 1, 1),
    "small": (1, 1, 640, 640, 9, 7),
    "heads": (1, 4, 640, 700, 5, 20),
    "entries": (3, 2, 320, 208, 4, 6),
    "ragged": (1, 2, 700, 1001, 8, 9),
    "many": (1, 2, 5000, 300, 130, 4),
    "far": (1, 1, 100, 4300, 3, 40),
}
ORDERS = ("in order", "anywhere")


def table_of(shape, order="in order", seed=0, density=0.3):
    """Blocks that begin and end anywhere, in order, or of queries and keys that lie anywhere."""
    generator = torch.Generator().manual_seed(seed)
    sizes = shape.batch, shape.heads, shape.table_q, shape.table_k
    listed = torch.rand(sizes, generator=generator) < density
    listed[..., 0, :] = True
    blocks = [
        torch.randint(0, count, (shape.batch, length), generator=generator).int()
        for count, length in ((shape.table_q, shape.seqlen_q), (shape.table_k, shape.seqlen_k))
    ]
    if order == "in order":
        blocks = [x.sort(-1).values for x in blocks]
    return BlockTable(listed, *blocks)


@pytest.mark.parametrize(
    ("name", "head_dim", "order"), pairwise(TABLES, [64, 128, 256], ORDERS, others_are_slow=True)
)
def test_tables_on_the_host(name, head_dim, order, on_host):
    *sizes, num_q, num_k = TABLES[name]
    shape = ListShape(*sizes, 64, 64, 0, num_q, num_k)
    problem, table = problem_of(shape, head_dim), table_of(shape, order)
    plan = planner.plan_of_lists(None, shape, problem, table=table)
    assert plan.block_map == problem.block_map
    expected = plan_of_lists(None, shape, problem, table=table)
    assert_same(plan, expected, walk_shapes(shape, problem))


@pytest.mark.parametrize("kind", [None, *INTERVALS])
@pytest.mark.parametrize("name", ["heads", "entries", "ragged"])
def test_tables_on_the_host_beside_lists_and_intervals(name, kind, on_host):
    *sizes, num_q, num_k = TABLES[name]
    count = {None: 0, "two": 2}.get(kind, 1)
    shape = ListShape(*sizes, 64, 128, count, num_q, num_k)
    intervals = intervals_of(shape, kind) if kind else None
    problem, table = problem_of(shape), table_of(shape, density=0.7)
    lists = lists_of(listed_of(shape, density=0.6), full_share=0)
    plan = planner.plan_of_lists(lists, shape, problem, intervals, table)
    expected = plan_of_lists(lists, shape, problem, intervals, table)
    assert_same(plan, expected, walk_shapes(shape, problem))
    planner.raise_pending()


@pytest.mark.parametrize("beside", [False, True])
def test_lists_of_odd_blocks_are_tables(beside, on_host):
    shape = ListShape(2, 2, 320, 208, 48, 80, int(beside), 7, 3)
    lists = lists_of(listed_of(shape), full_share=0.5 if not beside else 0)
    intervals = intervals_of(shape, "causal") if beside else None
    problem = problem_of(shape)
    plan = planner.plan_of_lists(lists, shape, problem, intervals)
    expected = plan_of_lists(lists, shape, problem, intervals)
    assert_same(plan, expected, walk_shapes(shape, problem))


def test_a_full_block_that_a_table_hides_something_of(on_host):
    shape = ListShape(1, 1, 256, 256, 128, 128, 0, 2, 2)
    blocks = (torch.arange(256) // 128).int()[None]
    listed = torch.tensor([[True, False], [False, True]])[None, None]
    counts = torch.ones(1, 1, 2, dtype=torch.int32)
    indices = torch.tensor([[0, 1], [1, 0]]).int()[None, None]
    lists = BlockLists(counts * 0, indices, counts, indices)
    planner.plan_of_lists(lists, shape, problem_of(shape), table=BlockTable(listed, blocks, blocks))
    planner.raise_pending()
    blocks = blocks.clone()
    blocks[:, 200] = 0
    planner.plan_of_lists(lists, shape, problem_of(shape), table=BlockTable(listed, blocks, blocks))
    with pytest.raises(MaskDataError, match="it hides some in kv block 1 of q block 1 of head 0"):
        planner.raise_pending()


def visits_of(walk, shape):
    """Which blocks of columns each line of rows sees, bool `[heads, batch, lines of an entry, blocks]`."""
    lists = shape.lists
    words = walk.edges.flatten()[: shape.first_ask]
    words = words.view(lists.heads, lists.batch, shape.num_tiles * shape.num_lines, -1)
    return (words[..., None] >> torch.arange(32) & 1).flatten(-2).bool()


@pytest.mark.parametrize(
    ("name", "kind", "head_dim"),
    pairwise(
        ["heads", "entries", "ragged", "tall", "wide", "uneven"],
        ["window", *INTERVALS],
        [64, 128, 256],
        others_are_slow=True,
    ),
)
def test_both_walks_visit_the_same(name, kind, head_dim):
    """The backward, where additions have an order, reads in the lines of queries who comes before: a tile that is
    counted there and never comes would be waited for without an end."""
    shape = ListShape(*SHAPES[name], intervals=2 if kind == "two" else 1)
    intervals = intervals_of(shape, "causal" if kind == "window" else kind)
    if kind == "window":
        row = torch.arange(shape.seqlen_q).repeat(shape.batch)
        first = torch.arange(shape.batch).repeat_interleave(shape.seqlen_q) * shape.seqlen_k
        begin, end = ((first + row + x).clamp(max=first + shape.seqlen_k) for x in (-64, 1))
        intervals = torch.stack([begin.maximum(first), end], -1)[:, None].int()
    problem, lists = problem_of(shape, head_dim), lists_of(listed_of(shape, density=0.8))
    assert_same_visits(plan_of_lists(lists, shape, problem, intervals), shape, problem)


@pytest.mark.parametrize(
    ("name", "kind", "head_dim", "order"),
    pairwise(TABLES, [None, *INTERVALS], [64, 128, 256], ORDERS, others_are_slow=True),
)
def test_both_walks_of_a_table_visit_the_same(name, kind, head_dim, order):
    *sizes, num_q, num_k = TABLES[name]
    count = {None: 0, "two": 2}.get(kind, 1)
    shape = ListShape(*sizes, 64, 64, count, num_q, num_k)
    intervals = intervals_of(shape, kind) if kind else None
    problem, table = problem_of(shape, head_dim), table_of(shape, order, density=0.1)
    assert_same_visits(plan_of_lists(None, shape, problem, intervals, table), shape, problem)


def assert_same_visits(plan, shape, problem):
    by_queries, by_keys = walk_shapes(shape, problem)
    of_queries, of_keys = visits_of(plan.q_walk, by_queries), visits_of(plan.k_walk, by_keys)
    seen = of_keys.unflatten(2, (by_keys.num_tiles, by_keys.num_lines)).any(3)
    told = of_queries.unflatten(3, (-1, by_keys.tile_rows // by_queries.block_cols)).any(4)
    block = torch.arange(-(-shape.seqlen_q // by_keys.block_cols))
    line = block * by_keys.block_cols * by_queries.num_lines // by_queries.tile_rows
    assert torch.equal(told[:, :, line, : by_keys.num_tiles], seen[..., block].mT)


def test_full_blocks_that_hide_something(on_host):
    """They must be seen by each query as a whole; by which of its intervals may differ."""
    shape = ListShape(*SHAPES["ragged"], intervals=2)
    intervals = intervals_of(shape, "two")
    rows = intervals.view(shape.seqlen_q, 2, 2)
    rows[:, 0] = torch.tensor([128, 256])
    rows[:, 1] = torch.tensor([0, 0])
    rows[1::2] = rows[1::2].flip(1)
    counts = torch.ones(1, 1, shape.num_q, dtype=torch.int32)
    indices = torch.ones(1, 1, shape.num_q, shape.num_k, dtype=torch.int32)
    lists = BlockLists(counts * 0, indices, counts, indices)
    planner.plan_of_lists(lists, shape, problem_of(shape), intervals)
    planner.raise_pending()
    rows[200, :] = torch.tensor([[128, 255], [0, 0]])
    planner.plan_of_lists(lists, shape, problem_of(shape), intervals)
    words = "hides no key, but it hides some in kv block 1 of q block 1 of head . of batch entry 0"
    with pytest.raises(MaskDataError, match=words):
        planner.raise_pending()
