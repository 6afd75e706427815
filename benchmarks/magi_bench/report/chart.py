"""One picture for a document: some contenders under some masks at one length, forward above backward, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from magi_bench.cases import PASSES, format_length
from magi_bench.report import tables
from magi_bench.results.rows import Results

WIDTH, PANEL, TOP, LEFT, RIGHT = 980, 226, 64, 16, 16
PLOT = 150  # height of the highest bar
# Ours first. The colours also differ in lightness, for readers who do not see hues.
COLORS = ("#e25822", "#1f4e9c", "#4fb3a5", "#b3b8c0")
STYLE = (
    "text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:#4b5563}"
    ".value{font-size:11px}.ours{font-weight:700;fill:#1d1f23}.title{font-size:14px;font-weight:600;fill:#1d1f23}"
)


def to_chart(results: Results, seqlen: int, masks: Sequence[str], names: Sequence[str]) -> str:
    """The chart of `names`, a colour each, under `masks` of `seqlen` tokens.

    Args:
        results: rows of one device, with the same heads, head_dim and dtype.
        seqlen: tokens of the sequence.
        masks: as they are called in reports, such as "document causal".
        names: contenders; at most as many as there are colours.

    Returns:
        The chart as SVG.

    Raises:
        ValueError: too many contenders, rows that do not belong together, or a mask without a number.
    """
    if len(names) > len(COLORS):
        raise ValueError(f"`contenders` must be at most {len(COLORS)}, got {len(names)}")
    found = tables.groups(results, every=True)
    setups = {(g.device, g.heads, g.head_dim, g.dtype) for g in found}
    if len(setups) != 1:
        raise ValueError(f"`results` must be of one device, heads and dtype, got {sorted(setups)}")
    device, heads, head_dim, dtype = setups.pop()
    cases = {mask: _cell(found, mask, seqlen, names) for mask in masks}
    setup = f"{device}, {format_length(seqlen)} tokens, heads {heads}, head_dim {head_dim}, {dtype}"
    has = {
        which for rows in cases.values() for row in rows.values() for which in row.get("passes", ())
    }
    shown = [which for which in PASSES if which in has][:2]
    labels = {name: row for rows in cases.values() for name, row in rows.items()}
    height = TOP + PANEL * len(shown)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-label="Attention speed: {escape(setup, quote=True)}">',
        f'<style>{STYLE}</style><rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        _text(LEFT, 24, f"TFLOP/s, more is better ({setup})", "title"),
        _legend(
            {name: tables.label_of(labels[name]) if name in labels else name for name in names}
        ),
    ]
    for i, which in enumerate(shown):
        parts += _panel(cases, which, names, TOP + PANEL * i)
    return "".join([*parts, "</svg>\n"])


def _cell(
    found: list[tables.Group], mask: str, seqlen: int, names: Sequence[str]
) -> dict[str, tables.Row]:
    rows: dict[str, tables.Row] = {}
    for group in found:
        rows = {**group.at(mask, seqlen), **rows}
    if not any(tables.tflops(rows.get(name), which) for name in names for which in PASSES):
        raise ValueError(f"`masks` names {mask!r}, which has no number at {format_length(seqlen)}")
    return rows


def _legend(labels: dict[str, str]) -> str:
    parts, x = [], LEFT
    for (name, label), color in zip(labels.items(), COLORS, strict=False):
        parts.append(f'<rect x="{x}" y="38" width="12" height="12" rx="2" fill="{color}"/>')
        parts.append(_text(x + 18, 48, label, "ours" if tables.is_ours(name) else ""))
        x += 44 + 7 * len(label)
    return "".join(parts)


def _panel(
    cases: dict[str, dict[str, tables.Row]], which: str, names: Sequence[str], top: int
) -> list[str]:
    bottom = top + 42 + PLOT
    parts = [
        _text(LEFT, top + 14, tables.PASS_TITLES[which], "title"),
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}" stroke="#d4d4d0"/>',
    ]
    speeds = {
        mask: [tables.tflops(rows.get(name), which) for name in names]
        for mask, rows in cases.items()
    }
    most = max(value for found in speeds.values() for value in found if value)
    pitch = (WIDTH - LEFT - RIGHT) / len(cases)
    width = min(0.84 * pitch / len(names), 36.0)
    for i, (mask, found) in enumerate(speeds.items()):
        middle = LEFT + pitch * (i + 0.5)
        for j, (name, value) in enumerate(zip(names, found, strict=True)):
            x = middle + width * (j - len(names) / 2)
            if value is None:
                parts.append(_text(x + width / 2, bottom - 5, "n/a", "value", "middle"))
                continue
            height = PLOT * value / most
            parts.append(
                f'<rect x="{x + 1:.1f}" y="{bottom - height:.1f}" width="{width - 2:.1f}" '
                f'height="{height:.1f}" rx="1.5" fill="{COLORS[j]}"/>'
            )
            style = "value ours" if tables.is_ours(name) else "value"
            parts.append(
                _text(x + width / 2, bottom - height - 4, tables.number(value), style, "middle")
            )
        parts.append(_text(middle, bottom + 17, mask, "", "middle"))
    return parts


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'
