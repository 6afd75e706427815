"""One contender on one case, from the check of its numbers to its times, as a row of results."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from magi_bench import gate, timing
from magi_bench.cases import Case
from magi_bench.contenders.base import Attend, Kernel, refusals
from magi_bench.gate import Call
from magi_bench.runner import failure
from magi_bench.workloads.workload import Inputs, Workload, build


class Prepared(NamedTuple):
    """A contender that is right about a case, and has run it once.

    Attributes:
        outcome: the fields of its row, without times.
        passes: what runs each of its passes, by name.
    """

    outcome: dict[str, Any]
    passes: dict[str, Callable[[], object]]


class Bench:
    """A contender on a device; remembers which masks it has been found right about."""

    def __init__(self, contender: Kernel, device: str, gate_seqlen: int = 2048):
        self.contender, self.device, self.gate_seqlen = contender, device, gate_seqlen
        self._outcomes: dict[str, dict[str, Any]] = {}

    def gate(self, case: Case) -> dict[str, Any]:
        """`status` "ok", "wrong", "unsupported", "oom" or "error", with the errors found at a reduced length."""
        small = case.at(min(case.seqlen, self.gate_seqlen))
        if small.key not in self._outcomes:
            self._outcomes[small.key] = self._guarded(lambda: self._gate(small))
        return self._outcomes[small.key]

    def time(
        self, case: Case, passes: tuple[str, ...], protocol: timing.Protocol
    ) -> dict[str, Any]:
        """The fields of a row: `status`, and all that was measured if that is "ok"."""
        return self._guarded(lambda: self._time(case, passes, protocol))

    def is_device_usable(self) -> bool:
        """True if CUDA still works in this process; after an illegal access it does not."""
        try:
            self._wait()
        except RuntimeError:
            return False
        return True

    def _guarded(self, step: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return step()
        except Exception as error:  # whatever a contender raises costs it this case only
            return failure(error)
        finally:
            self._give_memory_back()

    def _gate(self, case: Case) -> dict[str, Any]:
        workload = build(case, self.device)
        reasons = refusals(self.contender, workload, self.device)
        if reasons:
            return {"status": "unsupported", "reason": "; ".join(reasons)}
        inputs = workload.inputs(self.device)
        _, run, first_s = self._prepare_and_run(workload, inputs)
        check = gate.check(run, self.contender.layout, workload, inputs)
        outcome: dict[str, Any] = {"status": "ok", "gate": check.to_json(), "first_s": first_s}
        if not check.passed:
            outcome["status"], outcome["reason"] = "wrong", check.worst
        return outcome

    def _time(
        self, case: Case, passes: tuple[str, ...], protocol: timing.Protocol
    ) -> dict[str, Any]:
        workload = build(case, self.device)
        prepared = self._prepare(case, workload, workload.inputs(self.device))
        if not isinstance(prepared, Prepared):
            return prepared
        return {**prepared.outcome, "passes": self._passes(workload, prepared, passes, protocol)}

    def prepare(self, case: Case, workload: Workload, inputs: Inputs) -> Prepared | dict[str, Any]:
        """The passes of a contender that is right about the mask, ready to be timed; else what is the matter."""
        made: list[Prepared] = []

        def step() -> dict[str, Any]:
            prepared = self._prepare(case, workload, inputs)
            if not isinstance(prepared, Prepared):
                return prepared
            made.append(prepared)
            return prepared.outcome

        outcome = self._guarded(step)
        return made[0] if made else outcome

    def _prepare(self, case: Case, workload: Workload, inputs: Inputs) -> Prepared | dict[str, Any]:
        reasons = refusals(self.contender, workload, self.device)
        if reasons:
            return {"status": "unsupported", "reason": "; ".join(reasons)}
        outcome = self.gate(case)
        if outcome["status"] != "ok":
            return outcome
        attend, call, first_s = self._prepare_and_run(workload, inputs)
        leaves, dout, out, _ = call
        passes: dict[str, Callable[[], object]] = {"fwd": lambda: attend(*leaves)}
        if self.contender.has_backward:
            # Gradients are returned, not accumulated: accumulation is no part of attention.
            passes["bwd"] = lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
            passes["fwdbwd"] = lambda: torch.autograd.grad(attend(*leaves), leaves, dout)
        outcome = {
            **outcome,
            "area": workload.pairs // case.nheads_q,
            "density": workload.pairs / case.nheads_q / case.seqlen**2,
            "num_documents": len(workload.documents),
            "num_slices": len(workload.slices),
            "mask_hash": workload.mask_hash,
            "first_s": outcome["first_s"] + first_s,
            "plan_ms": self._plan_ms(workload, inputs),
        }
        return Prepared(outcome, passes)

    def _prepare_and_run(self, workload: Workload, inputs: Inputs) -> tuple[Attend, Call, float]:
        """Preparation and all passes once, and the seconds, compilation included."""
        begin = time.perf_counter()
        attend = self.contender.prepare(workload, inputs)
        call = gate.run(attend, self.contender, inputs)
        self._wait()
        return attend, call, time.perf_counter() - begin

    def _plan_ms(self, workload: Workload, inputs: Inputs) -> float:
        """Preparation again: what the next mask of the same shape costs."""
        self._wait()
        begin = time.perf_counter()
        self.contender.prepare(workload, inputs)
        self._wait()
        return (time.perf_counter() - begin) * 1e3

    def _passes(
        self,
        workload: Workload,
        prepared: Prepared,
        passes: tuple[str, ...],
        protocol: timing.Protocol,
    ) -> dict[str, dict[str, Any]]:
        measured = {}
        for which in passes:
            if which in prepared.passes:
                result = timing.measure(prepared.passes[which], self.device, protocol)
                result["tflops"] = workload.flops(which) / result["ms"] / 1e9
                measured[which] = result
        return measured

    def _give_memory_back(self) -> None:
        """To the other workers; a broken context is not this case's problem."""
        gc.collect()
        if self.device == "cuda":
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
