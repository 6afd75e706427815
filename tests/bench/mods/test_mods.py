"""`magi-bench mods`: every mod is right with ours on a CPU, every row has a time or a reason, the report."""

from dataclasses import asdict, replace

import pytest
import torch

from magi_bench import gate, runner
from magi_bench.arguments import Settings
from magi_bench.cli import main
from magi_bench.clock import Rounds, Work
from magi_bench.gate import Check
from magi_bench.mods.catalogue import BLOCK, Mod, Place, canvas
from magi_bench.mods.suite import (
    FLEX,
    MODS,
    Compiled,
    Mods,
    Problem,
    _attend,
    beside,
    contenders,
    results_of,
)
from magi_bench.report import tables
from magi_bench.results import rows as files
from magi_compile.lowering.backend import make_backend
from magi_compile.lowering.report import REPORT, Decision
from tests.bench.flat import flat, rows_of

SMALL = Settings(
    "cpu", "float32", (384,), 4, 2, 16, gate_tokens=8192, rounds=Rounds(2, 1.0), seed=3
)
# The lowering in front of a compiler that is quick on a CPU.
OURS = Compiled("magi", "MAGI", True, make_backend("aot_eager"))
REFUSED = {"latent_positions"}
# Eager FlexAttention asks the mask_mod alone.
BLOCK_LISTS = ("block_lists", "block_lists_by_head")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def execute(taking_part, settings=SMALL, mods=("causal",)):
    rows = rows_of(Mods(replace(settings, mods=mods), taking_part))
    return {(row["pass"], row["contender"]): row for row in rows}


def case_of(which="fwdbwd", mod="causal"):
    return SMALL.case("mods", mod, SMALL.tokens[0], which=which)


RIGHT = [name for name in MODS if name not in REFUSED]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in RIGHT),
        *((name, "bfloat16") for name in RIGHT[::6]),
        *(
            pytest.param(name, "bfloat16", marks=pytest.mark.slow)
            for i, name in enumerate(RIGHT)
            if i % 6
        ),
    ],
)
def test_every_mod_is_right_with_ours(name, dtype):
    asked = Problem(replace(SMALL, dtype=dtype), MODS[name], SMALL.tokens[0])
    before = len(REPORT.decisions)
    out, *gradients = OURS.prepare(asked, case_of()).call()
    check = asked.truth.check(results_of(out, gradients), asked.tokens)
    assert list(check.errors) == list(asked.truth.allowed)
    assert check.passed, check.worst
    (decision,) = REPORT.decisions[before:]
    assert decision.kernel == "cpu", decision


@pytest.mark.parametrize("name", ["documents", "neighbourhood", "alibi"])
def test_masks_made_in_the_graph_are_right(name):
    settings = replace(SMALL, mask_in_graph=True, passes=("fwdbwd",))
    row = execute([OURS], settings, (name,))["fwdbwd", "magi"]
    assert row["status"] == "ok", row
    assert row["gate"]["passed"]
    assert row["recompiles"] == 0


def test_lists_that_decide_are_not_made_in_a_graph():
    settings = replace(SMALL, mask_in_graph=True, passes=("fwdbwd",))
    row = execute([OURS], settings, ("block_lists",))["fwdbwd", "magi"]
    assert row["status"] == "unsupported"
    assert "its block lists decide" in row["reason"]


@pytest.mark.parametrize("name", [name for name in MODS if name not in BLOCK_LISTS])
def test_the_truth_is_that_of_eager_flex_attention(name):
    """Its dense arithmetic, under vmap: the mask and the score of each pair by themselves."""
    asked = Problem(replace(SMALL, tokens=(256,)), MODS[name], 256)
    leaves = asked.leaves(False)
    score_mod = asked.made.score_mod(leaves.learned)
    with torch.no_grad():
        out = _attend(*leaves[:3], score_mod, asked.made.block_mask, None)
    assert gate.relative_error(results_of(out, [])[0], asked.truth.exact[0]) < 1e-5


