"""Reports of result files: Markdown, the table in the README, and one HTML page without anything from outside.

The page draws speeds that others published dashed beside ours (`published.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from functools import partial
from html import escape
from pathlib import Path

from magi_bench.cases import PASS_TITLES, format_length
from magi_bench.report import chart, published, tables
from magi_bench.report.tables import Group, Section, Table
from magi_bench.results.rows import Results, Row


def to_html(results: Results, title: str | None = None, note: str = "") -> str:
    title, found = title or tables.title(results), list(tables.sections(results))
    style = Path(__file__).with_name("page.css").read_text()
    words = "".join(f"<p>{escape(x)}</p>" for x in (note, *tables.notes(results)) if x)
    body = [f"<header><h1>{escape(title)}</h1>{words}</header>"]
    if len(found) > 1:
        links = (f'<a href="#s{i}">{escape(x.title)}</a>' for i, x in enumerate(found))
        body.append(f"<nav>{''.join(links)}</nav>")
    body += [_section(section, f"s{i}") for i, section in enumerate(found)]
    body.append(_provenance(results))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _section(section: Section, name: str) -> str:
    charts = _charts(section.group) if section.group else ""
    charts += _figures(chart.over_ranks(*place) for place in section.over_ranks)
    return (
        f'<section id="{name}"><h2>{escape(section.title)}</h2>{charts}'
        f"{''.join(map(_html_table, section.tables))}</section>"
    )


def _charts(group: Group) -> str:
    """A picture of each mask: our first contenders and the fastest others, as many as there are colours."""
    mean = {
        name: statistics.mean(
            share
            for which in group.passes
            for (of, _), share in tables.shares(group, which).items()
            if of == name
        )
        for name in group.labels
    }
    others = sorted((x for x in mean if x not in group.ours), key=lambda x: -mean[x])
    ours = group.ours[: max(len(chart.COLORS) - len(others), 1)]
    names = [*ours, *others][: len(chart.COLORS)]
    made = []
    for mask in group.masks:
        cells = {format_length(x): group.at(mask, x) for x in group.seqlens}
        cells = {length: rows for length, rows in cells.items() if rows}
        told = partial(_published, group, mask)
        made.append(chart.picture([group], cells, names, mask, published=told))
    note = f"<p>{escape(published.KERNELS)}</p>" if _is_as_published(group) else ""
    return f"{_figures(made)}{note}"


def _figures(pictures: Iterable[str]) -> str:
    inline = (x.replace(f' xmlns="{chart.NAMESPACE}"', "") for x in pictures)  # a page needs none
    figures = "".join(f"<figure>{x}</figure>" for x in inline)
    return f'<div class="charts">{figures}</div>' if figures else ""


def _published(group: Group, mask: str, which: str) -> dict[str, dict[str, float]]:
    """The speeds that others published, by system and length as the picture has them."""
    found: dict[str, dict[str, float]] = {}
    told = published.of_kernels(mask.replace(" ", "_"), which) if _is_as_published(group) else []
    for x in told:
        of_system = found.setdefault(x.system, {})
        if x.seqlen in group.seqlens:
            of_system[format_length(x.seqlen)] = x.tflops
    return found


def _is_as_published(group: Group) -> bool:
    return group.level == "kernel" and group.setup == published.SETUP


def _provenance(results: Results) -> str:
    text = (
        "FLOPs are 4 x visible pairs x query heads x head_dim forward and 2.5 times that backward, for every "
        "contender; where v has a head_dim of its own, two and five matrix products with theirs. "
        "All contenders of a case get the same random inputs and a mask derived from the same slices."
    )
    facts = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in tables.facts(results)
    )
    runs = _html_table(tables.run_table(results))
    return f'<section class="runs"><h2>How it was measured</h2><p>{text}</p><dl>{facts}</dl>{runs}</section>'


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>"
        for line in table.lines
    )
    above = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    above += f"<p>{escape(table.words)}</p>" if table.words else ""
    return f'{above}<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


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
            parts += [made.words, ""] if made.words else []
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


def write_report(
    results: Results, output: Path, title: str | None = None, note: str = ""
) -> list[Path]:
    """Writes the report as `output` with .md and with .html, under the title of the first run or another; gives the
    files. A ValueError if there is nothing to report."""
    if not results.ok_rows():
        raise ValueError("the results must hold at least one measured row, got none")
    written = []
    for suffix, make in ((".md", to_markdown), (".html", to_html)):
        path = output.with_name(output.name + suffix)
        path.write_text(make(results, title, note))
        written.append(path)
    return written
