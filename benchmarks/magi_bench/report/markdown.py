"""A report as Markdown, and the table in the README."""

from __future__ import annotations

from pathlib import Path

from magi_bench.cases import PASS_TITLES, format_length
from magi_bench.report import tables
from magi_bench.results.rows import Results, Row

BEGIN, END = "<!-- magi-bench report -->", "<!-- end of magi-bench report -->"
# Lengths in the README.
README_SEQLENS = (4096, 16384, 65536)


def to_markdown(results: Results, title: str | None = None, note: str = "") -> str:
    parts = [f"# {title or tables.title(results)}", ""]
    parts += [x for words in (note, *tables.notes(results)) if words for x in (words, "")]
    parts += [f"- {name}: {value}" for name, value in tables.facts(results)] + [""]
    runs = tables.Section("Runs", [tables.run_table(results)])
    for section in (*tables.sections(results), runs):
        parts += [f"## {section.title}", ""]
        for made in section.tables:
            parts += [f"### {made.title}", ""] if made.title else []
            parts += [*table(made.header, made.lines), ""]
    return "\n".join(parts)


def table(header: list[str], lines: list[list[str]]) -> list[str]:
    """The lines of a table."""
    rows = [header, ["---"] * len(header), *lines]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def readme_table(results: Results) -> str:
    """Our fastest kernel beside the fastest other, of the first group."""
    group = next(group for group in tables.groups(results) if group.ours)
    whose = group.labels[group.ours[0]] if len(group.ours) == 1 else "ours"
    header = ["mask", "tokens"]
    for which in ("fwd", "bwd"):
        header += [f"{PASS_TITLES[which].lower()}, {whose}", "best other", "ratio"]
    lines = []
    for mask, seqlen, rows in group.every():
        cells = [x for which in ("fwd", "bwd") for x in _against_best(rows, which, group.unit[1])]
        if seqlen in README_SEQLENS and any(cell != "-" for cell in cells):
            lines.append([mask, format_length(seqlen), *cells])
    return "\n".join(table(header, lines))


def _against_best(rows: dict[str, Row], which: str, size: float) -> list[str]:
    ours, other = (tables.best(rows, which, ours) for ours in (True, False))
    ratio = tables.ratio_to_best(rows, which)
    return [
        tables.number(ours[1] / size) if ours else "-",
        f"{tables.number(other[1] / size)}, {other[0]}" if other else "-",
        f"{ratio:.2f}" if ratio else "-",
    ]


def write_readme_table(results: Results, path: Path) -> None:
    """Replaces what stands between the two marks in the Markdown file `path`; a ValueError if they are missing."""
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"`{path}` must hold the lines {BEGIN} and {END}")
    path.write_text(f"{before}{BEGIN}\n{readme_table(results)}\n{END}{after}")