@pytest.mark.parametrize("name", MODS)
def test_mods_are_the_same_for_all_and_hide_something_or_change_scores(name):
    place = Place(512, 4, "cpu", 7)
    one, other = (MODS[name].build(place) for _ in range(2))
    assert MODS[name].facts["about"].endswith((".", ")", "causal"))
    for mine, theirs in zip(one.learned.values(), other.learned.values(), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert (one.score_mod_of is not None) == (MODS[name].kind == "score")
    if MODS[name].kind == "mask":
        torch.testing.assert_close(one.block_mask.to_dense(), other.block_mask.to_dense())
        asked = Problem(replace(SMALL, tokens=(512,)), MODS[name], 512)
        index = torch.arange(512)
        zero = torch.tensor(0)
        visible = asked.made.block_mask.mask_mod(zero, zero, index[:, None], index)
        visible = visible & asked._listed(0)
        assert 0.01 < visible.float().mean() < 0.9
        assert visible.any(-1).all()


@pytest.mark.parametrize("name", BLOCK_LISTS)
def test_the_truth_of_block_lists_is_what_they_list(name):
    asked = Problem(SMALL, MODS[name], SMALL.tokens[0])
    mask = asked.made.block_mask
    for head in range(SMALL.nheads_q):
        row = 0 if name == "block_lists" else head
        for block, count in enumerate(mask.kv_num_blocks[0, row]):
            listed = mask.kv_indices[0, row, block, :count].tolist()
            assert listed == sorted(set(listed))
            visible = asked._listed(head)[BLOCK * block]
            assert visible.nonzero().flatten().tolist() == [
                BLOCK * at + column for at in listed for column in range(BLOCK)
            ]


@pytest.mark.parametrize(("seqlen", "sizes"), [(256, (16, 16)), (384, (32, 16)), (8192, (128, 64))])
def test_a_canvas_is_almost_a_square(seqlen, sizes):
    assert canvas(seqlen) == sizes


class Spoilt(Compiled):
    """A contender whose results `spoil` changes."""

    def __init__(self, name, spoil, is_ours=False):
        super().__init__(name, name.upper(), is_ours, OURS.backend)
        self.spoil = spoil

    def supports(self, problem, case):
        return []

    def prepare(self, problem, case):
        ready = super().prepare(problem, case)
        return ready._replace(call=lambda: self.spoil(ready.call()))


def raises(results):
    raise RuntimeError("no such thing\nas a second line")


@pytest.mark.slow
def test_what_is_wrong_is_caught_and_not_timed():
    taking_part = [
        Spoilt("flex", lambda results: results),
        Spoilt("large", lambda results: [x * 1.01 for x in results]),
        Spoilt("bias", lambda results: [*results[:4], *(x.flip(-1) for x in results[4:])]),
        Spoilt("raises", raises, is_ours=True),
        OURS,
    ]
    found = execute(taking_part, mods=("relative_bias",))
    statuses = {key: row["status"] for key, row in found.items()}
    assert statuses == {
        ("fwd", "flex"): "ok",
        ("fwd", "large"): "wrong",
        ("fwd", "bias"): "ok",
        ("fwd", "raises"): "error",
        ("fwd", "magi"): "ok",
        ("fwdbwd", "flex"): "ok",
        ("fwdbwd", "large"): "wrong",
        ("fwdbwd", "bias"): "wrong",
        ("fwdbwd", "raises"): "error",
        ("fwdbwd", "magi"): "ok",
    }
    assert all(("ms" in row) == (row["status"] == "ok") for row in found.values())
    assert found["fwd", "large"]["reason"].startswith("out: relative error 1.00e-02")
    assert found["fwdbwd", "bias"]["reason"].startswith("gradient of bias: relative error")
    assert found["fwd", "raises"]["reason"] == "RuntimeError: no such thing"
    assert runner.fault(found["fwd", "raises"]).startswith("relative_bias 384 fwd, raises: Runtime")
    ours = found["fwdbwd", "magi"]
    peer = found["fwdbwd", "flex"]
    assert (ours["ratio"], peer["ratio"]) == (1.0, pytest.approx(peer["ms"] / ours["ms"]))
    assert (ours["way"], ours["kernel"], ours["recompiles"]) == ("intervals", "cpu", 0)
    assert ours["score"]


def test_ours_is_held_to_the_errors_of_flex_attention():
    check = Check(9, {"out": 3e-3, "dq": 1e-3}, {"out": 1.0, "dq": 1.0})
    theirs = Check(9, {"out": 1e-3, "dq": 1e-3, "dk": 0.0}, {})
    mine = beside(check, theirs, torch.float32)
    assert mine.allowed["out"] == pytest.approx(2e-3, rel=1e-3)
    assert not mine.passed
    assert mine.worst.startswith("out: relative error 3.00e-03, allowed 2.00e-03")


def test_what_stays_on_flex_attention_says_why():
    found = execute([OURS], mods=("latent_positions",))
    for which in ("fwd", "fwdbwd"):
        row = found[which, "magi"]
        assert row["status"] == "unsupported"
        assert row["reason"].startswith("stays on FlexAttention: score_mod is no pointwise")
        assert "ms" not in row


def test_longer_sequences_are_checked_at_a_reduced_length():
    settings = replace(SMALL, tokens=(512,), gate_tokens=256, passes=("fwd",))
    row = execute([OURS], settings)["fwd", "magi"]
    assert (row["status"], row["tokens"], row["gate"]["seqlen"]) == ("ok", 512, 256)
    row = execute([OURS], replace(settings, gate_tokens=512))["fwd", "magi"]
    assert row["gate"]["seqlen"] == 512


def test_what_has_no_time_left_is_not_begun():
    found = execute([OURS, FLEX], replace(SMALL, seconds=1e-9))
    assert {key: row["status"] for key, row in found.items()} == {
        ("fwd", "magi"): "timeout",
        ("fwd", "flex"): "timeout",
        ("fwdbwd", "magi"): "timeout",
        ("fwdbwd", "flex"): "unsupported",
    }
    assert found["fwd", "flex"]["reason"] == "not begun: no time left of 1e-09 s"
    assert found["fwdbwd", "flex"]["reason"] == "FlexAttention has no backward on a CPU"


def test_a_mod_that_cannot_be_made_has_rows_too(monkeypatch):
    def broken(place):
        """Nothing."""
        raise ValueError("no mask")

    monkeypatch.setitem(MODS, "broken", Mod("mask", broken))
    suite = Mods(replace(SMALL, mods=("broken", "causal")), [OURS])
    rows = {(row["mask"], row["pass"]): row for row in rows_of(suite)}
    assert rows["causal", "fwd"]["status"] == "ok"  # of the mod behind it
    reasons = [rows["broken", which]["reason"] for which in ("fwd", "fwdbwd")]
    assert reasons == ["ValueError: no mask"] * 2


def test_kernels_are_counted_after_everything_that_is_timed(monkeypatch):
    done = runner.Runner(Mods(replace(SMALL, mods=("causal",)), [OURS]), say=lambda line: None)
    done.run()
    monkeypatch.setattr(runner, "work_of", lambda ready: Work(3.0, 2.0, len(ready.call())))
    done.count_work()
    assert [(x["kernels"], x["launches"], x["kernel_ms"]) for x in map(flat, done.rows)] == [
        (3.0, 2.0, 1),
        (3.0, 2.0, 4),
    ]


NOTES = {
    "intervals": (),
    "bits": ("by bit blocks: a reason",),
    "intervals, or bits": ("by intervals, or by bit blocks where the data is out of order",),
}


@pytest.mark.parametrize("way", NOTES)
def test_ways_are_those_of_the_lowering(way):
    decision = Decision("", (), (), "mask", "cpu", notes=NOTES[way])
    assert runner.decided(OURS, [decision])["way"] == way
    assert runner.decided(FLEX, [decision]) == {}


def test_reasons_are_one_line():
    decision = Decision("", (), (), "mask", None, reasons=("no kernel:\n  hopper: why", "b"))
    kept = runner.decided(OURS, [decision])
    assert kept["reason"] == "stays on FlexAttention: no kernel: hopper: why; b"


def made_row(contender, ms=None, **more):
    case = asdict(case_of("fwd"))
    place = {"run": "1", "key": contender, "case": case, "group": "Forward", "what": "causal"}
    names = {"contender": contender, "label": contender.upper(), "about": "Half.", "of": "mask"}
    passes = {} if ms is None else {"status": "ok", "passes": {"fwd": {"ms": ms}}}
    return {**place, **names, "is_ours": contender.startswith("magi"), **passes, **more}


def test_report():
    ours = {"way": "bits", "kernel": "hopper", "score": "", "notes": ["by bit blocks: a | b"]}
    rows = [
        made_row("flex", 3.0, first_s=9.0),
        made_row("magi", status="unsupported", reason="stays on FlexAttention: why"),
        made_row("magi-hopper", 1.5, first_s=5.0, **ours),
    ]
    runner.compare(rows)
    results = files.Results({"1": {"device": "a card"}}, {row["key"]: row for row in rows})
    times, coverage, missing = tables.sections(results)
    header = ["what", "tokens", "contender", "ms", "ratio", "first call, s", "way"]
    assert (times.title, times.tables[0].header) == ("Forward", header)
    assert times.tables[0].lines == [
        *[
            ["causal", "384", "FLEX", "3.000", "2.000", "9.00", "-"],
            ["causal", "384", "MAGI", "unsupported", "-", "-", "-"],
            ["causal", "384", "MAGI-HOPPER", "1.500", "1.000", "5.00", "bits"],
        ],
    ]
    why = "stays on FlexAttention: why; by bit blocks: a | b"
    assert coverage.tables[0].lines == [
        ["causal", "mask", "Half.", "unsupported", "bits: hopper", why]
    ]
    reason = "stays on FlexAttention: why"
    assert missing.tables[0].lines == [["MAGI", "unsupported", reason, "1: causal"]]


@pytest.mark.slow
def test_quick_on_a_cpu(tmp_path):
    out = tmp_path / "mods_cpu"
    command = ["mods", "--quick", "--device", "cpu", "--out", str(out)]
    assert main([*command, "--mods", "window_by_head", "tanh_softcap"]) == 0
    text = out.with_suffix(".md").read_text()
    rows = map(flat, files.load([out.with_suffix(".jsonl")]).rows.values())
    found = {(row["mask"], row["pass"], row["contender"]): row for row in rows}
    assert len(found) == 8
    for mod in ("window_by_head", "tanh_softcap"):
        for which in ("fwd", "fwdbwd"):
            assert found[mod, which, "magi"]["status"] == "ok"
            assert found[mod, which, "magi"]["recompiles"] == 0
        assert found[mod, "fwd", "flex"]["status"] == "ok"
        assert found[mod, "fwd", "magi"]["ratio"] > 0
        assert found[mod, "fwdbwd", "flex"]["status"] == "unsupported"
    row = found["window_by_head", "fwd", "magi"]
    assert row["way"] == "intervals, or bits"
    assert "each head has a mask of its own" in row["notes"]
    assert "intervals, or bits: cpu" in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "/nowhere/mods"], "`--out` must lie in a folder that exists"),
        (["--mods", "x"], "invalid choice"),
        (["--tokens", "200"], "`--tokens` must be a multiple of 128, at least 256, got 200"),
        (["--gate-tokens", "128"], "`--gate-tokens` must be a multiple of 128, at least 256"),
        (["--kernels", "x"], "invalid choice"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["mods", "--device", "cpu", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_kernels_are_counted():
    settings = Settings("cuda", "bfloat16", (1024,), 4, 2, 128)
    found = execute(contenders(()), settings, ("documents",))
    assert [row["status"] for row in found.values()] == ["ok"] * 4
    assert all(row["kernels"] >= 1 and row["kernel_ms"] > 0 for row in found.values())


def test_who_takes_part_in_the_order_of_reports():
    taking_part = contenders(["cpu"], ["flex-flash"])
    assert [x.name for x in taking_part] == ["flex", "flex-flash", "magi", "magi-cpu"]
    assert [x.is_ours for x in taking_part] == [False, False, True, True]
