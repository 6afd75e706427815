"""Guards of a mask_mod on a GPU against an index out of bounds, which ends the CUDA context, and a division by zero,
which gives any number. Both are noted instead, and the computation goes on with a meaningless number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from magi_compile._checks import MaskCheck, MaskDataError, first_of
from magi_compile.functions.names import name_of

_OF_COLUMN = "what the mask_mod computes of rows or of keys must"


class Index(NamedTuple):
    """A look-up in one dimension of a tensor, whose indices must be in `[least, size)`."""

    tensor: str
    least: int
    size: int

    @property
    def words_at_pair(self) -> tuple[str, str]:
        """The message and the detail of a `MaskCheck`."""
        wanted = f"{self.tensor} at indices in [{self.least}, {self.size})"
        return f"the mask_mod must look up {wanted}", "it looks up {} at q = {}, kv = {}"

    @property
    def words_of_column(self) -> tuple[str, str]:
        """The same, of what is computed of rows or of keys alone."""
        wanted = f"{self.tensor} at indices in [{self.least}, {self.size})"
        return f"{_OF_COLUMN} look up {wanted}", "it looks up {}"


class Divisor:
    """A number that must not be zero."""

    words_at_pair = ("the mask_mod must not divide by zero", "it divides by {} at q = {}, kv = {}")
    words_of_column = (f"{_OF_COLUMN} not divide by zero", "it does")


class Broken(NamedTuple):
    """The points where a look-up or a division is invalid.

    Attributes:
        what: should be so.
        where: bool, whether it is not, of each point.
        value: int64, which index or divisor was found.
    """

    what: Index | Divisor
    where: Tensor
    value: Tensor


def is_needed(device: torch.device) -> bool:
    """True if PyTorch raises no error of its own there."""
    return device.type == "cuda"


def is_of_data(error: Exception) -> bool:
    """True if it is what PyTorch raises on a CPU of an index out of bounds or a division by zero."""
    return isinstance(error, (IndexError, RuntimeError)) and any(
        words in str(error) for words in _OF_DATA
    )


_OF_DATA = ("out of bounds", "out of range", "ZeroDivisionError")


def guarded(
    mask_mod: Callable[..., Any], names: Mapping[int, str]
) -> tuple[Callable[..., tuple[Any, list[Tensor]]], list[Index | Divisor]]:
    """A mask_mod that also returns, for each of the list that it fills, where that is broken and the value found there;
    and that list, which is empty until the function is called, as torch.vmap may do. `names` are what captured tensors
    are called, by their ids."""
    known: list[Index | Divisor] = []

    def of_point(*index: Any) -> tuple[Any, list[Tensor]]:
        guard = _Guard(names)
        with guard:
            shown = mask_mod(*index)
        known[:] = [broken.what for broken in guard.found]
        return shown, [x for broken in guard.found for x in broken[1:]]

    return of_point, known


def checks(known: Sequence[Index | Divisor], found: Sequence[Tensor]) -> list[MaskCheck]:
    """The checks of a guarded function that computes a column or a number."""
    checks = []
    for what, where, value in paired(known, found):
        first = value.flatten()[first_of(where)]
        checks.append(MaskCheck(~where.any(), *what.words_of_column, (first,)))
    return checks


def paired(known: Sequence[Index | Divisor], found: Sequence[Tensor]) -> list[Broken]:
    """The results of a guarded mask_mod, each beside its description."""
    return [Broken(*each) for each in zip(known, found[::2], found[1::2], strict=True)]


class _Guard(TorchFunctionMode):
    def __init__(self, names: Mapping[int, str]):
        super().__init__()
        self.names = names
        self.found: list[Broken] = []

    def __torch_function__(self, func: Any, types: Any, args: Sequence = (), kwargs: Any = None):
        kwargs, name, args = kwargs or {}, name_of(func), list(args)
        if name == "getitem" and isinstance(args[0], Tensor):
            args[1] = self.items(args[0], args[1])
        elif name in _INDEXING:
            args, kwargs = self.operands(_INDEXING[name], args, dict(kwargs))
        elif name in _DIVIDING and len(args) == 2:
            place = int(not name.startswith("r") or name == "remainder")
            args[place] = self.divisor(args[1 - place], args[place], name, kwargs)
        return func(*args, **kwargs)

    def items(self, tensor: Tensor, index: Any) -> Any:
        """An index of which every tensor is inside."""
        items = list(index) if isinstance(index, (tuple, list)) else [index]
        if not any(isinstance(item, Tensor) for item in items):
            return index
        sizes = [_num_dims(item) for item in items]
        dim = 0
        for place, item in enumerate(items):
            if item is Ellipsis:
                dim = tensor.dim() - sum(sizes[place + 1 :])
            elif isinstance(item, Tensor) and item.dtype not in _MASKS:
                items[place] = self.inside(item, tensor, dim)
            elif isinstance(item, int) and not isinstance(item, bool):
                size = tensor.shape[dim]
                if not -size <= item < size:
                    name = self.names.get(id(tensor), "a captured tensor")
                    raise IndexError(
                        f"index {item} is out of bounds for dimension {dim} of {name} with size {size}"
                    )
            dim += sizes[place]
        return tuple(items) if isinstance(index, (tuple, list)) else items[0]

    def operands(
        self, places: tuple[int, int], args: list[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a function that looks up, with its index inside."""
        at, dim_at = places
        names = {at: "indices" if dim_at == 2 else "index", dim_at: "dim"}
        dim = args[dim_at] if dim_at < len(args) else kwargs.get("dim")
        given = args if at < len(args) else kwargs
        key: Any = at if at < len(args) else names[at]
        if isinstance(args[0], Tensor) and isinstance(given[key], Tensor):
            given[key] = self.inside(given[key], args[0], dim, None if dim_at == 2 else 0)
        return args, kwargs

    def inside(
        self, index: Tensor, tensor: Tensor, dim: int | None, least: int | None = None
    ) -> Tensor:
        """An index into a dimension, or into all entries, cut to those there are."""
        size = tensor.numel() if dim is None else tensor.shape[dim]
        least = -size if least is None else least
        if index.is_floating_point():
            return index  # PyTorch refuses it by itself
        name = self.names.get(id(tensor), "a captured tensor")
        if not size and index.numel():
            raise MaskDataError(
                f"the mask_mod must look up tensors that have entries, {name} has shape {list(tensor.shape)}"
            )
        if not size:
            return index
        index = index.long()
        is_outside = (index < least) | (index >= size)
        found = torch.where(is_outside, index, 0)
        if index.dim():  # at most one of both is not 0, if a single index is wrong
            low, high = found.amin(), found.amax()
            is_outside, found = is_outside.any(), torch.where(high > 0, high, low)
        name = f"dimension {dim} of {name}" if dim is not None and tensor.dim() > 1 else name
        self.found.append(Broken(Index(name, least, size), is_outside, found))
        return index.clamp(least, size - 1)

    def divisor(self, dividend: Any, divisor: Any, name: str, kwargs: Mapping[str, Any]) -> Any:
        """A divisor of integers that is 1 in place of 0."""
        is_rounded = name not in _OF_FLOATS or kwargs.get("rounding_mode") is not None
        if not is_rounded or not all(map(_is_integer, (dividend, divisor))):
            return divisor
        if not isinstance(divisor, Tensor):
            if divisor == 0:
                raise RuntimeError("ZeroDivisionError")
            return divisor
        is_zero = divisor == 0
        value = torch.where(is_zero, 1, divisor)
        if divisor.dim():
            is_zero = is_zero.any()
        self.found.append(Broken(Divisor(), is_zero, torch.zeros_like(is_zero, dtype=torch.int64)))
        return value


def _num_dims(item: Any) -> int:
    """The number of dimensions of a tensor that a part of an index takes."""
    if item is None or item is Ellipsis:
        return 0
    is_mask = isinstance(item, Tensor) and item.dtype in _MASKS
    return item.dim() if is_mask else 1


def _is_integer(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() and value.dtype != torch.bool
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


_MASKS = (torch.bool, torch.uint8)  # dtypes of indices that are masks
# Functions that look up: which argument is the index, and which the dimension.
_INDEXING: dict[str, tuple[int, int]] = {
    "take_along_dim": (1, 2),
    "gather": (2, 1),
    "index_select": (2, 1),
}
_OF_FLOATS = ("div", "divide")
_DIVIDING = (
    *("floordiv", "rfloordiv", "floor_divide", "mod", "rmod", "remainder", "fmod"),
    *_OF_FLOATS,
)
