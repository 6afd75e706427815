"""The tables of a report: rows sorted into groups of the same heads, and the tables made of them."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from magi_bench import contenders
from magi_bench.cases import PASSES, Case, format_length
from magi_bench.results.rows import Results
from magi_bench.workloads.workload import MASKS

Row = dict[str, Any]

PASS_TITLES = {"fwd": "Forward", "bwd": "Backward", "fwdbwd": "Forward and backward"}
# How a case without a number reads.
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
        labels = {case_of(row).mask_label: case_of(row) for row in self.rows}
        return sorted(
            labels, key=lambda x: (MASKS.index(labels[x].mask), labels[x].block, labels[x].density)
        )

    @property
    def seqlens(self) -> list[int]:
        return sorted({row["case"]["seqlen"] for row in self.rows})

    def at(self, mask: str, seqlen: int) -> dict[str, Row]:
        """The rows of a case by contender."""
        found: dict[str, Row] = {}
        for row in self.rows:
            if case_of(row).mask_label == mask and row["case"]["seqlen"] == seqlen:
                passes = found.get(row["contender"], row).get("passes", {}) | row.get("passes", {})
                found[row["contender"]] = {**row, **({"passes": passes} if passes else {})}
        return found


def case_of(row: Row) -> Case:
    return Case.from_json(row["case"])


def is_ours(name: str) -> bool:
    return name in contenders.names() and contenders.load(name).is_ours


def label(name: str) -> str:
    return contenders.load(name).label if name in contenders.names() else name


def label_of(row: Row) -> str:
    """The label of the contender, as the row has it or, in files of before, as it is called today."""
    return row["label"] if "label" in row else label(row["contender"])


def is_of_kernels(row: Row) -> bool:
    """True if a row is of `kernel` or `sparse`, which have tables and charts of their own; others have `sections`."""
    return row["case"]["level"] in ("kernel", "sparse")


def groups(results: Results, every: bool = False) -> list[Group]:
    """The rows of kernels, or `every` row, grouped, in the order of the file."""
    found: dict[tuple, Group] = {}
    for row in results.rows.values():
        if not (every or is_of_kernels(row)):
            continue
        case = case_of(row)
        device = results.runs[row["run"]]["device"]
        documents = "longca" if case.lengths == "blocks" else case.lengths  # of one preset
        key = (device, case.level, documents, case.heads, case.head_dims_label, case.dtype)
        found.setdefault(key, Group(*key, rows=[])).rows.append(row)
    return [group for group in found.values() if group.names]


def tflops(row: Row | None, which: str) -> float | None:
    if row is None or row["status"] != "ok":
        return None
    return row["passes"].get(which, {}).get("tflops")


def unit(group: Group) -> tuple[str, float]:
    """TFLOP/s, or GFLOP/s where that is all there is, and its size in TFLOP/s."""
    best = max(
        (x.get("tflops", 0.0) for row in group.rows for x in row.get("passes", {}).values()),
        default=0.0,
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
    """The fastest contender of a case among ours or the others."""
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
    """`ratio_to_best` of all cases that have one."""
    found = (ratio_to_best(group.at(m, s), which) for m in group.masks for s in group.seqlens)
    return [ratio for ratio in found if ratio]


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def heat_map(group: Group, which: str) -> dict[str, dict[str, float]]:
    """By contender and mask: the share of the case's fastest speed, as a geometric mean over the lengths."""
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
    """Medians over all cases of what speed does not show, and the worst error that the gate found."""
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


class Section(NamedTuple):
    """A table of what is no kernel's."""

    title: str
    header: list[str]
    lines: list[list[str]]


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:,.1f}"


