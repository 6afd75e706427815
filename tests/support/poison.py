"""Uninitialised memory that shows: inside the package, `torch.empty` and its kin return NaN."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

ALLOCATORS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch, "empty_permuted"),
    (Tensor, "new_empty"),
    (Tensor, "new_empty_strided"),
)


@contextlib.contextmanager
def poisoned_empty(package: str = "magi_compile") -> Iterator[None]:
    """Fill what `package` allocates uninitialised with NaN, or the lowest integer, while the context lasts."""
    with contextlib.ExitStack() as stack:
        for owner, name in ALLOCATORS:
            poisoned = _poisoned(getattr(owner, name), package)
            stack.enter_context(mock.patch.object(owner, name, poisoned))
        yield


def _poisoned(allocate: Callable[..., Tensor], package: str) -> Callable[..., Tensor]:
    def allocate_poisoned(*args, **kwargs) -> Tensor:
        tensor = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller != package and not caller.startswith(package + "."):
            return tensor
        if tensor.is_floating_point():
            return tensor.fill_(torch.nan)
        return tensor.fill_(False if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min)

    return allocate_poisoned
