"""The tables of a report: rows sorted into groups of the same heads, and the tables made of them."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from magi_bench.cases import PASS_TITLES, PASSES, Case, format_length
from magi_bench.results.rows import Results, Row
from magi_bench.workloads.workload import MASKS

# How a case without a number reads, where it is not its status.
SHORT = {"unsupported": "-", "unavailable": "-", "oom": "OOM"}


class Table(NamedTuple):
    """A table with a title, and words above it."""

    title: str
    header: list[str]
    lines: list[list[str]]
    words: str = ""


class Section(NamedTuple):
    """A heading with its tables; of kernels also their group, of which pages draw charts, and of strategies across
    ranks the groups and tokens of a rank that have several numbers of ranks."""

    title: str
    tables: list[Table]
    group: Group | None = None
    over_ranks: Sequence[tuple[Group, int]] = ()


def sections(results: Results) -> Iterator[Section]:
    """Every table of a report but that of its runs: kernels by their groups, all other rows by their headings."""
    for group in groups(results):
        made = [speed_table(group, which) for which in group.passes]
        yield Section(group.title, [*made, share_table(group), cost_table(group)], group)
    found: dict[str, list[Row]] = {}
    devices = {run["device"] for run in results.runs.values()}
    for row in results.rows.values():
        if not is_of_kernels(row):
            device = results.runs[row["run"]]["device"] if len(devices) > 1 else ""
            title = ", ".join(filter(None, (row.get("group", row["case"]["level"]), device)))
            found.setdefault(title, []).append(row)
    for title, rows in found.items():
        yield Section(title, [row_table(rows), *competitive_tables(rows)])
    if scaling := several_ranks(results):
        made = [scaling_table(*place) for place in scaling]
        yield Section("Over the number of ranks", made, over_ranks=scaling)
    if about := [row for row in results.rows.values() if "about" in row]:
        yield Section("What becomes of each", [coverage(about)])
    if missing := absent(results):
        header = ["contender", "outcome", "reason", "cases"]
        yield Section("Without a number", [Table("", header, missing)])


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
    def setup(self) -> tuple[str, str, str]:
        """Documents, heads and head_dim."""
        return self.documents, self.heads, self.head_dim

    @property
    def labels(self) -> dict[str, str]:
        """The labels of contenders with a result by their names, ours first."""
        ok = sorted((x for x in self.rows if x["status"] == "ok"), key=lambda x: not x["is_ours"])
        return {row["contender"]: row["label"] for row in ok}

    @property
    def ours(self) -> list[str]:
        """Those of `labels` that are ours."""
        ours = {row["contender"] for row in self.rows if row["is_ours"]}
        return [name for name in self.labels if name in ours]

    @property
    def passes(self) -> list[str]:
        found = {which for row in self.rows for which in row.get("passes", ())}
        return [which for which in PASSES if which in found]

    @property
    def masks(self) -> list[str]:
        labels = {case_of(row).mask_label: case_of(row) for row in self.rows}

        def order(label: str) -> tuple[Any, ...]:
            case = labels[label]
            place = MASKS.index(case.mask) if case.mask in MASKS else len(MASKS)
            return place, case.block, case.density

        return sorted(labels, key=order)

    @property
    def seqlens(self) -> list[int]:
        return sorted({row["case"]["seqlen"] for row in self.rows})

    @property
    def unit(self) -> tuple[str, float]:
        """TFLOP/s, or GFLOP/s where that is all there is, and its size in TFLOP/s."""
        times = [x for row in self.rows for x in row.get("passes", {}).values()]
        best = max((x.get("tflops", 0.0) for x in times), default=0.0)
        return ("TFLOP/s", 1.0) if best >= 10 else ("GFLOP/s", 1e-3)

    def at(self, mask: str, seqlen: int) -> dict[str, Row]:
        """The rows of a case by contender."""
        found: dict[str, Row] = {}
        for row in self.rows:
            if case_of(row).mask_label == mask and row["case"]["seqlen"] == seqlen:
                passes = found.get(row["contender"], row).get("passes", {}) | row.get("passes", {})
                found[row["contender"]] = {**row, **({"passes": passes} if passes else {})}
        return found

    def every(self) -> Iterator[tuple[str, int, dict[str, Row]]]:
        """Each mask and length with its rows."""
        for mask in self.masks:
            for seqlen in self.seqlens:
                if rows := self.at(mask, seqlen):
                    yield mask, seqlen, rows


def case_of(row: Row) -> Case:
    return Case(**row["case"])


def is_of_kernels(row: Row) -> bool:
    """True if a row is of `kernel` or `sparse`, whose tables have a column for each contender; others have a line."""
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
    return [group for group in found.values() if group.labels]


def tflops(row: Row | None, which: str) -> float | None:
    if row is None or row["status"] != "ok":
        return None
    return row["passes"].get(which, {}).get("tflops")


def several_ranks(results: Results) -> list[tuple[Group, int]]:
    """The groups, and lengths of a rank, whose speeds are measured on several numbers of ranks."""
    counts: dict[tuple[int, int], set[int]] = {}
    found = [group for group in groups(results, every=True) if group.level == "ranks"]
    for i, group in enumerate(found):
        for row in group.rows:
            case = case_of(row)
            if tflops(row, case.which):
                counts.setdefault((i, case.seqlen), set()).add(case.ranks)
    return [(found[i], seqlen) for (i, seqlen), ranks in counts.items() if len(ranks) > 1]


def speeds_over_ranks(
    group: Group, mask: str, seqlen: int, which: str
) -> dict[str, dict[int, float]]:
    """The TFLOP/s of a GPU by contender and number of ranks, the mean over packs of documents."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in group.rows:
        case, speed = case_of(row), tflops(row, which)
        if speed and (case.mask_label, case.seqlen) == (mask, seqlen):
            found.setdefault(row["contender"], {}).setdefault(case.ranks, []).append(speed)
    return {
        name: {ranks: statistics.mean(x) for ranks, x in sorted(of_ranks.items())}
        for name, of_ranks in found.items()
    }


