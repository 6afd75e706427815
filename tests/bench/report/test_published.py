"""What others published is read right, and drawn dashed where a report is of the same setup."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from magi_bench.cases import PASSES, Case
from magi_bench.cli import main
from magi_bench.report import chart, published, tables
from magi_bench.report.pages import to_html, to_markdown
from magi_bench.results import rows

SVG = f"{{{chart.NAMESPACE}}}"
MASKS = ("full", "causal", "document_full", "document_causal")


def test_every_strategy_has_a_speed_at_every_place():
    for mask in MASKS:
        for which in PASSES:
            found = published.of_strategies(published.SETUP, mask, which, 8192)
            assert [x.strategy for x in found].count("") == 2
            assert {x.number for x in found if not x.strategy} == {0, 1}
            assert {tuple(x.points) for x in found} == {(8, 16, 32, 64)}
            assert len({x.label for x in found}) == 8
            assert all("on H100s" in x.label for x in found)


def test_strategies_are_contenders():
    from magi_bench.ranks.suite import CONTENDERS

    found = published.of_strategies(published.SETUP, "full", "fwd", 8192)
    assert {x.strategy for x in found} - {""} <= {x.name for x in CONTENDERS}


def test_both_passes_follow_from_their_times():
    forward, backward, both = (
        published.of_strategies(published.SETUP, "causal", which, 8192)[0].points[8]
        for which in ("fwd", "bwd", "fwdbwd")
    )
    assert (forward, backward) == (602, 583)
    assert both == pytest.approx(3.5 / (1 / 602 + 2.5 / 583))


@pytest.mark.parametrize(
    ("setup", "tokens"),
    [
        (published.SETUP, 16384),
        (("short", "64:8", "128"), 8192),
        (("seeds", "32:8", "128"), 8192),
        (("seeds", "64:8", "64"), 8192),
    ],
)
def test_other_setups_have_none(setup, tokens):
    assert published.of_strategies(setup, "full", "fwd", tokens) == []


def results_of(level, ranks=(1,), heads=(64, 8), masks=("full",), passes=("fwd",)):
    found = {}
    for count in ranks:
        for name, speed in (("magi", 700.0), ("ulysses", 600.0), ("other", 500.0)):
            for mask in masks:
                for which in passes:
                    case = Case(
                        *(level, mask, 8192, *heads, 128), which=which, ranks=count
                    ).__dict__
                    found[f"{count}/{name}/{mask}/{which}"] = {
                        "run": "r",
                        "contender": name,
                        "case": case,
                        "label": name,
                        "is_ours": name == "magi",
                        "status": "ok",
                        "plan_ms": 1.0,
                        "first_s": 1.0,
                        "gate": {"errors": {"out": 1.0}, "allowed": {"out": 2.0}},
                        "passes": {
                            which: {
                                "ms": 1.0,
                                "p20_ms": 1.0,
                                "p80_ms": 1.0,
                                "tflops": speed - count,
                            }
                        },
                    }
    return rows.Results({"r": {"device": "a card"}}, found)


def test_kernels_beside_what_is_published():
    page = to_html(results_of("kernel"))
    assert "FlashAttention 3 on H100, published: 674" in page
    assert "FFA on H100, published: 618" in page
    assert page.count("stroke-dasharray") == 2
    assert published.KERNELS.split(",")[0] in page
    page = to_html(results_of("kernel", heads=(32, 8)))
    assert "published" not in page
    assert "stroke-dasharray" not in page


# Over the number of ranks


def picture_of(**options):
    ((group, tokens),) = tables.several_ranks(results_of("ranks", **options))
    return ElementTree.fromstring(chart.over_ranks(group, tokens))


def lines_of(root):
    """The title and the attributes of every line."""
    return [
        (x.find(f"{SVG}title").text, x.find(f"{SVG}polyline").attrib) for x in root.iter(f"{SVG}g")
    ]


def points_of(root, label):
    """The places of the first line with such a label."""
    line = next(x for title, x in lines_of(root) if title.startswith(label))
    return [tuple(map(float, point.split(","))) for point in line["points"].split()]


def test_a_panel_for_each_pass_and_mask_and_a_line_for_each_contender():
    root = picture_of(ranks=(2, 4), heads=(32, 8), masks=MASKS, passes=("fwd", "fwdbwd"))
    told = [title for title, _ in lines_of(root)]
    for name, speed in (("magi", 700), ("ulysses", 600), ("other", 500)):
        assert told.count(f"{name}: {speed - 2} on 2, {speed - 4} on 4") == 8
    assert len(told) == 3 * 8
    texts = [x.text for x in root.iter(f"{SVG}text")]
    assert [texts.count(x) for x in ("Forward", "Forward and backward", "document causal")] == [
        1,
        1,
        2,
    ]
    # 4 ranks are to the right of 2, and a higher speed is above a lower one.
    (x0, y0), (x1, y1) = points_of(root, "other")
    assert x0 < x1
    assert y0 < y1  # SVG counts downwards
    assert points_of(root, "magi")[0][1] < y0


def test_published_strategies_are_dashed_in_the_colours_of_their_like():
    root = picture_of(ranks=(2, 4))
    lines = dict(lines_of(root))
    dashed = {title: x for title, x in lines.items() if "stroke-dasharray" in x}
    assert sorted(title.split(",")[0] for title in dashed) == [
        "MagiAttention all-to-all-v on H100s",
        "MagiAttention native on H100s",
        "Ulysses on H100s",
    ]
    title = "Ulysses on H100s, published: 605 on 8, 575 on 16, 583 on 32, 619 on 64"
    own = "ulysses: 598 on 2, 596 on 4"
    assert lines[title]["stroke"] == lines[own]["stroke"]
    assert len({x["stroke-dasharray"] for x in dashed.values()}) == 2
    texts = " ".join(x.text for x in root.iter(f"{SVG}text"))
    assert "published by MagiAttention for H100s, 8K tokens a GPU" in texts
    assert "read off its bar charts" in texts
    assert {"2", "4", "8", "64"} <= set(texts.split())


def test_a_report_has_the_picture_where_there_are_several_numbers_of_ranks():
    results = results_of("ranks", ranks=(2, 4))
    page, text = to_html(results), to_markdown(results)
    assert page.count("<svg") == 1
    assert "| mask | pass | contender | 2 ranks | 4 ranks |" in text
    assert "| full | forward | magi | 698 | 696 |" in text
    alone = results_of("ranks", ranks=(2,))
    assert "<svg" not in to_html(alone)
    assert "Over the number of ranks" not in to_markdown(alone)


RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
FILES = [str(RESULTS / f"ranks_seeds_8k_h200x{n}.jsonl") for n in ("2_2026-11-29", "4_2026-11-28")]


@pytest.mark.skipif(not RESULTS.exists(), reason="needs a checkout")
def test_the_command_draws_them(tmp_path, capsys):
    asked = ["--seqlen", "8K", "--masks", "causal", "--contenders", "magi", "ring"]
    asked += ["--output", str(tmp_path / "c.svg")]
    assert main(["chart", *FILES, "--by-ranks", *asked]) == 0
    root = ElementTree.fromstring((tmp_path / "c.svg").read_text())
    told = [title.split(":")[0] for title, _ in lines_of(root)]
    assert told[-1] == "magi_compile.dtensor.plan"  # on top
    assert told.count("Ring P2P, zigzag") == told.count("Ring P2P on H100s, published") == 2
    with pytest.raises(SystemExit):
        main(["chart", FILES[0], "--by-ranks", *asked])
    assert "must be of several numbers of ranks at 8K" in capsys.readouterr().err
