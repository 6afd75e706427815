"""The interface of a contender: is it available, which workloads does it run, and its calls."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from magi_bench.workloads.workload import Inputs, Workload

#: Attention of prepared q, k, v in the contender's layout; differentiable where the contender has a backward.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Layout(Enum):
    """The layout in which a contender takes `[tokens, heads, head_dim]`: views, and for HEADS a copy, made before the
    time is taken. Nobody pays for a copy."""

    PACKED = "thd"
    BATCHED = "bthd"
    HEADS_FIRST = "bhtd"
    HEADS = "htd"  # contiguous

    def of(self, x: Tensor) -> Tensor:
        """Packed `x` in this layout."""
        if self is Layout.PACKED:
            return x
        if self is Layout.HEADS:
            return x.transpose(0, 1).contiguous()
        return x[None] if self is Layout.BATCHED else x.transpose(0, 1)[None]

    def to_packed(self, x: Tensor) -> Tensor:
        """The inverse of `of`."""
        if self is Layout.PACKED:
            return x
        if self is Layout.HEADS:
            return x.transpose(0, 1)
        return x[0] if self is Layout.BATCHED else x[0].transpose(0, 1)


class Contender(ABC):
    """Whoever is measured."""

    name: str  # how the command line and result files call it
    label: str  # how reports call it
    is_ours: bool = False  # ratios are to the first of these that has a time
    is_alone: bool = False  # whether its times have no ratio, as its work is another
    devices: tuple[str, ...] = ("cuda", "cpu")  # where it runs
    module: str | None = None  # what must be imported

    def available(self) -> str | None:
        """Why it cannot be had on this machine, or None. May import packages."""
        return import_error(self.module) if self.module else None

    def unavailable(self, device: str) -> str | None:
        """Why it cannot be had on a device of this machine, or None."""
        if device not in self.devices:
            return f"runs on {' and '.join(self.devices)}, not on {device}"
        return self.available()

    def supports(self, problem: Any, case: Any) -> list[str]:
        """Every reason against a case; empty if it runs."""
        return []

    @abstractmethod
    def prepare(self, problem: Any, case: Any) -> Any:
        """Everything that comes before the first call: a `clock.Ready`, and of kernels an `Attend`."""

    def check(self, problem: Any, case: Any, results: Sequence[Tensor]) -> Any:
        """The `gate.Check` of the results of the first call; None if they are checked elsewhere."""
        return None


class Kernel(Contender):
    """One implementation of attention. A worker process of its own makes one instance and keeps it."""

    levels: tuple[str, ...] = ("kernel",)  # which cases it takes part in, of "kernel" and "sparse"
    devices: tuple[str, ...] = ("cuda",)
    dtypes: tuple[str, ...] = ("bfloat16", "float16")  # of q, k, v
    layout: Layout = Layout.PACKED  # what `prepare`'s result takes and returns
    has_backward: bool = True  # whether it can be differentiated
    compiles_slowly: bool = False  # whether a new shape costs seconds; such contenders run last
    distributions: tuple[str, ...] = ()  # of packages that it consists of

    def supports(self, workload: Workload, device: str) -> list[str]:
        """Every reason against this workload beyond level, device and dtype; empty if it runs."""
        return []

    @abstractmethod
    def prepare(self, workload: Workload, inputs: Inputs) -> Attend:
        """Everything that depends on the mask and the shapes but not on the values: conversions and plans. The slices
        of the workload are on the host, and the packed `inputs` on the device, for contenders that plan from them.
        Gives the call that is timed, of q, k and v in the layout of the contender."""

    def versions(self) -> dict[str, str]:
        """The packages it consists of, for the record."""
        found = {}
        for name in self.distributions:
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = "not a distribution"
        return found


class UniformBlocks(Kernel):
    """Attention to listed blocks, which are visible as a whole, for as many key-value as query heads."""

    levels = ("sparse",)
    dtypes = ("bfloat16",)
    sizes: tuple[int, ...]  # of blocks that it takes
    no_groups = "has no grouped heads"

    def supports(self, workload: Workload, device: str) -> list[str]:
        blocks = workload.blocks
        reasons = []
        if not blocks.is_uniform or blocks.is_causal or blocks.q_sizes[0] not in self.sizes:
            sizes = " or ".join(map(str, self.sizes))
            reasons.append(f"takes uniform blocks of {sizes}, visible as a whole")
        if blocks.group > 1:
            reasons.append(self.no_groups)
        return reasons


def refusals(contender: Kernel, workload: Workload, device: str) -> list[str]:
    """Every reason why `contender` cannot run `workload` on `device` ("cuda" or "cpu")."""
    case = workload.case
    reasons = []
    if case.level not in contender.levels:
        reasons.append(f"has no {case.level} masks")
    if device not in contender.devices:
        reasons.append(f"runs on {' and '.join(contender.devices)}, not on {device}")
    if case.dtype not in contender.dtypes:
        reasons.append(f"takes {', '.join(contender.dtypes)}, not {case.dtype}")
    return reasons or contender.supports(workload, device)


def import_error(module: str) -> str | None:
    """Why `module` cannot be imported, or None."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a binary package may fail in any way
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return None


def memory_refusal(needed: int, device: str) -> list[str]:
    """A reason if scores of `needed` bytes are more than half of the device's memory."""
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
    else:
        import os

        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed <= total // 2:
        return []
    return [f"the scores would take {needed / 2**30:.0f} GiB of {total / 2**30:.0f} GiB"]


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of `function` for Dynamo, which keeps what it compiled, for all backends, with a function's code."""
    assert isinstance(function, FunctionType)
    copy = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """torch.compile for static shapes, with code of its own for Dynamo to guard."""
    return torch.compile(with_own_code(function), dynamic=False, **options)
