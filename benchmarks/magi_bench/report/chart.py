"""Pictures of speeds as SVG, a panel for each pass: of a document some contenders under some masks at one length, of a
report one mask at all lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from magi_bench.cases import PASS_TITLES, PASSES, format_length
from magi_bench.report import tables
from magi_bench.results.rows import Results, Row

NAMESPACE = "http://www.w3.org/2000/svg"
WIDTH, PANEL, TOP, LEFT, RIGHT = 980, 226, 64, 16, 16
PLOT = 150  # height of the highest bar
# Ours first. The colours also differ in lightness, for readers who do not see hues.
COLORS = ("#e25822", "#1f4e9c", "#4fb3a5", "#b3b8c0")
DASHES = ("5 4", "2 3")  # of what others published
STYLE = (
    "text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:#4b5563}"
    ".value{font-size:11px}.ours{font-weight:700;fill:#1d1f23}.title{font-size:14px;font-weight:600;fill:#1d1f23}"
)


def to_chart(results: Results, seqlen: int, masks: Sequence[str], names: Sequence[str]) -> str:
    """The chart of `names`, a colour each, under `masks`, as reports call them, of `seqlen` tokens, forward above
    backward. A ValueError: too many contenders, rows of several devices, heads or dtypes, or a mask without a
    number."""
    if len(names) > len(COLORS):
        raise ValueError(f"`contenders` must be at most {len(COLORS)}, got {len(names)}")
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
    height = TOP + PANEL * len(shown)
    parts = [
        f'<svg xmlns="{NAMESPACE}" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-label="Attention speed: {escape(title, quote=True)}">',
        f'<style>{STYLE}</style><rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        _text(LEFT, 24, f"{unit}, {title}", "title"),
    ]
    x = LEFT
    for name, color in zip(names, COLORS, strict=False):
        label = labels.get(name, name)
        parts.append(f'<rect x="{x}" y="38" width="12" height="12" rx="2" fill="{color}"/>')
        parts.append(_text(x + 18, 48, label, "ours" if name in ours else ""))
        x += 44 + 7 * len(label)
    for i, which in enumerate(shown):
        top = TOP + PANEL * i
        parts.append(_text(LEFT, top + 14, PASS_TITLES[which], "title"))
        speeds = {
            place: [tables.tflops(rows.get(name), which) for name in names]
            for place, rows in cells.items()
        }
        styles = ["value ours" if name in ours else "value" for name in names]
        parts += _bars(speeds, styles, size, top + 42 + PLOT, published(which))
    return "".join([*parts, "</svg>\n"])


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
                    f'stroke="#1d1f23" stroke-dasharray="{dash}"><title>{escape(system)}, published: '
                    f"{tables.number(value)}</title></line>"
                )
        parts.append(_text(middle, bottom + 17, place, "", "middle"))
    return parts


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'
