"""The agenda of the backward kernel, written and read: the source, compiled for the threads of a CPU."""

import ctypes
import heapq
import struct
from itertools import groupby, pairwise, takewhile
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")

from magi_compile.kernels.heuristics import AGENDA_NUMBERS
from magi_compile.masks.slices import MaskType
from magi_compile.plan.tiles import RUN_FIELDS, build_tile_plan
from tests.kernels.support.cpp import compile_library
from tests.support.cases import MASKS, Case, one, varlen
from tests.support.pairwise import pairwise as pairs

BLOCK_COLS, ALIGNMENT, ARRIVALS = 64, 16, 8
LEAST_VISITS, LEAST_VISITS_IN_STEP = (
    AGENDA_NUMBERS[name] for name in ("least_visits", "least_visits_in_step")
)
SHARE_OF_FEW = AGENDA_NUMBERS["share_of_few"]
LATEST_END = 2.25  # see `end_of`: a few short walks for many thread blocks are the worst
COL_END, FIRST = (RUN_FIELDS.index(name) for name in ("col_end", "first"))
ENTRY, PARAMS = struct.Struct("<i6h"), struct.Struct("<7Q2iQ10i")
SOURCE = """
#include <algorithm>
#include "many_threads.cuh"
using std::max;
using std::min;
inline int atomicAdd(int* x, int y) { return __sync_fetch_and_add(x, y); }
#include "backward/schedule/writer.cuh"
#include "backward/schedule/queue.cuh"

struct Config {
    static constexpr bool kIsDeterministic = false, kHandsOn = true;
    static constexpr int kCtas = 1;
    struct Params {
        ffa::backward::Agenda agenda;
    };
};

using Writer = ffa::backward::AgendaWriter<64, 8>;

extern "C" void write_agenda(const Writer::Params* params, int* order_of_dq) {
    launch(1, 256, [=] {
        const ffa::backward::DqOrder order = Writer(*params).write();
        order_of_dq[0] = order.heads_of_turn, order_of_dq[1] = order.passes;
    });
}

// For each item: which thread block has drawn it, its entry, its head, and the wave in which it keeps step.
extern "C" int read_agenda(const Writer::Params* params, int (*items)[4]) {
    int count = 0;
    launch(params->num_blocks, 1, [=, &count] {
        const Config::Params lists{params->agenda};
        for (ffa::backward::Items<Config> reader(lists); reader.has_work(); reader.advance()) {
            int* const item = items[count++];
            item[0] = blockIdx.x, item[1] = &reader.entry() - params->agenda.entries;
            item[2] = reader.head_in_section();
            item[3] = reader.wave_in_step();
        }
    });
    return count;
}
"""


class Entry(NamedTuple):
    tile: int
    first_head: int
    part: int
    num_parts: int
    slot: int
    turn: int
    is_ascending: int


