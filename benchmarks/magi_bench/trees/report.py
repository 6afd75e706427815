"""A run as Markdown: a table for each pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from magi_bench.report.markdown import table
from magi_bench.trees.run import Row, heads_of, means, ratios
from magi_bench.workloads.cells import format_length

TITLES = {"fwd": "Forward", "bwd": "Backward"}
NOTES = (
    "Each tree is a process, and all share one device. In every round each times one turn of calls, in another order; times are "
    "medians over rounds. On a GPU calls wait behind a spinning kernel, so the host takes no part. Ratios are times of a tree, of "
    "that of the first: above 1 the first is faster."
)


def to_markdown(context: dict[str, Any], rows: Sequence[Row]) -> str:
    """Title, where the numbers come from, means, tables."""
    lines = [f"# Trees of this package, {context['device']}", ""]
    lines += [*(f"- {name}: {value}" for name, value in context.items()), "", NOTES, ""]
    of_means = [[name, *(f"{x:.3f}" for x in values)] for name, values in means(rows).items()]
    lines += [*table(["tree", "geometric mean", "least", "most"], of_means), ""]
    for which, title in TITLES.items():
        timed = [row for row in rows if row["pass"] == which and "ms" in row]
        if timed:
            first, *others = timed[0]["ms"]
            header = ["mask", "tokens", "heads", "head_dim", f"{first}, ms", *others]
            lines += [f"## {title}", "", *table(header, [_line(row) for row in timed]), ""]
    missing = [
        [row["pass"], row["mask"], format_length(row["tokens"]), row["reason"]]
        for row in rows
        if "ms" not in row
    ]
    if missing:
        lines += [
            "## Without a number",
            "",
            *table(["pass", "mask", "tokens", "reason"], missing),
            "",
        ]
    return "\n".join(lines)


def _line(row: Row) -> list[str]:
    line = [
        row["mask"].replace("_", " "),
        format_length(row["tokens"]),
        heads_of(row),
        str(row["head_dim"]),
    ]
    first = next(iter(row["ms"].values()))
    return [*line, f"{first:.3f}", *(f"{ratio:.3f}" for ratio in ratios(row).values())]
