"""`magi-bench plans`: what the host does before a kernel runs,
from a mask_mod to slices, from slices to tile plans, and from either to the plan of a rank."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from magi_bench import arguments, runner
from magi_bench.cases import Case
from magi_bench.clock import Ready
from magi_bench.contenders.base import Contender
from magi_bench.gate import Check
from magi_bench.results.rows import Row
from magi_bench.workloads.workload import Workload, build
from magi_compile import masks
from magi_compile.dtensor import HostPlan, plan
from magi_compile.dtensor.planning import rank_plan
from magi_compile.kernels.heuristics import PlanTiles
from magi_compile.plan.tiles import build_tile_plan

RANKS = 4
TILES = PlanTiles(q_tile_rows=128, q_block_cols=128, k_tile_rows=128, k_block_cols=64)
QUICK = {"tokens": [8192], "rounds": 2, "turn_ms": 5.0}


def to_slices(workload: Workload, device: str) -> masks.AttnSlices:
    """As an eager call does it: of any number."""
    return masks.slices_from_intervals(_intervals(workload, device))


def to_padded_slices(workload: Workload, device: str) -> masks.AttnSlices:
    """As a compiled graph does it: of a number that the shapes say."""
    capacity = workload.case.seqlen // 16 + 256
    return masks.padded_slices_from_intervals(_intervals(workload, device), capacity)[0]


def _intervals(workload: Workload, device: str) -> Any:
    program, tables, _ = masks.trace_mask_mod(workload.mask_mod)
    seqlen = workload.case.seqlen
    return masks.row_intervals(
        program, tables, batch=1, seqlen_q=seqlen, seqlen_k=seqlen, device=device
    )


class Conversion(Contender):
    """A mask_mod becomes slices."""

    is_alone = True

    def __init__(self, name: str, label: str, convert: Callable[[Workload, str], masks.AttnSlices]):
        self.name, self.label, self._convert = name, label, convert

    def prepare(self, problem: Workload, case: Case) -> Ready:
        device = problem.slices.q_ranges.device.type

        def call() -> Sequence[Tensor]:
            made = self._convert(problem, device)
            self._area = made.area()
            return made.lists

        return Ready(call)

    def check(self, problem: Workload, case: Case, results: Sequence[Tensor]) -> Check:
        error = abs(self._area / problem.slices.area() - 1)
        return Check(case.seqlen, {"area": error}, {"area": 1e-12})


class Tiles(Contender):
    """Slices become a plan of tiles."""

    is_alone = True

    def __init__(self, name: str, label: str, how: str):
        self.name, self.label, self._how = name, label, how
        self.devices = ("cuda",) if how in ("graph", "launch") else Contender.devices

    def prepare(self, problem: Workload, case: Case) -> Ready:
        slices = problem.slices

        def call() -> Sequence[Tensor]:
            if self._how == "launch":
                from magi_compile.kernels.sm90.planner.tile_plan import plan_on_device

                return [x for x in plan_on_device(slices, TILES) if isinstance(x, Tensor)]
            exact = self._how == "exact"
            return list(build_tile_plan(slices, **TILES._asdict(), exact=exact))

        facts = {"bytes": sum(x.nbytes for x in call())}
        if self._how != "graph":
            return Ready(call, facts=facts)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()

        def replay() -> Sequence[Tensor]:
            graph.replay()
            return []

        return Ready(replay, facts=facts)


class OfARank(Contender):
    """The plan of the first of `RANKS` ranks, of a mask that nobody has planned yet."""

    is_alone = True
    devices = ("cpu",)

    def __init__(self, name: str, label: str, *, by_mask_mod: bool):
        self.name, self.label, self._by_mask_mod = name, label, by_mask_mod

    def prepare(self, problem: Workload, case: Case) -> Ready:
        mask = problem.mask_mod if self._by_mask_mod else problem.slices
        seqlen = case.seqlen if self._by_mask_mod else None

        def call() -> Sequence[Tensor]:
            rank_plan.forget()
            made = plan(mask, ranks=(RANKS, 0), seqlen=seqlen)
            assert isinstance(made, HostPlan)
            self._slices = made.slices
            return []

        return Ready(call)

    def check(self, problem: Workload, case: Case, results: Sequence[Tensor]) -> Check:
        area = 0 if self._slices is None else self._slices.area()
        error = abs(area / problem.slices.area() - 1)
        return Check(case.seqlen, {"area": error}, {"area": 1e-12})


CONTENDERS: tuple[Contender, ...] = (
    Conversion("slices", "mask_mod to slices", to_slices),
    Conversion("padded-slices", "mask_mod to slices, padded", to_padded_slices),
    Tiles("tiles", "slices to tiles", "exact"),
    Tiles("padded-tiles", "slices to tiles, padded", "padded"),
    Tiles("graph-tiles", "slices to tiles, padded, CUDA graph", "graph"),
    Tiles("launch-tiles", "slices to tiles, one launch", "launch"),
    OfARank("rank", f"slices to the plan of one of {RANKS} ranks", by_mask_mod=False),
    OfARank("rank-of-mask-mod", f"mask_mod to the plan of one of {RANKS} ranks", by_mask_mod=True),
)


class Plans(runner.Suite):
    """Planning, without a kernel."""

    title = "Masks to slices, slices to tile plans"
    notes = (
        "Milliseconds of wall time: medians over rounds in which everything takes turns. Plans are of tiles of 128 by "
        "128 and 128 by 64."
    )
    everyone = CONTENDERS
    build = staticmethod(lru_cache(1)(build))

    def cases(self) -> Iterator[Case]:
        for tokens in self.settings.tokens:
            for mask in self.settings.masks:
                yield self.settings.case("plans", mask, tokens, which="plan")

    def problem(self, case: Case, contender: Contender) -> Workload:
        made = self.build(case, self.settings.device)
        return Workload(
            made.case, made.documents, made.mask_mod, made.slices.to(self.settings.device)
        )

    def place(self, case: Case) -> Row:
        return {"group": "Plans", "what": case.mask_label}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option of the command."""
    names = [x.name for x in CONTENDERS]
    parser.add_argument("--contenders", nargs="+", choices=names, metavar="NAME")
    parser.add_argument("--threads", type=arguments.count, default=1, help="of PyTorch")
    masks = ["document_causal", "block_diffusion"]
    places = ("tokens", "masks", "lengths", "device", "seed")
    wanted = (*places, "rounds", "turn_ms", "seconds", "quick", "out")
    arguments.add(parser, wanted, tokens=[8192, 131072, 1 << 20], masks=masks)
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Measures; 1 if a conversion was wrong."""
    torch.set_num_threads(args.threads)
    return runner.run_command(Plans(arguments.settings_of(args, QUICK)), args)
