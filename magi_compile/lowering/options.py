"""The user's options of the lowering."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from magi_compile import _compat
from magi_compile.kernels.base import KernelName

PREFIX = "magi."


@dataclass(frozen=True)
class LoweringOptions:
    """Options of `backend="magi"` (as `options={"magi.strict": True}`) and of `enable()` (as keywords).

    Attributes:
        strict: raise an error where an attention cannot be lowered or runs eagerly inside a compiled function, instead
            of leaving it on FlexAttention.
        kernel: the only kernel to use ("hopper", "fa4", "triton", "cpu", "reference"); None chooses by device
            and problem.
        slice_capacity: the most slices of a mask that is derived in a graph, per batch entry, and per head where heads
            have masks of their own. None stands for one slice for every 16 query rows and every interval of the mask,
            and at least 256. A mask that needs more has bit blocks on a CPU. On a GPU it has them if the data of the
            call that is compiled need more; where later data do, it raises `MaskDataError`.
        bits: evaluate masks that have intervals for data in some order alone by bit blocks, whatever their data.
            Otherwise the data decide, on a CPU in every run and on a GPU in the call that is compiled; there
            `MaskDataError` is raised where the data of a later call are in another order.
        verify: compare the slices with the mask_mod, at a few thousand points, in every run. Otherwise only the first
            run of a mask in a process is compared.
    """

    strict: bool = False
    kernel: KernelName | None = None
    slice_capacity: int | None = None
    bits: bool = False
    verify: bool = False

    def __post_init__(self) -> None:
        from magi_compile.kernels.select import KERNELS, OLD_NAMES
        from magi_compile.masks.arguments import check_flag

        for name in ("strict", "bits", "verify"):
            check_flag(name, getattr(self, name))
        capacity = self.slice_capacity
        if isinstance(capacity, bool) or not isinstance(capacity, (int, type(None))):
            raise TypeError(f"`slice_capacity` must be an int or None, got {self.slice_capacity!r}")
        if self.slice_capacity is not None and self.slice_capacity < 1:
            raise ValueError(f"`slice_capacity` must be at least 1, got {self.slice_capacity}")
        if not isinstance(self.kernel, (str, type(None))):
            raise TypeError(
                f"`kernel` must be a name ({', '.join(KERNELS)}) or None, got {self.kernel!r}"
            )
        if self.kernel in OLD_NAMES:
            object.__setattr__(self, "kernel", OLD_NAMES[self.kernel])
        if self.kernel is not None and self.kernel not in KERNELS:
            raise ValueError(f"`kernel` must be one of {', '.join(KERNELS)}, got {self.kernel!r}")


class OptionsByName(TypedDict, total=False):
    """The same, as the keywords of `enable`."""

    strict: bool
    kernel: KernelName | None
    slice_capacity: int | None
    bits: bool
    verify: bool


DEFAULTS = LoweringOptions()


def options_of(function: str, given: dict[str, Any]) -> LoweringOptions:
    """The options of the keyword arguments `given` to `function`. Raises TypeError where one is not an option, or its
    value is of the wrong type."""
    known = [field.name for field in fields(LoweringOptions)]
    for name, value in given.items():
        if name not in known:
            raise TypeError(
                f"`{function}` takes only the options {', '.join(known)}, got {name}={value!r}"
            )
    return LoweringOptions(**given)


def split_options(options: dict[str, Any] | None) -> tuple[LoweringOptions, dict[str, Any]]:
    """Splits torch.compile's `options` into those of the `magi.*` entries, and the other entries, which are the inner
    backend's. Raises TypeError where a value is of the wrong type, and ValueError where an entry is neither an option
    of ours nor one of Inductor, or a value is none that its option takes."""
    known = {PREFIX + field.name: field.name for field in fields(LoweringOptions)}
    ours, rest = {}, {}
    for key, value in (options or {}).items():
        if key in known:
            ours[known[key]] = value
        elif isinstance(key, str) and _compat.is_inductor_option(key):
            rest[key] = value
        else:
            raise ValueError(
                f"`options` has no entry {key!r};{_meant(key, known)} the entries of this backend are "
                f"{', '.join(sorted(known))}"
            )
    return LoweringOptions(**ours), rest


def _meant(key: Any, known: dict[str, str]) -> str:
    """A question for the entry that is near to `key`, if there is one."""
    names = {name: name for name in _compat.inductor_options()}
    names |= {name: entry for entry, option in known.items() for name in (entry, option)}
    near = difflib.get_close_matches(str(key).lower(), names, n=1, cutoff=0.7)
    return f" did you mean {names[near[0]]!r}?" if near else ""
