"""A run as Markdown: a table for each group, and everything that has no number, with its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from magi_bench.report.markdown import table
from magi_bench.step.cases import GROUPS, ROWS
from magi_bench.workloads.cells import format_length

Row = dict[str, Any]
LABELS = {row.name: row.label for row in ROWS}
PASS_LABELS = {"fwd": "forward", "fwdbwd": "forward, backward"}


def to_markdown(context: dict[str, Any], rows: Sequence[Row]) -> str:
    """Title, where the numbers come from, tables."""
    parts = [f"# Wall time of attention and of training steps, {context['device']}", ""]
    parts += [f"- {name}: {value}" for name, value in context.items() if name != "settings"]
    settings = (f"{name} {value}" for name, value in context.get("settings", {}).items())
    parts += [f"- settings: {', '.join(settings)}", ""]
    parts += [
        "Milliseconds, host included: medians over rounds in which contenders take turns. Ratios are to ours, above 1 "
        "where ours is faster. GPU kernels, launches by the host and recompilations in the same order as times.",
        "",
    ]
    for group, title in GROUPS.items():
        of_group = [row for row in rows if row["group"] == group]
        if of_group:
            parts += [f"## {title}", "", *table(*group_table(of_group)), ""]
    missing = without_number(rows)
    if missing:
        header = ["contender", "outcome", "reason", "rows", "count"]
        parts += ["## Without a number", "", *table(header, missing), ""]
    return "\n".join(parts)


def group_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and lines: a line for each case, with a time of each contender and the ratios of our peers."""
    labels = {row["contender"]: row["label"] for row in rows}
    ours = {row["contender"] for row in rows if row["is_ours"]}
    peers = [name for name in labels if name not in ours]
    header = ["what", "tokens", *(["layers"] if _is_deep(rows) else []), "pass"]
    header += [f"{label}, ms" for label in labels.values()]
    header += [f"{labels[name]}, ratio" for name in peers]
    header += ["kernels", "launches", "recompiled"]
    lines = []
    for case in _by_case(rows):
        by_name = {row["contender"]: row for row in case}
        first = case[0]
        line = [LABELS[first["row"]], format_length(first["tokens"])]
        line += [str(first["layers"])] if _is_deep(rows) else []
        line += [PASS_LABELS[first["pass"]]]
        line += [_time(by_name[name]) if name in by_name else "-" for name in labels]
        line += [_number(by_name.get(name, {}), "ratio", ".2f") for name in peers]
        timed = [row for row in case if "ms" in row]
        for field in ("kernels", "launches", "recompiles"):
            line.append(", ".join(_number(row, field, "g") for row in timed) or "-")
        lines.append(line)
    return header, lines


def without_number(rows: Sequence[Row]) -> list[list[str]]:
    """Contender, outcome, reason, rows and how many cases, of everything that was not timed."""
    names: dict[tuple[str, str, str], Counter[str]] = {}
    for row in rows:
        if "ms" not in row:
            key = (row["label"], row["status"], row["reason"])
            names.setdefault(key, Counter())[row["row"]] += 1
    return [[*key, ", ".join(found), str(found.total())] for key, found in names.items()]


def _by_case(rows: Sequence[Row]) -> list[list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    order = [row.name for row in ROWS]
    for row in rows:
        key = (order.index(row["row"]), row["layers"], row["pass"] != "fwd", row["tokens"])
        found.setdefault(key, []).append(row)
    return [found[key] for key in sorted(found)]


def _is_deep(rows: Sequence[Row]) -> bool:
    return rows[0]["group"] in ("layers", "training")


def _time(row: Row) -> str:
    """Of a call, of a step, or of a layer of the group "layers"; else what became of the contender."""
    if "ms" not in row:
        return row["status"]
    ms = row["ms"] / (row["layers"] if row["group"] == "layers" else 1)
    return f"{ms:.3f}" if ms < 100 else f"{ms:.1f}"


def _number(row: Row, field: str, form: str) -> str:
    return format(row[field], form) if field in row else "-"
