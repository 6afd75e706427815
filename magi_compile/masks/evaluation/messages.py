"""Messages about the requirements of a mask on its data: the requirement, and the value that breaks it.

Each function returns the message and the detail of a `MaskCheck`.
"""

from __future__ import annotations

from magi_compile._checks import of_intervals

Words = tuple[str, str]


def of_a_head(words: Words) -> Words:
    """`words` whose values name a head behind the batch entry."""
    message, detail = words
    return message, detail.replace("batch entry {}", "batch entry {} and head {}")


def of_a_key(words: Words) -> Words:
    """`words` about rows and the keys that they see, as they are about keys and the rows that see them; what stands in
    backticks stays."""
    return _exchanged(words[0]), _exchanged(words[1])


def _exchanged(text: str) -> str:
    parts = text.split("`")
    for i in range(0, len(parts), 2):
        part = parts[i].replace("that a row may see", "that may see a key")
        for by_rows, by_keys in _BY_KEYS.items():
            part = part.replace(by_rows, by_keys)
        parts[i] = part
    return "`".join(parts)


_BY_KEYS = {
    "the keys": "the rows",
    "in row q = {}": "at key kv = {}",
    "row q = {}": "key kv = {}",
    "along kv": "along q",
    "in every row": "at every key",
    "at q = {}": "at kv = {}",
}


def are_neighbours(keys: str) -> Words:
    return (
        of_intervals(f"the keys with `{keys}` that a row may see must be next to each other"),
        "in row q = {} of batch entry {} there is a gap",
    )


def is_grouped(keys: str) -> Words:
    return (
        of_intervals(f"`{keys}` must hold equal values next to each other along kv"),
        "the value {} that row q = {} of batch entry {} looks up lies in several places",
    )


def is_sorted(keys: str) -> Words:
    return (
        of_intervals(f"`{keys}` must never decrease along the keys that a row may see"),
        "in row q = {} of batch entry {} it does",
    )


def is_true(condition: str) -> Words:
    return of_intervals(f"`{condition}` must be true in every row"), "it is not at q = {}"


def is_not_zero(divisor: str) -> Words:
    return (
        f"`{divisor}` must not be zero, it divides",
        "it is at position {} of batch entry {}",
    )


def is_entry(look_up: str, size: int) -> Words:
    return (
        f"`{look_up}` must look up entries in [{-size}, {size})",
        "it looks up {} at position {} of batch entry {}",
    )


def fits(capacity: int) -> Words:
    return of_intervals(f"the mask must fit in {capacity} slices (`slice_capacity`)"), "it has {}"


def fits_dtype(number: str, dtype: str) -> Words:
    return of_intervals(
        f"`{number}` must not wrap around in {dtype}"
    ), "values of its tensors are too large"
