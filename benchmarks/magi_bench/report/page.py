"""A report as one HTML page: no script, nothing from outside, light and dark, wide and narrow."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from html import escape
from pathlib import Path

from magi_bench.cases import format_length
from magi_bench.report import published, svg, tables
from magi_bench.report.tables import Group
from magi_bench.results.rows import Results

# The style sheet has so many colours for contenders that are not ours, which also differ in lightness, and so many for
# ours. Charts draw the fastest contenders of a group, as many as there are colours; tables have all of them.
NUM_COLORS, NUM_OURS = 5, 3
# Below this share of a large matmul's speed, its line would leave the bars no room; the legend has it anyway.
ROOF_SHARE = 0.6


def to_html(results: Results, title: str | None = None, note: str = "") -> str:
    found, title = tables.groups(results), title or tables.title(results)
    styles = _styles(found)
    style = Path(__file__).with_name("page.css").read_text()
    words = f"<p>{escape(note)}</p>" if note else ""
    body = [f"<header><h1>{escape(title)}</h1>{words}{_summary(results, found)}</header>"]
    if len(found) > 1:
        links = "".join(f'<a href="#g{i}">{escape(g.title)}</a>' for i, g in enumerate(found))
        body.append(f"<nav>{links}</nav>")
    body += [_section(group, i, styles, results) for i, group in enumerate(found)]
    for section in tables.sections(results):
        words = "".join(f"<p>{escape(x)}</p>" for x in tables.notes(results))
        made = _table(section.header, section.lines)
        body.append(f"<section><h2>{escape(section.title)}</h2>{words}{made}</section>")
    body += [_absent(results), _provenance(results)]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _summary(results: Results, found: list[Group]) -> str:
    devices = " and ".join(dict.fromkeys(run["device"] for run in results.runs.values()))
    dates = sorted({run["date"][:10] for run in results.runs.values() if "date" in run})
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}" if dates else ""
    tiles = [("measured", f"{len(results.ok_rows())}", "contenders x cases")]
    for which in ("fwd", "bwd"):
        ratios = [ratio for group in found for ratio in tables.ratios(group, which)]
        if ratios:
            # The median, as a cell in which nobody else can skip what is hidden says little of the others.
            name = f"ours / best other, {tables.PASS_TITLES[which].lower()}"
            tiles.append((name, f"{statistics.median(ratios):.2f}", "median of all cases"))
    wrong = sum(row["status"] == "wrong" for row in results.rows.values())
    tiles.append(("failed the numerical gate", str(wrong), "never drawn as speed"))
    boxes = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span><i>{escape(note)}</i></div>'
        for name, value, note in tiles
    )
    return (
        f'<p class="lead">{escape(devices)} <span>{span}</span></p><div class="tiles">{boxes}</div>'
    )


def _section(group: Group, index: int, styles: dict[str, str], results: Results) -> str:
    parts = [f'<section id="g{index}"><h2>{escape(group.title)}</h2>']
    styles = {name: styles[name] for name in _drawn(group)}
    for which in group.passes:
        parts.append(f"<h3>{tables.PASS_TITLES[which]}</h3>")
        parts.append(_heat_map(group, which))
        parts.append(_legend(group, styles, results))
        charts = (_speed_chart(group, which, mask, styles, results) for mask in group.masks)
        parts.append(f'<div class="charts">{"".join(charts)}</div>')
        table = _table(*tables.speed_table(group, which))
        parts.append(
            f"<details><summary>All numbers, {tables.unit(group)[0]}</summary>{table}</details>"
        )
    parts.append(_memory(group, styles))
    parts.append(
        "<h3>Other costs</h3><p>Medians over all cases: preparing for a new mask of a known shape, the first "
        "calls with compilation, the time until a call returns, and the spread from the 20th to the 80th "
        "percentile; and the worst of all errors over what is allowed.</p>"
    )
    parts.append(_table(*tables.cost_table(group)))
    return "".join([*parts, "</section>"])


def _drawn(group: Group) -> list[str]:
    """The contenders of a group that charts show: ours, and the fastest others."""
    shares: dict[str, list[float]] = {}
    for which in group.passes:
        for name, by_mask in tables.heat_map(group, which).items():
            shares.setdefault(name, []).extend(by_mask.values())
    others = [name for name in group.names if not tables.is_ours(name)]
    others.sort(key=lambda name: -statistics.mean(shares.get(name, [0.0])))
    return [name for name in group.names if tables.is_ours(name) or name in others[:NUM_COLORS]]


def _styles(found: list[Group]) -> dict[str, str]:
    """A style of the sheet for each contender, where possible the same in all groups; ours stand out."""
    drawn = [_drawn(group) for group in found]
    ours = list(dict.fromkeys(name for names in drawn for name in names if tables.is_ours(name)))
    styles = {name: f"ours{i % NUM_OURS}" for i, name in enumerate(ours)}
    for names in drawn:
        taken = {styles[name] for name in names if name in styles}
        free = (style for i in range(NUM_COLORS) if (style := f"c{i}") not in taken)
        styles |= {name: next(free) for name in names if name not in styles}
    return styles


def _legend(group: Group, styles: dict[str, str], results: Results) -> str:
    entries = _swatches(styles)
    unit, size = tables.unit(group)
    if roof := tables.roofline(group, results):
        entries.append(
            f'<span><i class="stroke roof"></i>large matmul, measured: {tables.number(roof / size)} {unit}</span>'
        )
    if len(styles) < len(group.names):
        entries.append("<span>others: in the tables</span>")
    if _has_published(group):
        entries += [
            f'<span><i class="stroke published{i}"></i>{escape(system)}, published</span>'
            for i, system in enumerate(published.SYSTEMS)
        ]
    note = f'<p class="note">{escape(published.SOURCE)}</p>' if _has_published(group) else ""
    return f'<div class="legend">{"".join(entries)}</div>{note}'


def _has_published(group: Group) -> bool:
    return (
        (group.level, group.documents) == ("kernel", published.DOCUMENTS)
        and (group.heads, group.head_dim) == (published.HEADS, published.HEAD_DIM)
        and "NVIDIA" in group.device
    )


def _speed_chart(
    group: Group, which: str, mask: str, styles: dict[str, str], results: Results
) -> str:
    unit, size = tables.unit(group)
    bars: list[tuple[str, list[svg.Bar]]] = []
    seqlens = []
    for seqlen in group.seqlens:
        rows = group.at(mask, seqlen)
        cell_bars = [
            _bar(rows[name], name, which, styles[name], unit, size)
            for name in styles
            if tables.tflops(rows.get(name), which) is not None
        ]
        if cell_bars:
            bars.append((format_length(seqlen), cell_bars))
            seqlens.append(seqlen)
    if not bars:
        return ""
    lines = []
    roof = tables.roofline(group, results)
    highest = max(bar.value for _, cell_bars in bars for bar in cell_bars)
    if roof and highest * size >= ROOF_SHARE * roof:
        tip = f"large matmul: {tables.number(roof / size)} {unit}"
        lines.append(svg.Line("roof", [roof / size] * len(seqlens), tip))
    if _has_published(group):
        figures_of = published.figures(mask.replace(" ", "_"), which)
        for i, system in enumerate(published.SYSTEMS):
            figures = figures_of.get(system, {})
            values = [figures.get(seqlen) for seqlen in seqlens]
            if any(values):
                lines.append(svg.Line(f"published{i}", values, f"{system}, published"))
    chart = svg.bar_chart(bars, lines, unit, f"{mask}, {tables.PASS_TITLES[which]}")
    return (
        f'<figure><figcaption>{escape(mask)}</figcaption><div class="scroll">{chart}</div></figure>'
    )


def _bar(row: tables.Row, name: str, which: str, style: str, unit: str, size: float) -> svg.Bar:
    times = row["passes"][which]
    value = times["tflops"] / size
    low, high = (value * times["ms"] / times[key] for key in ("p80_ms", "p20_ms"))
    tip = f"{tables.label(name)}: {tables.number(value)} {unit}, {times['ms']:.4g} ms"
    return svg.Bar(style, value, low, high, tip)


def _heat_map(group: Group, which: str) -> str:
    found = tables.heat_map(group, which)
    names = [name for name in group.names if name in found]
    if len(names) < 2:
        return ""
    head = "".join(f"<th><span>{escape(mask)}</span></th>" for mask in group.masks)
    lines = []
    for name in names:
        cells = []
        for mask in group.masks:
            share = found[name].get(mask)
            if share is None:
                cells.append('<td class="none">-</td>')
            else:
                cells.append(f'<td style="--share:{share:.3f}"><b>{share:.0%}</b></td>')
        lines.append(f"<tr><th>{escape(tables.label(name))}</th>{''.join(cells)}</tr>")
    return (
        "<p>Share of the fastest contender's speed, geometric mean over the lengths each one ran.</p>"
        f'<div class="scroll"><table class="heat"><tr><th></th>{head}</tr>{"".join(lines)}</table></div>'
    )


def _memory(group: Group, styles: dict[str, str]) -> str:
    which = "fwdbwd" if "fwdbwd" in group.passes else group.passes[-1]
    charts = []
    for mask in group.masks:
        lines = []
        for name in styles:
            values = [_peak_mib(group.at(mask, s).get(name), which) for s in group.seqlens]
            if any(values):
                lines.append(svg.Line(styles[name], values, tables.label(name)))
        if lines:
            xs = [format_length(seqlen) for seqlen in group.seqlens]
            chart = svg.line_chart(xs, lines, "MiB", f"{mask}, peak memory")
            charts.append(
                f"<figure><figcaption>{escape(mask)}</figcaption>"
                f'<div class="scroll">{chart}</div></figure>'
            )
    if not charts:
        return ""
    title = tables.PASS_TITLES[which].lower()
    return (
        f"<h3>Peak memory, {title}</h3><p>Allocated by the call at most, beyond its inputs.</p>"
        f"<details><summary>All masks, MiB</summary>"
        f'<div class="legend">{"".join(_swatches(styles))}</div><div class="charts">{"".join(charts)}</div></details>'
    )


def _swatches(styles: dict[str, str]) -> list[str]:
    return [
        f'<span><i class="swatch {style}"></i>{escape(tables.label(name))}</span>'
        for name, style in styles.items()
    ]


def _peak_mib(row: tables.Row | None, which: str) -> float | None:
    if row is None or row["status"] != "ok":
        return None
    peak = row["passes"].get(which, {}).get("peak_bytes")
    return peak / 2**20 if peak else None


def _absent(results: Results) -> str:
    missing = tables.absent(results)
    if not missing:
        return ""
    header = ["contender", "outcome", "reason", "cases"]
    made = _table(header, map(list, missing))
    return f'<section class="words"><h2>Without a number</h2>{made}</section>'


def _provenance(results: Results) -> str:
    text = (
        "FLOPs are 4 x visible pairs x query heads x head_dim forward and 2.5 times that backward, for every "
        "contender; where v has a head_dim of its own, two and five matrix products with theirs. "
        "All contenders of a case get the same random inputs and a mask derived from the same slices."
    )
    facts = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in tables.facts(results)
    )
    runs = _table(*tables.run_table(results))
    return f'<section class="runs"><h2>How it was measured</h2><p>{text}</p><dl>{facts}</dl>{runs}</section>'


def _table(header: list[str], lines: Iterable[list[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines
    )
    return f'<div class="scroll"><table class="plain"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
