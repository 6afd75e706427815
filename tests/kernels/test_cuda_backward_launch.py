"""What the host hands to the backward kernels, with a driver that does nothing: no GPU needed."""

import struct
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.cuda import backward as module
from magi_compile.kernels.cuda.backward_scratch import Scratch
from magi_compile.kernels.cuda.launch import TENSOR_MAP_BYTES
from magi_compile.kernels.heuristics import BackwardPasses, BackwardSections
from magi_compile.plan.stairs import NUM_LANES
from tests.kernels import idle_driver

ROWS, HEADS_Q, HEADS_KV, HEAD_DIM = 250, 4, 2, 64
PADDED = 256  # ROWS in whole groups of 16
PROBLEM = AttnProblem("cuda", (9, 0), torch.bfloat16, HEADS_Q, HEADS_KV, HEAD_DIM, HEAD_DIM, 0.125)
TILES, RUNS = (torch.zeros(n, m, dtype=torch.int32) for n, m in ((70, 4), (90, 12)))
EDGES = torch.zeros(ROWS, NUM_LANES, 2, dtype=torch.int32)
# As the sources in csrc/sm90 assert and lay out: after seven tensor maps in the main kernel.
PREPROCESS = struct.Struct("<6Qi4x3Q4qif7Q2iQ10iQ")
MAIN, LIST = struct.Struct("<2QQi4xQ3if8Qi2f4x"), struct.Struct("<6Q2i")
POSTPROCESS = struct.Struct("<Qi4xQ3ifQ")
SIZES = (240, 1088, 48)


class Call(NamedTuple):
    before: tuple
    maps: list[int]  # the addresses that they begin with
    main: tuple
    tiles: tuple  # the list of them
    after: tuple


def addresses(params: bytes) -> list[int]:
    """What the tensor maps of the main kernel begin with."""
    return [struct.unpack_from("<Q", params, i * TENSOR_MAP_BYTES)[0] for i in range(7)]


@pytest.fixture
def launches(monkeypatch):
    found = idle_driver.install(
        monkeypatch, module, _stats_map=lambda address, *_: idle_driver.address_map(address)
    )
    module._route.cache_clear()
    yield found
    module._route.cache_clear()


def inputs() -> dict[str, torch.Tensor]:
    heads = {"dout": HEADS_Q, "q": HEADS_Q, "k": HEADS_KV, "v": HEADS_KV, "out": HEADS_Q}
    return {
        name: torch.randn(ROWS, n, HEAD_DIM).to(torch.bfloat16) for name, n in heads.items()
    } | {"lse": torch.randn(HEADS_Q, ROWS), "dlse": torch.randn(HEADS_Q, ROWS)}


def call(launches, tensors, problem=PROBLEM, tiles=TILES):
    launches.clear()
    names = ("dout", "dlse", "q", "k", "v", "out", "lse")
    grads = module.backward(*(tensors[n] for n in names), tiles, RUNS, EDGES, problem)
    assert [len(params) for params in launches] == list(SIZES)
    before, main, after = launches
    fields = MAIN.unpack_from(main, 7 * TENSOR_MAP_BYTES)
    tiles = LIST.unpack_from(main, 7 * TENSOR_MAP_BYTES + MAIN.size)
    before, after = PREPROCESS.unpack(before), POSTPROCESS.unpack(after)
    return grads, Call(before, addresses(main), fields, tiles, after)


def test_every_launch_has_the_addresses_of_its_tensors(launches):
    for _ in range(3):
        tensors = inputs()
        (dq, dk, dv), found = call(launches, tensors)
        at = {name: x.data_ptr() for name, x in tensors.items()}
        assert found.before[:4] == (at["out"], at["dout"], at["lse"], at["dlse"])
        stats, dq_sum = found.before[4:6]
        grads = (dk.data_ptr(), dv.data_ptr())
        assert found.maps == [*(at[n] for n in ("q", "dout", "k", "v")), stats, *grads]
        assert found.main[:2] == grads
        row_groups, nheads = PADDED // 16, (HEADS_Q, HEADS_Q // HEADS_KV)
        items = (dq_sum, row_groups, dq.data_ptr(), ROWS, *nheads, PROBLEM.softmax_scale)
        assert found.main[2:9] == found.after[:-1] == items
        done, wanted, turns, progress, runs, edges, *signals = found.main[9:17]
        assert wanted == 0  # dq is rounded behind it
        assert turns == 0  # additions have no order
        assert (done, wanted, progress) == found.before[7:10]
        assert progress == found.after[-1]
        assert edges == EDGES.data_ptr()
        assert signals == [0, 0]
        assert (found.tiles[0], runs) == found.before[16:18] == (TILES.data_ptr(), RUNS.data_ptr())
        strides = (*tensors["out"].stride()[:2], *tensors["dout"].stride()[:2])
        assert found.before[10:14] == strides
        assert found.before[14] == ROWS
        assert found.before[15] == -1 / PROBLEM.softmax_scale
    assert module._route.cache_info().misses == 1


