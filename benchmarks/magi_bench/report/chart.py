"""Pictures of speeds as SVG. Bars, a panel for each pass: of a document some contenders under some masks at one length,
of a report one mask at all lengths. Lines over the number of ranks, a panel for each pass and mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from typing import NamedTuple

from magi_bench.cases import PASS_TITLES, PASSES, format_length
from magi_bench.report import published as others
from magi_bench.report import tables
from magi_bench.results.rows import Results, Row

NAMESPACE = "http://www.w3.org/2000/svg"
WIDTH, PANEL, TOP, LEFT, RIGHT = 980, 226, 64, 16, 16
PLOT = 150  # height of the highest bar
# Ours first. The colours also differ in lightness, for readers who do not see hues.
COLORS = ("#e25822", "#1f4e9c", "#4fb3a5", "#b3b8c0")
#: Of lines, which there may be more of; those beyond them begin again, with hollow marks.
LINE_COLORS = (
    *(*COLORS, "#8e44ad", "#c99700", "#2e7d32", "#c2185b"),
    *("#6d4c41", "#0aa2c0", "#8a8d1f", "#7986cb"),
)
BLACK = "#1d1f23"
DASHES = ("5 4", "2 3")  # of what others published
COLUMNS, AXIS, LINE = 4, 34, 18  # panels side by side, width of what an axis says, height of a line
STYLE = (
    "text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:#4b5563}"
    ".value{font-size:11px}.ours{font-weight:700;fill:#1d1f23}.title{font-size:14px;font-weight:600;fill:#1d1f23}"
)


def to_chart(
    results: Results,
    seqlen: int,
    masks: Sequence[str],
    names: Sequence[str],
    *,
    by_ranks: bool = False,
) -> str:
    """The chart of `names`, a colour each, under `masks`, as reports call them, of `seqlen` tokens: bars, forward above
    backward, or `by_ranks` lines over the number of ranks. A ValueError: too many contenders, rows of several devices,
    heads or dtypes, or a mask without a number."""
    most = len(LINE_COLORS if by_ranks else COLORS)
    if len(names) > most:
        raise ValueError(f"`contenders` must be at most {most}, got {len(names)}")
    found = tables.groups(results, every=True)
    setups = {(g.device, g.heads, g.head_dim, g.dtype) for g in found}
    if len(setups) != 1:
        raise ValueError(f"`results` must be of one device, heads and dtype, got {sorted(setups)}")
    device, heads, head_dim, dtype = setups.pop()
    cells: dict[str, dict[str, Row]] = {}
    for mask in masks:
        cells[mask] = {k: row for group in found[::-1] for k, row in group.at(mask, seqlen).items()}
        if not any(tables.tflops(cells[mask].get(x), which) for x in names for which in PASSES):
            where = format_length(seqlen)
            raise ValueError(f"`masks` names {mask!r}, which has no number at {where}")
    if by_ranks:
        group = next((x for x, of in tables.several_ranks(results) if of == seqlen), None)
        if group is None:
            where = format_length(seqlen)
            raise ValueError(f"`results` must be of several numbers of ranks at {where}")
        return over_ranks(group, seqlen, masks, names)
    setup = f"{device}, {format_length(seqlen)} tokens, heads {heads}, head_dim {head_dim}, {dtype}"
    return picture(found, cells, names, f"more is better ({setup})", most_panels=2)


def picture(
    groups: Sequence[tables.Group],
    cells: Mapping[str, dict[str, Row]],
    names: Sequence[str],
    title: str,
    most_panels: int = len(PASSES),
    published: Callable[[str], Mapping[str, Mapping[str, float]]] = lambda which: {},
) -> str:
    """The picture of `names` in `cells`, rows by contender, from left to right. What others published of a pass, by
    system and cell, is drawn dashed."""
    has = {
        which for rows in cells.values() for row in rows.values() for which in row.get("passes", ())
    }
    shown = [which for which in PASSES if which in has][:most_panels]
    labels = {name: label for group in groups for name, label in group.labels.items()}
    ours = {name for group in groups for name in group.ours}
    unit, size = max((group.unit for group in groups), key=lambda unit: unit[1])
    legend, lowest = _legend({x: labels.get(x, x) for x in names}, ours)
    parts = [_text(LEFT, 24, f"{unit}, {title}", "title"), *legend]
    for i, which in enumerate(shown):
        top = lowest + PANEL * i
        parts.append(_text(LEFT, top + 14, PASS_TITLES[which], "title"))
        speeds = {
            place: [tables.tflops(rows.get(name), which) for name in names]
            for place, rows in cells.items()
        }
        styles = ["value ours" if name in ours else "value" for name in names]
        parts += _bars(speeds, styles, size, top + 42 + PLOT, published(which))
    return _svg(parts, lowest + PANEL * len(shown), title)


def _svg(parts: Sequence[str], height: float, title: str) -> str:
    begin = (
        f'<svg xmlns="{NAMESPACE}" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-label="Attention speed: {escape(title, quote=True)}">'
        f'<style>{STYLE}</style><rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>'
    )
    return "".join([begin, *parts, "</svg>\n"])


def _legend(labels: Mapping[str, str], ours: Collection[str]) -> tuple[list[str], int]:
    """The colours of contenders in as many lines as they need, and where what is below them begins."""
    parts, x, y = [], LEFT, TOP - 26
    for i, (name, label) in enumerate(labels.items()):
        width = 44 + 7 * len(label)
        if x > LEFT and x + width - 20 > WIDTH:
            x, y = LEFT, y + LINE
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" rx="2" {_fill(i)}/>')
        parts.append(_text(x + 18, y + 10, label, "ours" if name in ours else ""))
        x += width
    return parts, y + 26


def _fill(i: int) -> str:
    """The colour of a contender, hollow where colours have begun again."""
    color = LINE_COLORS[i % len(LINE_COLORS)]
    if i < len(LINE_COLORS):
        return f'fill="{color}"'
    return f'fill="#ffffff" stroke="{color}"'


def over_ranks(
    group: tables.Group,
    seqlen: int,
    masks: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
) -> str:
    """The picture of the TFLOP/s of a GPU over the number of ranks, of so many tokens each: all masks and contenders of
    a group, or some. What others published of the same setup is drawn dashed."""
    masks, names = masks or group.masks, names or list(group.labels)
    places = [(which, mask) for which in group.passes for mask in masks]
    panels = {x: _lines(group, *x, seqlen, names) for x in places}
    points = [x for lines in panels.values() for line in lines for x in line.points.items()]
    legend, lowest = _legend({x: group.labels.get(x, x) for x in names}, group.ours)
    (unit, size), (length, heads) = group.unit, (format_length(seqlen), group.heads)
    setup = f"{group.device}, {length} tokens a rank, heads {heads}, head_dim {group.head_dim}, {group.dtype}"
    title = f"{unit} of a GPU over the number of ranks, more is better"
    parts = [_text(LEFT, 24, title, "title"), *legend, _text(LEFT, lowest + 4, setup)]
    lowest += LINE
    columns = min(len(masks), COLUMNS)
    rows_of_pass = math.ceil(len(masks) / columns)
    pitch = (WIDTH - LEFT - RIGHT) / columns
    ranks = sorted({x for x, _ in points})
    for i, ((which, mask), lines) in enumerate(panels.items()):
        in_pass, column = divmod(i % len(masks), columns)
        row = i // len(masks) * rows_of_pass + in_pass
        left, top = LEFT + pitch * column, lowest + PANEL * row
        axes = Axes(
            left + AXIS, top + 42 + PLOT, pitch - AXIS - 14, ranks, max(y for _, y in points)
        )
        if i % len(masks) == 0:
            parts.append(_text(LEFT, top + 14, PASS_TITLES[which], "title"))
        parts.append(_text(axes.left, top + 34, mask, "value ours"))
        parts += [*axes.drawn(size), *(axes.line(x, size) for x in lines)]
    bottom = lowest + PANEL * rows_of_pass * len(group.passes)
    if any(line.dash for lines in panels.values() for line in lines):
        parts += [_text(LEFT, bottom + 8 + LINE * i, x) for i, x in enumerate(others.STRATEGIES)]
        bottom += 8 + LINE * len(others.STRATEGIES)
    return _svg(parts, bottom, f"{title} ({setup})")


class Line(NamedTuple):
    """The speeds of a contender, or of what others published."""

    label: str
    points: Mapping[int, float]  # TFLOP/s by number of ranks
    color: str
    width: float
    fill: str = ""  # of the marks; published ones have none
    dash: str = ""  # of published ones


def _lines(
    group: tables.Group, which: str, mask: str, seqlen: int, names: Sequence[str]
) -> list[Line]:
    """The lines of a panel, ours on top; of strategies that others published those that are there, and their own."""
    speeds = tables.speeds_over_ranks(group, mask, seqlen, which)
    colors = {name: LINE_COLORS[i % len(LINE_COLORS)] for i, name in enumerate(names)}
    told = others.of_strategies(group.setup, mask.replace(" ", "_"), which, seqlen)
    made = [
        Line(x.label, x.points, colors.get(x.strategy, BLACK), 1.2, dash=DASHES[x.number])
        for x in told
        if x.strategy in colors or not x.strategy
    ]
    for i, name in sorted(enumerate(names), key=lambda x: x[1] in group.ours):
        if name in speeds:
            width = 3.0 if name in group.ours else 1.5
            label = group.labels[name]
            made.append(Line(label, speeds[name], colors[name], width, _fill(i)))
    return made


class Axes(NamedTuple):
    """A panel: the number of ranks to the right, in powers of two, and speed upwards."""

    left: float
    bottom: float
    width: float
    ranks: Sequence[int]  # that have a tick
    most: float  # the speed at the top

    def at(self, ranks: int, speed: float) -> tuple[float, float]:
        """A place in the picture."""
        low, high = math.log2(self.ranks[0]), math.log2(self.ranks[-1])
        share = (math.log2(ranks) - low) / (high - low)
        return self.left + self.width * share, self.bottom - PLOT * speed / self.most

    def drawn(self, size: float) -> list[str]:
        """The ticks, of speeds in units of so many TFLOP/s."""
        parts, step = [], _step(self.most / size) * size
        for i in range(int(self.most / step) + 1):
            x, y = self.at(self.ranks[0], i * step)
            parts.append(
                f'<line x1="{x:.1f}" x2="{x + self.width:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e0"/>'
            )
            parts.append(_text(x - 6, y + 4, f"{i * step / size:g}", "value", "end"))
        for ranks in self.ranks:
            parts.append(_text(self.at(ranks, 0)[0], self.bottom + 17, str(ranks), "", "middle"))
        return parts

    def line(self, line: Line, size: float) -> str:
        """A line, and its speeds in units of so many TFLOP/s, which a browser shows under the mouse."""
        places = [self.at(*point) for point in line.points.items()]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
        told = ", ".join(f"{tables.number(y / size)} on {x}" for x, y in line.points.items())
        marks = (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{line.width / 2 + 1.5:.1f}" {line.fill}/>'
            for x, y in places
            if line.fill
        )
        return (
            f"<g><title>{escape(line.label)}: {told}</title>"
            f'<polyline points="{path}" fill="none" stroke="{line.color}" stroke-width="{line.width}"{dash}/>'
            f"{''.join(marks)}</g>"
        )


def _step(most: float) -> float:
    """The distance of ticks, 1, 2 or 5 times a power of ten, of which there are at most six."""
    power = 10.0 ** math.floor(math.log10(most / 6))
    return next(x * power for x in (1, 2, 5, 10) if most <= 6 * x * power)


def _bars(
    speeds: Mapping[str, list[float | None]],
    styles: Sequence[str],
    size: float,
    bottom: int,
    published: Mapping[str, Mapping[str, float]],
) -> list[str]:
    parts = [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}" stroke="#d4d4d0"/>'
    ]
    told_by_others = [x for values in published.values() for x in values.values()]
    most = max([x for found in speeds.values() for x in found if x] + told_by_others, default=1.0)
    pitch = (WIDTH - LEFT - RIGHT) / len(speeds)
    width = min(0.84 * pitch / len(styles), 36.0)
    for i, (place, found) in enumerate(speeds.items()):
        middle = LEFT + pitch * (i + 0.5)
        for j, (style, value) in enumerate(zip(styles, found, strict=True)):
            x = middle + width * (j - len(styles) / 2)
            if value is None:
                parts.append(_text(x + width / 2, bottom - 5, "n/a", "value", "middle"))
                continue
            height = PLOT * value / most
            parts.append(
                f'<rect x="{x + 1:.1f}" y="{bottom - height:.1f}" width="{width - 2:.1f}" '
                f'height="{height:.1f}" rx="1.5" fill="{COLORS[j]}"/>'
            )
            told = tables.number(value / size)
            parts.append(_text(x + width / 2, bottom - height - 4, told, style, "middle"))
        for dash, (system, values) in zip(DASHES, published.items(), strict=False):
            if value := values.get(place):
                y, half = bottom - PLOT * value / most, width * len(styles) / 2 + 4
                parts.append(
                    f'<line x1="{middle - half:.1f}" x2="{middle + half:.1f}" y1="{y:.1f}" y2="{y:.1f}" '
                    f'stroke="{BLACK}" stroke-dasharray="{dash}"><title>{escape(system)}, published: '
                    f"{tables.number(value)}</title></line>"
                )
        parts.append(_text(middle, bottom + 17, place, "", "middle"))
    return parts


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'
