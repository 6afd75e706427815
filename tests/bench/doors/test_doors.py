"""`magi-bench doors`: a Llama of transformers with each attention, the gates, the rows of torchtitan, the report."""

from dataclasses import replace

import pytest
import torch

from magi_bench.arguments import Settings
from magi_bench.cli import main
from magi_bench.clock import Rounds
from magi_bench.doors import torchtitan_runs
from magi_bench.doors.suite import Doors, model_flops
from magi_bench.doors.torchtitan_runs import RANKS, Run, failure_in, summary
from magi_bench.gate import STEP_RESULTS
from magi_bench.results import rows as files
from tests.bench.flat import flat, rows_of

SMALL = Settings(
    *("cpu", "float32", (256,), 2, 1, 16),
    train_layers=2,
    ffn_dim=64,
    vocab=64,
    frameworks=("transformers",),
    attentions=("magi", "flex_attention", "sdpa", "flash_attention_2"),
    modes=("eager",),
    gate_tokens=128,
    rounds=Rounds(2, 1.0),
)


@pytest.fixture
def door():
    pytest.importorskip("transformers")
    from magi_bench.doors import transformers

    return transformers


def execute(settings=SMALL, door=None):
    return {row["contender"]: row for row in rows_of(Doors(settings, door))}


def test_attentions_have_times_or_reasons(door):
    rows = execute()
    assert list(rows) == list(SMALL.attentions)
    for name in ("magi", "sdpa"):
        row = rows[name]
        assert (row["status"], row["graphs"], row["breaks"], row["recompiles"]) == ("ok", 0, 0, 0)
        assert row["tokens_per_s"] == pytest.approx(256 / row["ms"] * 1e3)
        assert 0 < row["mfu"] < 1
        assert set(row["gate"]["errors"]) == set(STEP_RESULTS)
    assert rows["flash_attention_2"]["status"] == "unavailable"
    assert "FlashAttention2" in rows["flash_attention_2"]["reason"]
    assert rows["flex_attention"]["reason"] == "FlexAttention has no backward on a CPU"
    assert rows["magi"]["ratio"] == 1


class Wrong:
    """The module of a framework, one of whose attentions does not know documents, of more than `above` tokens."""

    def __init__(self, door, above):
        self.inner, self.above = door, above

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def with_attention(self, model, name):
        made = self.inner.with_attention(model, name)
        made.is_wrong = name == "sdpa"
        return made

    def step(self, model, call, inputs):
        if getattr(model, "is_wrong", False) and inputs["input_ids"].shape[1] > self.above:
            inputs = {**inputs, "position_ids": torch.arange(inputs["input_ids"].shape[1])[None]}
        return self.inner.step(model, call, inputs)


def test_another_mask_is_caught_on_the_small_input(door):
    rows = execute(door=Wrong(door, 0))
    assert rows["magi"]["status"] == "ok"
    assert rows["sdpa"]["status"] == "wrong"
    assert rows["sdpa"]["reason"].startswith("gradient of the")
    assert "at 128 tokens" in rows["sdpa"]["reason"]


def test_another_mask_is_caught_at_full_length(door):
    rows = execute(door=Wrong(door, 128))
    assert rows["sdpa"]["status"] == "wrong"
    assert rows["sdpa"]["reason"].startswith("not what magi, eager gives: gradient of the")


def test_what_has_no_time_left_is_not_begun(door):
    rows = execute(replace(SMALL, seconds=1e-9)).values()
    assert {row["status"] for row in rows} == {"timeout", "unsupported"}


def test_weights_are_shared(door):
    model = door.build(SMALL)
    other = door.with_attention(model, "magi")
    assert all(x is y for x, y in zip(model.parameters(), other.parameters(), strict=True))
    assert (model.config._attn_implementation, other.config._attn_implementation) == (
        "eager",
        "magi",
    )


def test_packs_begin_anew(door):
    inputs = door.make_inputs(SMALL, 256, 1)
    positions, labels = inputs["position_ids"][0], inputs["labels"][0]
    assert (positions == 0).sum() > 1
    assert torch.equal(labels == door.IGNORED, positions == 0)
    assert torch.equal(labels[positions > 0], inputs["input_ids"][0][positions > 0])


def test_flops_are_of_weights_and_visible_pairs():
    whole = replace(SMALL, lengths="whole")
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64
    weights = 2 * layer + 32 * 64
    assert model_flops(whole, 256) == 6 * weights * 256 + 12 * 2 * 32 * 256 * 257 / 2


