"""The structs of `params.py` are those of the sources: the compiler says where each field lies."""

import re

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")
pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from cuda.bindings import nvrtc as compiler

from magi_compile.functions.text import functions
from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.sm90 import params
from magi_compile.kernels.sm90.backward import launch as backward
from magi_compile.kernels.sm90.forward import overlap, split_kv
from magi_compile.kernels.sm90.masks import mask_bits, mask_slices
from magi_compile.kernels.sm90.masks.bits_source import bits_source
from magi_compile.kernels.sm90.masks.mask_graph import mask_graph
from magi_compile.kernels.sm90.masks.source import mask_source
from magi_compile.kernels.sm90.planner import block_map
from magi_compile.kernels.sm90.planner import tile_plan as planner
from magi_compile.kernels.sm90.runtime import nvrtc
from magi_compile.masks import MaskProgram

PROBLEM = AttnProblem("cuda", (9, 0), torch.bfloat16, 4, 2, 128, 128, 0.125)
FORWARD = nvrtc.Variant("forward/params.cuh", "")
BACKWARD = nvrtc.Variant("backward/params.cuh", "")
_MASK = MaskProgram.parse("(q >= kv) & (t0[q] == t0[kv])")
PROGRAM = mask_source(_MASK, _MASK.keys(64, []), (torch.int64,))
_MASK_MOD = functions("def mask(q, kv, t0):\n    return t0[q] & t0[kv] > 0\n")["mask"]
TABLE_GRADIENTS = nvrtc.Variant("scores/gradients/params.cuh", "")
MASK_MOD = bits_source(mask_graph(_MASK_MOD, [torch.arange(9)], torch.device("cpu")), ())
# In whose source each struct is.
SOURCES = [
    (params.FORWARD, FORWARD),
    (params.EARLY_FORWARD, FORWARD),
    (params.params_of(params.FORWARD, has_bits=True), FORWARD),
    (params.MERGE, split_kv.merge_variant(128, torch.bfloat16)),
    (params.SPLIT_TILES, split_kv.split_variant()),
    (params.TILE_PLAN, planner.planner_variant()),
    (params.BACKWARD, BACKWARD),
    (params.params_of(params.BACKWARD, has_bits=True), BACKWARD),
    (params.PREPROCESS, backward.backward_variants(PROBLEM)[0]),
    (params.POSTPROCESS, backward.backward_variants(PROBLEM)[2]),
    (
        params.mask_program_params(PROGRAM.num_words + len(PROGRAM.checks) + 1),
        mask_slices.mask_variant(PROGRAM),
    ),
    (params.BLOCK_LISTS, mask_slices.lists_variant()),
    (params.BLOCK_MAP, block_map.block_map_variants()[0]),
    (
        params.mask_mod_params(MASK_MOD.num_words + len(MASK_MOD.checks) + 1),
        mask_bits.bits_variant(MASK_MOD, has_lists=False),
    ),
    (params.EARLY_TILES, overlap.early_tiles_variant()),
    *((params.table_gradients_params(*n), TABLE_GRADIENTS) for n in ((1, 1), (4, 3))),
]


def places_of(struct):
    """(offset, size) of each field, by its name in C++."""
    return {name: (offset, scalar.size) for name, offset, scalar in struct.places()}


def log_of(struct, variant, places):
    """What the compiler says with the fields of `struct` at `places`."""
    struct_name = f"ffa::{struct.name}"
    lines = [
        f'#include "{variant.source}"',
        f"static_assert(sizeof({struct_name}) == {struct.size});",
    ]
    for name, (offset, size) in places.items():
        field = f"static_cast<{struct_name}*>(nullptr)->{name}"
        # `__INTADDR__` is what NVRTC's front end makes of offsetof, which it does not offer itself.
        lines.append(f'static_assert(__INTADDR__(&{field}) == {offset}, "{name}");')
        lines.append(f'static_assert(sizeof({field}) == {size}, "{name}");')
    source = "\n".join(lines).encode()
    options = [x.encode() for x in nvrtc._options(variant)]
    names = [name.encode() for name, _ in variant.headers]
    texts = [text.encode() for _, text in variant.headers]
    program = nvrtc._check(
        compiler.nvrtcCreateProgram(source, b"places.cu", len(names), texts, names)
    )
    compiler.nvrtcCompileProgram(program, len(options), options)
    log = nvrtc._buffer(nvrtc._check(compiler.nvrtcGetProgramLogSize(program)))
    nvrtc._check(compiler.nvrtcGetProgramLog(program, log))
    nvrtc._check(compiler.nvrtcDestroyProgram(program))
    return log.decode()


@pytest.mark.parametrize(
    ("struct", "variant"), SOURCES, ids=[f"{x.name}-{x.size}" for x, _ in SOURCES]
)
def test_every_field_is_where_the_kernel_reads_it(struct, variant):
    assert "error" not in log_of(struct, variant, places_of(struct))


@pytest.mark.parametrize(
    ("number", "names"),
    [
        (0, ("remote_begin", "total_q")),
        (6, ("agenda.arrivals", "agenda.counters")),
        (8, ("agenda.num_slots", "agenda.num_tiles")),
        (-1, ("sums[2]", "schedule.tiles")),
    ],
)
def test_a_field_elsewhere_would_be_found(number, names):
    struct, variant = SOURCES[number]
    places = places_of(struct)
    first, second = names
    places[first], places[second] = places[second], places[first]
    failed = re.findall(r'assertion failed with "(.*)"', log_of(struct, variant, places))
    assert sorted(failed) == sorted(names)