class Sizes(NamedTuple):
    """What the agenda is for; there are two sections of heads where nothing else is said."""

    group: int
    num_blocks: int
    nheads_kv: int = 4
    heads_per_section: int = 2
    num_slots: int = 300
    is_one_way: bool = False
    most_heads_of_pass: int = 0
    blocks_of_cache: int = 0
    least_visits_of_pass: int = 0
    passes_of_map: int = 0

    @property
    def sections(self) -> range:
        return range(self.nheads_kv // self.heads_per_section)


class Agenda(NamedTuple):
    entries: list[Entry]
    items: list[list[int]]  # thread block, entry, head in its section, wave in step or -1
    num_in_step: int
    order_of_dq: tuple[int, int]  # heads of a turn, passes over its rows


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    numbers = " ".join(f"-DFFA_{name.upper()}={value}" for name, value in AGENDA_NUMBERS.items())
    options, replaced = f"-O1 -pthread {numbers}", {"common/ptx.cuh": "queue_ptx.cuh"}
    return compile_library(tmp_path_factory, SOURCE, options, replaced)


def unwritten(num_words: int) -> torch.Tensor:
    """So many integers, and one that nobody may write."""
    return torch.full((num_words + 1,), -7, dtype=torch.int32)


def write(library, plan, sizes: Sizes) -> Agenda:
    """Written by the source, and read by all thread blocks, one after the other."""
    num_tiles, num_slots = len(plan.k_tiles), sizes.num_slots
    num_items = num_tiles * len(sizes.sections)
    most_passes = max(sizes.group, sizes.passes_of_map)
    entries = unwritten(max(num_items + num_slots, num_items * most_passes) * ENTRY.size // 4)
    num_waves = num_tiles * sizes.nheads_kv // sizes.num_blocks
    counts = unwritten(3 + num_waves)  # entries; then the counters: two, and steps of each wave
    arrivals = unwritten(num_slots * sizes.heads_per_section * ARRIVALS)
    workspace = unwritten(3 * num_tiles + 1 + (num_items if sizes.group > 1 else 0))
    at = [x.data_ptr() for x in (plan.k_tiles, plan.k_runs, entries, counts, arrivals, workspace)]
    params = PARAMS.pack(
        *(at[0], at[1], at[2], at[3], at[3] + 4, at[4], 0),
        *(sizes.nheads_kv, sizes.heads_per_section, at[5]),
        *(num_tiles, num_slots, sizes.group, sizes.num_blocks, sizes.is_one_way),
        *(sizes.most_heads_of_pass, sizes.blocks_of_cache, sizes.least_visits_of_pass),
        *(sizes.passes_of_map, 0),
    )
    order_of_dq = (ctypes.c_int * 2)()
    library.write_agenda(params, order_of_dq)
    assert [int(x[-1]) for x in (entries, counts, arrivals, workspace)] == [-7] * 4
    assert not arrivals[:-1].any()
    num_entries, ticket, num_in_step = counts[:3].tolist()
    assert ticket == 0
    assert num_in_step % sizes.num_blocks == 0
    waves_in_step = num_in_step // sizes.num_blocks
    assert (counts[3 : 3 + waves_in_step] == 0).all()
    assert (counts[3 + waves_in_step :] == -7).all()
    assert (entries[num_entries * ENTRY.size // 4 :] == -7).all()
    items = torch.empty(num_entries * sizes.heads_per_section + 1, 4, dtype=torch.int32)
    count = library.read_agenda(params, ctypes.c_void_p(items.data_ptr()))
    packed = ctypes.string_at(at[2], num_entries * ENTRY.size)
    read = [Entry(*x) for x in ENTRY.iter_unpack(packed)]
    return Agenda(read, items[:count].tolist(), num_in_step, tuple(order_of_dq))


def plan_of(case: Case, exact: bool = False):
    return build_tile_plan(
        case.slices(),
        q_tile_rows=128,
        q_block_cols=128,
        k_tile_rows=128,
        k_block_cols=BLOCK_COLS,
        exact=exact,
    )


def tiles_with_rows(plan) -> list[list[list[int]]]:
    """The runs of each."""
    runs = plan.k_runs.tolist()
    return [runs[begin:end] for *rows, begin, end in plan.k_tiles.tolist() if rows[0] < rows[1]]


def blocks_of_tiles(plan) -> list[int]:
    return [
        sum(-(-(run[COL_END] - run[FIRST] // ALIGNMENT * ALIGNMENT) // BLOCK_COLS) for run in runs)
        for runs in tiles_with_rows(plan)
    ]


def lengths_of_documents(plan) -> list[int]:
    """How many tiles in a row end with the same query."""
    last_queries = (runs[-1][COL_END] if runs else -1 for runs in tiles_with_rows(plan))
    return [len(list(tiles)) for _, tiles in groupby(last_queries)]


def is_few(num_tiles: int, sizes: Sizes) -> bool:
    return num_tiles * sizes.nheads_kv < 3 * sizes.num_blocks


def expected_places(plan, sizes: Sizes) -> list[tuple[int, int]]:
    """The section and the tile."""
    tiles = range(len(tiles_with_rows(plan)))
    return [(section, tile) for section in sizes.sections for tile in tiles]


def divisors(sizes: Sizes) -> list[int]:
    return [n for n in range(1, sizes.group + 1) if sizes.group % n == 0]


class Place(NamedTuple):
    """A tile for the heads of a section, as the agenda has it."""

    section: int
    tile: int
    num_parts: int
    blocks: int  # of the walk of one head

    def visits(self, sizes: Sizes) -> int:
        """Blocks that a thread block walks for a part, all query heads of it."""
        return self.blocks * sizes.group // self.num_parts


def places_of(entries: list[Entry], blocks: list[int], sizes: Sizes) -> list[Place]:
    """The places in order. The parts of each lie behind one another, and their number divides the heads of a group."""
    places, at = [], 0
    while at < len(entries):
        first = entries[at]
        parts = entries[at : at + first.num_parts]
        at += len(parts)
        same = {(x.tile, x.first_head, x.num_parts, x.is_ascending) for x in parts}
        assert len(same) == 1
        assert [x.part for x in parts] == list(range(first.num_parts))
        assert first.num_parts in divisors(sizes)
        section = first.first_head // sizes.heads_per_section
        places.append(Place(section, first.tile, first.num_parts, blocks[first.tile]))
    return places


def check_parts(places: list[Place], sizes: Sizes) -> None:
    """Of many tiles: as few parts as it takes for none to be longer than a thread block's share of all that is left."""
    left, free = sum(x.blocks for x in places), sizes.num_slots
    for place in places:
        share = left * sizes.heads_per_section * sizes.group / sizes.num_blocks
        fewer = max((n for n in divisors(sizes) if n < place.num_parts), default=None)
        more = min((n for n in divisors(sizes) if n > place.num_parts), default=None)
        if fewer is not None:
            assert place._replace(num_parts=fewer).visits(sizes) > share - 1
            assert place.visits(sizes) >= LEAST_VISITS
        elif more is not None and place.visits(sizes) > share:
            # Too short to be cut, or without room: then nobody behind has any.
            enough = min(
                (n for n in divisors(sizes) if place._replace(num_parts=n).visits(sizes) <= share),
                default=sizes.group,
            )
            is_short = place._replace(num_parts=more).visits(sizes) < LEAST_VISITS
            if not is_short and enough > free:
                free = 0
            assert is_short or enough > free
        if place.num_parts > 1:
            assert place.num_parts <= free
            free -= place.num_parts
        left -= place.blocks


def check_parts_of_few(places: list[Place], sizes: Sizes) -> None:
    """None is longer than one and a half shares of a thread block,
    except where there is no room for parts or one has a head."""
    share = sum(x.blocks for x in places) * sizes.nheads_kv * sizes.group / sizes.num_blocks
    share /= len(sizes.sections)
    free = sizes.num_slots
    for place in places:
        if place.num_parts > 1:
            assert place.num_parts <= free
            free -= place.num_parts
        elif place.visits(sizes) > SHARE_OF_FEW * share and sizes.group > 1:
            free = 0  # nor is there room for anybody behind
        if free > 0 and place.num_parts < sizes.group:
            assert place.visits(sizes) <= SHARE_OF_FEW * share
        fewer = max((n for n in divisors(sizes) if n < place.num_parts), default=None)
        if fewer is not None:
            assert place._replace(num_parts=fewer).visits(sizes) > SHARE_OF_FEW * share - 1


def end_of(places: list[Place], sizes: Sizes) -> float:
    """When the last thread block ends, if each draws the next item when it is done, in shares of all work; nobody can
    end before 1, or before the shortest part that the longest walk can have."""
    items = [x.visits(sizes) for x in places for _ in range(x.num_parts * sizes.heads_per_section)]
    ends = [0] * sizes.num_blocks
    for item in items:
        heapq.heapreplace(ends, ends[0] + item)
    least = max(sum(items) / sizes.num_blocks, max(x.blocks for x in places))
    return max(ends) / least if least else 1.0


def expected_directions(plan, sizes: Sizes) -> list[bool]:
    """For each place: every other wave of its document is ascending, where one document is all there is those of all
    sections in a row."""
    heads = sizes.heads_per_section
    documents, of_section = lengths_of_documents(plan), 0
    if len(documents) == 1:
        of_section = int(documents[0] * heads / sizes.num_blocks + 0.5)
    waves = [place * heads // sizes.num_blocks for length in documents for place in range(length)]
    return [
        not sizes.is_one_way and (section * of_section + waves[tile]) % 2 == 1
        for section, tile in expected_places(plan, sizes)
    ]


def expected_in_step(plan, sizes: Sizes, entries: list[Entry]) -> int:
    """Whole waves of items in front of the first tile in parts, under a full mask with long walks."""
    blocks = blocks_of_tiles(plan)
    if len(set(blocks)) != 1 or blocks[0] * sizes.group < LEAST_VISITS_IN_STEP:
        return 0
    whole = len(list(takewhile(lambda entry: entry.num_parts == 1, entries)))
    return whole * sizes.heads_per_section // sizes.num_blocks * sizes.num_blocks


def check(library, case: Case, sizes: Sizes) -> list[Entry]:
    plan = plan_of(case)
    agenda = write(library, plan, sizes)
    entries = agenda.entries
    places = places_of(entries, blocks_of_tiles(plan), sizes)
    assert [(x.section, x.tile) for x in places] == expected_places(plan, sizes)
    if is_few(len(tiles_with_rows(plan)), sizes):
        check_parts_of_few(places, sizes)
    else:
        check_parts(places, sizes)
    assert end_of(places, sizes) < LATEST_END
    is_ascending = {
        (x.first_head // sizes.heads_per_section, x.tile): x.is_ascending for x in entries
    }
    directions = zip(expected_places(plan, sizes), expected_directions(plan, sizes), strict=True)
    assert {place: bool(x) for place, x in is_ascending.items()} == dict(directions)
    assert {entry.turn for entry in entries} <= {-1}
    assert agenda.order_of_dq == (sizes.heads_per_section * sizes.group, 1)
    # All parts of a tile know where its slots begin, and nobody else has those.
    slots = [(x.slot, x.num_parts) for x in entries if x.num_parts > 1 and x.part == 0]
    assert all(begin + n <= end for (begin, n), (end, _) in pairwise(sorted(slots)))
    assert all(begin >= 0 and begin + n <= sizes.num_slots for begin, n in slots)
    assert [x.slot for x in entries if x.num_parts > 1] == [x for x, n in slots for _ in range(n)]
    # Every head of a section has every entry once; the first thread block to draw, here, draws all but the first items.
    drawn = [(entry, head) for _, entry, head, _ in sorted(agenda.items, key=lambda x: x[1:])]
    heads = range(sizes.heads_per_section)
    assert drawn == [(entry, head) for entry in range(len(entries)) for head in heads]
    first_of_others = [item[1:3] for item in agenda.items if item[0] > 0]
    assert first_of_others == [list(x) for x in drawn[1 : sizes.num_blocks]]
    assert agenda.num_in_step == expected_in_step(plan, sizes, entries)
    for _, entry, head, wave in agenda.items:
        item = entry * sizes.heads_per_section + head
        assert wave == (item // sizes.num_blocks if item < agenda.num_in_step else -1)
    return entries


CASES = [
    *MASKS,
    one(MaskType.CAUSAL, 4000, name="causal_4000"),
    varlen("one_long", [3000, *[130] * 10], MaskType.FULL),
]


@pytest.mark.parametrize(
    ("case", "num_blocks", "group"),
    pairs(CASES, [4, 132], [1, 5, 6, 8, 64], others_are_slow=True),
    ids=lambda x: getattr(x, "id", x),
)
def test_every_tile_for_every_head(case, num_blocks, group, library):
    check(library, case, Sizes(group, num_blocks))


@pytest.mark.parametrize(
    ("case", "num_blocks", "group"),
    pairs(CASES, [44, 60, 110], [6, 8], others_are_slow=True),
    ids=lambda x: getattr(x, "id", x),
)
def test_few_tiles_of_one_section(case, num_blocks, group, library):
    check(library, case, Sizes(group, num_blocks, heads_per_section=4))


@pytest.mark.parametrize(("num_blocks", "parts"), [(22, 1), (96, 1), (97, 2), (192, 2), (193, 4)])
def test_parts_of_few_equal_tiles(num_blocks, parts, library):
    """16 tiles of 32 blocks for 4 heads: as few parts as it takes for none to be longer than one and a half shares."""
    entries = check(library, one(MaskType.FULL, 2048), Sizes(8, num_blocks, heads_per_section=4))
    assert {x.num_parts for x in entries} == {parts}


@pytest.mark.parametrize("num_slots", [0, 1, 7, 20])
@pytest.mark.parametrize("num_blocks", [16, 132])
def test_parts_as_long_as_there_are_slots(num_blocks, num_slots, library):
    entries = check(library, CASES[-2], Sizes(8, num_blocks, num_slots=num_slots))
    has_parts = any(entry.num_parts > 1 for entry in entries)
    assert has_parts == (num_slots > 1)


def test_the_last_tiles_are_in_parts(library):
    """Of many: those for whose number of blocks too few others are left."""
    entries = check(library, CASES[-2], Sizes(8, 16))
    assert not is_few(32, Sizes(8, 16))
    assert [x.num_parts for x in entries if x.first_head == 0] == [1] * 32
    in_parts = [x.tile for x in entries if x.num_parts > 1 and x.part == 0]
    assert in_parts == list(range(in_parts[0], in_parts[0] + len(in_parts)))
    assert in_parts[0] > 16


def test_a_tile_that_everything_sees(library):
    documents = [(at, at + 128, at, at + 128, MaskType.FULL) for at in range(128, 4096, 128)]
    case = Case("shared", 4096, 4096, [(0, 4096, 0, 128, MaskType.FULL), *documents])
    entries = check(library, case, Sizes(8, 132))
    assert [x[2:4] for x in entries[:9]] == [*((part, 8) for part in range(8)), (0, 1)]


@pytest.mark.parametrize("num_blocks", [5, 8, 12, 16, 31])
@pytest.mark.parametrize("heads_per_section", [1, 2, 4])
@pytest.mark.parametrize(
    "lengths", [[4000], [1280] * 3, [2100, 300, 900, 700]], ids=["one", "equal", "different"]
)
def test_directions(lengths, heads_per_section, num_blocks, library):
    case = varlen("documents", lengths, MaskType.CAUSAL)
    sizes = Sizes(8, num_blocks, heads_per_section=heads_per_section)
    assert len(lengths_of_documents(plan_of(case))) == len(lengths)
    entries = check(library, case, sizes)
    most_waves = -(-max(lengths) // 128) * heads_per_section / num_blocks
    assert any(x.is_ascending for x in entries) >= (most_waves > 1)
    one_way = check(library, case, sizes._replace(is_one_way=True))
    assert not any(x.is_ascending for x in one_way)


def test_sections_of_one_wave_alternate(library):
    """16 tiles of one document for 16 thread blocks: each section walks back the way of the one before it."""
    entries = check(library, one(MaskType.FULL, 2048), Sizes(1, 16, 4, 1))
    assert [x.is_ascending for x in entries] == [0] * 16 + [1] * 16 + [0] * 16 + [1] * 16


def prefix_lm() -> Case:
    """8 tiles of 64 blocks, and 24 of 48 to 2."""
    slices = [(0, 4096, 0, 1024, MaskType.FULL), (1024, 4096, 1024, 4096, MaskType.CAUSAL)]
    return Case("prefix_lm", 4096, 4096, slices)


def rank_of_causal() -> Case:
    """The second and the seventh eighth of the queries, which see the keys of others in front of both."""
    slices = [(0, 2048, 0, 4096, MaskType.CAUSAL), (2048, 4096, 0, 14336, MaskType.CAUSAL)]
    return Case("rank_of_causal", 4096, 14336, slices)


def global_window() -> Case:
    """A sixth of the keys is seen by all queries, others by those a third away."""
    slices = [(0, 4096, 0, 768, MaskType.FULL)]
    slices += [
        (max(key - 1344, 0), min(key + 1472, 4096), key, key + 128, MaskType.FULL)
        for key in range(768, 4096, 128)
    ]
    return Case("global_window", 4096, 4096, slices)


@pytest.mark.parametrize("heads_per_section", [1, 2, 4])
@pytest.mark.parametrize(
    ("group", "most_heads", "cached", "heads"),
    [
        (2, 1, 1.9, 1),
        (8, 8, 1.5, 1),
        (8, 8, 3.9, 2),
        (8, 2, 7.9, 2),
        (8, 4, 0.5, 1),
        (6, 5, 5.1, 3),
    ],
)
@pytest.mark.parametrize(
    "case", [prefix_lm(), rank_of_causal(), global_window()], ids=lambda case: case.id
)
def test_uneven_long_walks_are_handed_on(
    case, group, most_heads, cached, heads, heads_per_section, library
):
    """For each section passes for so many heads of a group as stay in the cache and divide it, over all tiles, all of
    them from the last query to the first."""
    plan = plan_of(case)
    blocks = blocks_of_tiles(plan)
    mean, num_passes = sum(blocks) // len(blocks), group // heads
    sizes = Sizes(group, 12, 4, heads_per_section, most_heads_of_pass=most_heads)
    sizes = sizes._replace(blocks_of_cache=int(cached * mean), least_visits_of_pass=mean * heads)
    agenda = write(library, plan, sizes)
    assert agenda.num_in_step == 0
    assert agenda.order_of_dq == (heads_per_section * group, num_passes)
    passes = [(section, part) for section in sizes.sections for part in reversed(range(num_passes))]
    expected = [
        (tile, section * heads_per_section, part, num_passes, tile, turn, 0)
        for turn, (section, part) in enumerate(passes)
        for tile in range(len(blocks))
    ]
    assert agenda.entries == [Entry(*x) for x in expected]
    check(library, case, sizes._replace(most_heads_of_pass=0))
    check(library, case, sizes._replace(blocks_of_cache=group * mean))
    check(library, case, sizes._replace(least_visits_of_pass=mean * heads + 1))


@pytest.mark.parametrize("heads_per_section", [1, 2])
@pytest.mark.parametrize("passes", [1, 2, 6])
def test_passes_of_a_block_map(passes, heads_per_section, library):
    """As many as the host says, whatever the tiles are; nobody keeps step, and the kernel behind makes dq."""
    plan = plan_of(one(MaskType.FULL, 4096))
    num_tiles = len(blocks_of_tiles(plan))
    sizes = Sizes(2, 8, 4, heads_per_section, passes_of_map=passes)
    agenda = write(library, plan, sizes)
    assert agenda.num_in_step == 0
    assert agenda.order_of_dq == (2 * heads_per_section, 1)
    if passes == 1:
        return
    assert [(x.tile, x.first_head, x.part, x.num_parts, x.turn) for x in agenda.entries] == [
        (tile, section * heads_per_section, part, passes, section * passes + passes - 1 - part)
        for section in sizes.sections
        for part in reversed(range(passes))
        for tile in range(num_tiles)
    ]


@pytest.mark.parametrize("mask_type", [MaskType.FULL, MaskType.CAUSAL])
@pytest.mark.parametrize("length", [4096, 4000, 3970])
def test_even_walks_are_not_handed_on(length, mask_type, library):
    """Equal ones, and those of which each is as much shorter as the others."""
    check(library, one(mask_type, length), Sizes(8, 12, most_heads_of_pass=8))


@pytest.mark.parametrize("num_tiles", [0, 1, 2])
def test_two_walks_are_even(num_tiles, library):
    slices = [(0, 4096, 0, 128, MaskType.FULL), (0, 128, 128, 256, MaskType.FULL)][:num_tiles]
    check(
        library,
        Case("few", 4096, 128 * max(num_tiles, 1), slices),
        Sizes(8, 12, most_heads_of_pass=8),
    )


@pytest.mark.parametrize(("group", "waves"), [(1, 0), (8, 7)])
def test_long_walks_of_a_full_mask_keep_step(group, waves, library):
    """64 tiles of 64 blocks for 8 thread blocks. With one head a group walks are short; with 8,
    the last tiles are in parts."""
    sizes = Sizes(group, 8, nheads_kv=1, heads_per_section=1)
    case = Case("full", 4096, 8192, [(0, 4096, 0, 8192, MaskType.FULL)])
    assert write(library, plan_of(case), sizes).num_in_step == 8 * waves


def test_walks_of_different_lengths_do_not(library):
    sizes = Sizes(64, 8, nheads_kv=1, heads_per_section=1)
    assert write(library, plan_of(one(MaskType.CAUSAL, 4096)), sizes).num_in_step == 0
