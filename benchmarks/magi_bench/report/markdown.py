"""A report as Markdown, and the table in the README."""

from __future__ import annotations

from pathlib import Path

from magi_bench.cases import format_length
from magi_bench.report import tables
from magi_bench.results.rows import Results

BEGIN, END = "<!-- magi-bench report -->", "<!-- end of magi-bench report -->"
# Lengths in the README.
README_SEQLENS = (4096, 16384, 65536)


def to_markdown(results: Results, title: str | None = None, note: str = "") -> str:
    parts = [f"# {title or tables.title(results)}", ""]
    parts += [x for words in (note, *tables.notes(results)) if words for x in (words, "")]
    parts += [f"- {name}: {value}" for name, value in tables.facts(results)] + [""]
    for group in tables.groups(results):
        parts += [f"## {group.title}", ""]
        for which in group.passes:
            parts += [f"### {tables.PASS_TITLES[which]}, {tables.unit(group)[0]}", ""]
            parts += [*table(*tables.speed_table(group, which)), ""]
        parts += ["### Other costs, medians", "", *table(*tables.cost_table(group)), ""]
    for section in tables.sections(results):
        parts += [f"## {section.title}", "", *table(section.header, section.lines), ""]
    missing = tables.absent(results)
    if missing:
        header = ["contender", "outcome", "reason", "cases"]
        parts += ["## Without a number", "", *table(header, list(map(list, missing))), ""]
    parts += ["## Runs", "", *table(*tables.run_table(results)), ""]
    return "\n".join(parts)


def table(header: list[str], lines: list[list[str]]) -> list[str]:
    """The lines of a table."""
    rows = [header, ["---"] * len(header), *lines]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def readme_table(results: Results) -> str:
    """Our fastest kernel beside the fastest other, of the first group."""
    group = next(g for g in tables.groups(results) if any(map(tables.is_ours, g.names)))
    ours = [tables.label(name) for name in group.names if tables.is_ours(name)]
    whose = ours[0] if len(ours) == 1 else "ours"
    header = ["mask", "tokens"]
    for which in ("fwd", "bwd"):
        header += [f"{tables.PASS_TITLES[which].lower()}, {whose}", "best other", "ratio"]
    lines = []
    for mask in group.masks:
        for seqlen in README_SEQLENS:
            rows = group.at(mask, seqlen)
            line = [mask, format_length(seqlen)]
            for which in ("fwd", "bwd"):
                line += _against_best(rows, which, tables.unit(group)[1])
            if any(cell != "-" for cell in line[2:]):
                lines.append(line)
    return "\n".join(table(header, lines))


def _against_best(rows: dict[str, tables.Row], which: str, size: float) -> list[str]:
    ours, other = (tables.best(rows, which, ours) for ours in (True, False))
    ratio = tables.ratio_to_best(rows, which)
    return [
        tables.number(ours[1] / size) if ours else "-",
        f"{tables.number(other[1] / size)}, {tables.label(other[0])}" if other else "-",
        f"{ratio:.2f}" if ratio else "-",
    ]


def write_readme_table(results: Results, path: Path) -> None:
    """Replaces what stands between the two marks in `path`.

    Args:
        results: rows of any runs.
        path: a Markdown file with both marks.

    Raises:
        ValueError: the marks are missing.
    """
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"`{path}` must hold the lines {BEGIN} and {END}")
    path.write_text(f"{before}{BEGIN}\n{readme_table(results)}\n{END}{after}")
