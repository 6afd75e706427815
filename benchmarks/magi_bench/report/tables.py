"""What a report says: rows sorted into groups of the same heads, and the tables made of them."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from magi_bench import contenders
from magi_bench.results.rows import Results
from magi_bench.workloads.cells import PASSES, Cell, format_length
from magi_bench.workloads.workload import MASKS

Row = dict[str, Any]

PASS_TITLES = {"fwd": "Forward", "bwd": "Backward", "fwdbwd": "Forward and backward"}
# How a cell without a number reads.
SHORT = {
    "unsupported": "-",
    "unavailable": "-",
    "oom": "OOM",
    "wrong": "wrong",
    "error": "error",
    "crash": "crash",
    "timeout": "timeout",
}


@dataclass
class Group:
    """Rows of one level, kind of documents, heads, head_dim and dtype on one device."""

    device: str
    level: str
    documents: str
    heads: str
    head_dim: str
    dtype: str
    rows: list[Row]

    @property
    def title(self) -> str:
        kind = f"Kernels, {self.documents}" if self.level == "kernel" else "Block-sparse kernels"
        return f"{kind}, heads {self.heads}, head_dim {self.head_dim}, {self.dtype}, {self.device}"

    @property
    def names(self) -> list[str]:
        """Contenders with a result, ours first, else in the order of the registry."""
        present = {row["contender"] for row in self.rows if row["status"] == "ok"}
        known = contenders.names()
        return sorted(present, key=lambda n: (not is_ours(n), known.index(n) if n in known else 99))

    @property
    def passes(self) -> list[str]:
        found = {which for row in self.rows for which in row.get("passes", ())}
        return [which for which in PASSES if which in found]

    @property
    def masks(self) -> list[str]:
        labels = {cell_of(row).mask_label: cell_of(row) for row in self.rows}
        return sorted(
            labels, key=lambda x: (MASKS.index(labels[x].mask), labels[x].block, labels[x].density)
        )

    @property
    def seqlens(self) -> list[int]:
        return sorted({row["cell"]["seqlen"] for row in self.rows})

    def at(self, mask: str, seqlen: int) -> dict[str, Row]:
        """The rows of a cell by contender."""
        return {
            row["contender"]: row
            for row in self.rows
            if cell_of(row).mask_label == mask and row["cell"]["seqlen"] == seqlen
        }


def cell_of(row: Row) -> Cell:
    return Cell.from_json(row["cell"])


def is_ours(name: str) -> bool:
    return name in contenders.names() and contenders.load(name).is_ours


def label(name: str) -> str:
    return contenders.load(name).label if name in contenders.names() else name


def groups(results: Results) -> list[Group]:
    """All rows, grouped, in the order of the file."""
    found: dict[tuple, Group] = {}
    for row in results.rows.values():
        cell = cell_of(row)
        device = results.runs[row["run"]]["device"]
        documents = "longca" if cell.lengths == "blocks" else cell.lengths  # of one preset
        key = (device, cell.level, documents, cell.heads, cell.head_dims_label, cell.dtype)
        found.setdefault(key, Group(*key, rows=[])).rows.append(row)
    return [group for group in found.values() if group.names]


def tflops(row: Row | None, which: str) -> float | None:
    if row is None or row["status"] != "ok" or which not in row["passes"]:
        return None
    return row["passes"][which]["tflops"]


def unit(group: Group) -> tuple[str, float]:
    """TFLOP/s, or GFLOP/s where that is all there is, and its size in TFLOP/s."""
    best = max(
        (x["tflops"] for row in group.rows for x in row.get("passes", {}).values()), default=0.0
    )
    return ("TFLOP/s", 1.0) if best >= 10 else ("GFLOP/s", 1e-3)


def number(value: float) -> str:
    """A speed in a group's unit: whole numbers from 10 on, one decimal below."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def speed_table(group: Group, which: str) -> tuple[list[str], list[list[str]]]:
    """Header and lines: a mask and length each, all contenders, and ours against the best of the others."""
    names, (_, size) = group.names, unit(group)
    has_ratio = any(map(is_ours, names)) and not all(map(is_ours, names))
    header = ["mask", "tokens", *map(label, names)] + ["ours / best other"] * has_ratio
    lines = []
    for mask in group.masks:
        for seqlen in group.seqlens:
            rows = group.at(mask, seqlen)
            if not rows:
                continue
            line = [mask, format_length(seqlen)]
            line += [_speed(rows.get(name), which, size) for name in names]
            if has_ratio:
                ratio = ratio_to_best(rows, which)
                line.append(f"{ratio:.2f}" if ratio else "-")
            lines.append(line)
    return header, lines


def _speed(row: Row | None, which: str, size: float) -> str:
    if row is None:
        return "not run"
    value = tflops(row, which)
    return SHORT.get(row["status"], "-") if value is None else number(value / size)


def best(rows: dict[str, Row], which: str, ours: bool) -> tuple[str, float] | None:
    """The fastest contender of a cell among ours or the others."""
    speeds = {
        name: speed
        for name, row in rows.items()
        if is_ours(name) == ours and (speed := tflops(row, which)) is not None
    }
    return max(speeds.items(), key=lambda item: item[1]) if speeds else None


def ratio_to_best(rows: dict[str, Row], which: str) -> float | None:
    """Our fastest over their fastest."""
    ours, other = best(rows, which, True), best(rows, which, False)
    return ours[1] / other[1] if ours and other else None


