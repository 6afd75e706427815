"""A run as Markdown: a table for each framework, length and mode, and everything that has no number, with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from magi_compile.bench.report.markdown import table
from magi_compile.bench.workloads.cells import format_length

Row = dict[str, Any]
NOTES = (
    "A step is forward, loss and backward on a pack of causal documents, other ones in every step. Of transformers: medians of wall "
    "time over rounds in which attentions take turns; ratios are to ours, above 1 where ours is faster; MFU is the model's FLOPs, "
    "without what is computed again, over the rate of a large matmul in the same run; graphs are those of the first step, "
    "recompilations those of all later ones; peak memory is that of PyTorch's allocator, weights and gradients included. Of "
    "torchtitan: its own log, the median of the last steps, with its optimizer, its MFU and its memory."
)
COLUMNS = ("attention", "ms", "ratio", "tokens/s", "MFU, %", "peak, GiB")
COUNTS = ("graphs", "breaks", "recompiles")


def to_markdown(context: dict[str, Any], rows: Sequence[Row]) -> str:
    """Title, where the numbers come from, tables."""
    parts = [f"# Training steps of other frameworks' models, {context['device']}", ""]
    parts += [f"- {name}: {value}" for name, value in context.items() if name != "settings"]
    settings = (f"{name} {value}" for name, value in context["settings"].items())
    parts += [f"- settings: {', '.join(settings)}", "", NOTES, ""]
    cases: dict[tuple[str, int, int, str], list[Row]] = {}
    for row in rows:
        place = (row["framework"], row["ranks"], row["tokens"], row["mode"])
        cases.setdefault(place, []).append(row)
    for (framework, ranks, tokens, mode), of_case in cases.items():
        if any("tokens_per_s" in row for row in of_case):
            where = f"{ranks} ranks, " if ranks > 1 else ""
            parts += [f"## {framework}, {where}{format_length(tokens)} tokens, {mode}", ""]
            parts += [*table([*COLUMNS, *COUNTS], [_line(row) for row in of_case]), ""]
    missing = [
        [*_place(row), row["status"], row["reason"]] for row in rows if "tokens_per_s" not in row
    ]
    if missing:
        header = ["framework", "attention", "mode", "tokens", "ranks", "outcome", "reason"]
        parts += ["## Without a number", "", *table(header, missing), ""]
    return "\n".join(parts)


def _place(row: Row) -> list[str]:
    tokens = format_length(row["tokens"])
    return [row["framework"], _name(row), row["mode"], tokens, str(row["ranks"])]


def _name(row: Row) -> str:
    return row["attention"] + (", CUDA graphs" if row.get("cuda_graphs") else "")


def _line(row: Row) -> list[str]:
    if "tokens_per_s" not in row:
        return [_name(row), row["status"], *["-"] * (len(COLUMNS) + len(COUNTS) - 2)]
    peak = row.get("peak_bytes")
    return [
        _name(row),
        _number(row, "ms", ".1f"),
        _number(row, "ratio", ".2f"),
        _number(row, "tokens_per_s", ",.0f"),
        f"{100 * row['mfu']:.1f}" if row.get("mfu") is not None else "-",
        "-" if peak is None else f"{peak / 2**30:.2f}",
        *(_number(row, name, "d") for name in COUNTS),
    ]


def _number(row: Row, field: str, form: str) -> str:
    return format(row[field], form) if row.get(field) is not None else "-"
