"""Contenders on one case, from the check of their numbers to their times, as rows of results; run as a module, a
process for one contender or for several: JSON requests on stdin, a JSON line each on stdout.

python -m magi_bench.kernel.measure DEVICE GATE_SEQLEN NAME...
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from magi_bench import clock, contenders, gate
from magi_bench.cases import Case
from magi_bench.clock import Ready, Rounds, in_turns, wait
from magi_bench.contenders.base import Attend, Kernel, refusals
from magi_bench.gate import Call
from magi_bench.process import serve
from magi_bench.results import provenance
from magi_bench.results.rows import Row
from magi_bench.runner import failure
from magi_bench.workloads.workload import Inputs, Workload, build

Calls = dict[str, Callable[[], object]]


class Bench:
    """Contenders on a device; remembers which masks each has been found right about."""

    def __init__(self, contenders: Sequence[Kernel], device: str, gate_seqlen: int = 2048):
        self.contenders, self.device, self.gate_seqlen = contenders, device, gate_seqlen
        self._outcomes: dict[tuple[str, str], Row] = {}

    def gate(self, contender: Kernel, case: Case) -> Row:
        """`status` "ok", "wrong", "unsupported", "oom" or "error", with the errors found at a reduced length."""
        small = replace(case, seqlen=min(case.seqlen, self.gate_seqlen))
        key = contender.name, small.key
        if key not in self._outcomes:
            self._outcomes[key], _ = self._guarded(self._gate, contender, small)
        return self._outcomes[key]

    def time(self, case: Case, passes: Sequence[str], protocol: clock.Protocol) -> dict[str, Row]:
        """The fields of the rows of all contenders, timed by themselves or, in several rounds, in turns: `status`, and
        all that was measured if that is "ok"."""
        outcomes: dict[str, Row] = {}
        failed, _ = self._guarded(self._time, case, passes, protocol, outcomes)
        for contender in self.contenders if failed else ():
            found = outcomes.setdefault(contender.name, failed)
            if found["status"] == "ok":
                outcomes[contender.name] = failed
        for row in outcomes.values():
            if self.device == "cuda" and row["status"] == "ok":
                row["gpu_state"] = provenance.gpu_state()
        return outcomes

    def is_device_usable(self) -> bool:
        """True if CUDA still works in this process; after an illegal access it does not."""
        try:
            wait(self.device)
        except RuntimeError:
            return False
        return True

    def _guarded(self, step: Callable[..., tuple[Row, Any]], *arguments: Any) -> tuple[Row, Any]:
        try:
            return step(*arguments)
        except Exception as error:  # whatever a contender raises costs it this case only
            return failure(error), None
        finally:
            gc.collect()
            if self.device == "cuda":
                # To the other workers; a broken context is not this case's problem.
                with contextlib.suppress(RuntimeError):
                    torch.cuda.empty_cache()

    def _time(
        self, case: Case, passes: Sequence[str], protocol: clock.Protocol, outcomes: dict[str, Row]
    ) -> tuple[Row, None]:
        workload = build(case, self.device)
        inputs, ready = workload.inputs(self.device), {}
        for contender in self.contenders:
            outcome, prepared = self._guarded(self._prepare, contender, workload, inputs)
            outcomes[contender.name] = outcome
            if prepared is not None:
                ready[contender.name] = prepared
                outcome["passes"] = {}
        for which in passes:
            calls = {name: x[which] for name, x in ready.items() if which in x}
            for name, result in self._times(calls, protocol).items():
                result["tflops"] = workload.flops(which) / result["ms"] / 1e9
                outcomes[name]["passes"][which] = result
        return {}, None

    def _gate(self, contender: Kernel, case: Case) -> tuple[Row, None]:
        workload = build(case, self.device)
        reasons = refusals(contender, workload, self.device)
        if reasons:
            return {"status": "unsupported", "reason": "; ".join(reasons)}, None
        inputs = workload.inputs(self.device)
        _, run, first_s = self._prepare_and_run(contender, workload, inputs)
        check = gate.check(run, contender.layout, workload, inputs)
        wrong = {} if check.passed else {"status": "wrong", "reason": check.worst}
        return {"status": "ok", "gate": check.to_json(), "first_s": first_s} | wrong, None

    def _prepare(
        self, contender: Kernel, workload: Workload, inputs: Inputs
    ) -> tuple[Row, Calls | None]:
        """The passes of a contender that is right about the mask, ready to be timed; else what is the matter."""
        case = workload.case
        reasons = refusals(contender, workload, self.device)
        if reasons:
            return {"status": "unsupported", "reason": "; ".join(reasons)}, None
        outcome = self.gate(contender, case)
        if outcome["status"] != "ok":
            return outcome, None
        attend, call, first_s = self._prepare_and_run(contender, workload, inputs)
        leaves, dout, out, _ = call
        passes: Calls = {"fwd": lambda: attend(*leaves)}
        if contender.has_backward:
            # Gradients are returned, not accumulated: accumulation is no part of attention.
            passes["bwd"] = lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
            passes["fwdbwd"] = lambda: torch.autograd.grad(attend(*leaves), leaves, dout)
        began = time.perf_counter()
        contender.prepare(workload, inputs)  # what the next mask of the same shape costs
        wait(self.device)
        outcome = {
            **outcome,
            "area": workload.pairs // case.nheads_q,
            "density": workload.pairs / case.nheads_q / case.seqlen**2,
            "num_documents": len(workload.documents),
            "num_slices": len(workload.slices),
            "mask_hash": workload.mask_hash,
            "first_s": outcome["first_s"] + first_s,
            "plan_ms": (time.perf_counter() - began) * 1e3,
        }
        return outcome, passes

    def _prepare_and_run(
        self, contender: Kernel, workload: Workload, inputs: Inputs
    ) -> tuple[Attend, Call, float]:
        """Preparation and all passes once, and the seconds, compilation included."""
        begin = time.perf_counter()
        attend = contender.prepare(workload, inputs)
        call = gate.run(attend, contender, inputs)
        wait(self.device)
        return attend, call, time.perf_counter() - begin

    def _times(self, calls: Calls, protocol: clock.Protocol) -> dict[str, Row]:
        if protocol.rounds == 1:
            return {name: clock.measure(x, self.device, protocol) for name, x in calls.items()}

        def ready(call: Callable[[], object]) -> Ready:
            return Ready(list, turn_ms=lambda n: clock.of_turn(call, self.device, protocol, n))

        asked = Rounds(protocol.rounds, clock.MS_OF_A_TURN)
        turns = in_turns({name: ready(x) for name, x in calls.items()}, self.device, asked)
        return {name: clock.summary(x.times_ms) for name, x in turns.items()}


def start() -> Callable[[dict[str, Any]], tuple[Any, bool]]:
    """Answers for the contenders of the command line; a process that has lost its GPU is spent."""
    device, gate_seqlen, *names = sys.argv[1:]
    bench = Bench(list(map(contenders.load, names)), device, int(gate_seqlen))
    return lambda request: (_answer(bench, request), not bench.is_device_usable())


def _answer(bench: Bench, request: dict[str, Any]) -> dict[str, Any]:
    if request["op"] == "probe":
        reasons = {x.name: reason for x in bench.contenders if (reason := x.available())}
        bench.contenders = [x for x in bench.contenders if x.name not in reasons]
        gc.freeze()  # what has been imported stays; looking at it after every case would cost more than some cases
        versions = {k: v for x in bench.contenders for k, v in x.versions().items()}
        return {"reasons": reasons, "versions": versions}
    if request["op"] == "describe":
        record = provenance.describe(bench.device, request["command"])
        protocol = clock.Protocol(**request["protocol"])
        return record | {"matmul_tflops": clock.matmul_tflops(bench.device, protocol)}
    case = Case(**request["case"])
    if request["op"] == "gate":
        return {x.name: bench.gate(x, case) for x in bench.contenders}
    return bench.time(case, request["passes"], clock.Protocol(**request["protocol"]))


if __name__ == "__main__":
    serve(start)