def scaling_table(group: Group, seqlen: int) -> Table:
    """A line for each mask, pass and contender, a column for each number of ranks."""
    lines: list[tuple[list[str], dict[int, float]]] = []
    for mask in group.masks:
        for which in group.passes:
            speeds = speeds_over_ranks(group, mask, seqlen, which)
            for name, label in group.labels.items():
                if name in speeds:
                    lines.append(([mask, PASS_TITLES[which].lower(), label], speeds[name]))
    ranks = sorted({x for _, speeds in lines for x in speeds})
    unit, size = group.unit
    written = [
        [*line, *(number(speeds[x] / size) if x in speeds else "-" for x in ranks)]
        for line, speeds in lines
    ]
    header = ["mask", "pass", "contender", *(f"{x} ranks" for x in ranks)]
    where = f"{group.documents}, heads {group.heads}, head_dim {group.head_dim}, {group.dtype}, {group.device}"
    title = f"{unit} of a GPU, {format_length(seqlen)} tokens a rank, {where}"
    return Table(title, header, written)


def number(value: float) -> str:
    """A speed in a group's unit: whole numbers from 10 on, one decimal below."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def speed_table(group: Group, which: str) -> Table:
    """A line for each mask and length: all contenders, and ours against the best of the others."""
    unit, size = group.unit
    has_ratio = 0 < len(group.ours) < len(group.labels)
    header = ["mask", "tokens", *group.labels.values()] + ["ours / best other"] * has_ratio
    lines = []
    for mask, seqlen, rows in group.every():
        line = [mask, format_length(seqlen)]
        for row in map(rows.get, group.labels):
            value = tflops(row, which)
            if row is not None and row["status"] != "ok":
                line.append(SHORT.get(row["status"], str(row["status"])))
            else:
                nothing = "not run" if row is None else "-"
                line.append(nothing if value is None else number(value / size))
        if has_ratio:
            ratio = ratio_to_best(rows, which)
            line.append(f"{ratio:.2f}" if ratio else "-")
        lines.append(line)
    return Table(f"{PASS_TITLES[which]}, {unit}", header, lines)


def best(rows: dict[str, Row], which: str, ours: bool) -> tuple[str, float] | None:
    """The label and the speed of the fastest contender of a case among ours or the others."""
    speeds = [
        (speed, row["label"])
        for row in rows.values()
        if row["is_ours"] == ours and (speed := tflops(row, which)) is not None
    ]
    return max(speeds)[::-1] if speeds else None


def ratio_to_best(rows: dict[str, Row], which: str) -> float | None:
    """Our fastest over their fastest."""
    ours, other = best(rows, which, True), best(rows, which, False)
    return ours[1] / other[1] if ours and other else None


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def shares(group: Group, which: str) -> dict[tuple[str, str], float]:
    """By contender and mask: the share of the case's fastest speed, as a geometric mean over the lengths."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for mask, _, rows in group.every():
        speeds = {name: s for name, row in rows.items() if (s := tflops(row, which))}
        for name, speed in speeds.items():
            found[name, mask].append(speed / max(speeds.values()))
    return {key: geometric_mean(x) for key, x in found.items()}


