"""Charts as SVG text, coloured by the page's style sheet so that they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 680, 250
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 14, 26


class Bar(NamedTuple):
    """One bar; `low` and `high` bound its noise, `tip` is what a pointer sees."""

    style: str
    value: float
    low: float
    high: float
    tip: str


class Line(NamedTuple):
    """One value for each group, None for a gap."""

    style: str
    values: Sequence[float | None]
    tip: str


class Axis(NamedTuple):
    """From values to heights, with round steps."""

    top: float
    step: float

    @classmethod
    def covering(cls, largest: float) -> Axis:
        rough = max(largest, 1e-12) / 4
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough)
        return cls(step * math.ceil(largest * 1.02 / step), step)

    def y(self, value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / self.top)

    def ticks(self) -> list[float]:
        return [self.step * i for i in range(round(self.top / self.step) + 1)]


def bar_chart(
    groups: Sequence[tuple[str, Sequence[Bar]]], lines: Sequence[Line], unit: str, title: str
) -> str:
    """Grouped bars, with a level across each group for every line.

    Args:
        groups: name and bars.
        lines: one value for each group each.
        unit: of all values.
        title: for readers who hear the page.

    Returns:
        An `<svg>` element.
    """
    values = [bar.high for _, bars in groups for bar in bars]
    values += [value for line in lines for value in line.values if value is not None]
    axis = Axis.covering(max(values))
    parts = [_open(title), *_grid(axis, unit)]
    pitch = (WIDTH - LEFT - RIGHT) / len(groups)
    most = max(len(bars) for _, bars in groups)
    width = min(pitch * 0.84 / most, 34.0)
    for i, (name, bars) in enumerate(groups):
        middle = LEFT + pitch * (i + 0.5)
        start = middle - width * len(bars) / 2
        for j, bar in enumerate(bars):
            parts.append(_bar(bar, start + j * width, width, axis))
        parts.append(_text(middle, HEIGHT - 8, name, "middle"))
    for line in lines:
        steps = "".join(
            f"M{LEFT + pitch * i:.1f},{axis.y(value):.1f}h{pitch:.1f}"
            for i, value in enumerate(line.values)
            if value is not None
        )
        parts.append(
            f'<path d="{steps}" class="{line.style}"><title>{escape(line.tip)}</title></path>'
        )
    return "".join([*parts, "</svg>"])


def line_chart(xs: Sequence[str], lines: Sequence[Line], unit: str, title: str) -> str:
    """Lines with dots over named places, logarithmic upwards."""
    values = [value for line in lines for value in line.values if value]
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    high = max(high, low + 1)

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (math.log2(value) - low) / (high - low))

    parts = [_open(title)]
    stride = max(1, (high - low) // 5)
    for power in range(low, high + 1, stride):
        parts.append(_rule(y(2.0**power), f"{2.0**power:g}", unit if power + stride > high else ""))
    pitch = (WIDTH - LEFT - RIGHT) / len(xs)
    parts += [_text(LEFT + pitch * (i + 0.5), HEIGHT - 8, x, "middle") for i, x in enumerate(xs)]
    for line in lines:
        points = [
            (LEFT + pitch * (i + 0.5), y(value)) for i, value in enumerate(line.values) if value
        ]
        parts.append(_polyline(points, f"line {line.style}", line.tip))
        for (px, py), value in zip(points, (v for v in line.values if v), strict=True):
            tip = escape(f"{line.tip}: {value:.4g} {unit}")
            parts.append(
                f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5" class="dot {line.style}">'
                f"<title>{tip}</title></circle>"
            )
    return "".join([*parts, "</svg>"])


def _open(title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">'
    )


def _grid(axis: Axis, unit: str) -> list[str]:
    ticks = axis.ticks()
    return [_rule(axis.y(t), f"{t:g}", unit if t == ticks[-1] else "") for t in ticks]


def _rule(y: float, label: str, unit: str) -> str:
    unit_text = _text(LEFT + 4, y - 4, unit, "start") if unit else ""
    return (
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
        f"{_text(LEFT - 6, y + 4, label, 'end')}{unit_text}"
    )


def _bar(bar: Bar, x: float, width: float, axis: Axis) -> str:
    y, bottom, middle = axis.y(bar.value), axis.y(0), x + width / 2
    return (
        f'<g><title>{escape(bar.tip)}</title><rect x="{x + 0.5:.1f}" y="{y:.1f}" '
        f'width="{max(width - 1, 1):.1f}" height="{max(bottom - y, 0.5):.1f}" rx="1.5" class="fill {bar.style}"/>'
        f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="{axis.y(bar.low):.1f}" '
        f'y2="{axis.y(bar.high):.1f}" class="noise"/></g>'
    )


def _polyline(points: Sequence[tuple[float, float]], style: str, tip: str) -> str:
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{text}" class="{style}"><title>{escape(tip)}</title></polyline>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