#: What a row may have beside its time, by field, of a pass or of the row: the title of its column, and how it is
#: written.
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "layer_ms": ("ms a layer", "{:.3f}".format),
    "ratio": ("ratio", "{:.3f}".format),
    "tflops": ("TFLOP/s", "{:.3g}".format),
    "tokens_per_s": ("tokens/s", "{:,.0f}".format),
    "mfu": ("MFU", "{:.1%}".format),
    "kernel_ms": ("on the GPU, ms", "{:.3f}".format),
    "kernels": ("kernels", "{:g}".format),
    "launches": ("launches", "{:g}".format),
    "exposed_ms": ("exposed, ms", "{:.3f}".format),
    "received_bytes": ("received, MiB", _mebibytes),
    "peak_bytes": ("peak, MiB", _mebibytes),
    "bytes": ("MiB", _mebibytes),
    "prepare_s": ("prepared, s", "{:.3f}".format),
    "first_s": ("first call, s", "{:.2f}".format),
    "graphs": ("graphs", str),
    "breaks": ("breaks", str),
    "recompiles": ("recompiled", str),
    "way": ("way", str),
}


def sections(results: Results) -> list[Section]:
    """A table for each heading: a line for each case and contender; and what becomes of every mod."""
    found: dict[tuple[str, ...], list[Row]] = {}
    devices = {run["device"] for run in results.runs.values()}
    for row in results.rows.values():
        if not is_of_kernels(row):
            device = results.runs[row["run"]]["device"]
            key = (row.get("group", row["case"]["level"]), *((device,) if len(devices) > 1 else ()))
            found.setdefault(key, []).append(row)
    made = [Section(", ".join(key), *_section(rows)) for key, rows in found.items()]
    return made + coverage(row for row in results.rows.values() if "about" in row)


def _section(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    called = list(dict.fromkeys(what_of(row) for row in rows))

    def order(row: Row) -> tuple[Any, ...]:
        case = case_of(row)
        return called.index(what_of(row)), case.layers, case.ranks, case.which, case.seqlen

    header, facts = ["what", "tokens"], []
    for name in ("heads", "head_dims_label", "layers", "ranks", "which"):
        if len({getattr(case_of(row), name) for row in rows}) > 1:
            facts.append(name)
            header.append({"head_dims_label": "head_dim", "which": "pass"}.get(name, name))
    fields = [name for name in COLUMNS if any(_field(row, name) is not None for row in rows)]
    header += ["contender", "ms", *(COLUMNS[name][0] for name in fields)]
    lines = []
    for row in sorted(rows, key=order):
        case = case_of(row)
        line = [what_of(row), format_length(case.seqlen)]
        line += [str(getattr(case, name)) for name in facts]
        line += [label_of(row), _milliseconds(row)]
        values = ((COLUMNS[name][1], _field(row, name)) for name in fields)
        lines.append([*line, *("-" if x is None else written(x) for written, x in values)])
    return header, lines


def what_of(row: Row) -> str:
    """The call that a row measures, in words."""
    return str(row.get("what", case_of(row).mask_label))


def _field(row: Row, name: str) -> Any:
    return next(iter(row.get("passes", {"": {}}).values())).get(name, row.get(name))


def _milliseconds(row: Row) -> str:
    """The milliseconds of a call, or why there are none."""
    if "passes" not in row:
        return str(row["status"])
    (times,) = row["passes"].values()
    return f"{times['ms']:.3f}" if times["ms"] < 100 else f"{times['ms']:.1f}"


def coverage(rows: Iterable[Row]) -> list[Section]:
    """Describes every mod, and how and why each of ours runs it; nothing where there are no mods."""
    by_mod: dict[str, list[Row]] = {}
    for row in rows:
        by_mod.setdefault(what_of(row), []).append(row)
    every = [row for of_mod in by_mod.values() for row in of_mod if row["is_ours"]]
    ours = {row["contender"]: label_of(row) for row in every}
    lines = []
    for mod, of_mod in by_mod.items():
        mine = [row for row in of_mod if row["is_ours"]]
        line = [mod, of_mod[0]["of"], of_mod[0]["about"]]
        line += [_joined(_way(row) for row in mine if row["contender"] == name) for name in ours]
        why = (
            x
            for row in mine
            for x in (row.get("notes", ()) if row["status"] == "ok" else [row["reason"]])
        )
        lines.append([*line, _joined(why)])
    header = ["mod", "of", "what", *ours.values(), "why"]
    return [Section("What becomes of each", header, lines)] if lines else []


def _way(row: Row) -> str:
    """The path that one of ours took, or why it took none."""
    if row["status"] != "ok" or "way" not in row:
        return str(row["status"])
    score = ", score program" if row["score"] else ""
    return f"{row['way']}{score}: {row['kernel']}"


def _joined(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts)) or "-"


