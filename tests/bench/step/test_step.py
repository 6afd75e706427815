"""`magi-bench step`: every row or a reason, the gate, ratios, counts, on tiny sizes of a CPU."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from magi_bench import clock, runner, step
from magi_bench.arguments import Settings
from magi_bench.cli import main
from magi_bench.clock import Ready, Rounds, in_turns
from magi_bench.contenders.base import with_own_code
from magi_bench.gate import STEP_RESULTS
from magi_bench.report import tables
from magi_bench.results import rows as files
from magi_bench.step import GROUPS, WAYS, Problem, Step
from magi_bench.workloads.lengths import SHORT, sample
from magi_bench.workloads.llama import (
    Documents,
    Llama,
    Shape,
    build,
    causal_within,
    checked_parameters,
)
from magi_compile._compat import num_compiled_graphs
from tests.bench.flat import flat, rows_of

SMALL = Settings(
    *("cpu", "float32", (192,), 2, 1, 32),
    layers=(2,),
    train_layers=1,
    vocab=64,
    rows=("eager",),
    rounds=Rounds(2, 1.0),
    seed=3,
)


def case_of(name, tokens, which, layers=1):
    return SMALL.case("step", name, tokens, which=which, layers=layers)


def problem_of(tokens):
    return Problem(SMALL, tokens)


def measured(tmp_path, *arguments):
    """The rows and the Markdown of a run."""
    out = tmp_path / "step_cpu"
    code = main(["step", "--quick", "--device", "cpu", "--out", str(out), *arguments])
    results = files.load([out.with_suffix(".jsonl")])
    return code, results, out.with_suffix(".md").read_text()


def execute(settings=SMALL):
    return rows_of(Step(settings))


@pytest.mark.slow
def test_every_way_to_call_attention_has_a_time_or_a_reason(tmp_path):
    names = ["outside", "new_layout", "cuda_graphs", "eager"]
    code, results, text = measured(tmp_path, "--rows", *names)
    rows = [flat(row) for row in results.rows.values()]
    assert code == 0
    assert {(row["mask"], row["pass"]) for row in rows} == {
        (name, which) for name in names for which in ("fwd", "fwdbwd")
    }
    assert all(row["ms"] > 0 if row["status"] == "ok" else row["reason"] for row in rows)
    status = {(row["mask"], row["pass"], row["contender"]): row["status"] for row in rows}
    assert status["outside", "fwd", "flex"] == status["outside", "fwd", "magi"] == "ok"
    assert status["outside", "fwdbwd", "magi"] == status["new_layout", "fwdbwd", "magi"] == "ok"
    assert status["outside", "fwdbwd", "flex"] == "unsupported"
    assert status["cuda_graphs", "fwd", "magi"] == "unsupported"
    assert status["eager", "fwd", "fa4"] == "unavailable"
    assert [row["recompiles"] for row in rows if "ms" in row] == [0] * 8
    (run,) = results.runs.values()
    assert {"torch", "commit", "command", "settings"} <= set(run)
    assert str(tmp_path) not in text
    for words in ("no backward on a CPU", "CUDA graphs need a GPU", "runs on cuda, not on cpu"):
        assert words in text
    for name in names:
        assert f"| {WAYS[name].label} | 1K |" in text


@pytest.mark.slow
def test_layers_and_training_have_a_time_or_a_reason(tmp_path):
    names = ["layers_outside", "training"]
    code, results, text = measured(tmp_path, "--rows", *names, "--passes", "fwdbwd")
    assert code == 0
    ours = [flat(x) for x in results.rows.values() if x["contender"] == "magi"]
    assert [row["mask"] for row in ours] == [
        "layers_outside",
        "training_inside",
        "training_outside",
    ]
    assert [row["status"] for row in ours] == ["ok"] * 3
    assert [row["recompiles"] for row in ours] == [0] * 3
    assert set(ours[1]["gate"]["errors"]) == set(STEP_RESULTS)
    assert f"{ours[0]['ms'] / 2:.3f}" in text


def test_all_rows_are_planned_in_all_groups():
    every = replace(SMALL, tokens=(64,), layers=(2, 16), rows=tuple(WAYS))
    planned = list(Step(every).cases())
    assert {WAYS[case.mask].group for case in planned} == set(GROUPS)
    depths = {case.layers for case in planned if WAYS[case.mask].group == "layers"}
    assert depths == {2, 16}
    assert len(planned) == 2 * (len(WAYS) + 2)
    assert len({case.key for case in planned}) == len(planned)


class TooLarge(step.MagiEager):
    name = "too-large"
    is_ours = False

    def prepare(self, problem, case):
        ready = super().prepare(problem, case)
        return Ready(lambda: [x * 1.01 for x in ready.call()])


class WrongGradient(TooLarge):
    name = "wrong-gradient"

    def prepare(self, problem, case):
        ready = step.MagiEager.prepare(self, problem, case)

        def call():
            out, *gradients = ready.call()
            return [out, *(x.flip(0) for x in gradients)]

        return Ready(call)


class Raises(TooLarge):
    name = "raises"

    def prepare(self, problem, case):
        raise RuntimeError("no such thing\nas a second line")


def test_what_is_wrong_is_caught_and_not_timed(monkeypatch):
    taking_part = (step.MagiEager, TooLarge, WrongGradient, Raises)
    monkeypatch.setattr(step, "CONTENDERS", taking_part)
    found = {(row["contender"], row["pass"]): row for row in execute()}
    assert {key: row["status"] for key, row in found.items()} == {
        ("magi-eager", "fwd"): "ok",
        ("magi-eager", "fwdbwd"): "ok",
        ("too-large", "fwd"): "wrong",
        ("too-large", "fwdbwd"): "wrong",
        ("wrong-gradient", "fwd"): "ok",
        ("wrong-gradient", "fwdbwd"): "wrong",
        ("raises", "fwd"): "error",
        ("raises", "fwdbwd"): "error",
    }
    assert all(("ms" in row) == (row["status"] == "ok") for row in found.values())
    assert "out: relative error 1.00e-02" in found["too-large", "fwd"]["reason"]
    assert found["wrong-gradient", "fwdbwd"]["reason"].startswith(("dq", "dk", "dv"))
    assert found["raises", "fwd"]["reason"] == "RuntimeError: no such thing"
    assert runner.fault(found["raises", "fwd"]).startswith("eager 192 fwd, raises: Runtime")


def test_a_model_of_another_mask_is_caught():
    problem, contender = problem_of(2048), step.Magi()
    case = case_of("training_outside", 2048, "fwdbwd", layers=2)
    model = contender._model = build(SMALL, 2, "cpu")
    tokens, targets, document, documents = problem.pack(0)

    def results(lengths):
        loss = model(tokens, targets, document, Documents(lengths))
        return [loss, *torch.autograd.grad(loss, checked_parameters(model))]

    assert len(documents) > 1
    assert contender.check(problem, case, results(documents)).passed
    check = contender.check(problem, case, results([2048]))
    assert all(check.errors[name] > 0.125 for name in check.errors if name != "loss")


def test_where_ours_stays_on_flex_attention_it_is_not_timed(monkeypatch):
    """Also in cases behind, whose graph is compiled."""
    monkeypatch.setattr(step, "CONTENDERS", (step.MagiEager,))
    decisions, prepare = [], step.MagiEager.prepare

    def kept(self, problem, case):
        decisions.extend([SimpleNamespace(kernel=None, reasons=("a reason",))] * (not decisions))
        return prepare(self, problem, case)

    monkeypatch.setattr(step.MagiEager, "prepare", kept)
    report = SimpleNamespace(decisions=decisions)
    monkeypatch.setattr(runner, "lowering_report", lambda: report)
    rows = execute()
    assert len(rows) == 2
    for row in rows:
        assert row["status"] == "unsupported"
        assert row["reason"] == "stays on FlexAttention: a reason"


def test_what_has_no_time_left_is_not_begun(monkeypatch):
    monkeypatch.setattr(step, "CONTENDERS", (step.MagiEager,))
    rows = execute(replace(SMALL, seconds=1e-9))
    assert [row["status"] for row in rows] == ["timeout"] * 2
    assert rows[0]["reason"] == "not begun: no time left of 1e-09 s"


def timed(name, ms, **more):
    row = {"contender": name, "label": name.upper(), "is_ours": name == "ours", "status": "ok"}
    times = {"ms": ms, "layer_ms": ms / 4, "recompiles": 0}
    case = case_of("layers_outside", 2048, "fwd", layers=4)
    place = {"run": "1", "key": name, "case": asdict(case), "group": "Layers", "what": "W"}
    return row | place | {"passes": {"fwd": times}} | more


def test_ratios_are_to_ours_and_in_the_report():
    rows = [timed("peer", 6.0), timed("ours", 3.0), timed("lost", 1.0)]
    rows[2] |= {"status": "oom", "reason": "too large"}
    del rows[2]["passes"]
    runner.compare(rows)
    assert [row["passes"]["fwd"]["ratio"] for row in rows[:2]] == [2.0, 1.0]
    rows[0]["passes"]["fwd"] |= {"kernels": 3.0, "launches": 1.0}
    results = files.Results({"1": {"device": "a card", "title": "T"}}, {x["key"]: x for x in rows})
    section, missing = (x.tables[0] for x in tables.sections(results))
    names = ("what", "tokens", "contender", "ms", "ms a layer", "ratio", "kernels", "recompiled")
    header = dict(zip(section.header, range(99), strict=False))
    assert [[line[header[name]] for name in names] for line in section.lines] == [
        ["W", "2K", "PEER", "6.000", "1.500", "2.000", "3", "0"],
        ["W", "2K", "OURS", "3.000", "0.750", "1.000", "-", "0"],
        ["W", "2K", "LOST", "oom", "-", "-", "-", "-"],
    ]
    assert missing.lines == [["LOST", "oom", "too large", "1: W"]]


def test_without_ours_there_is_no_ratio():
    rows = [timed("peer", 1.0)]
    runner.compare(rows)
    assert "ratio" not in rows[0]["passes"]["fwd"]


def test_contenders_take_turns_with_masks_made_before():
    seen = []

    def contender(name):
        def renew(calls):
            seen.append(f"{name} renews {calls}")

        return Ready(lambda: seen.append(name) or [], renew)

    rounds = Rounds(2, 1e6, max_calls=5, max_masks=3)
    result = in_turns({"a": contender("a"), "b": contender("b")}, "cpu", rounds)
    one = ["a renews 1", "a"]
    assert seen[:4] == one * 2
    turn_a, turn_b = ([f"{x} renews 3", x, x, x] for x in "ab")
    assert seen[8:] == turn_a + turn_b + turn_b + turn_a
    assert [(len(x.times_ms), x.calls, x.recompiles) for x in result.values()] == [(2, 3, 0)] * 2
    for x in result.values():
        assert all(0 < host <= ms for host, ms in zip(x.host_ms, x.times_ms, strict=True))


def test_calls_of_a_turn():
    rounds = Rounds(count=3, turn_ms=20.0, max_calls=50)
    assert [rounds.calls(ms) for ms in (0.001, 2.0, 15.0, 1000.0)] == [50, 10, 1, 1]


def test_what_is_compiled_again_is_counted():
    compiled = torch.compile(with_own_code(times_two), backend="eager", dynamic=False)
    sizes = iter(range(2, 100))
    same, growing = torch.ones(1), Ready(lambda: [compiled(torch.ones(next(sizes)))])
    compiled(same)
    before = num_compiled_graphs()
    turns = in_turns(
        {"same": Ready(lambda: [compiled(same)]), "growing": growing}, "cpu", Rounds(1, 1e6, 3)
    )
    assert turns["same"].recompiles == 0
    assert turns["growing"].recompiles == 3
    assert num_compiled_graphs() - before == 5  # two to see how long a call takes


def times_two(x: Tensor) -> Tensor:
    return x * 2


def test_copies_of_a_function_have_code_of_their_own():
    copy = with_own_code(times_two)
    assert copy.__code__ is not times_two.__code__
    assert copy(torch.tensor(3)) == 6


def test_kernels_and_launches_are_told_apart():
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [
        SimpleNamespace(name="flash_fwd", device_type=cuda),
        SimpleNamespace(name="Memcpy DtoD", device_type=cuda),
        SimpleNamespace(name="Memset (Device)", device_type=cuda),
        SimpleNamespace(name="a region", device_type=cuda, is_user_annotation=True),
        SimpleNamespace(name="cudaLaunchKernelExC", device_type=cpu),
        SimpleNamespace(name="cuLaunchKernelEx", device_type=cpu),
        SimpleNamespace(name="cudaGraphLaunch", device_type=cpu),
        SimpleNamespace(name="cudaMemcpyAsync", device_type=cpu),
    ]
    assert [event.name for event in events if clock._is_kernel(event)] == ["flash_fwd"]
    assert sum(map(clock._is_launch, events)) == 3


def test_new_layouts_are_new_in_every_call_and_equal_for_all():
    problem = problem_of(4096)
    masks, others = (step.masks_of(problem, WAYS["new_layout"]) for _ in range(2))
    drawn = []
    for calls in (1, 2):
        for one in (masks, others):
            one.renew(calls)
        for _ in range(calls):
            drawn.append(masks.next().kv_num_blocks)
            torch.testing.assert_close(drawn[-1], others.next().kv_num_blocks)
    torch.testing.assert_close(drawn[0], causal_within(problem.document(0)).kv_num_blocks)
    torch.testing.assert_close(drawn[2], causal_within(problem.document(2)).kv_num_blocks)
    assert not torch.equal(drawn[0], drawn[1])


def test_rows_of_one_layout_keep_their_mask():
    problem = problem_of(256)
    for name in ("outside", "inside"):
        masks = step.masks_of(problem, WAYS[name])
        masks.renew(1)
        first = masks.next()
        masks.renew(5)
        assert masks.next() is first


def test_short_documents_have_700_tokens_on_average():
    drawn = sample("short", 2**20, seed=1)[:-1]
    assert min(drawn) >= SHORT[0]
    assert max(drawn) <= SHORT[1]
    assert sum(drawn) / len(drawn) == pytest.approx(700, rel=0.05)


def test_a_model_takes_documents_or_makes_the_mask_itself():
    torch.manual_seed(0)
    model = Llama(Shape(1, 32, 64, 2, 1, 16))
    document = torch.tensor([0] * 40 + [1] * 88)
    tokens = torch.randint(16, (1, 128))
    with torch.no_grad():
        by_document = model(tokens, tokens, document, Documents([40, 88]))
        made_inside = model(tokens, tokens, document)
        from_outside = model(tokens, tokens, document, causal_within(document))
        other = model(tokens, tokens, document, Documents([128]))
    torch.testing.assert_close(made_inside, by_document)
    torch.testing.assert_close(from_outside, by_document)
    assert not torch.allclose(other, by_document, rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "/nowhere/step"], "`--out` must lie in a folder that exists"),
        (["--heads", "3:2"], "heads must be Q:KV with Q a multiple of KV"),
        (["--tokens", "0"], "must be a number of tokens"),
        (["--rows", "x"], "invalid choice"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["step", "--device", "cpu", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(capsys):
    with pytest.raises(SystemExit):
        main(["step", "--device", "cuda"])
    assert "needs a GPU, and PyTorch sees none" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_kernels_are_counted():
    settings = Settings("cuda", "bfloat16", (1024,), 4, 2, 128, rows=("outside", "cuda_graphs"))
    rows = [row for row in execute(settings) if row["contender"] in ("flex", "magi")]
    assert [row["status"] for row in rows] == ["ok"] * 8
    assert all(row["kernels"] >= 1 and row["launches"] >= 1 for row in rows)
    assert [row["recompiles"] for row in rows] == [0] * 8
    assert all(row["ratio"] == 1 for row in rows if row["is_ours"])
