"""What the host hands to the backward kernels, with a driver that does nothing: no GPU needed."""

import struct
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile.kernels.base import AttnProblem, Grads, Saved
from magi_compile.kernels.heuristics import BackwardPasses, backward_config
from magi_compile.kernels.overlap import KeyTensors, SavedQueries
from magi_compile.kernels.sm90.backward import launch as module
from magi_compile.kernels.sm90.backward.workspace import Scratch
from magi_compile.kernels.sm90.params import BACKWARD, POSTPROCESS, PREPROCESS
from magi_compile.kernels.sm90.runtime import calls
from magi_compile.kernels.sm90.runtime.structs import TENSOR_MAP_BYTES
from magi_compile.plan.stairs import NUM_LANES
from magi_compile.plan.tiles import Walk
from tests.kernels.support import idle_driver

ROWS, HEADS_Q, HEADS_KV, HEAD_DIM = 250, 4, 2, 64
PADDED = 256  # ROWS in whole groups of 16
PROBLEM = AttnProblem("cuda", (9, 0), torch.bfloat16, HEADS_Q, HEADS_KV, HEAD_DIM, HEAD_DIM, 0.125)
TILES, RUNS = (torch.zeros(n, m, dtype=torch.int32) for n, m in ((70, 4), (90, 12)))
EDGES = torch.zeros(ROWS, NUM_LANES, 2, dtype=torch.int32)
WALK = Walk(TILES, RUNS, EDGES)
LAYOUTS = {x.size: x for x in (PREPROCESS, BACKWARD, POSTPROCESS)}


class Call(NamedTuple):
    """The fields of the parameters of each launch."""

    before: dict
    main: dict
    after: dict


def read(params: bytes) -> dict:
    return idle_driver.fields(LAYOUTS[len(params)], params)


@pytest.fixture
def launches(monkeypatch):
    yield idle_driver.install(monkeypatch)
    idle_driver.clear_caches()


def inputs() -> dict[str, torch.Tensor]:
    heads = {"dout": HEADS_Q, "q": HEADS_Q, "k": HEADS_KV, "v": HEADS_KV, "out": HEADS_Q}
    return {
        name: torch.randn(ROWS, n, HEAD_DIM).to(torch.bfloat16) for name, n in heads.items()
    } | {"lse": torch.randn(HEADS_Q, ROWS), "dlse": torch.randn(HEADS_Q, ROWS)}


def records(tensors):
    """The tensors as a backward takes them."""
    saved = Saved(*(tensors[n] for n in Saved._fields))
    return Grads(tensors["dout"], tensors["dlse"]), saved


def call(launches, tensors, problem=PROBLEM, tiles=TILES):
    launches.clear()
    grads = module.backward(*records(tensors), Walk(tiles, RUNS, EDGES), problem)
    assert [len(params) for params in launches] == list(LAYOUTS)
    return grads, Call(*map(read, launches))


def items(found: dict, prefix: str) -> list:
    """The fields of a struct in it."""
    return [value for name, value in found.items() if name.startswith(f"{prefix}.")]


def test_every_launch_has_the_addresses_of_its_tensors(launches):
    for _ in range(3):
        tensors = inputs()
        (dq, dk, dv), found = call(launches, tensors)
        at = {name: x.data_ptr() for name, x in tensors.items()}
        before, main, after = found
        for name in ("out", "dout", "lse", "dlse"):
            assert before[name] == at[name]
        for name in ("q", "dout", "k", "v"):
            assert main[name] == at[name]
        for name, grad in (("dk", dk), ("dv", dv)):
            assert main[name] == main[f"{name}_rows"] == grad.data_ptr()
        assert main["stats"] == before["stats"]
        row_groups, nheads = PADDED // 16, (HEADS_Q, HEADS_Q // HEADS_KV)
        sums = before["dq.data"]
        expected = [sums, row_groups, dq.data_ptr(), ROWS, *nheads, PROBLEM.softmax_scale]
        assert items(main, "dq") == items(after, "items") == expected
        assert main["visits.wanted"] == before["wanted"] == 0  # dq is rounded behind it
        assert main["visits.turns"] == 0  # additions have no order
        assert main["visits.done"] == before["done"]
        assert main["dq_progress"] == before["dq_progress"] == after["progress"]
        assert main["edges"] == EDGES.data_ptr()
        assert main["tiles"] == before["agenda.tiles"] == TILES.data_ptr()
        assert main["runs"] == before["agenda.runs"] == RUNS.data_ptr()
        for name in ("out", "dout"):
            strides = [before[f"{name}_{of}_stride"] for of in ("row", "head")]
            assert strides == list(tensors[name].stride()[:2])
        assert before["total_q"] == ROWS
        assert before["lse_factor"] == -1 / PROBLEM.softmax_scale
    assert module._prepared.cache_info().misses == 1


