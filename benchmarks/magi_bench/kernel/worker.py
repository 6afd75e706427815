"""A process for one contender, or for several: JSON requests on stdin, a JSON line each on stdout.

python -m magi_bench.kernel.worker DEVICE GATE_SEQLEN NAME...
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

from magi_bench import contenders
from magi_bench.cases import Case
from magi_bench.kernel.measure import Bench
from magi_bench.process import serve
from magi_bench.results import provenance
from magi_bench.timing import Protocol, matmul_tflops


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
        protocol = Protocol(**request["protocol"])
        return record | {"matmul_tflops": matmul_tflops(bench.device, protocol)}
    case = Case.from_json(request["case"])
    if request["op"] == "gate":
        return {x.name: bench.gate(x, case) for x in bench.contenders}
    return bench.time(case, request["passes"], Protocol(**request["protocol"]))


if __name__ == "__main__":
    serve(start)
