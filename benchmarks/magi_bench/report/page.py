"""A report as one HTML page: no script, nothing from outside, light and dark, wide and narrow."""

from __future__ import annotations

import statistics
from functools import partial
from html import escape
from pathlib import Path

from magi_bench.cases import format_length
from magi_bench.report import chart, published, tables
from magi_bench.report.tables import Group, Section, Table
from magi_bench.results.rows import Results


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
    return (
        f'<section id="{name}"><h2>{escape(section.title)}</h2>{charts}'
        f"{''.join(map(_table, section.tables))}</section>"
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
    figures = []
    for mask in group.masks:
        cells = {format_length(x): group.at(mask, x) for x in group.seqlens}
        cells = {length: rows for length, rows in cells.items() if rows}
        made = chart.picture(
            [group], cells, names, mask, published=partial(_published, group, mask)
        )
        inline = made.replace(f' xmlns="{chart.NAMESPACE}"', "")  # a page needs none
        figures.append(f"<figure>{inline}</figure>")
    note = f"<p>{escape(published.SOURCE)}</p>" if _has_published(group) else ""
    return f'<div class="charts">{"".join(figures)}</div>{note}'


def _has_published(group: Group) -> bool:
    of = (group.level, group.documents, group.heads, group.head_dim)
    return of == ("kernel", published.DOCUMENTS, published.HEADS, published.HEAD_DIM)


def _published(group: Group, mask: str, which: str) -> dict[str, dict[str, float]]:
    """The speeds that others published, by system and length as the picture has them."""
    if not _has_published(group):
        return {}
    found, lengths = published.figures(mask.replace(" ", "_"), which), set(group.seqlens)
    return {
        system: {format_length(n): x for n, x in values.items() if n in lengths}
        for system, values in found.items()
    }


def _provenance(results: Results) -> str:
    text = (
        "FLOPs are 4 x visible pairs x query heads x head_dim forward and 2.5 times that backward, for every "
        "contender; where v has a head_dim of its own, two and five matrix products with theirs. "
        "All contenders of a case get the same random inputs and a mask derived from the same slices."
    )
    facts = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in tables.facts(results)
    )
    runs = _table(tables.run_table(results))
    return f'<section class="runs"><h2>How it was measured</h2><p>{text}</p><dl>{facts}</dl>{runs}</section>'


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>"
        for line in table.lines
    )
    above = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    above += f"<p>{escape(table.words)}</p>" if table.words else ""
    return f'{above}<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