def ratios(group: Group, which: str) -> list[float]:
    """`ratio_to_best` of all cells that have one."""
    found = (ratio_to_best(group.at(m, s), which) for m in group.masks for s in group.seqlens)
    return [ratio for ratio in found if ratio]


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def heat_map(group: Group, which: str) -> dict[str, dict[str, float]]:
    """By contender and mask: the share of the cell's fastest speed, as a geometric mean over the lengths."""
    shares: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for mask in group.masks:
        for seqlen in group.seqlens:
            rows = group.at(mask, seqlen)
            speeds = {name: s for name, row in rows.items() if (s := tflops(row, which))}
            for name, speed in speeds.items():
                shares[name][mask].append(speed / max(speeds.values()))
    return {
        name: {mask: geometric_mean(found) for mask, found in by_mask.items()}
        for name, by_mask in shares.items()
    }


def cost_table(group: Group) -> tuple[list[str], list[list[str]]]:
    """Medians over all cells of what speed does not show, and the worst error that the gate found."""
    header = ["contender", "plan ms", "first s", "host us", "noise", "worst error / allowed"]
    lines = []
    for name in group.names:
        rows = [r for r in group.rows if r["contender"] == name and r["status"] == "ok"]
        hosts = [x["host_ms"] for r in rows for x in r["passes"].values() if "host_ms" in x]
        noise = [(x["p80_ms"] - x["p20_ms"]) / x["ms"] for r in rows for x in r["passes"].values()]
        errors = [
            error / r["gate"]["allowed"][key]
            for r in rows
            for key, error in r["gate"]["errors"].items()
        ]
        lines.append(
            [
                label(name),
                f"{statistics.median(r['plan_ms'] for r in rows):.2f}",
                f"{statistics.median(r['first_s'] for r in rows):.2f}",
                f"{1e3 * statistics.median(hosts):.0f}" if hosts else "-",
                f"{statistics.median(noise):.1%}",
                f"{max(errors):.2f}",
            ]
        )
    return header, lines


def absent(results: Results) -> list[tuple[str, str, str, int]]:
    """Why there is no number: contender, status, reason, cells."""
    counts = Counter(
        (label(row["contender"]), row["status"], row["reason"])
        for row in results.rows.values()
        if row["status"] != "ok"
    )
    counts.update(
        (label(key.rsplit("/", 1)[1]), "not run", "time limit") for key in results.not_run
    )
    return [(*key, count) for key, count in sorted(counts.items())]


def facts(results: Results) -> list[tuple[str, str]]:
    """What the runs have in common: machine, software and protocol; where they differ, all of it."""
    runs = list(_runs_with_rows(results).values())
    software: dict[str, list[Any]] = defaultdict(list)
    for run in runs:
        for name in ("torch", "python", "cuda", "cudnn", "driver"):
            software[name].append(run.get(name))
        for name, version in run.get("versions", {}).items():
            software[name].append(version)
    versions = {name: _distinct(found) for name, found in software.items()}
    flushed = {run.get("protocol", {}).get("flush_bytes", 0) // 2**20 for run in runs}
    caches = (
        f"{n} MiB written between calls" if n else "as the last call left them" for n in flushed
    )
    found = {
        "device": _distinct(run["device"] for run in runs),
        "software": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "power limit": _distinct(run.get("power_limit") for run in runs),
        "max SM clock": _distinct(run.get("max_sm_clock") for run in runs),
        "timing": "; ".join(dict.fromkeys(map(_timing, runs))),
        "caches": " or ".join(caches),
        "checked": "against fp64 at up to "
        f"{_distinct(run.get('gate_seqlen') for run in runs)} tokens",
    }
    return [(name, value) for name, value in found.items() if value]


def run_table(results: Results) -> tuple[list[str], list[list[str]]]:
    """Header and lines: when and how each run was started, from which sources, and what a large matmul reached then."""
    measured = Counter(row["run"] for row in results.ok_rows())
    fields = ("date", "commit", "source", "card")
    header = [*fields, "measured", "matmul, TFLOP/s", "command"]
    lines = []
    for name, run in sorted(_runs_with_rows(results).items(), key=lambda x: x[1].get("date", "")):
        line = [str(run.get(field, "-")) for field in fields]
        matmul = f"{run['matmul_tflops']:.3g}" if "matmul_tflops" in run else "-"
        lines.append([*line, str(measured[name]), matmul, run.get("command", "-")])
    return header, lines


def _runs_with_rows(results: Results) -> dict[str, dict[str, Any]]:
    present = {row["run"] for row in results.rows.values()}
    return {name: run for name, run in results.runs.items() if name in present}


def _timing(run: dict[str, Any]) -> str:
    protocol = run.get("protocol", {})
    if protocol.get("interleaved"):
        return f"median of {protocol['rounds']} rounds, contenders interleaved in one process"
    return (
        f"median of {protocol.get('min_reps')} to {protocol.get('max_reps')} calls within about "
        f"{protocol.get('budget_ms'):g} ms"
    )


def _distinct(values: Iterable[Any]) -> str:
    return " or ".join(dict.fromkeys(str(value) for value in values if value is not None))


def roofline(group: Group, results: Results) -> float | None:
    """TFLOP/s of a large matmul: the most that any run of the group saw. Later runs find a warmer card."""
    runs = (results.runs[row["run"]] for row in group.rows)
    return max((run["matmul_tflops"] for run in runs if "matmul_tflops" in run), default=None)
