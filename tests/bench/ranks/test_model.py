"""Training steps across two gloo ranks: held to one rank's model, eager here and compiled in the slow test."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from magi_bench.cli import main
from magi_bench.contenders.flex import NO_BACKWARD
from magi_bench.gate import STEP_RESULTS
from magi_bench.ranks import model, suite
from magi_bench.ranks.model import MagiAheadTraining, MagiTraining, TorchTraining
from magi_bench.results import rows as files
from magi_bench.workloads.llama import causal_in, document_of, truth_of
from magi_bench.world import World
from tests.bench.flat import flat, rows_of
from tests.bench.ranks.test_ranks import SMALL

MODEL = replace(
    SMALL,
    tokens=(128,),
    model=True,
    masks=("document_causal",),
    train_layers=2,
    vocab=64,
    contenders=("magi", "magi-ahead", "torch-head-tail"),
)


class OwnTokens(MagiTraining):
    """Attention over the tokens of one document in place of all of them."""

    name = "torch-head-tail"
    is_ours = False

    def spread(self, batch, mask):
        return super().spread(batch._replace(lengths=[sum(batch.lengths)]), mask)


class NoWindow(MagiTraining):
    """All tokens before itself in its document, in place of a window."""

    name = "torch-head-tail"
    is_ours = False

    def mask_mod(self, batch):
        return causal_in(document_of(batch.lengths))


def run_model(group, trainings, window=None):
    masks = {"document_causal": window}
    with (
        patch.object(torch, "compile", lambda function, **_: function),
        patch.object(model, "TRAININGS", trainings),
        patch.object(model, "MASKS", masks),
    ):
        return rows_of(suite.Ranks(MODEL, World("cpu")))


def test_steps_are_held_to_those_of_one_rank(two_ranks):
    trainings = (MagiTraining, MagiAheadTraining, TorchTraining)
    for rows in two_ranks.run(run_model, trainings):
        status = {(row["contender"], row["pass"]): row["status"] for row in rows}
        assert status == {
            ("magi", "fwd"): "ok",
            ("magi-ahead", "fwd"): "ok",
            ("torch-head-tail", "fwd"): "ok",
            ("magi", "fwdbwd"): "ok",
            ("magi-ahead", "fwdbwd"): "ok",
            ("torch-head-tail", "fwdbwd"): "unsupported",
        }
        assert rows[-1]["reason"] == NO_BACKWARD
        for row in rows[:5]:
            assert row["what"] == "model, document causal"
            assert row["tokens_per_s"] == pytest.approx(256 / row["ms"] * 1e3)
        assert set(rows[3]["gate"]["errors"]) == set(STEP_RESULTS)


@pytest.mark.parametrize("window", [None, 10])
def test_another_mask_is_caught(two_ranks, window):
    for rows in two_ranks.run(run_model, (MagiTraining, OwnTokens), window):
        status = {(row["contender"], row["pass"]): row["status"] for row in rows}
        assert status["magi", "fwdbwd"] == "ok"
        assert status["torch-head-tail", "fwdbwd"] == "wrong"


def test_an_attention_without_the_window_is_caught(two_ranks):
    for rows in two_ranks.run(run_model, (MagiTraining, NoWindow), 10):
        status = {(row["contender"], row["pass"]): row["status"] for row in rows}
        assert status["magi", "fwdbwd"] == "ok"
        assert status["torch-head-tail", "fwdbwd"] == "wrong"


def truths(group, lengths, window):
    """The truth of such documents by all ranks together, and by one."""
    settings = replace(MODEL, dtype="float32")
    problem = model.Problem(settings, World("cpu"), "document_causal", 128)
    batch = problem.batch(0)._replace(lengths=lengths, document=document_of(lengths))
    together = truth_of(problem.build(), batch, window, problem.world)
    return together, truth_of(problem.build(), batch, window)


@pytest.mark.parametrize("lengths", [[1, 90, 20, 145], [256]], ids=["several", "one"])
@pytest.mark.parametrize("window", [None, 10])
def test_ranks_share_the_truth(two_ranks, lengths, window):
    for together, alone in two_ranks.run(truths, lengths, window):
        assert max(together.check(alone.exact, 256).errors.values()) < 1e-6
        assert together.allowed.keys() == alone.allowed.keys()


def run_spread(group):
    found = []
    for made in model.TRAININGS:
        problem = model.Problem(MODEL, World("cpu"), "document_causal", 128)
        training, batch = made(problem), problem.batch(3)
        with (
            patch.object(torch, "compile", lambda function, **_: function),
            training.spread(batch, training.mask(batch)) as part,
        ):
            found.append((batch, part.tokens, part.targets, part.positions))
    return found


def test_ranks_have_every_token_once(two_ranks):
    for ranks in zip(*two_ranks.run(run_spread), strict=True):
        batch = ranks[0][0]
        assert len(batch.lengths) > 1
        positions = torch.cat([part[3] for part in ranks])
        assert torch.equal(positions.sort().values, torch.arange(256))
        for _, tokens, targets, mine in ranks:
            assert torch.equal(tokens, batch.tokens[:, mine])
            assert torch.equal(targets, batch.targets[:, mine])


def test_steps_have_their_own_masks_and_turns_with_a_preset_too():
    with patch.object(suite.world, "start", return_value=0) as start:
        assert main(["ranks", "--device", "cpu", "--preset", "seeds", "--model"]) == 0
        settings = start.call_args.args[3]
        assert settings.masks == ("document_causal",)
        assert settings.tokens == (8192, 16384, 32768)
        assert settings.rounds.turn_ms == 600
        assert main(["ranks", "--device", "cpu", "--preset", "seeds"]) == 0
        assert start.call_args.args[3].masks[0] == "full"
        assert start.call_args.args[3].rounds.turn_ms == 20


@pytest.mark.slow
def test_compiled_steps(tmp_path):
    out = tmp_path / "model_cpu"
    arguments = ["--quick", "--device", "cpu", "--model", "--passes", "fwdbwd", "--out", str(out)]
    assert main(["ranks", *arguments]) == 0
    *ours, peer = map(flat, files.load([out.with_suffix(".jsonl")]).rows.values())
    assert [(x["contender"], x["status"], x["recompiles"]) for x in ours] == [
        ("magi", "ok", 0),
        ("magi-ahead", "ok", 0),
    ]
    assert peer["status"] == "unsupported"
    assert "tokens/s" in out.with_suffix(".md").read_text()
