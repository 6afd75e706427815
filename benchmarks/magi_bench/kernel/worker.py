"""A process for one contender: JSON requests on stdin, a JSON line each on stdout. A crash costs one case.

python -m magi_bench.kernel.worker NAME DEVICE GATE_SEQLEN
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


def main() -> None:
    def start() -> Callable[[dict[str, Any]], tuple[Any, bool]]:
        name, device, gate_seqlen = sys.argv[1:]
        bench = Bench(contenders.load(name), device, int(gate_seqlen))
        return lambda request: (_answer(bench, request), not bench.is_device_usable())

    serve(start)


def _answer(bench: Bench, request: dict[str, Any]) -> dict[str, Any]:
    contender = bench.contender
    if request["op"] == "probe":
        reason = contender.available()
        gc.freeze()  # what has been imported stays; looking at it after every case would cost more than some cases
        return {"reason": reason, "versions": {} if reason else contender.versions()}
    if request["op"] == "describe":
        record = provenance.describe(bench.device, request["command"])
        protocol = Protocol(**request["protocol"])
        return record | {"matmul_tflops": matmul_tflops(bench.device, protocol)}
    case = Case.from_json(request["case"])
    if request["op"] == "gate":
        return bench.gate(case)
    row = bench.time(case, tuple(request["passes"]), Protocol(**request["protocol"]))
    if bench.device == "cuda" and row["status"] == "ok":
        row["gpu_state"] = provenance.gpu_state()
    return row


if __name__ == "__main__":
    main()
