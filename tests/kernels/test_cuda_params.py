"""What the host packs for the forward kernel lies where the kernel reads it: the compiler says where that is."""

import re
import struct

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")
pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from cuda.bindings import nvrtc as compiler

from magi_compile.kernels.cuda import forward as module
from magi_compile.kernels.cuda import nvrtc
from magi_compile.kernels.cuda.launch import TENSOR_MAP_BYTES

# In the order in which they are packed: tensor maps, `_ADDRESSES`, `_SCALARS`.
MAPS = ("q", "k[0]", "k[1]", "v[0]", "v[1]", "out")
ADDRESSES = (
    *("out_rows", "lse", "wide_out", "wide_lse", "prior_out", "prior_lse"),
    *("runs", "part_shifts", "schedule.tiles", "schedule.ticket"),
)
SCALARS = (
    *("schedule.num_tiles", "schedule.num_heads", "schedule.heads_per_section"),
    *("total_q", "qhead_per_kvhead", "far_begin", "scale_log2", "cap_scale"),
)


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


def expected() -> dict[str, tuple[int, int]]:
    maps = len(MAPS) * TENSOR_MAP_BYTES
    places = [(i * TENSOR_MAP_BYTES, TENSOR_MAP_BYTES) for i in range(len(MAPS))]
    places += packed(module._ADDRESSES, maps)
    places += packed(module._SCALARS, maps + module._ADDRESSES.size)
    return dict(zip((*MAPS, *ADDRESSES, *SCALARS), places, strict=True))


def log_of(places: dict[str, tuple[int, int]], num_bytes: int) -> str:
    """What the compiler says about ForwardParams with its fields at `places`, `num_bytes` large."""
    lines = ['#include "fwd.cuh"', f"static_assert(sizeof(ffa::ForwardParams) == {num_bytes});"]
    for name, (offset, size) in places.items():
        field = f"static_cast<ffa::ForwardParams*>(nullptr)->{name}"
        # `__INTADDR__` is what NVRTC's front end makes of offsetof, which it does not offer itself.
        lines.append(f'static_assert(__INTADDR__(&{field}) == {offset}, "{name}");')
        lines.append(f'static_assert(sizeof({field}) == {size}, "{name}");')
    source = "\n".join(lines).encode()
    options = [x.encode() for x in nvrtc._options(nvrtc.Variant("", ""))]
    program = nvrtc._check(compiler.nvrtcCreateProgram(source, b"places.cu", 0, [], []))
    compiler.nvrtcCompileProgram(program, len(options), options)
    log = nvrtc._buffer(nvrtc._check(compiler.nvrtcGetProgramLogSize(program)))
    nvrtc._check(compiler.nvrtcGetProgramLog(program, log))
    nvrtc._check(compiler.nvrtcDestroyProgram(program))
    return log.decode()


def size() -> int:
    return len(MAPS) * TENSOR_MAP_BYTES + module._ADDRESSES.size + module._SCALARS.size


def test_every_field_is_where_the_kernel_reads_it():
    assert "error" not in log_of(expected(), size())


def test_a_field_elsewhere_would_be_found():
    places = expected()
    places["far_begin"], places["total_q"] = places["total_q"], places["far_begin"]
    log = log_of(places, size())
    failed = re.findall(r'assertion failed with "(.*)"', log)
    assert sorted(failed) == ["far_begin", "total_q"]


def test_tensors_are_packed_in_that_order(monkeypatch):
    """The maps in the order of MAPS, the addresses in that of ADDRESSES."""
    monkeypatch.setattr(module, "tensor_map", lambda x, rows: bytes([int(x)]) * TENSOR_MAP_BYTES)
    far = module.FarKeys(3, 5, 0)
    maps = module._tensor_maps(1, 2, 4, far, 6, module.ForwardConfig(3, 80, 3, 3, 2, 32, 160))
    assert list(maps[::TENSOR_MAP_BYTES]) == [1, 2, 3, 4, 5, 6]
    assert module.Results._fields == ("out", *ADDRESSES[1:6])
