"""A run as Markdown: a table for each pass and length, and everything that has no number, with its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from magi_bench.report.markdown import table
from magi_bench.step.report import PASS_LABELS
from magi_bench.workloads.cells import format_length

Row = dict[str, Any]
NOTES = (
    "Times are of the slowest rank, host included: medians over rounds in which contenders take turns. Ratios are to ours, above 1 "
    "where ours is faster. TFLOP/s are of a rank, by the mean visible area of its queries. Received is what the rank that "
    "receives most gets from others in a call: of ours counted from the plan, of the others from shapes. Peak memory is what "
    "PyTorch's allocator holds in a call beyond the inputs; buffers of NCCL and symmetric memory are not in it. A call of the model "
    "spreads a batch of new documents, and ours plans their mask in it, while PyTorch's BlockMask is made before; with a backward it "
    "adds the gradients up over ranks."
)
COLUMNS = ["contender", "ms", "ratio", "TFLOP/s", "received, MiB", "peak, MiB", "prepared, s"]
MODEL_COLUMNS = ["contender", "ms", "ratio", "tokens/s", "peak, MiB"]


def to_markdown(context: dict[str, Any], rows: Sequence[Row]) -> str:
    """Title, where the numbers come from, tables."""
    ranks, device = context["ranks"], context["device"]
    parts = [f"# Attention across {ranks} ranks, {device}", ""]
    parts += [f"- {name}: {value}" for name, value in context.items() if name != "settings"]
    settings = (f"{name} {value}" for name, value in context["settings"].items())
    parts += [f"- settings: {', '.join(settings)}", "", NOTES, ""]
    for (mask, tokens, which), of_case in by_case(rows).items():
        is_model = mask == "model"
        what = f"{PASS_LABELS[which].capitalize()}, {mask.replace('_', ' ')}"
        parts += [f"## {what}, {format_length(tokens)} tokens a rank", ""]
        header = MODEL_COLUMNS if is_model else COLUMNS
        parts += [*table(header, [_line(row, is_model) for row in of_case]), ""]
    missing = without_number(rows)
    if missing:
        header = ["contender", "outcome", "reason", "masks", "count"]
        parts += ["## Without a number", "", *table(header, missing), ""]
    return "\n".join(parts)


def by_case(rows: Sequence[Row]) -> dict[tuple[str, int, str], list[Row]]:
    """The rows of each mask, length and pass."""
    found: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["mask"], row["tokens"], row["pass"]), []).append(row)
    return found


def without_number(rows: Sequence[Row]) -> list[list[str]]:
    """Contender, outcome, reason, masks and how many cases, of everything that was not timed."""
    found: dict[tuple[str, str, str], Counter[str]] = {}
    for row in rows:
        if "ms" not in row:
            key = (row["label"], row["status"], row["reason"])
            found.setdefault(key, Counter())[row["mask"]] += 1
    return [[*key, ", ".join(names), str(names.total())] for key, names in found.items()]


def _line(row: Row, is_model: bool) -> list[str]:
    if "ms" not in row:
        return [row["label"], row["status"], *["-"] * (3 if is_model else 5)]
    line = [row["label"], _number(row, "ms", ".3f"), _number(row, "ratio", ".2f")]
    if is_model:
        return [*line, _number(row, "tokens_per_s", ",.0f"), _mebibytes(row, "peak_bytes")]
    line += [_number(row, "tflops", ".3g"), _mebibytes(row, "received_bytes")]
    return [*line, _mebibytes(row, "peak_bytes"), _number(row, "prepare_s", ".3f")]


def _number(row: Row, field: str, form: str) -> str:
    return format(row[field], form) if row.get(field) is not None else "-"


def _mebibytes(row: Row, field: str) -> str:
    return f"{row[field] / 2**20:,.1f}" if row.get(field) is not None else "-"
