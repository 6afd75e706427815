"""The picture of a mask shows exactly its area."""

import builtins
import importlib.util
from pathlib import Path

import pytest

from magi_compile.masks import AttnSlice, AttnSlices, MaskType
from magi_compile.masks.picture import plot

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
EXAMPLE = Path(__file__).parents[2] / "examples" / "plot_masks.py"


def drawn_area(polygon):
    points = polygon.get_path().vertices
    x, y = points[:, 0], points[:, 1]
    return abs(float((x[:-1] * y[1:] - x[1:] * y[:-1]).sum())) / 2


@pytest.mark.parametrize("mask_type", MaskType)
@pytest.mark.parametrize(
    "shape", [(1, 1), (20, 30), (30, 20), (200, 300), (300, 200)], ids="{0[0]}x{0[1]}".format
)
def test_outline_has_the_area_of_the_slice(mask_type, shape):
    rows, keys = shape
    slices = AttnSlices.from_slices([AttnSlice((5, 5 + rows), (7, 7 + keys), mask_type)])
    ax = plot(slices)
    drawn = sum(map(drawn_area, ax.patches))
    tolerance = (
        0 if rows <= 48 else 1
    )  # long diagonals are straight lines, half a step off at each end
    assert drawn == pytest.approx(slices.area(), abs=tolerance)
    matplotlib.pyplot.close(ax.figure)


def test_labels_and_legend():
    slices = AttnSlices.from_lists(
        [[0, 4], [0, 0], [4, 8]], [[0, 4], [0, 0], [0, 8]], [1, 3, 0], 8, 8
    )
    figure, ax = matplotlib.pyplot.subplots()
    assert plot(slices, ax, title="two") is ax
    texts = [text.get_text() for text in ax.texts]
    assert texts == ["2 slices, area 42, density 65.6%", "two"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["FULL", "CAUSAL"]
    assert len(ax.patches) == 2
    assert ax.get_ylim() == (8, 0)
    figure.draw_without_rendering()
    matplotlib.pyplot.close(figure)


def test_empty_masks():
    ax = plot(AttnSlices.from_slices([], 0, 0), legend=False)
    assert ax.texts[0].get_text() == "0 slices, area 0, density 0.0%"
    assert ax.get_legend() is None
    matplotlib.pyplot.close(ax.figure)


def test_something_else():
    with pytest.raises(TypeError, match="`slices` must be AttnSlices, got list"):
        plot([])
    with pytest.raises(TypeError, match="`ax` must be Axes of matplotlib or None, got int"):
        plot(AttnSlices.causal(4), 3)
    with pytest.raises(TypeError, match="`title` must be a text or None, got int"):
        plot(AttnSlices.causal(4), title=3)


def test_matplotlib_is_optional(monkeypatch):
    real_import = builtins.__import__

    def without_matplotlib(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(ImportError, match="`plot` needs matplotlib"):
        plot(AttnSlices.causal(4))


def test_example(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("plot_masks", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    path = tmp_path / "images" / "masks.png"
    example.main(str(path), example.four_masks(), columns=4)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert f"wrote {path}" in capsys.readouterr().out