@pytest.mark.parametrize("sections", [(1, 1), (1, 2), (2, 1), (4, 1)])
@pytest.mark.parametrize("heads_kv", [1, 2, 4])
@pytest.mark.parametrize("num_tiles", [1, 64, 70])
@pytest.mark.parametrize("most_heads", [0, 2])
def test_what_lies_in_scratch_does_not_overlap(
    most_heads, num_tiles, heads_kv, sections, launches, monkeypatch
):
    heads, at_once = (min(x, heads_kv) for x in sections)
    monkeypatch.setattr(module, "rounds_dq", lambda *_: True)
    monkeypatch.setattr(module, "backward_sections", lambda *_: BackwardSections(heads, at_once))
    passes = BackwardPasses(most_heads, 7, 8)
    monkeypatch.setattr(module, "backward_passes", lambda *_: passes)
    problem = replace(PROBLEM, nheads_kv=heads_kv)
    tensors = inputs()
    for name in "kv":
        tensors[name] = torch.randn(ROWS, heads_kv, HEAD_DIM).to(torch.bfloat16)
    _, found = call(launches, tensors, problem, TILES[:num_tiles])
    stats, dq_sum = found.before[4:6]
    entries, num_entries, counters, arrivals, partials = found.before[18:23]
    done, wanted, progress = found.before[7:10]
    workspace, agenda_tiles, first_slot, num_slots, group, grid, *others = found.before[25:]
    assert found.tiles[1:] == found.before[18:25]
    assert found.main[17] == group
    assert found.before[23:25] == (heads_kv, heads)
    assert (agenda_tiles, first_slot, group) == (num_tiles, 0, HEADS_Q // heads_kv)
    assert grid == min(num_tiles * HEADS_Q, 132)
    # No way that all go, no tiles behind.
    assert others == [0, *passes, at_once, 0]
    num_items = num_tiles * heads_kv // heads
    slots_of_parts = min(num_items * group, 768 // heads) if group > 1 else 0
    assert num_slots == max(slots_of_parts, num_tiles * (most_heads > 0))
    most_entries = max(num_items + num_slots, num_items * group * (most_heads > 0))
    sizes = [
        HEADS_Q * PADDED * HEAD_DIM,
        HEADS_Q * PADDED * 3,
        num_slots * heads * 2 * 128 * HEAD_DIM,
        most_entries * 4,
        3 + num_tiles * heads_kv // grid,
        1,
        3 * num_tiles + 1 + (num_items if group > 1 else 0),
        num_slots * heads * 8,
        HEADS_Q * PADDED // 16,
        PADDED // 16 + 1,
        7 + 2 * 16 * grid,
    ]
    starts = [dq_sum, stats, partials, entries, counters, num_entries, workspace, arrivals]
    starts += [done, wanted, progress]
    ends = [start + 4 * size for start, size in zip(starts, sizes, strict=True)]
    ends[6] += -ends[6] % 16  # what follows the agenda
    assert starts[1:] == ends[:-1]
    assert starts == sorted(starts)
    assert entries % 16 == partials % 16 == stats % 16 == dq_sum % 16 == 0
    scratch = Scratch.of(problem, PADDED, num_tiles, 1, heads, grid, most_heads > 0)
    assert scratch.size == ends[-1] - dq_sum


def test_what_is_never_handed_on(launches, monkeypatch):
    """Where additions have an order."""
    monkeypatch.setattr(module, "backward_passes", lambda *_: BackwardPasses(2, 7, 8))
    found = []
    for deterministic in (False, True):
        launches.clear()
        names = ("dout", "dlse", "q", "k", "v", "out", "lse")
        tensors = inputs()
        args = (*(tensors[n] for n in names), TILES, RUNS, EDGES, PROBLEM)
        module.backward(*args, deterministic=deterministic)
        found.append(PREPROCESS.unpack(launches[0])[32:35])
    assert found == [(2, 7, 8), (0, 0, 0)]


def test_more_heads_than_there_is_room_for_parts():
    """A slot for a part of each of 1024 heads: nobody has two of them, so no tile has parts."""
    problem = replace(PROBLEM, nheads_q=2048, nheads_kv=1024)
    assert Scratch.of(problem, PADDED, 5, 1, 1024, 132).num_slots == 1


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
    used = {
        "out": found.before[0],
        "dout": found.maps[1],
        "q": found.maps[0],
        "k": found.maps[2],
        "v": found.maps[3],
    }
    assert used[name] != tensors[name].data_ptr()
    assert used[name] % 16 == 0


def test_strided_inputs_are_read_where_they_are(launches):
    tensors = inputs()
    qkv = torch.randn(ROWS, 3, HEADS_Q, HEAD_DIM).to(torch.bfloat16)
    tensors["q"] = qkv[:, 0]
    _, found = call(launches, tensors)
    assert found.maps[0] == qkv.data_ptr()


class Steps:
    """A backward in phases: what happens in which order, and whether a launch may start before the one in front ends."""

    def __init__(self, monkeypatch, tensors):
        self.tensors, self.done, self.params = tensors, [], []
        self.keys = [tensors[n] for n in "kv"]
        self.grads = [torch.empty_like(x) for x in self.keys]
        monkeypatch.setattr(module, "launch", self.launch)

    def launch(self, function, *rest, may_start_early=False, **_):
        *_, params, _ = rest
        name = dict(zip(SIZES, ("before", "main", "after"), strict=True))[len(params)]
        self.done.append((name, may_start_early))
        self.params.append(params)

    def arrive(self):
        self.done.append("arrive")
        return *self.keys, *self.grads

    def depart(self, dk, dv):
        assert (dk, dv) == tuple(self.grads)
        self.done.append("depart")

    def run(self):
        dout, dlse, q, out, lse = (self.tensors[n] for n in ("dout", "dlse", "q", "out", "lse"))
        ends = (self.arrive, self.depart)
        return module.backward_in_phases(
            dout, dlse, q, *ends, out, lse, TILES, RUNS, EDGES, PROBLEM
        )

    @property
    def mapped(self):
        """The addresses of k, v, dk and dv in the main kernel's tensor maps."""
        maps = addresses(self.params[-2])
        return [maps[i] for i in (2, 3, 5, 6)]


def test_keys_arrive_in_front_of_the_main_kernel_and_gradients_leave_behind_it(
    launches, monkeypatch
):
    steps = Steps(monkeypatch, inputs())
    dq = steps.run()
    # With the work of other streams between them, each launch waits for all that is in front of it.
    launched = [(name, False) for name in ("before", "main", "after")]
    assert steps.done == [launched[0], "arrive", launched[1], "depart", launched[2]]
    assert steps.mapped == [x.data_ptr() for x in (*steps.keys, *steps.grads)]
    assert POSTPROCESS.unpack(steps.params[2])[2] == dq.data_ptr()


def test_in_one_call_a_launch_begins_while_the_one_in_front_of_it_ends(launches, monkeypatch):
    steps = Steps(monkeypatch, inputs())
    names = ("dout", "dlse", "q", "k", "v", "out", "lse")
    module.backward(*(steps.tensors[n] for n in names), TILES, RUNS, EDGES, PROBLEM)
    assert steps.done == [("before", False), ("main", True), ("after", True)]


def test_keys_that_tma_can_not_read_are_copied_when_they_are_there(launches, monkeypatch):
    steps = Steps(monkeypatch, inputs())
    steps.keys[0] = steps.keys[0].transpose(1, 2).contiguous().transpose(1, 2)
    steps.run()
    expected = [x.data_ptr() for x in (*steps.keys, *steps.grads)]
    assert steps.mapped[0] != expected[0]
    assert steps.mapped[1:] == expected[1:]


def test_fewer_keys_at_the_same_addresses(launches, monkeypatch):
    def tensor_map(x, box_rows):
        return struct.pack("<2Q", x.data_ptr(), len(x)).ljust(TENSOR_MAP_BYTES, b"\0")

    monkeypatch.setattr(module, "tensor_map", tensor_map)
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
    names = ("dout", "dlse", "q", "k", "v", "out", "lse")
    dq, dk, dv = module.backward(*(tensors[n] for n in names), TILES, RUNS, EDGES, PROBLEM)
    assert not launches
    assert not dq.any()
    assert dk.shape == dv.shape == (0, HEADS_KV, HEAD_DIM)
