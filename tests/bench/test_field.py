"""The models of strategies: what is known in closed form, and the command that sets them beside measurements."""

import argparse

import pytest
import torch

from magi_bench import simulate as command
from magi_bench.cases import Case
from magi_bench.cli import main
from magi_bench.field import (
    OTHERS,
    OURS,
    Point,
    Predicted,
    Work,
    compare,
    measured_in,
    plot,
    predict,
)
from magi_bench.results.rows import Ledger
from magi_compile.dtensor.planning.cost import CostModel
from magi_compile.masks.library import MASKS

HEADS = (64, 8)


def work(cp, domain, mask="full", documents=None, tokens=8192, **rates):
    cost = CostModel.of_heads(*HEADS, **rates)
    documents = documents or [tokens * cp]
    return Work(mask, documents, MASKS[mask](documents).slices, cp, domain, HEADS, cost)


def test_rows_of_the_field():
    """The volumes of the strategies, in rows over those that a rank holds."""
    found = predict(work(8, 8))
    rows = {name: x.near / 8192 for name, x in found.items() if isinstance(x, Predicted)}
    assert rows["ring"] == rows["ring-all-gather"] == rows["torch-head-tail"] == 7
    assert rows["ulysses"] == 7 / 8 * (64 + 64 + 8 + 8) / 16
    assert rows["usp"] == 3 / 4 * (64 + 64 + 8 + 8) / 16 + 1
    assert rows["loongtrain"] == rows["loongtrain-context-first"]
    assert rows["loongtrain"] == 1 / 2 * (64 + 64 + 8 + 8) / 16 + 3
    assert rows["magi"] == rows["hybrid-cp"] == 7
    assert found["magi-hierarchical"] == "there is one domain"
    assert all(x.far == 0 for x in found.values() if isinstance(x, Predicted))


def test_rows_that_cross_domains():
    found = predict(work(32, 8))
    far = {name: x.far / 8192 for name, x in found.items() if isinstance(x, Predicted)}
    assert far["magi-flat"] == 24
    assert far["magi-hierarchical"] == far["ring-all-gather"] == 3
    assert far["ring"] == 31
    assert far["usp"] == 3  # heads are exchanged inside of a domain, keys go around outside
    assert found["magi-hierarchical"].forward < found["magi-flat"].forward
    assert found["ulysses"].far > 0
    assert (
        predict(work(128, 8), ["ulysses"])["ulysses"] == "64 query heads do not divide by 128 ranks"
    )


def test_free_links_leave_the_computation():
    fast = {"bytes_per_second": 1e18, "bytes_per_second_between_hosts": 1e18}
    given = work(8, 4, **fast)
    ideal = given.compute
    for name, found in predict(given).items():
        assert isinstance(found, Predicted)
        share = 0.55 if name == "torch-head-tail" else 1.0
        assert ideal[0] / share <= found.forward <= 1.1 * ideal[0] / share, name
        assert found.backward >= ideal[1]


def test_documents_cost_rings_more():
    """Tiny parts of documents, of which kernels compute whole tiles."""
    documents = [256] * 256
    given = work(8, 8, "document_full", documents)
    assert given.cut(1) == 1
    assert 2 < given.cut(8) < given.cut(64)
    assert given.cut(8, [65536]) < 1.02
    found = predict(given, ["ring", "usp"])
    assert found["ring"].forward > found["usp"].forward
    window = work(8, 8, "sliding_window_causal")
    for name in ("ring", "usp", "loongtrain", "hybrid-cp"):
        assert "takes full, causal" in predict(window, [name])[name]
    # Groups of HybridCP: as many documents as ranks need no communication.
    alone = predict(work(8, 8, "document_full", [8192] * 8), ["hybrid-cp"])["hybrid-cp"]
    assert alone.near == 0


def test_every_contender_of_ranks_is_named():
    from magi_bench.ranks.strategies.contenders import STRATEGIES

    assert {x.name for x in STRATEGIES} <= OTHERS.keys()
    assert list(OURS) == ["magi", "magi-flat", "magi-hierarchical"]


RATES = argparse.Namespace(gbytes=350.0, gbytes_far=50.0)


def results(path, contenders):
    ledger = Ledger(path)
    ledger.begin({"device": "d"})
    for name, both in contenders.items():
        for which, tflops in zip(("fwd", "fwdbwd"), both, strict=True):
            case = Case("ranks", "causal", 8192, *HEADS, 128, which=which, ranks=4)
            ledger.add(case, name, {"status": "ok", "passes": {which: {"tflops": tflops}}})
    return path


