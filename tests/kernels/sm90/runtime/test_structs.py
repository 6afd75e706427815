"""Structs and the values of their fields."""

import struct

import pytest

from magi_compile.kernels.sm90.runtime.structs import (
    ADDRESS,
    FLOAT,
    INT,
    LONG,
    TENSOR_MAP,
    Pointer,
    Struct,
    TensorMap,
)

INNER = Struct("Inner", {"at": ADDRESS, "count": INT})
OUTER = Struct(
    "Outer", {"map": TENSOR_MAP, "first": INT, "inner": (INNER, 2), "wide": LONG, "x": FLOAT}
)


def test_fields_lie_where_a_compiler_puts_them():
    assert INNER.size == 16
    assert [(name, offset) for name, offset, _ in OUTER.places()] == [
        ("map", 0),
        ("first", 128),
        ("inner[0].at", 136),
        ("inner[0].count", 144),
        ("inner[1].at", 152),
        ("inner[1].count", 160),
        ("wide", 168),
        ("x", 176),
    ]
    assert OUTER.size == 192  # a multiple of the alignment of a tensor map


def test_what_inherits_comes_behind():
    more = Struct("More", {"last": INT}, base=OUTER)
    assert more.offsets["last"] == OUTER.size
    assert more.size == 256


def test_values_and_what_is_still_to_come():
    tensor_map = TensorMap(Pointer(3), 9, (64, 10, 2), (128, 256), (64, 8, 1))
    packed = OUTER.pack(
        map=tensor_map,
        first=-7,
        inner=[{"at": Pointer(1, 24), "count": 5}, {"at": None, "count": 6}],
        wide=2**40,
        x=0.5,
    )
    assert packed.maps == [(0, tensor_map)]
    assert packed.pointers == [(136, Pointer(1, 24))]
    assert struct.unpack_from("<i", packed.data, 128) == (-7,)
    assert struct.unpack_from("<Qi", packed.data, 152) == (0, 6)
    assert struct.unpack_from("<qf", packed.data, 168) == (2**40, 0.5)


@pytest.mark.parametrize("values", [{"at": None}, {"at": None, "count": 1, "more": 2}])
def test_every_field_has_a_value(values):
    with pytest.raises(TypeError, match="Inner must have a value for each field"):
        INNER.pack(**values)
