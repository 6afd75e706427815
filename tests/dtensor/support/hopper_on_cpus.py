"""A rank on a CPU that thinks it has a Hopper GPU: its host does what it does there, and no kernel runs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

from magi_compile import _compat
from magi_compile.dtensor.transport.collectives import COLLECTIVES
from magi_compile.kernels.heuristics import plan_tiles
from magi_compile.kernels.select import KERNELS
from magi_compile.kernels.sm90.forward import overlap, split_kv
from magi_compile.kernels.sm90.kernel import HopperKernel
from magi_compile.kernels.sm90.planner import tile_plan
from tests.dtensor.support import on_cpus
from tests.kernels.support import idle_driver

KERNEL = "idle_hopper"
# How a CPU differs from a GPU: ranks are compared in each call, and freed memory does not come back at once.
OF_CPUS = {"_exchange", "_compare", "Launch._put_maps.<locals>.<genexpr>"}
TESTS = "/tests/"


class IdleHopper(HopperKernel):
    """Plans slices of a CPU as those of a GPU; of fakes, as ever."""

    name = KERNEL

    def refusals(self, problem):
        return []

    def plan(self, slices, problem):
        if _compat.is_fake(slices.q_ranges):
            return super().plan(slices, problem)
        plan = tile_plan.plan_on_device(slices, plan_tiles(problem), problem)
        plan.packed[0].zero_()  # no kernel has written to it
        return plan


@contextmanager
def idle_hopper(
    load_function: Callable[..., Any] = lambda variant, device: None,
) -> Iterator[None]:
    """Inside, the kernel `KERNEL` and the collective "emulated" work, and every GPU operation is done at once."""
    with pytest.MonkeyPatch.context() as patch, on_cpus.emulation():
        idle_driver.fake_hopper(
            patch,
            num_sms=132,
            load_function=load_function,
            launch=lambda *_: None,
            encode=lambda tensor_map, address: idle_driver.address_map(address),
        )
        # As of a GPU, where tiles may be cut in splits.
        sizes, gpu = split_kv._size, torch.device("cuda")
        for module, name in ((split_kv, "_size"), (tile_plan, "size_of_splits")):
            patch.setattr(module, name, lambda *of_plan: sizes(*of_plan[:-1], device=gpu))
        patch.setattr(overlap, "_stream", lambda device: on_cpus.Stream())
        patch.setattr(_compat, "on_stream", lambda stream: nullcontext())
        patch.setitem(KERNELS, KERNEL, f"{__name__}:IdleHopper")
        patch.setitem(COLLECTIVES, "emulated", f"{on_cpus.__name__}:Emulated")
        yield
    idle_driver.clear_caches()


class Calls:
    """The Python functions that are called inside, but for those that tensors on CPUs alone need."""

    def __init__(self) -> None:
        self.counts: Counter[CodeType] = Counter()
        self._outside = 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _seen(self, frame: FrameType, event: str, _: Any) -> None:
        is_of_cpus = frame.f_code.co_qualname in OF_CPUS
        if event == "return":
            self._outside -= is_of_cpus
        elif event == "call":
            self._outside += is_of_cpus
            if not self._outside and TESTS not in frame.f_code.co_filename:
                self.counts[frame.f_code] += 1

    def __len__(self) -> int:
        return self.counts.total()

    def lines(self) -> list[str]:
        """The functions, most often called ones first."""
        return [
            f"{number:4d} {code.co_filename.rpartition('/magi_compile/')[2]}:{code.co_qualname}"
            for code, number in self.counts.most_common()
        ]