def test_what_is_measured_is_predicted_from_one_gpu(tmp_path):
    names = {"one-rank": (700.0, 620.0), "magi": (690.0, 600.0), "unknown": (1.0, 1.0)}
    rows = list(measured_in(results(tmp_path / "ranks.jsonl", names), RATES))
    assert [(x.name, x.which, x.tflops) for x in rows] == [
        ("magi", "fwd", 690),
        ("magi", "fwdbwd", 600),
    ]
    for row in rows:
        assert 0.9 * row.tflops < row.predicted() < 1.05 * row.tflops
    told = compare(rows)
    assert "of 2 rows" in told
    assert "mean error" in told
    # Without links and imbalance it is the rate of one GPU.
    alone = argparse.Namespace(gbytes=1e9, gbytes_far=1e9)
    forward, both = (x.predicted() for x in measured_in(tmp_path / "ranks.jsonl", alone))
    assert forward == pytest.approx(700, rel=0.05)
    assert both == pytest.approx(620, rel=0.05)


def test_a_backward_by_itself_and_documents_of_the_row(tmp_path):
    ledger, drawn = Ledger(tmp_path / "ranks.jsonl"), [1024] * 32
    ledger.begin({"device": "d"})
    for name, both in {"one-rank": (700.0, 560.0), "magi": (690.0, 550.0)}.items():
        for which, tflops in zip(("fwd", "bwd"), both, strict=True):
            case = Case("ranks", "causal", 8192, *HEADS, 128, which=which, ranks=4)
            outcome = {"status": "ok", "passes": {which: {"tflops": tflops}}, "documents": drawn}
            ledger.add(case, name, outcome)
    alone = argparse.Namespace(gbytes=1e9, gbytes_far=1e9)
    rows = list(measured_in(tmp_path / "ranks.jsonl", alone))
    assert [(x.which, x.work.documents) for x in rows] == [("fwd", drawn), ("bwd", drawn)]
    forward, backward = (x.predicted() for x in rows)
    assert forward == pytest.approx(700, rel=0.05)
    assert backward == pytest.approx(560, rel=0.05)


def test_other_files(tmp_path):
    path = results(tmp_path / "other.jsonl", {"magi": (1.0, 1.0)})
    with pytest.raises(ValueError, match="`--measured` must be results of `magi-bench ranks`"):
        list(measured_in(path, RATES))


@pytest.mark.parametrize(("documents", "domain"), [("seeds", 8), ("short", 8), ("seeds", 4)])
def test_published_speeds_are_drawn_where_the_setup_is_theirs(
    documents, domain, tmp_path, monkeypatch
):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    given = [work(cp, domain) for cp in (8, 16)]
    points = [Point(x, name, found, None) for x in given for name, found in predict(x).items()]
    plot(points, tmp_path / "field.png", "a title", documents)
    figure = pyplot.gcf()
    lines = {x.get_label(): x for x in figure.axes[0].get_lines()}
    told = {label: x for label, x in lines.items() if label.endswith(" on H100s, published")}
    words = figure.get_suptitle()
    if (documents, domain) == ("seeds", 8):
        assert len(told) == 8
        ring = told["Ring P2P on H100s, published"]
        assert list(ring.get_ydata()) == [512, 536]  # on 8 and 16
        assert ring.get_color() == lines["ring, predicted"].get_color()
        assert all(x.is_dashed() for x in told.values())
        assert not any(x.is_dashed() for label, x in lines.items() if label not in told)
        assert "for H100s, 8K tokens a GPU" in words
        assert "bar charts" in words
    else:
        assert not told
        assert words.endswith("only crosses are measured")


def test_command(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "field.png"
    names = {"one-rank": (700.0, 620.0), "magi": (690.0, 600.0)}
    measured = results(tmp_path / "ranks.jsonl", names)
    arguments = f"--preset seeds --cp 4,8 --domain 4 --rank-tokens 2K --measured {measured} --plot {picture}"
    threads = torch.get_num_threads()
    try:
        assert main(["simulate", *arguments.split()]) == 0
    finally:
        torch.set_num_threads(threads)
    told = capsys.readouterr().out
    assert "measured fwd" in told
    assert "magi-hierarchical" in told
    assert "mean error" in told
    assert picture.stat().st_size > 0
    assert command.__doc__
