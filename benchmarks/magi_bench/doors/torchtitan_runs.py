"""Rows of torchtitan: its trainer in processes of its own, and what its metrics say."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from magi_bench import clock
from magi_bench.arguments import Settings
from magi_bench.cases import format_length
from magi_bench.contenders.base import import_error
from magi_bench.results.rows import Row
from magi_bench.runner import compare

ATTENTIONS = ("magi", "flex", "varlen")
RANKS = (1, 2, 4)
# torchtitan waits for the GPU where it logs, so it does not log each step; the last lines count.
STEPS, LOG_EVERY, COUNTED = 30, 5, 4
SECONDS = 600  # of a run at most


@dataclass(frozen=True)
class Run:
    """The arguments of the processes of a run."""

    attention: str  # "magi", or what torchtitan calls an `attn_backend`
    ranks: int  # of context parallelism
    tokens: int  # of a rank
    layers: int  # of the model
    lengths: str  # how documents are drawn
    seed: int  # of the weights
    flavor: str = "8B"  # torchtitan's name of the model
    steps: int = STEPS  # how many
    log_every: int = LOG_EVERY  # steps of a line of torchtitan's log, behind the first step's
    cuda_graphs: bool = False  # whether torchtitan may record them. It does not with varlen


def rows(
    settings: Settings, left_s: Callable[[], float], say: Callable[[str], None]
) -> Iterator[tuple[Run, Row]]:
    """The outcome of each length, number of ranks and attention."""
    missing = unavailable(settings.device)
    for tokens, ranks in itertools.product(settings.tokens, settings.cp_degrees):
        made = []
        for attention in ATTENTIONS:
            sizes = (ranks, tokens, settings.train_layers, settings.lengths, settings.seed)
            graphs = records_graphs(attention, ranks)
            run = Run(attention, *sizes, cuda_graphs=graphs)
            status, reason = "unsupported", ""
            if missing is not None:
                status, reason = "unavailable", missing
            elif ranks > torch.cuda.device_count():
                reason = f"needs {ranks} GPUs, found {torch.cuda.device_count()}"
            elif attention == "varlen" and ranks > 1:
                reason = "torchtitan 0.3 has no context parallelism for varlen"
            elif left_s() <= 0:
                status, reason = "timeout", f"not begun: no time left of {settings.seconds:g} s"
            outcome: Row = {"status": status, "reason": reason}
            if not reason:
                outcome = train(run, min(left_s(), SECONDS))
            label = attention + (", CUDA graphs" if graphs else "")
            who = {"label": label, "is_ours": attention == "magi", "cuda_graphs": graphs}
            made.append((run, who | outcome))
            if missing is None:
                times = outcome.get("passes", {}).get("fwdbwd", {})
                said = times.get("tokens_per_s", outcome["status"])
                say(f"torchtitan {format_length(tokens)}, {ranks} ranks, {attention}: {said}")
        compare([row for _, row in made])
        yield from made


def records_graphs(attention: str, ranks: int) -> bool:
    """True if a step can be a CUDA graph: varlen has none in torchtitan,
    and our context parallelism plans on the host."""
    return attention == "flex" or (attention == "magi" and ranks == 1)


def unavailable(device: str) -> str | None:
    """Why torchtitan cannot train here, or None."""
    try:
        importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        return 'torchtitan is not installed: pip install ".[torchtitan]" in a clone of magi_compile'
    if device == "cpu":
        return "torchtitan trains on accelerators, not on a CPU"
    return import_error("magi_compile.integrations.torchtitan")


def train(
    run: Run, seconds: float, module: Sequence[str] = ("-m", "magi_bench.doors.torchtitan")
) -> Row:
    """Trains in `run.ranks` processes; the outcome of the row."""
    with tempfile.TemporaryDirectory() as folder:
        told, result = Path(folder, "run.json"), Path(folder, "result.json")
        told.write_text(json.dumps(asdict(run)))
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={run.ranks}"]
        command = [sys.executable, "-m", *launcher, *module, str(told), str(result)]
        process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            said = process.communicate(timeout=seconds)[1]
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher then ends its ranks
            process.communicate()
            return {"status": "timeout", "reason": f"no end after {seconds:.0f} s"}
        if not result.exists():
            return failure_in(said)
        return summary(json.loads(result.read_text()))


def failure_in(text: str) -> Row:
    """The outcome of a run that ended without a result: the last exception that its output names,
    but for torchrun's own."""
    raised = [
        line.split("]: ", 1)[-1].strip()
        for line in text.splitlines()
        if "Error: " in line and "ChildFailedError" not in line
    ]
    reason = (raised or ["it ended without a result"])[-1][:300]
    if reason.startswith("NotImplementedError"):
        return {"status": "unsupported", "reason": reason}
    is_oom = "OutOfMemoryError" in reason
    return {"status": "oom" if is_oom else "error", "reason": reason}


def summary(steps: Sequence[dict[str, float]]) -> Row:
    """Medians of the last lines of the log; `tokens_per_s` and memory are of a rank."""
    last = steps[-COUNTED:]

    def median(name: str) -> float:
        return statistics.median(step[name] for step in last)

    seconds = [step["time_metrics/end_to_end(s)"] for step in last]
    times = {
        **clock.summary([1e3 * x for x in seconds]),
        "tokens_per_s": median("throughput(tps)"),
        "mfu": median("mfu(%)") / 100,
        "peak_bytes": int(median("memory/max_active(GiB)") * 2**30),
        "recompiles": int(last[-1]["graphs"] - steps[0]["graphs"]),
    }
    return {
        "status": "ok",
        "passes": {"fwdbwd": times},
        "loss": last[-1]["loss_metrics/global_avg_loss"],
        "graphs": int(steps[0]["graphs"]),
        "breaks": int(last[-1]["breaks"]),
    }
