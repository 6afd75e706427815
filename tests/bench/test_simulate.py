"""The simulator: its bound bounds, its figures are those of the plan, and the command runs."""

import pytest
import torch

from magi_bench import simulate as command
from magi_bench.cli import main
from magi_bench.simulate import lower_bound, simulate, ulysses_rows_of
from magi_compile.dtensor.planning.chunks import ChunkTable, rank_loads
from magi_compile.dtensor.planning.dispatch import dispatch
from magi_compile.masks.slices import AttnSlices
from tests.dtensor.planning.test_dispatch import every_assignment
from tests.support.cases import random_disjoint, varlen
from tests.support.pairwise import pairwise

SMALL = [
    varlen("long_and_short", [140, 20, 7, 9, 16], 1),
    varlen("one", [192], 1),
    varlen("full", [100, 60, 32], 0),
    random_disjoint(192, 192, seed=1),
]


@pytest.mark.parametrize(
    ("case", "slack", "cp_size"),
    pairwise(SMALL, (0.025, 0.3), (2, 3)),
    ids=lambda x: getattr(x, "name", x),
)
def test_no_placement_is_below_the_bound(case, slack, cp_size):
    slices = case.slices()
    where = dispatch(slices, cp_size, chunk_size=16)
    bound = lower_bound(where, slack)
    table = ChunkTable.of(slices, 16, 12)
    for assignment in every_assignment(12, cp_size):
        loads = rank_loads(table, assignment)
        if loads.imbalance <= 1 + slack:
            assert loads.recv_rows.double().mean().item() >= (bound - 1e-9) * where.seqlen_local


def test_bound_of_a_full_mask_is_the_all_gather():
    slices = AttnSlices.full(1024)
    where = dispatch(slices, 8, chunk_size=16)
    assert lower_bound(where, 0.0) == 7.0


def test_figures_of_a_full_mask():
    outcome = simulate(AttnSlices.full(1024), 4, chunk_size=32, repeats=1)
    assert (outcome.imbalance, outcome.recv_mean, outcome.send_max) == (1.0, 3.0, 3.0)
    assert (outcome.bound, outcome.gather) == (3.0, 3.0)
    assert 0 < outcome.eff_fwd <= 1
    assert 0 < outcome.eff_bwd <= 1


def test_ulysses_moves_all_heads_once():
    rows = ulysses_rows_of(64, 8)
    # A rank sends and receives 7/8 of its q and out (64 heads each) and of its k and v (8 each).
    assert rows(8) == 7 / 8 * (64 + 64 + 8 + 8) / (8 + 8)
    assert rows(1) == 0
    assert rows(16) == 15 / 16 * (64 + 64 + 16 + 16) / (8 + 8)


@pytest.mark.parametrize("mask", ["document_causal", "sliding_window_causal"])
def test_command(mask, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    picture, measure, found = tmp_path / "figure.png", command.measure, []
    monkeypatch.setattr(command, "measure", lambda args: found.append(measure(args)) or found[0])
    threads = torch.get_num_threads()
    arguments = f"--mask {mask} --tokens 64K --cp 2,8 --packs 1 --plot {picture}"
    try:
        assert main(["simulate", *arguments.split()]) == 0
    finally:
        torch.set_num_threads(threads)
    (outcomes,) = found
    assert [outcome.cp for outcome in outcomes] == [2] * 4 + [8] * 4
    assert all(outcome.recv_mean >= 0.999 * outcome.bound for outcome in outcomes[3::4])
    assert "min_heap" in capsys.readouterr().out
    assert picture.stat().st_size > 0


def test_many_ranks_and_tokens():
    slices = varlen("documents", [2**22, 2**21, 2**21], 1).slices()
    outcome = simulate(slices, 512, chunk_size=2048, repeats=1)
    assert outcome.imbalance < 1.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--cp 0", "--cp: must be a positive integer, got '0'"),
        ("--cp 8,x", "--cp: must be a positive integer, got 'x'"),
        ("--strategies best", "--strategies: must be of "),
        ("--packs 0", "--packs: must be a positive integer"),
        ("--slack=-1", "--slack: must be a number, and not negative, got '-1'"),
        ("--nheads-q 12", "`--nheads-q` must be a multiple of `--nheads-kv` 8, got 12"),
        ("--tflops 0", "--tflops: must be a positive number, got '0'"),
        ("--plot no_such_directory/x.png", "`--plot` must lie in a folder that exists"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["simulate", *arguments.split()])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