@pytest.mark.slow
def test_the_command(tmp_path):
    pytest.importorskip("transformers")
    out = tmp_path / "doors_cpu"
    arguments = ["--quick", "--device", "cpu", "--attentions", "magi", "sdpa", "--out", str(out)]
    assert main(["doors", *arguments]) == 0
    rows = map(flat, files.load([out.with_suffix(".jsonl")]).rows.values())
    compiled = [row for row in rows if row["mode"] == "compiled" and "ms" in row]
    assert [row["contender"] for row in compiled] == ["magi", "sdpa"]
    assert [row["graphs"] for row in compiled] == [1, 1]
    assert str(tmp_path) not in out.with_suffix(".md").read_text()


# torchtitan


def test_where_torchtitan_cannot_train_every_row_has_the_reason(monkeypatch):
    monkeypatch.setattr(torchtitan_runs, "unavailable", lambda device: "no such thing")
    runs, rows = zip(*torchtitan_runs.rows(SMALL, lambda: 1.0, print), strict=True)
    assert [(run.ranks, run.attention) for run in runs] == [
        (ranks, name) for ranks in RANKS for name in ("magi", "flex", "varlen")
    ]
    assert {(row["status"], row["reason"]) for row in rows} == {("unavailable", "no such thing")}


def test_torchtitan_needs_an_accelerator_and_itself(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.3.0")
    assert torchtitan_runs.unavailable("cpu") == "torchtitan trains on accelerators, not on a CPU"

    def missing(name):
        raise torchtitan_runs.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert "torchtitan is not installed" in torchtitan_runs.unavailable("cuda")


def test_runs_of_torchtitan_become_rows(monkeypatch):
    def train(run, seconds):
        if run.attention == "varlen":
            return {"status": "unsupported", "reason": "NotImplementedError: no"}
        times = {"ms": 3.0 if run.attention == "flex" else 2.0, "tokens_per_s": 1.0}
        return {"status": "ok", "passes": {"fwdbwd": times}}

    monkeypatch.setattr(torchtitan_runs, "unavailable", lambda device: None)
    monkeypatch.setattr(torchtitan_runs, "train", train)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    said = []
    runs, rows = zip(*torchtitan_runs.rows(SMALL, lambda: 1.0, said.append), strict=True)
    assert [row.get("passes", {}).get("fwdbwd", {}).get("ratio") for row in rows[:4]] == [
        *(1.0, 1.5, None, None)
    ]
    reasons = {row["reason"] for run, row in zip(runs, rows, strict=True) if run.ranks > 1}
    assert reasons == {"needs 2 GPUs, found 1", "needs 4 GPUs, found 1"}
    assert said[0] == "torchtitan 256, 1 ranks, magi: 1.0"
    late = next(torchtitan_runs.rows(SMALL, lambda: 0.0, said.append))[1]
    assert late["reason"] == "not begun: no time left of inf s"


def test_the_reason_of_a_run_that_failed():
    text = (
        "[rank0]: Traceback (most recent call last):\n"
        "[rank0]: NotImplementedError: varlen has no context parallelism\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    )
    reason = "NotImplementedError: varlen has no context parallelism"
    assert failure_in(text) == {"status": "unsupported", "reason": reason}
    assert failure_in("torch.OutOfMemoryError: CUDA")["status"] == "oom"
    assert failure_in("") == {"status": "error", "reason": "it ended without a result"}


def test_the_last_lines_of_torchtitan_count():
    def step(number):
        return {
            "time_metrics/end_to_end(s)": 9.0 if number < 7 else number / 10,
            "throughput(tps)": 100.0 * number,
            "mfu(%)": 50.0,
            "memory/max_active(GiB)": 2.0,
            "loss_metrics/global_avg_loss": 7.0 - number,
            "graphs": 3 + (number > 2),
            "breaks": 0,
        }

    row = summary([step(number) for number in range(14)])
    times = row["passes"]["fwdbwd"]
    assert times["ms"] == pytest.approx(1150.0)
    assert (times["tokens_per_s"], times["mfu"], times["peak_bytes"]) == (1150.0, 0.5, 2 * 2**30)
    assert (row["graphs"], times["recompiles"], row["loss"]) == (3, 1, -6.0)


def test_a_run_without_end_is_a_timeout(tmp_path):
    program = tmp_path / "sleeps.py"
    program.write_text("import time\ntime.sleep(60)\n")
    outcome = torchtitan_runs.train(Run("magi", 1, 256, 1, "short", 0), 1.0, (str(program),))
    assert outcome == {"status": "timeout", "reason": "no end after 1 s"}


# The command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "/nowhere/doors"], "`--out` must lie in a folder that exists"),
        (["--attentions", "x"], "invalid choice"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["doors", "--device", "cpu", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
