"""What the host packs for a kernel lies where the kernel reads it: the compiler says where that is."""

import re
import struct
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")
pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from cuda.bindings import nvrtc as compiler

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.cuda import backward, early, forward, nvrtc, parts
from magi_compile.kernels.cuda.launch import TENSOR_MAP_BYTES

PROBLEM = AttnProblem("cuda", (9, 0), torch.bfloat16, 4, 2, 128, 128, 0.125)


class Layout(NamedTuple):
    """The fields of a struct of `csrc/sm90`, in the order in which they are packed: tensor maps, then values."""

    name: str
    variant: nvrtc.Variant  # in whose source it is
    maps: tuple[str, ...]
    values: tuple[str, ...]
    packers: tuple[struct.Struct, ...]  # of the values
    alignment: int = 1  # of its size

    @property
    def num_bytes(self) -> int:
        size = len(self.maps) * TENSOR_MAP_BYTES + sum(x.size for x in self.packers)
        return -(-size // self.alignment) * self.alignment

    def expected(self) -> dict[str, tuple[int, int]]:
        places = [(i * TENSOR_MAP_BYTES, TENSOR_MAP_BYTES) for i in range(len(self.maps))]
        begin = len(self.maps) * TENSOR_MAP_BYTES
        for packer in self.packers:
            places += packed(packer, begin)
            begin += packer.size
        return dict(zip((*self.maps, *self.values), places, strict=True))

    def log_of(self, places: dict[str, tuple[int, int]]) -> str:
        """What the compiler says with the fields at `places`."""
        struct_name = f"ffa::{self.name}"
        lines = [f'#include "{self.variant.source}"']
        lines.append(f"static_assert(sizeof({struct_name}) == {self.num_bytes});")
        for name, (offset, size) in places.items():
            field = f"static_cast<{struct_name}*>(nullptr)->{name}"
            # `__INTADDR__` is what NVRTC's front end makes of offsetof, which it does not offer itself.
            lines.append(f'static_assert(__INTADDR__(&{field}) == {offset}, "{name}");')
            lines.append(f'static_assert(sizeof({field}) == {size}, "{name}");')
        source = "\n".join(lines).encode()
        options = [x.encode() for x in nvrtc._options(self.variant)]
        program = nvrtc._check(compiler.nvrtcCreateProgram(source, b"places.cu", 0, [], []))
        compiler.nvrtcCompileProgram(program, len(options), options)
        log = nvrtc._buffer(nvrtc._check(compiler.nvrtcGetProgramLogSize(program)))
        nvrtc._check(compiler.nvrtcGetProgramLog(program, log))
        nvrtc._check(compiler.nvrtcDestroyProgram(program))
        return log.decode()


def packed(layout: struct.Struct, begin: int) -> list[tuple[int, int]]:
    """Where the values of a packed struct lie, behind `begin` bytes, and how large they are."""
    places, offset, count = [], begin, ""
    for letter in layout.format.lstrip("<"):
        if letter.isdigit():
            count += letter
            continue
        size = struct.calcsize(f"<{letter}")
        for _ in range(int(count or 1)):
            if letter != "x":
                places.append((offset, size))
            offset += size
        count = ""
    assert offset == begin + layout.size
    return places


FORWARD_ADDRESSES = (
    *("out_rows", "lse", "wide_out", "wide_lse", "prior_out", "prior_lse", "wide_rows"),
    *("runs", "edges", "part_shifts", "schedule.tiles", "schedule.ticket"),
)
FORWARD = Layout(
    "ForwardParams",
    nvrtc.Variant("fwd_shared.cuh", ""),
    ("q", "k[0]", "k[1]", "v[0]", "v[1]", "out"),
    (
        *FORWARD_ADDRESSES,
        *("schedule.num_tiles", "schedule.num_heads", "schedule.heads_per_section"),
        "schedule.tiles_in_sections",
        *("total_q", "qhead_per_kvhead", "far_begin", "scale_log2", "cap_scale"),
    ),
    (forward._ADDRESSES, forward._SCALARS),
)
SCHEDULE = ("tiles", "ticket", "num_tiles", "num_heads", "heads_per_section", "tiles_in_sections")
EARLY_FORWARD = FORWARD._replace(
    name="EarlyForwardParams",
    values=(
        *FORWARD.values,
        *(f"lists[{i}].{name}" for i in range(3) for name in SCHEDULE),
        *("far_tiles", "num_begun_parts", "num_stored", "part_rows", "first_behind"),
    ),
    packers=(*FORWARD.packers, *[early._SCHEDULE] * 3, early._EARLY),
)
DQ_ITEMS = (
    *("sums.data", "sums.row_groups", "dq", "total_q"),
    *("num_heads", "qhead_per_kvhead", "softmax_scale"),
)
AGENDA = ("entries", "num_entries", "counters", "arrivals", "partials")
HEADS = ("num_heads", "heads_per_section")
BACKWARD = Layout(
    "BackwardParams<2>",
    nvrtc.Variant("bwd_shared.cuh", ""),
    ("q", "dout", "k", "v", "stats", "dk", "dv"),
    (
        *("dk_rows", "dv_rows"),
        *(f"dq.{name}" for name in DQ_ITEMS),
        *("visits.done", "visits.wanted", "visits.turns", "dq_progress", "runs", "edges"),
        *("have_arrived", "are_complete", "qhead_per_kvhead", "scale_log2", "cap_scale"),
        *(
            f"lists[{i}].{name}"
            for i in range(2)
            for name in ("tiles", *(f"agenda.{x}" for x in (*AGENDA, *HEADS)))
        ),
    ),
    (
        *(backward._GRADIENTS, backward._DQ_ITEMS, backward._ADDRESSES, backward._SCALARS),
        *(backward._TILE_LIST, backward._TILE_LIST),
    ),
    alignment=64,
)
PREPROCESS, _, POSTPROCESS = backward.backward_variants(PROBLEM, has_far_tiles=True)
BEFORE = Layout(
    "PreprocessParams",
    PREPROCESS,
    (),
    (
        *("out", "dout", "lse", "dlse", "stats", "dq.data", "dq.row_groups"),
        *("done", "wanted", "dq_progress"),
        *("out_row_stride", "out_head_stride", "dout_row_stride", "dout_head_stride"),
        *("total_q", "lse_factor"),
        *(
            f"agendas[{i}].{name}"
            for i in range(2)
            for name in (
                *("tiles", "runs", *(f"agenda.{name}" for name in (*AGENDA, *HEADS))),
                *("scratch", "num_tiles", "first_slot", "num_slots", "qhead_per_kvhead"),
                *("num_blocks", "is_one_way", "most_heads_of_pass", "blocks_of_cache"),
                *("least_visits_of_pass", "sections_at_once", "tiles_behind"),
            )
        ),
    ),
    (backward._PREPROCESS, backward._AGENDA, backward._AGENDA),
)
AFTER = Layout(
    "PostprocessParams",
    POSTPROCESS,
    (),
    (*(f"items.{name}" for name in DQ_ITEMS), "progress"),
    (backward._DQ_ITEMS, backward._PROGRESS),
)
CUT = Layout(
    "TilePartsParams",
    parts.parts_variant(),
    (),
    (
        *("tiles", "runs", "part_runs", "part_tiles", "cuts", "part_shifts"),
        *("num_tiles", "num_runs", "max_parts", "num_sms"),
        *("least_blocks", "tile_rows", "block_cols"),
    ),
    (parts._CUT_PARAMS,),
)
MERGE = Layout(
    "MergeParams",
    parts.merge_variant(128, torch.bfloat16),
    (),
    (
        *("part_out", "part_lse", "out", "lse", "cuts"),
        *("num_cuts", "tile_rows", "num_heads", "total_q", "part_rows"),
    ),
    (parts._MERGE_ADDRESSES, parts._MERGE_SCALARS),
)
LAYOUTS = (FORWARD, EARLY_FORWARD, CUT, MERGE, BACKWARD, BEFORE, AFTER)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_field_is_where_the_kernel_reads_it(layout):
    assert "error" not in layout.log_of(layout.expected())


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (FORWARD, ("far_begin", "total_q")),
        (BACKWARD, ("have_arrived", "are_complete")),
        (BACKWARD, ("lists[0].agenda.arrivals", "lists[0].agenda.counters")),
        (BEFORE, ("agendas[1].num_slots", "agendas[1].num_tiles")),
    ],
    ids=lambda x: x.name if isinstance(x, Layout) else "",
)
def test_a_field_elsewhere_would_be_found(layout, names):
    places = layout.expected()
    first, second = names
    places[first], places[second] = places[second], places[first]
    failed = re.findall(r'assertion failed with "(.*)"', layout.log_of(places))
    assert sorted(failed) == sorted(names)


def test_tensors_are_packed_in_that_order(monkeypatch):
    """Of the forward: the maps in the order of its layout, the addresses too."""
    monkeypatch.setattr(forward, "tensor_map", lambda x, rows: bytes([int(x)]) * TENSOR_MAP_BYTES)
    far = forward.FarKeys(3, 5, 0, b"")
    maps = forward._tensor_maps(1, 2, 4, far, 6, forward.ForwardConfig(3, 80, 3, 3, 2, 32, 160))
    assert list(maps[::TENSOR_MAP_BYTES]) == [1, 2, 3, 4, 5, 6]
    assert forward.Results._fields == ("out", *FORWARD_ADDRESSES[1:6])