def ratios_by_contender(results: Results) -> dict[str, tuple[float, float, float]]:
    """The geometric mean of the ratios of each contender that is not ours, the smallest and the largest."""
    found: dict[str, list[float]] = {}
    for row in results.ok_rows():
        for times in row["passes"].values() if not row["is_ours"] else ():
            found.setdefault(row["contender"], []).append(times["ratio"])
    return {name: (geometric_mean(x), min(x), max(x)) for name, x in found.items()}


def absent(results: Results) -> list[tuple[str, str, str, str]]:
    """Why there is no number: contender, status, reason, how many cases and, if they are no kernels', which."""
    counts: Counter[tuple[str, str, str]] = Counter()
    names: dict[tuple[str, str, str], dict[str, None]] = defaultdict(dict)
    for row in results.rows.values():
        if row["status"] != "ok":
            key = (label_of(row), row["status"], row["reason"])
            counts[key] += 1
            names[key] |= {} if is_of_kernels(row) else {what_of(row): None}
    counts.update(
        (label(key.rsplit("/", 1)[1]), "not run", "time limit") for key in results.not_run
    )
    return [
        (*key, f"{count}: {', '.join(names[key])}" if names[key] else str(count))
        for key, count in sorted(counts.items())
    ]


def title(results: Results) -> str:
    """That of the first run that has one."""
    return next(
        (run["title"] for run in results.runs.values() if "title" in run), "Attention kernels"
    )


def notes(results: Results) -> list[str]:
    """The notes of the runs."""
    return list(dict.fromkeys(run["notes"] for run in results.runs.values() if run.get("notes")))


def facts(results: Results) -> list[tuple[str, str]]:
    """The facts that the runs share: machine, software and protocol; where they differ, all of it."""
    runs = list(_runs_with_rows(results).values())
    software: dict[str, list[Any]] = defaultdict(list)
    for run in runs:
        for name in ("torch", "python", "cuda", "cudnn", "driver"):
            software[name].append(run.get(name))
        for name, version in run.get("versions", {}).items():
            software[name].append(version)
    versions = {name: _distinct(found) for name, found in software.items()}
    protocols = [run.get("protocol", {}) for run in runs]
    flushed = {x["flush_bytes"] // 2**20 for x in protocols if "flush_bytes" in x}
    gated = [run["gate_seqlen"] for run in runs if "gate_seqlen" in run]
    settings = (", ".join(f"{k} {x}" for k, x in run.get("settings", {}).items()) for run in runs)
    caches = (
        f"{n} MiB written between calls" if n else "as the last call left them" for n in flushed
    )
    found = {
        "device": _distinct(run["device"] for run in runs),
        "software": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "power limit": _distinct(run.get("power_limit") for run in runs),
        "max SM clock": _distinct(run.get("max_sm_clock") for run in runs),
        "timing": "; ".join(filter(None, dict.fromkeys(map(_timing, protocols)))),
        "caches": " or ".join(caches),
        "checked": f"against fp64 at up to {_distinct(gated)} tokens" if gated else "",
        "settings": "; ".join(filter(None, dict.fromkeys(settings))),
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


def _timing(protocol: dict[str, Any]) -> str:
    if protocol.get("in_turns"):
        return f"median of {protocol['rounds']} rounds, in which contenders take turns"
    if protocol.get("interleaved"):
        return f"median of {protocol['rounds']} rounds, contenders interleaved in one process"
    if "budget_ms" not in protocol:
        return ""
    calls = f"{protocol['min_reps']} to {protocol['max_reps']} calls"
    return f"median of {calls} within about {protocol['budget_ms']:g} ms"


def _distinct(values: Iterable[Any]) -> str:
    return " or ".join(dict.fromkeys(str(value) for value in values if value is not None))


def roofline(group: Group, results: Results) -> float | None:
    """TFLOP/s of a large matmul: the most that any run of the group saw. Later runs find a warmer card."""
    runs = (results.runs[row["run"]] for row in group.rows)
    return max((run["matmul_tflops"] for run in runs if "matmul_tflops" in run), default=None)