def share_table(group: Group) -> Table:
    """`shares` of every pass."""
    lines = []
    for which in group.passes:
        found = shares(group, which)
        for name, label in group.labels.items():
            cells = (found.get((name, mask)) for mask in group.masks)
            written = ("-" if share is None else f"{share:.0%}" for share in cells)
            lines.append([label, PASS_TITLES[which].lower(), *written])
    words = "Geometric means over the lengths that each one ran."
    header = ["contender", "pass", *group.masks]
    return Table("Share of the fastest contender's speed", header, lines, words)


def cost_table(group: Group) -> Table:
    """Medians over all cases of what speed does not show, the most memory, and the worst error that the gate found."""
    header = ["contender", "plan ms", "first s", "host us", "peak MiB", "noise"]
    lines = []
    for name, label in group.labels.items():
        rows = [r for r in group.rows if r["contender"] == name and r["status"] == "ok"]
        passes = [x for r in rows for x in r["passes"].values()]
        hosts = [x["host_ms"] for x in passes if "host_ms" in x]
        peaks = [x["peak_bytes"] for x in passes if "peak_bytes" in x]
        noise = [(x["p80_ms"] - x["p20_ms"]) / x["ms"] for x in passes]
        errors = [
            error / r["gate"]["allowed"][key]
            for r in rows
            for key, error in r["gate"]["errors"].items()
        ]
        line = [
            label,
            f"{statistics.median(r['plan_ms'] for r in rows):.2f}",
            f"{statistics.median(r['first_s'] for r in rows):.2f}",
            f"{1e3 * statistics.median(hosts):.0f}" if hosts else "-",
            f"{max(peaks) / 2**20:,.0f}" if peaks else "-",
            f"{statistics.median(noise):.1%}",
            f"{max(errors):.2f}",
        ]
        lines.append(line)
    words = (
        "Preparing for a new mask of a known shape, the first calls with compilation, the time until a call returns, "
        "and the spread from the 20th to the 80th percentile; at most, the memory of a call beyond its inputs."
    )
    return Table("Other costs, medians", [*header, "worst error / allowed"], lines, words)


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
    "host_ms": ("host, ms", "{:.3f}".format),
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
#: What tells cases of one heading apart, where it differs: the name of a case's attribute, and of its column.
FACTS = {
    "heads": "heads",
    "head_dims_label": "head_dim",
    "layers": "layers",
    "ranks": "ranks",
    "which": "pass",
}


