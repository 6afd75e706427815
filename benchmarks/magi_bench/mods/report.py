"""A run as Markdown: what becomes of every mod, a table of times for each pass, and everything that has no number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from magi_bench.report.markdown import table
from magi_bench.step.report import PASS_LABELS
from magi_bench.workloads.cells import format_length

Row = dict[str, Any]
MASKS = {
    False: "BlockMasks are made before, by PyTorch, and ours is derived from them in the first call.",
    True: "Every call makes its BlockMask, in the function that is compiled.",
}
NOTES = (
    "Times are of a call, host included: medians over rounds in which contenders take turns. {masks} "
    "Ratios are FlexAttention's time over that of ours, above 1 where ours is faster. Several numbers in a cell are in the order of "
    "the times: what the kernels of a GPU take in a call, launches by the host, and seconds of the first call, which compiles. A mask "
    "goes to kernels by intervals of keys, by blocks of bits, or, on a CPU, as its data decide."
)


class Counted(NamedTuple):
    """A column of what a row has beside its time."""

    field: str
    title: str
    form: str


COUNTED = (
    Counted("kernel_ms", "on the GPU, ms", ".3f"),
    Counted("launches", "launches", "g"),
    Counted("first_s", "first call, s", ".1f"),
)


def to_markdown(context: dict[str, Any], rows: Sequence[Row]) -> str:
    """Title, where the numbers come from, tables."""
    parts = [f"# mask_mods and score_mods beside FlexAttention, {context['device']}", ""]
    parts += [f"- {name}: {value}" for name, value in context.items() if name != "settings"]
    settings = (f"{name} {value}" for name, value in context["settings"].items())
    masks = MASKS[context["settings"]["mask_in_graph"]]
    parts += [f"- settings: {', '.join(settings)}", "", NOTES.format(masks=masks), ""]
    for which in dict.fromkeys(row["pass"] for row in rows):
        of_pass = [row for row in rows if row["pass"] == which]
        length = format_length(of_pass[0]["tokens"])
        parts += [f"## {PASS_LABELS[which].capitalize()}, {length} tokens", ""]
        parts += [*table(*times_table(of_pass)), ""]
    parts += ["## What becomes of each", "", *table(*coverage_table(rows)), ""]
    missing = without_number(rows)
    if missing:
        header = ["contender", "outcome", "reason", "mods"]
        parts += ["## Without a number", "", *table(header, missing), ""]
    return "\n".join(parts)


def times_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of one pass: a line for each mod."""
    labels = {row["contender"]: row["label"] for row in rows}
    ours = [name for name in labels if _is_ours(name, rows)]
    header = ["mod", "way", *(f"{label}, ms" for label in labels.values())]
    header += [f"{labels[name]}, ratio" for name in ours]
    counted = [x for x in COUNTED if any(x.field in row for row in rows)]
    header += [x.title for x in counted]
    lines = []
    for mod, of_mod in _by_mod(rows).items():
        by_name = {row["contender"]: row for row in of_mod}
        timed = [row for row in of_mod if "ms" in row]
        line = [mod, next((row["way"] for row in of_mod if "way" in row), "-")]
        line += [_time(by_name[name]) for name in labels]
        line += [_number(by_name[name], "ratio", ".2f") for name in ours]
        for x in counted:
            line.append(", ".join(_number(row, x.field, x.form) for row in timed) or "-")
        lines.append(line)
    return header, lines


def coverage_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and lines: what every mod is, how each of ours runs it, and why so."""
    ours = {row["contender"]: row["label"] for row in rows if row["is_ours"]}
    lines = []
    for mod, of_mod in _by_mod(rows).items():
        line = [mod, of_mod[0]["kind"], of_mod[0]["what"]]
        for name in ours:
            line.append(_distinct(_way(row) for row in of_mod if row["contender"] == name))
        line.append(_distinct(why for row in of_mod if row["is_ours"] for why in _why(row)))
        lines.append(line)
    return ["mod", "of", "what", *ours.values(), "why"], lines


def without_number(rows: Sequence[Row]) -> list[list[str]]:
    """Contender, outcome, reason, and the mods and passes, of everything that was not timed."""
    found: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for row in rows:
        if "ms" not in row:
            key = (row["label"], row["status"], row["reason"])
            found.setdefault(key, {}).setdefault(PASS_LABELS[row["pass"]], []).append(row["mod"])
    return [
        [*key, "; ".join(f"{which}: {', '.join(mods)}" for which, mods in passes.items())]
        for key, passes in found.items()
    ]


def _by_mod(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["mod"], []).append(row)
    return found


def _is_ours(name: str, rows: Sequence[Row]) -> bool:
    return any(row["is_ours"] for row in rows if row["contender"] == name)


def _way(row: Row) -> str:
    """How one of ours ran it, or what became of that."""
    if row["status"] != "ok":
        return row["status"]
    score = ", score program" if row["score"] else ""
    return f"{row['way']}{score}: {row['kernel']}"


def _why(row: Row) -> list[str]:
    return [row["reason"]] if row["status"] != "ok" else row["notes"]


def _distinct(texts: Any) -> str:
    return "; ".join(dict.fromkeys(texts)) or "-"


def _time(row: Row) -> str:
    """Of a call; else what became of the contender."""
    if "ms" not in row:
        return row["status"]
    return f"{row['ms']:.3f}" if row["ms"] < 100 else f"{row['ms']:.1f}"


def _number(row: Row, field: str, form: str) -> str:
    return format(row[field], form) if field in row else "-"
