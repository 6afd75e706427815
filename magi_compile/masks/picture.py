"""Draws a mask with its slices. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from magi_compile.masks.arguments import check_flag
from magi_compile.masks.slices import AttnSlice, AttnSlices, MaskType

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that also differ in lightness, for readers who do not see hues.
COLORS = {
    MaskType.FULL: "#3b6fb6",
    MaskType.CAUSAL: "#e8954a",
    MaskType.INV_CAUSAL: "#5aa469",
    MaskType.BI_CAUSAL: "#9a6fb0",
}
_STAIRS = 48  # rows up to which the steps of a diagonal edge are drawn one by one


def plot(
    slices: AttnSlices,
    ax: Axes | None = None,
    *,
    title: str | None = None,
    legend: bool = True,
) -> Axes:
    """Draws `slices`, coloured by type: queries downwards, keys to the right.

    Args:
        slices: the mask; slices that see nothing are left out.
        ax: where to draw; by default new axes.
        title: above the number of slices, the area and the density.
        legend: whether to explain the colours.

    Returns:
        `ax`, or the new axes.

    Raises:
        TypeError: `slices`, `ax` or `title` is something else.
        ImportError: matplotlib is missing.
    """
    if not isinstance(slices, AttnSlices):
        raise TypeError(f"`slices` must be AttnSlices, got {type(slices).__name__}")
    check_flag("legend", legend)
    if ax is not None and not hasattr(ax, "add_patch"):
        raise TypeError(f"`ax` must be Axes of matplotlib or None, got {type(ax).__name__}")
    if not isinstance(title, (str, type(None))):
        raise TypeError(f"`title` must be a text or None, got {type(title).__name__}")
    try:
        from matplotlib import pyplot
        from matplotlib.patches import Patch, Polygon
    except ImportError as error:
        raise ImportError(
            "`plot` needs matplotlib: install it, or magi_compile with the extra `plot`"
        ) from error
    if ax is None:
        ax = pyplot.figure(figsize=(5, 5.4), layout="constrained").add_subplot()
    live = slices.restrict_q(0, slices.seqlen_q)  # without rows and slices that see nothing
    for item in live:
        ax.add_patch(
            Polygon(
                _outline(item),
                closed=True,
                facecolor=COLORS[item.mask_type],
                edgecolor="white",
                linewidth=0.8,
                joinstyle="round",
            )
        )
    seqlen_q, seqlen_k = slices.seqlen_q, slices.seqlen_k
    ax.set(xlim=(0, max(seqlen_k, 1)), ylim=(max(seqlen_q, 1), 0), aspect="equal")
    ax.set_facecolor("#f4f4f2")
    ax.xaxis.set_label_position("top")
    ax.xaxis.tick_top()
    ax.set_xlabel("key", color="#555555")
    ax.set_ylabel("query", color="#555555")
    ax.tick_params(length=0, labelsize=8, colors="#777777")
    for spine in ax.spines.values():
        spine.set_color("#c8c8c4")
    area = slices.area()
    density = area / (seqlen_q * seqlen_k) if seqlen_q and seqlen_k else 0.0
    count = f"{len(live)} slice" + ("s" if len(live) != 1 else "")
    summary = f"{count}, area {area:,}, density {density:.1%}"
    _write_above(ax, summary, 36, fontsize=8, color="#555555")
    if title:
        _write_above(ax, title, 50, fontsize=11, fontweight="bold")
    if legend:
        kinds = sorted({item.mask_type for item in live})
        patches = [Patch(color=COLORS[kind], label=kind.name) for kind in kinds]
        below: dict[str, Any] = {
            "loc": "upper center",
            "bbox_to_anchor": (0.5, -0.01),
            "ncols": max(len(kinds), 1),
        }
        ax.legend(handles=patches, **below, fontsize=7, frameon=False, handlelength=1.2)
    return ax


def _write_above(ax: Axes, text: str, points: int, **style: Any) -> None:
    offset: dict[str, Any] = {
        "xycoords": "axes fraction",
        "textcoords": "offset points",
        "ha": "center",
    }
    ax.annotate(text, xy=(0.5, 1), xytext=(0, points), **offset, **style)


def _outline(item: AttnSlice) -> list[tuple[float, float]]:
    """The corners of a slice, all of whose rows see a key, as (key, query), clockwise."""
    (q_begin, q_end), (k_begin, k_end), mask_type = item

    def keys(row: float) -> tuple[float, float]:
        """The keys at a height: of row r at r + 0.5, in between on a straight line."""
        lo = k_begin + (row - 0.5 - q_begin if mask_type & 2 else 0)
        hi = k_end - (q_end - 0.5 - row if mask_type & 1 else 0)
        return max(lo, k_begin), min(hi, k_end)

    if q_end - q_begin <= _STAIRS:
        heights = [(row + side, row + 0.5) for row in range(q_begin, q_end) for side in (0.0, 1.0)]
    else:
        heights = [(row, row) for row in (q_begin, q_begin + 0.5, q_end - 0.5, q_end)]
    left = [(keys(row)[0], height) for height, row in heights]
    right = [(keys(row)[1], height) for height, row in heights]
    return right + left[::-1]