def row_table(rows: list[Row]) -> Table:
    """A line for each case and contender."""
    called = list(dict.fromkeys(what_of(row) for row in rows))

    def order(row: Row) -> tuple[Any, ...]:
        case = case_of(row)
        return called.index(what_of(row)), case.layers, case.ranks, case.which, case.seqlen

    facts = [name for name in FACTS if len({getattr(case_of(row), name) for row in rows}) > 1]
    fields = [name for name in COLUMNS if any(_field(row, name) is not None for row in rows)]
    header = ["what", "tokens", *(FACTS[name] for name in facts)]
    header += ["contender", "ms", *(COLUMNS[name][0] for name in fields)]
    lines = []
    for row in sorted(rows, key=order):
        case = case_of(row)
        line = [what_of(row), format_length(case.seqlen)]
        line += [str(getattr(case, name)) for name in facts]
        ms = _field(row, "ms")
        line += [row["label"], row["status"] if ms is None else f"{ms:.{3 if ms < 100 else 1}f}"]
        values = ((COLUMNS[name][1], _field(row, name)) for name in fields)
        lines.append([*line, *("-" if x is None else written(x) for written, x in values)])
    return Table("", header, lines)


#: A strategy of `ranks` is competitive that has so much of its kernel's rate under these masks, from so many tokens a
#: rank on.
COMPETITIVE, DENSE_MASKS, DENSE_TOKENS = 0.85, ("full", "causal"), 2**15


def competitive_tables(rows: list[Row]) -> list[Table]:
    """Strategies beside their own kernel on one rank; none where no row is of them and of a long dense mask."""
    speeds = {
        (case, row["contender"]): (row["label"], speed)
        for row in rows
        if (case := case_of(row)).level == "ranks" and (speed := tflops(row, case.which))
    }
    lines = []
    for (case, name), (label, speed) in speeds.items():
        yardstick = yardstick_of(name)
        if case.mask in DENSE_MASKS and case.seqlen >= DENSE_TOKENS and name != yardstick:
            line = [case.mask_label, format_length(case.seqlen), label, f"{speed:.0f}"]
            if (case, yardstick) in speeds:
                alone = speeds[case, yardstick][1]
                verdict = "not competitive" if speed < COMPETITIVE * alone else "competitive"
                lines.append([*line, f"{alone:.0f}", f"{speed / alone:.1%}", verdict])
            else:
                lines.append([*line, "not run", "-", "-"])
    header = ["mask", "tokens", "contender", "TFLOP/s", "its kernel, one rank", "share", "verdict"]
    words = f"A strategy with less than {COMPETITIVE:.0%} of the rate of its own kernel on one rank is not competitive."
    return [Table("Dense masks, beside the kernel alone", header, lines, words)] if lines else []


def yardstick_of(contender: str) -> str:
    """The contender that runs the kernel of a strategy on one rank."""
    if contender.startswith("torch"):
        return "one-rank-flex"
    kernels = ("flash-attn-4", "cudnn", "fa2", "flex")
    kernel = next((x for x in kernels if contender.endswith(f"-{x}")), None)
    return f"one-rank-{kernel}" if kernel else "one-rank"


def what_of(row: Row) -> str:
    """The call that a row measures, in words."""
    return str(row.get("what", case_of(row).mask_label))


def _field(row: Row, name: str) -> Any:
    return next(iter(row.get("passes", {"": {}}).values())).get(name, row.get(name))


def coverage(rows: list[Row]) -> Table:
    """Describes every mod, and how and why each of ours runs it."""
    ours = {row["contender"]: row["label"] for row in rows if row["is_ours"]}
    lines = []
    for mod in dict.fromkeys(map(what_of, rows)):
        of_mod = [row for row in rows if what_of(row) == mod]
        mine = [row for row in of_mod if row["is_ours"]]
        line = [mod, of_mod[0]["of"], of_mod[0]["about"]]
        line += [_joined(_way(row) for row in mine if row["contender"] == name) for name in ours]
        why = (row.get("notes", ()) if row["status"] == "ok" else [row["reason"]] for row in mine)
        lines.append([*line, _joined(x for found in why for x in found)])
    return Table("", ["mod", "of", "what", *ours.values(), "why"], lines)


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


