"""Structs that kernels take as their parameters, as a C++ compiler lays them out, and values for their fields.

An address is not known before a call: a `Pointer` says which buffer of the call it leads into. So a struct is packed
once, and each call writes its addresses into a copy.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

TENSOR_MAP_BYTES = 128


class Pointer(NamedTuple):
    """An address: so many bytes into a buffer of a call."""

    buffer: int
    offset: int = 0


class TensorMap(NamedTuple):
    """A TMA descriptor of a tensor of three dimensions, the innermost first.

    Attributes:
        pointer: where the tensor begins, a multiple of 16 bytes.
        element: `CUtensorMapDataType` of its elements.
        sizes: in elements.
        strides: of the two outer dimensions, in bytes.
        box: what one instruction moves, in elements.
        is_swizzled: whether rows of 128 bytes are swizzled in shared memory.
    """

    pointer: Pointer
    element: int
    sizes: tuple[int, int, int]
    strides: tuple[int, int]
    box: tuple[int, int, int]
    is_swizzled: bool = True


class Scalar(NamedTuple):
    """A field without fields of its own: its size, which is its alignment too unless there is another."""

    size: int
    format: str
    align: int


INT, FLOAT = Scalar(4, "<i", 4), Scalar(4, "<f", 4)
LONG, ADDRESS = Scalar(8, "<q", 8), Scalar(8, "<Q", 8)
TENSOR_MAP = Scalar(TENSOR_MAP_BYTES, f"{TENSOR_MAP_BYTES}s", 64)

FieldType = Any  # Scalar, Struct, or a tuple (type, how many)


class Struct:
    """A struct of `csrc/sm90`.

    Args:
        name: in C++, within namespace ffa.
        fields: their types by their names, in order: a `Scalar`, a `Struct`, or `(type, count)` for an array.
        base: a struct that it inherits from.
    """

    def __init__(self, name: str, fields: Mapping[str, FieldType], base: Struct | None = None):
        self.name = name
        self.fields: dict[str, FieldType] = {**(base.fields if base else {}), **fields}
        self.offsets: dict[str, int] = dict(base.offsets) if base else {}
        self.align: int = base.align if base else 1
        offset = base.size if base else 0
        for field, kind in fields.items():
            align = _align(kind)
            offset += -offset % align
            self.offsets[field] = offset
            offset += _size(kind)
            self.align = max(self.align, align)
        self.size: int = offset + -offset % self.align

    def places(self, begin: int = 0) -> Iterator[tuple[str, int, Scalar]]:
        """Every scalar in it: how C++ names it, its offset in bytes, and its type."""
        for field, kind in self.fields.items():
            yield from _places(field, kind, begin + self.offsets[field])

    def pack(self, **values: Any) -> Packed:
        """Its bytes for `values`, one for each field: an int, a float, a `Pointer`, a `TensorMap`, None for nothing,
        a dict for a struct and a sequence for an array."""
        packed = Packed(bytearray(self.size), [], [])
        self._pack_into(packed, 0, values)
        return packed

    def _pack_into(self, packed: Packed, begin: int, values: Mapping[str, Any]) -> None:
        if values.keys() != self.fields.keys():
            wrong = sorted(values.keys() ^ self.fields.keys())
            raise TypeError(f"{self.name} must have a value for each field, got or lacks {wrong}")
        data, pointers, maps = packed
        for field, kind in self.fields.items():
            value, offset = values[field], begin + self.offsets[field]
            # One call less for each number: a new mask may need new parameters in every step.
            if type(kind) is Scalar and type(value) in (int, float, bool):
                struct.pack_into(kind.format, data, offset, value)
            elif type(value) is Pointer:
                assert kind is ADDRESS
                pointers.append((offset, value))
            elif type(value) is TensorMap:
                assert kind is TENSOR_MAP
                maps.append((offset, value))
            elif value is not None:
                _pack_into(packed, offset, kind, value)


class Packed(NamedTuple):
    """A struct whose addresses are still to come.

    Attributes:
        data: its bytes.
        pointers: `(offset, pointer)` of what leads into a buffer.
        maps: `(offset, tensor map)`.
    """

    data: bytearray
    pointers: list[tuple[int, Pointer]]
    maps: list[tuple[int, TensorMap]]


def _size(kind: FieldType) -> int:
    return kind[1] * _size(kind[0]) if _is_array(kind) else kind.size


def _align(kind: FieldType) -> int:
    return _align(kind[0]) if _is_array(kind) else kind.align


def _is_array(kind: FieldType) -> bool:
    return isinstance(kind, tuple) and not isinstance(kind, Scalar)


def _places(name: str, kind: FieldType, offset: int) -> Iterator[tuple[str, int, Scalar]]:
    if _is_array(kind):
        of, count = kind
        for i in range(count):
            yield from _places(f"{name}[{i}]", of, offset + i * _size(of))
    elif isinstance(kind, Struct):
        for field, at, scalar in kind.places(offset):
            yield f"{name}.{field}", at, scalar
    else:
        yield name, offset, kind


def _pack_into(packed: Packed, offset: int, kind: FieldType, value: Any) -> None:
    if _is_array(kind):
        of, count = kind
        values: Sequence[Any] = value
        if len(values) != count:
            raise TypeError(f"an array of {count} got {len(values)} values")
        for i, one in enumerate(values):
            _pack_into(packed, offset + i * _size(of), of, one)
    elif isinstance(kind, Struct):
        kind._pack_into(packed, offset, value)
    elif isinstance(value, Pointer):
        assert kind is ADDRESS
        packed.pointers.append((offset, value))
    elif isinstance(value, TensorMap):
        assert kind is TENSOR_MAP
        packed.maps.append((offset, value))
    elif value is not None:
        struct.pack_into(kind.format, packed.data, offset, value)