@pytest.mark.parametrize("section_heads", [1, 2, 4])
@pytest.mark.parametrize("heads_kv", [1, 2, 4])
@pytest.mark.parametrize("num_tiles", [1, 64, 70])
@pytest.mark.parametrize("most_heads", [0, 2])
def test_what_lies_in_scratch_does_not_overlap(
    most_heads, num_tiles, heads_kv, section_heads, launches, monkeypatch
):
    heads = min(section_heads, heads_kv)
    monkeypatch.setattr(module, "rounds_dq", lambda *_: True)
    monkeypatch.setattr(module, "backward_sections", lambda *_: heads)
    passes = BackwardPasses(most_heads, 7, 8)
    monkeypatch.setattr(module, "backward_passes", lambda *_: passes)
    problem = replace(PROBLEM, nheads_kv=heads_kv)
    tensors = inputs()
    for name in "kv":
        tensors[name] = torch.randn(ROWS, heads_kv, HEAD_DIM).to(torch.bfloat16)
    _, found = call(launches, tensors, problem, TILES[:num_tiles])
    before, main, _ = found
    assert items(main, "agenda") == items(before, "agenda.agenda")
    group, grid = HEADS_Q // heads_kv, min(num_tiles * HEADS_Q, 132)
    assert main["qhead_per_kvhead"] == before["agenda.qhead_per_kvhead"] == group
    assert before["agenda.agenda.num_heads"] == heads_kv
    assert before["agenda.agenda.heads_per_section"] == heads
    assert before["agenda.num_tiles"] == num_tiles
    assert before["agenda.num_blocks"] == grid
    assert before["agenda.is_one_way"] == 0
    of_passes = ("most_heads_of_pass", "blocks_of_cache", "least_visits_of_pass")
    assert tuple(before[f"agenda.{name}"] for name in of_passes) == passes
    num_slots = before["agenda.num_slots"]
    num_items = num_tiles * heads_kv // heads
    slots_of_parts = min(num_items * group, 768 // heads) if group > 1 else 0
    has_passes = most_heads > 0 and group > 1
    assert num_slots == max(slots_of_parts, num_tiles * has_passes)
    most_entries = max(num_items + num_slots, num_items * group * has_passes)
    sizes = [
        HEADS_Q * PADDED * HEAD_DIM,
        HEADS_Q * PADDED * 3,
        num_slots * heads * 2 * 128 * HEAD_DIM,
        most_entries * 4,
        2 + num_tiles * heads_kv // grid,
        1,
        3 * num_tiles + 1 + (num_items if group > 1 else 0),
        num_slots * heads * 8,
        HEADS_Q * PADDED // 16,
        PADDED // 16 + 1,
        7 + 2 * 16 * grid,
    ]
    of_agenda = ("partials", "entries", "counters", "num_entries")
    starts = [before["dq.data"], before["stats"]]
    starts += [before[f"agenda.agenda.{name}"] for name in of_agenda]
    starts += [before["agenda.scratch"], before["agenda.agenda.arrivals"]]
    starts += [before[name] for name in ("done", "wanted", "dq_progress")]
    ends = [start + 4 * size for start, size in zip(starts, sizes, strict=True)]
    assert starts[1:] == ends[:-1]
    assert starts == sorted(starts)
    assert not any(starts[i] % 16 for i in (0, 1, 2, 3))
    scratch = Scratch.of(
        *(problem, backward_config(problem), PADDED, num_tiles),
        heads,
        grid,
        group if most_heads else 1,
    )
    assert scratch.size == ends[-1] - starts[0]


def test_what_is_never_handed_on(launches, monkeypatch):
    """Where additions have an order."""
    monkeypatch.setattr(module, "backward_passes", lambda *_: BackwardPasses(2, 7, 8))
    found = []
    for deterministic in (False, True):
        launches.clear()
        module.backward(*records(inputs()), WALK, PROBLEM, deterministic=deterministic)
        before = read(launches[0])
        names = ("most_heads_of_pass", "blocks_of_cache", "least_visits_of_pass")
        found.append(tuple(before[f"agenda.{name}"] for name in names))
    assert found == [(2, 7, 8), (0, 0, 0)]


def test_more_heads_than_there_is_room_for_parts():
    """A slot for a part of each of 1024 heads: nobody has two of them, so no tile has parts."""
    problem = replace(PROBLEM, nheads_q=2048, nheads_kv=1024)
    config = backward_config(problem)
    assert Scratch.of(problem, config, PADDED, 5, 1024, 132).num_slots == 1


@pytest.mark.parametrize("name", ["dout", "q", "k", "v", "out"])
@pytest.mark.parametrize("what", ["address", "stride", "inner", "expanded"])
def test_what_tma_can_not_read_is_copied(what, name, launches):
    tensors = inputs()
    x = tensors[name]
    tensors[name] = {
        "address": torch.empty(x.numel() + 1).to(x)[1:].view(x.shape),
        "stride": torch.empty(*x.shape[:2], HEAD_DIM + 1).to(x)[..., :HEAD_DIM],
        "inner": torch.empty(ROWS, HEAD_DIM, x.shape[1]).to(x).transpose(1, 2),
        "expanded": x[:1].expand(x.shape),
    }[what]
    _, found = call(launches, tensors)
    used = found.before[name] if name == "out" else found.main[name]
    assert used != tensors[name].data_ptr()
    assert used % 16 == 0


def test_strided_inputs_are_read_where_they_are(launches):
    tensors = inputs()
    qkv = torch.randn(ROWS, 3, HEADS_Q, HEAD_DIM).to(torch.bfloat16)
    tensors["q"] = qkv[:, 0]
    _, found = call(launches, tensors)
    assert found.main["q"] == qkv.data_ptr()


class Steps:
    """A backward in phases: what happens in which order,
    and whether a launch may start before the one in front ends."""

    def __init__(self, monkeypatch, tensors):
        self.tensors, self.done, self.params = tensors, [], []
        self.keys = [tensors[n] for n in "kv"]
        self.grads = [torch.empty_like(x) for x in self.keys]
        monkeypatch.setattr(calls, "launch", self.launch)

    def launch(self, function, grid, block, params, stream, options):
        name = dict(zip(LAYOUTS, ("before", "main", "after"), strict=True))[len(params)]
        self.done.append((name, options.may_start_early))
        self.params.append(params)

    def run(self):
        grads, saved = records(self.tensors)
        queries = SavedQueries(saved.q, saved.out, saved.lse)
        launched = len(self.params)
        steps = module.BackwardPass(grads, queries, WALK, PROBLEM, deterministic=False)
        assert len(self.params) == launched  # to make it launches nothing
        steps.begin()
        self.done.append("arrive")
        steps.main(KeyTensors(*self.keys, *self.grads))
        self.done.append("depart")
        return steps.finish()

    @property
    def mapped(self):
        """The addresses of k, v, dk and dv in the main kernel's tensor maps."""
        main = read(self.params[-2])
        return [main[name] for name in ("k", "v", "dk", "dv")]


def test_keys_arrive_in_front_of_the_main_kernel_and_gradients_leave_behind_it(
    launches, monkeypatch
):
    steps = Steps(monkeypatch, inputs())
    dq = steps.run()
    # With the work of other streams between them, each launch waits for all that is in front of it.
    launched = [(name, False) for name in ("before", "main", "after")]
    assert steps.done == [launched[0], "arrive", launched[1], "depart", launched[2]]
    assert steps.mapped == [x.data_ptr() for x in (*steps.keys, *steps.grads)]
    assert read(steps.params[2])["items.dq"] == dq.data_ptr()


def test_in_one_call_a_launch_begins_while_the_one_in_front_of_it_ends(launches, monkeypatch):
    steps = Steps(monkeypatch, inputs())
    module.backward(*records(steps.tensors), WALK, PROBLEM)
    assert steps.done == [("before", False), ("main", True), ("after", True)]


def test_keys_that_tma_can_not_read_are_copied_when_they_are_there(launches, monkeypatch):
    steps = Steps(monkeypatch, inputs())
    steps.keys[0] = steps.keys[0].transpose(1, 2).contiguous().transpose(1, 2)
    steps.run()
    expected = [x.data_ptr() for x in (*steps.keys, *steps.grads)]
    assert steps.mapped[0] != expected[0]
    assert steps.mapped[1:] == expected[1:]


def test_fewer_keys_at_the_same_addresses(launches, monkeypatch):
    def encode(tensor_map, address):
        return struct.pack("<2Q", address, tensor_map.sizes[1]).ljust(TENSOR_MAP_BYTES, b"\0")

    monkeypatch.setattr(calls, "encode", encode)
    steps = Steps(monkeypatch, inputs())
    whole = (steps.keys, steps.grads)
    for num_keys in (ROWS, ROWS - 7, ROWS):
        steps.keys, steps.grads = ([x[:num_keys] for x in xs] for xs in whole)
        steps.run()
        main = steps.params[-2]
        rows = [struct.unpack_from("<2Q", main, i * TENSOR_MAP_BYTES)[1] for i in (2, 3, 5, 6)]
        assert rows == [num_keys] * 4


def test_no_rows_and_no_keys_launch_nothing(launches):
    tensors = inputs()
    for name in "kv":
        tensors[name] = tensors[name][:0]
    dq, dk, dv = module.backward(*records(tensors), WALK, PROBLEM)
    assert not launches
    assert not dq.any()
    assert dk.shape == dv.shape == (0, HEADS_KV, HEAD_DIM)
