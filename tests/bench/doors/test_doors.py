"""`magi-bench doors`: a Llama of transformers with each attention, the gates, the rows of torchtitan, the report."""

import json

import pytest
import torch

from magi_bench.cli import main
from magi_bench.doors import run, torchtitan_runs
from magi_bench.doors.report import to_markdown
from magi_bench.doors.run import Case, Execution, Transformers, model_flops
from magi_bench.doors.settings import Settings
from magi_bench.doors.torchtitan_runs import Run, failure_in, summary
from magi_bench.step.clock import Rounds

SMALL = Settings(
    device="cpu",
    dtype="float32",
    tokens=(256,),
    layers=2,
    nheads_q=2,
    nheads_kv=1,
    head_dim=16,
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


def execution(settings=SMALL):
    return Execution(settings, ["magi-bench", "doors"], None, lambda line: None)


def test_attentions_have_times_or_reasons(door):
    rows = {row["attention"]: row for row in execution().run()}
    assert list(rows) == list(SMALL.attentions)
    for name in ("magi", "sdpa"):
        row = rows[name]
        assert (row["status"], row["graphs"], row["breaks"], row["recompiles"]) == ("ok", 0, 0, 0)
        assert row["tokens_per_s"] == pytest.approx(256 / row["ms"] * 1e3)
        assert 0 < row["mfu"] < 1
        assert set(row["gate"]["errors"]) == {
            "loss",
            "gradient of the first qkv",
            "gradient of the last qkv",
        }
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


def rows_of_wrong(door, above):
    whole = execution()
    Transformers(whole, Wrong(door, above)).run()
    return {row["attention"]: row for row in whole.rows}


def test_another_mask_is_caught_on_the_small_input(door):
    rows = rows_of_wrong(door, 0)
    assert rows["magi"]["status"] == "ok"
    assert rows["sdpa"]["status"] == "wrong"
    assert rows["sdpa"]["reason"].startswith("gradient of the")
    assert "at 128 tokens" in rows["sdpa"]["reason"]


def test_another_mask_is_caught_at_full_length(door):
    rows = rows_of_wrong(door, 128)
    assert rows["sdpa"]["status"] == "wrong"
    assert rows["sdpa"]["reason"].startswith("not what magi, eager gives: gradient of the")


def test_what_has_no_time_left_is_not_begun(door):
    whole = execution(Settings(**{**vars(SMALL), "seconds": 1e-9}))
    rows = whole.run()
    assert {row["status"] for row in rows} == {"timeout", "unavailable", "unsupported"}


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
    whole = Settings(**{**vars(SMALL), "lengths": "whole"})
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64
    weights = 2 * layer + 32 * 64
    assert model_flops(whole, 256) == 6 * weights * 256 + 12 * 2 * 32 * 256 * 257 / 2


@pytest.mark.slow
def test_the_command(tmp_path):
    pytest.importorskip("transformers")
    out = tmp_path / "doors_cpu"
    arguments = ["--quick", "--device", "cpu", "--attentions", "magi", "sdpa", "--out", str(out)]
    assert main(["doors", *arguments]) == 0
    record = json.loads(out.with_suffix(".json").read_text())
    compiled = [row for row in record["rows"] if row["mode"] == "compiled" and "ms" in row]
    assert [row["attention"] for row in compiled] == ["magi", "sdpa"]
    assert [row["graphs"] for row in compiled] == [1, 1]
    assert str(tmp_path) not in out.with_suffix(".md").read_text()


# torchtitan


def test_where_torchtitan_cannot_train_every_row_has_the_reason(monkeypatch):
    monkeypatch.setattr(torchtitan_runs, "unavailable", lambda device: "no such thing")
    rows = torchtitan_runs.rows(SMALL, lambda: 1.0, print)
    assert [(row["ranks"], row["attention"]) for row in rows] == [
        (ranks, name) for ranks in (1, 2) for name in ("magi", "flex", "varlen")
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
        return {"status": "ok", "ms": 3.0 if run.attention == "flex" else 2.0, "tokens_per_s": 1.0}

    monkeypatch.setattr(torchtitan_runs, "unavailable", lambda device: None)
    monkeypatch.setattr(torchtitan_runs, "train", train)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    said = []
    rows = torchtitan_runs.rows(SMALL, lambda: 1.0, said.append)
    assert [row.get("ratio") for row in rows] == [1.0, 1.5, None, None, None, None]
    assert {row["reason"] for row in rows if row["ranks"] == 2} == {"needs 2 GPUs, found 1"}
    assert said[0] == "torchtitan 256, 1 ranks, magi: 1.0"
    late = torchtitan_runs.rows(SMALL, lambda: 0.0, said.append)
    assert late[0]["reason"] == "not begun: no time left of inf s"


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


def test_the_last_steps_of_torchtitan_count():
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
    assert row["ms"] == pytest.approx(1000.0)
    assert (row["tokens_per_s"], row["mfu"], row["peak_bytes"]) == (1000.0, 0.5, 2 * 2**30)
    assert (row["graphs"], row["recompiles"], row["loss"]) == (3, 1, -6.0)


def test_a_run_without_end_is_a_timeout(tmp_path):
    program = tmp_path / "sleeps.py"
    program.write_text("import time\ntime.sleep(60)\n")
    outcome = torchtitan_runs.train(Run("magi", 1, 256, 1, "short", 0), 1.0, (str(program),))
    assert outcome == {"status": "timeout", "reason": "no end after 1 s"}


# The report and the command


def test_a_report_has_numbers_and_reasons():
    case = Case(8192, "compiled")
    rates = {"tokens_per_s": 81920.0, "mfu": 0.42, "peak_bytes": 3 * 2**30}
    counts = {"graphs": 2, "breaks": 1, "recompiles": 0}
    rows = [
        run.row_of("magi", case) | {"status": "ok", "ms": 100.0, "ratio": 1.0} | rates | counts,
        run.row_of("sdpa", case) | {"status": "oom", "reason": "too large"},
        run.missing_row("torchtitan", "no such thing"),
    ]
    text = to_markdown({"device": "a card", "settings": {"seed": 1}}, rows)
    assert "## transformers, 8K tokens, compiled" in text
    assert "| magi | 100.0 | 1.00 | 81,920 | 42.0 | 3.00 | 2 | 1 | 0 |" in text
    assert "| sdpa | oom | - | - | - | - | - | - | - |" in text
    assert "| torchtitan | - | - | 0 | 1 | unavailable | no such thing |" in text


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