def absent(results: Results) -> list[list[str]]:
    """Why there is no number: contender, status, reason, how many cases and, if they are no kernels', which."""
    counts: Counter[tuple[str, str, str]] = Counter()
    names: dict[tuple[str, str, str], dict[str, None]] = defaultdict(dict)
    for row in results.rows.values():
        if row["status"] != "ok":
            key = (row["label"], row["status"], row["reason"])
            counts[key] += 1
            names[key] |= {} if is_of_kernels(row) else {what_of(row): None}
    labels = {row["contender"]: row["label"] for row in results.rows.values()}
    for planned in results.not_run:
        name = planned.rsplit("/", 1)[1]
        counts[labels.get(name, name), "not run", "time limit"] += 1
    return [
        [*key, f"{count}: {', '.join(names[key])}" if names[key] else str(count)]
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
        own = {name: run.get(name) for name in ("torch", "python", "cuda", "cudnn", "driver")}
        for name, version in (own | run.get("versions", {})).items():
            software[name].append(version)
    versions = {name: _distinct(found) for name, found in software.items()}
    protocols = [run.get("protocol", {}) for run in runs]
    flushed = {x["flush_bytes"] // 2**20 for x in protocols if "flush_bytes" in x}
    caches = (
        f"{n} MiB written between calls" if n else "as the last call left them" for n in flushed
    )
    gated = [run["gate_seqlen"] for run in runs if "gate_seqlen" in run]
    settings = (", ".join(f"{k} {x}" for k, x in run.get("settings", {}).items()) for run in runs)
    found = {
        "device": _distinct(run["device"] for run in runs),
        "software": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "power limit": _distinct(run.get("power_limit") for run in runs),
        "max SM clock": _distinct(run.get("max_sm_clock") for run in runs),
        "large matmul": _matmul(runs),
        "timing": "; ".join(filter(None, dict.fromkeys(map(_timing, protocols)))),
        "caches": " or ".join(caches),
        "checked": f"against fp64 at up to {_distinct(gated)} tokens" if gated else "",
        "settings": "; ".join(filter(None, dict.fromkeys(settings))),
    }
    return [(name, value) for name, value in found.items() if value]


def run_table(results: Results) -> Table:
    """When and how each run was started, from which sources, and what a large matmul reached then."""
    measured = Counter(row["run"] for row in results.ok_rows())
    fields = ("date", "commit", "source", "card")
    header = [*fields, "measured", "matmul, TFLOP/s", "command"]
    lines = []
    for name, run in sorted(_runs_with_rows(results).items(), key=lambda x: x[1].get("date", "")):
        line = [str(run.get(field, "-")) for field in fields]
        matmul = f"{run['matmul_tflops']:.3g}" if "matmul_tflops" in run else "-"
        lines.append([*line, str(measured[name]), matmul, run.get("command", "-")])
    return Table("", header, lines)


def _runs_with_rows(results: Results) -> dict[str, dict[str, Any]]:
    present = {row["run"] for row in results.rows.values()}
    return {name: run for name, run in results.runs.items() if name in present}


def _matmul(runs: Iterable[dict[str, Any]]) -> str:
    """The most that any run saw: what products of attention could reach. Later runs find a warmer card."""
    most = max((run["matmul_tflops"] for run in runs if "matmul_tflops" in run), default=None)
    return f"{most:.3g} TFLOP/s" if most else ""


def _timing(protocol: dict[str, Any]) -> str:
    if protocol.get("in_turns"):
        return f"median of {protocol['rounds']} rounds, in which contenders take turns"
    if protocol.get("rounds", 1) > 1:
        return f"median of {protocol['rounds']} rounds, contenders interleaved in one process"
    if "budget_ms" not in protocol:
        return ""
    calls = f"{protocol['min_reps']} to {protocol['max_reps']} calls"
    return f"median of {calls} within about {protocol['budget_ms']:g} ms"


def _distinct(values: Iterable[Any]) -> str:
    return " or ".join(dict.fromkeys(str(value) for value in values if value is not None))
