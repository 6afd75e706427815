"""`magi-bench ranks` on two gloo ranks: every row or a reason, the gate, what moves, the report."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from magi_bench.arguments import Settings
from magi_bench.cli import main
from magi_bench.clock import Rounds
from magi_bench.contenders.flex import NO_BACKWARD
from magi_bench.gate import exact_and_plain
from magi_bench.ranks import suite
from magi_bench.ranks.base import Problem
from magi_bench.ranks.strategies.contenders import Ulysses
from magi_bench.report import tables
from magi_bench.results import rows as files
from magi_bench.world import World
from magi_compile.dtensor import plan
from tests.bench.flat import flat, rows_of

CONTENDERS = suite.CONTENDERS
OURS = ("magi", "magi-all-to-all", "magi-waits", "magi-one-stage", "one-rank", "ulysses")
SMALL = Settings(
    *("cpu", "float32", (256,), 4, 2, 16),
    masks=("document_causal", "causal"),
    contenders=OURS,
    rounds=Rounds(1, 0.1),
)


def run_ranks(settings, taking_part=CONTENDERS):
    suite.CONTENDERS = taking_part
    try:
        return rows_of(suite.Ranks(settings, World("cpu")))
    finally:
        suite.CONTENDERS = CONTENDERS


def run_small(group, settings):
    return run_ranks(settings)


def test_every_case_has_a_time_for_everybody(two_ranks):
    rows, others = two_ranks.run(run_small, SMALL)
    assert [(x["mask"], x["pass"], x["contender"]) for x in rows] == [
        (mask, which, name) for mask in SMALL.masks for which in ("fwd", "fwdbwd") for name in OURS
    ]
    for row, other in zip(rows, others, strict=True):
        assert row["status"] == "ok", row
        assert row["ms"] == other["ms"] > 0  # of the slowest rank
        assert set(row["gate"]["errors"]) == (
            {"out"} if row["pass"] == "fwd" else {"out", "dq", "dk", "dv"}
        )
        assert row["recompiles"] == 0
        assert row["peak_bytes"] is None
    assert all(row["ratio"] == 1 for row in rows if row["contender"] == "magi")
    assert not any("ratio" in row for row in rows if row["contender"] == "one-rank")


# The truth


def run_truth(group, mask):
    problem = Problem(replace(SMALL, nheads_q=6, nheads_kv=3), World("cpu"), mask, 320)
    exact, _ = exact_and_plain(problem.workload, problem.inputs)
    for name, x, dense in zip(("out", "dq", "dk", "dv"), problem.truth.exact, exact, strict=True):
        heads = [0, 1, 4, 5] if name in ("out", "dq") else [0, 2]
        torch.testing.assert_close(x, dense[:, heads].double(), rtol=1e-9, atol=1e-9)
    mine = torch.arange(group.rank(), problem.total, 2)
    return problem.check([x[mine] for x in exact], mine)


def test_the_truth_is_that_of_the_dense_oracle(two_ranks):
    for mask in (*suite.ALL_MASKS, "full"):
        for check in two_ranks.run(run_truth, mask):
            assert check.passed
            assert check.seqlen == 640
            assert all(error < 1e-12 for error in check.errors.values())
            assert all(1e-8 < allowed < 1e-5 for allowed in check.allowed.values())


class OtherTokens(suite.Magi):
    """Right, but for tokens that it says lie elsewhere; on one rank."""

    name = "other-tokens"
    is_ours = False

    def spread(self, problem):
        made = super().spread(problem)
        if problem.world.rank:
            return made
        return made._replace(attend=lambda q, k, v: made.attend(q, k, v).flip(0))


class WrongGradient(suite.Magi):
    name = "wrong-gradient"
    is_ours = False

    def spread(self, problem):
        made = super().spread(problem)
        return made._replace(attend=lambda q, k, v: made.attend(q, 2 * k - k.detach(), v))


class RaisesOnOne(suite.Magi):
    name = "raises"
    is_ours = False

    def spread(self, problem):
        if problem.world.rank:
            raise RuntimeError("no such thing\nas a second line")
        raise MemoryError("nor that")


class RefusesAll(RaisesOnOne):
    name = "refuses"

    def supports(self, problem, case):
        return ["one reason", "another"]


def run_wrong(group):
    taking_part = (suite.Magi, OtherTokens, WrongGradient, RaisesOnOne, RefusesAll)
    names = tuple(x.name for x in taking_part)
    return run_ranks(replace(SMALL, masks=("document_causal",), contenders=names), taking_part)


def test_what_is_wrong_on_any_rank_is_not_timed(two_ranks):
    for rows in two_ranks.run(run_wrong):
        found = {(row["contender"], row["pass"]): row for row in rows}
        status = {key: row["status"] for key, row in found.items()}
        assert status["magi", "fwd"] == status["magi", "fwdbwd"] == "ok"
        assert status["other-tokens", "fwd"] == "wrong"
        assert status["wrong-gradient", "fwd"] == "ok"
        assert status["wrong-gradient", "fwdbwd"] == "wrong"
        assert found["wrong-gradient", "fwdbwd"]["reason"].startswith("dk: relative error")
        assert found["raises", "fwd"]["reason"] == "MemoryError: nor that"
        assert found["refuses", "fwd"]["reason"] == "one reason; another"
        assert all(("ms" in row) == (row["status"] == "ok") for row in rows)


def test_what_has_no_time_left_is_not_begun(two_ranks):
    settings = replace(SMALL, seconds=1e-9, masks=("causal",), passes=("fwd",))
    for rows in two_ranks.run(run_small, settings):
        assert {row["status"] for row in rows} == {"timeout"}
        assert rows[0]["reason"] == "not begun: no time left of 1e-09 s"


# What moves


def run_bytes(group):
    world = World("cpu")
    problem = Problem(SMALL, world, "causal", 256)
    ours = suite.Magi().spread(problem).received
    spread = Ulysses().spread(problem).received
    told = plan(problem.workload.slices, world.mesh).explain()
    return ours, spread, told.received_rows[world.rank], told.sent_rows[world.rank]


def test_bytes_that_a_rank_receives(two_ranks):
    row = 2 * 2 * 16 * 4  # key and value of 2 heads of 16 floats
    for ours, spread, received, sent in two_ranks.run(run_bytes):
        assert 0 < received <= 256
        assert ours == (received * row, (received + sent) * row)
        # Half of q, k, v and of out stay.
        assert spread == (256 * (4 + 2 + 2 + 4) * 16 * 4 // 2,) * 2


def run_all_to_all(group):
    problem = Problem(SMALL, World("cpu"), "causal", 256)
    spread = [made.spread(problem) for made in (suite.Magi(), suite.MagiAllToAll())]
    tensors = [x[spread[0].positions] for x in problem.inputs[:3]]
    called = patch.object(
        suite, "context_parallel_attention", wraps=suite.context_parallel_attention
    )
    with called as asked:
        outs = [made.attend(*tensors) for made in spread]
    return asked.call_args_list[0].kwargs, asked.call_count, torch.equal(*outs)


def test_ours_over_all_to_all_is_ours_with_that_collective(two_ranks):
    for found in two_ranks.run(run_all_to_all):
        assert found == ({"collective": "all_to_all"}, 1, True)


def run_heads(group):
    return run_ranks(replace(SMALL, nheads_kv=1, masks=("causal",), passes=("fwd",)))


def test_heads_that_do_not_divide_are_a_reason(two_ranks):
    rows, _ = two_ranks.run(run_heads)
    (row,) = (row for row in rows if row["contender"] == "ulysses")
    assert (row["status"], row["reason"]) == (
        "unsupported",
        "1 key-value heads do not divide by 2 ranks",
    )


def run_refusals(group):
    problem = Problem(replace(SMALL, lengths="short"), World("cpu"), "document_causal", 256)
    return [
        (
            made.name,
            which,
            made().supports(problem, SMALL.case("ranks", "causal", 256, which=which)),
        )
        for made in CONTENDERS
        for which in ("fwd", "fwdbwd")
    ]


def test_what_peers_cannot_do_on_a_cpu(two_ranks):
    found, _ = two_ranks.run(run_refusals)
    for name, which, reasons in found:
        is_flex = name.startswith("torch") or name.endswith("-flex")
        assert (NO_BACKWARD in reasons) == (is_flex and which == "fwdbwd")
        odd = [x for x in reasons if "documents of a multiple of 4 tokens" in x]
        assert len(odd) == (name == "torch-documents")


# Documents, local kernels, presets


def run_quickly(group, settings):
    return run_ranks(replace(settings, passes=("fwd",), contenders=("ring", "hybrid-cp")))


def test_packs_of_documents_are_cases(two_ranks):
    settings = replace(
        SMALL, masks=("full", "document_causal"), samplers=("short", "pile"), packs=2
    )
    rows, _ = two_ranks.run(run_quickly, settings)
    assert [row["what"] for row in rows[::2]] == [
        "full",
        "document causal, of short",
        "document causal, of short, pack 2",
        "document causal, of pile",
        "document causal, of pile, pack 2",
    ]
    assert {row["status"] for row in rows} == {"ok"}
    assert all(row["rank_tokens"] == 256 for row in rows if row["contender"] == "ring")


def test_local_kernels_are_part_of_a_name(two_ranks):
    settings = replace(SMALL, masks=("causal",), local_kernels=("ours", "flash-attn-4"))
    rows, _ = two_ranks.run(run_quickly, settings)
    found = {row["contender"]: (row["status"], row.get("reason")) for row in rows}
    missing = "unavailable", "local kernel flash-attn-4: runs on a GPU, not on cpu"
    assert found == {
        "ring": ("ok", None),
        "ring-flash-attn-4": missing,
        "hybrid-cp": ("ok", None),
        "hybrid-cp-flash-attn-4": missing,
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {"tokens": (8192,), "packs": 1, "samplers": ("seeds",), "exposed": False}),
        (
            ["--preset", "seeds"],
            {"tokens": (8192, 16384, 32768), "packs": 3, "seconds": 1500.0, "exposed": True},
        ),
        (["--preset", "seeds", "--no-exposed"], {"nheads_q": 64, "exposed": False}),
        (["--exposed"], {"nheads_q": 32, "exposed": True}),
        (
            ["--preset", "seeds", "--packs", "1", "--tokens", "8K", "--lengths", "pile"],
            {"tokens": (8192,), "nheads_q": 64, "packs": 1, "samplers": ("pile",)},
        ),
    ],
)
def test_a_preset_leaves_what_is_given(arguments, expected, monkeypatch):
    started = []
    monkeypatch.setattr("magi_bench.world.start", lambda *x: started.append(x[3]) or 0)
    assert main(["ranks", "--device", "cpu", *arguments]) == 0
    assert {name: getattr(started[0], name) for name in expected} == expected


# The report and the command


def results_of(*measured, mask="causal", tokens=32):
    """Results with such contenders and TFLOP/s, of so many K tokens a rank."""
    case = {"level": "ranks", "mask": mask, "seqlen": tokens << 10, "which": "fwd", "ranks": 2}
    case |= {"nheads_q": 64, "nheads_kv": 8, "head_dim": 128, "dtype": "bfloat16"}
    found = {
        f"{mask}/{name}": {
            "run": "r",
            "contender": name,
            "case": case,
            "label": name,
            "is_ours": False,
            "group": "Forward",
            "status": "ok",
            "passes": {"fwd": {"ms": 1.0, "tflops": speed}},
        }
        for name, speed in measured
    }
    return files.Results({"r": {"device": "a card"}}, found)


def test_strategies_beside_their_kernel_alone():
    measured = (
        *(("one-rank", 700.0), ("magi", 690.0), ("ring", 594.0), ("ulysses", 596.0)),
        *(("one-rank-fa2", 300.0), ("ring-fa2", 270.0), ("torch-ptrr", 400.0)),
    )
    (found,) = tables.sections(results_of(*measured))
    _, beside = found.tables
    assert [line[2:] for line in beside.lines] == [
        ["magi", "690", "700", "98.6%", "competitive"],
        ["ring", "594", "700", "84.9%", "not competitive"],
        ["ulysses", "596", "700", "85.1%", "competitive"],
        ["ring-fa2", "270", "300", "90.0%", "competitive"],
        ["torch-ptrr", "400", "not run", "-", "-"],
    ]
    for shorter in ({"tokens": 16}, {"mask": "document_causal"}):
        (found,) = tables.sections(results_of(*measured, **shorter))
        assert len(found.tables) == 1


@pytest.mark.slow
def test_the_command_starts_its_own_ranks(tmp_path):
    out = tmp_path / "ranks_cpu"
    arguments = ["--quick", "--device", "cpu", "--masks", "causal", "--passes", "fwd"]
    names = ["magi", "torch-head-tail"]
    assert main(["ranks", *arguments, "--contenders", *names, "--out", str(out)]) == 0
    results, text = files.load([out.with_suffix(".jsonl")]), out.with_suffix(".md").read_text()
    rows = {row["contender"]: flat(row) for row in results.rows.values()}
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(names, "ok")
    assert [row["ranks"] for row in rows.values()] == [2, 2]
    assert "received, MiB" in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "/nowhere/ranks"], "`--out` must lie in a folder that exists"),
        (["--tokens", "8000"], "`--tokens` must be multiples of 128, got 8000"),
        (["--heads", "3:2"], "heads must be Q:KV with Q a multiple of KV"),
        (["--masks", "x"], "invalid choice"),
        (
            ["--model", "--contenders", "one-rank"],
            "must be among magi, magi-ahead, torch-head-tail",
        ),
        (["--contenders", "magi-ahead"], "without --model must be among hybrid-cp, "),
        (
            ["--model", "--masks", "causal"],
            "`--masks` of --model must be among document_causal, sliding_window_causal, got causal",
        ),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["ranks", "--device", "cpu", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_torchrun_counts_its_processes(monkeypatch, capsys):
    monkeypatch.setattr("magi_bench.world.is_launched", lambda: True)
    with pytest.raises(SystemExit):
        main(["ranks", "--device", "cpu", "--ranks", "2"])
    assert "`--ranks` must not be given to processes of torchrun" in capsys.readouterr().err
