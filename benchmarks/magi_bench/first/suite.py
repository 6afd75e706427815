"""`magi-bench first`: seconds of the first forward and the first backward of a compiled FlexAttention, ours beside
Inductor's, each in a process of its own with empty caches."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator

from magi_bench import arguments
from magi_bench.arguments import say
from magi_bench.process import Process, WorkerLost
from magi_bench.results import provenance
from magi_bench.results.rows import Row

CONTENDERS = ("magi", "flex")
CASES = ("causal", "documents", "alibi")
QUICK = {"tokens": 512, "heads": "2:1", "head_dim": 64, "runs": 1, "cases": ["causal"]}
LIMIT_S = 600.0  # of a process
#: Environment variables that say where caches are.
CACHES = (
    "MAGI_COMPILE_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "CUDA_CACHE_PATH",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option of the command."""
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--runs", type=arguments.count, default=3, help="processes of each")
    parser.add_argument(
        "--imports", action="store_true", help="import Dynamo and Inductor before the first call"
    )
    parser.add_argument("--tokens", type=arguments.length, default=8192)
    arguments.add(parser, ("heads", "head_dim", "device", "quick", "out"))
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Measures; 1 if a process failed."""
    device = arguments.device_of(args.device)
    if args.quick:
        vars(args).update(QUICK)
    rows = []
    for case in args.cases:
        for row in _rows(args, case, device):
            say(_line(row))
            rows.append(row)
    if args.out:
        typed = arguments.as_typed(args.command_line, args.out)
        record = {"record": "run", **provenance.describe(device, typed)}
        lines = "".join(json.dumps(x) + "\n" for x in (record, *rows))
        args.out.with_suffix(".jsonl").write_text(lines)
    return any("error" in row for row in rows)


def _rows(args: argparse.Namespace, case: str, device: str) -> Iterator[Row]:
    """The rows of a case: contenders take turns, the first one in every other run is another one."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in args.contenders}
    errors: dict[str, str] = {}
    for number in range(args.runs):
        for name in args.contenders[:: -1 if number % 2 else 1]:
            request = {
                "contender": name,
                "case": case,
                "tokens": args.tokens,
                "heads": [int(x) for x in args.heads.split(":")],
                "head_dim": args.head_dim,
                "device": device,
                "imports": args.imports,
            }
            try:
                found[name].append(_with_empty_caches(request))
            except WorkerLost as lost:
                errors[name] = str(lost)
    for name, runs in found.items():
        steps = {x: [seconds[x] for seconds in runs] for x in (runs[0] if runs else ())}
        medians = {x: round(statistics.median(values), 3) for x, values in steps.items()}
        row: Row = {
            "record": "row",
            "case": case,
            "contender": name,
            "seconds": medians,
            "runs": steps,
        }
        yield row | ({"error": errors[name]} if name in errors else {})


def _with_empty_caches(request: dict[str, object]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        places = {name: os.path.join(folder, name.lower()) for name in CACHES}
        worker = Process(["-m", "magi_bench.first.worker"], {**os.environ, **places})
        try:
            return worker.ask(request, LIMIT_S)
        finally:
            worker.stop()


def _line(row: Row) -> str:
    steps = ", ".join(f"{name} {seconds:.2f}" for name, seconds in row["seconds"].items())
    return f"{row['case']:10} {row['contender']:5} {steps or row.get('error')}"
