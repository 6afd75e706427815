"""`magi-bench step`: every row or a reason, the gate, ratios, counts, on tiny sizes of a CPU."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from magi_bench.cli import main
from magi_bench.own_code import with_own_code
from magi_bench.step import checks, clock, contenders, run
from magi_bench.step.cases import GROUPS, ROWS, Case, Settings, cases
from magi_bench.step.clock import Ready, Rounds, Turns, in_turns
from magi_bench.step.problem import Problem
from magi_bench.step.report import group_table, to_markdown, without_number
from magi_bench.workloads.lengths import SHORT, sample
from magi_bench.workloads.llama import Llama, Shape, causal_within
from magi_compile._compat import num_compiled_graphs

SMALL = Settings(
    "cpu", "float32", (192,), 2, 1, 32, (2,), 1, 64, rows=("eager",), rounds=Rounds(2, 1.0), seed=3
)


def row_of(name):
    return next(row for row in ROWS if row.name == name)


def measured(tmp_path, *arguments):
    """The rows and the Markdown of a run."""
    out = tmp_path / "step_cpu"
    code = main(["step", "--quick", "--device", "cpu", "--out", str(out), *arguments])
    record = json.loads(out.with_suffix(".json").read_text())
    return code, record, out.with_suffix(".md").read_text()


def execute(settings=SMALL):
    return run.execute(settings, ["magi-bench", "step"], None, lambda line: None)


@pytest.mark.slow
def test_every_way_to_call_attention_has_a_time_or_a_reason(tmp_path):
    names = ["outside", "new_layout", "cuda_graphs", "eager"]
    code, record, text = measured(tmp_path, "--rows", *names)
    rows = record["rows"]
    assert code == 0
    assert {(row["row"], row["pass"]) for row in rows} == {
        (name, which) for name in names for which in ("fwd", "fwdbwd")
    }
    assert all(row["ms"] > 0 if row["status"] == "ok" else row["reason"] for row in rows)
    status = {(row["row"], row["pass"], row["contender"]): row["status"] for row in rows}
    assert status["outside", "fwd", "flex"] == status["outside", "fwd", "magi"] == "ok"
    assert status["outside", "fwdbwd", "magi"] == status["new_layout", "fwdbwd", "magi"] == "ok"
    assert status["outside", "fwdbwd", "flex"] == "unsupported"
    assert status["cuda_graphs", "fwd", "magi"] == "unsupported"
    assert status["eager", "fwd", "fa4"] == "unavailable"
    assert [row["recompiles"] for row in rows if "ms" in row] == [0] * 8
    assert {"torch", "commit", "command", "settings", "took_s"} <= set(record["context"])
    assert str(tmp_path) not in text
    for words in ("no backward on a CPU", "CUDA graphs need a GPU", "runs on cuda, not on cpu"):
        assert words in text
    for name in names:
        assert text.count(f"| {row_of(name).label} | 1K |") == 2


@pytest.mark.slow
def test_layers_and_training_have_a_time_or_a_reason(tmp_path):
    names = ["layers_outside", "masks", "training"]
    code, record, text = measured(tmp_path, "--rows", *names, "--passes", "fwdbwd")
    assert code == 0
    ours = [row for row in record["rows"] if row["contender"] == "magi"]
    assert [row["row"] for row in ours] == ["layers_outside", "training_inside", "training_outside"]
    assert [row["status"] for row in ours] == ["ok"] * 3
    assert [row["recompiles"] for row in ours] == [0] * 3
    assert set(ours[1]["gate"]["errors"]) == {
        "loss",
        "gradient of the first qkv",
        "gradient of the last qkv",
    }
    assert f"{ours[0]['ms'] / 2:.3f}" in text or f"{ours[0]['ms'] / 2:.1f}" in text


def test_all_rows_are_planned_in_all_groups():
    every = Settings("cpu", "float32", (64,), 2, 1, 32, layers=(2, 16))
    planned = list(cases(every, 64))
    assert {case.row.group for case in planned} == set(GROUPS)
    depths = {case.layers for case in planned if case.row.group == "layers"}
    assert depths == {2, 16}
    assert len(planned) == 2 * (len(ROWS) + 2) - 1  # making a mask has no backward


class TooLarge(contenders.MagiEager):
    name = "too-large"
    is_ours = False

    def prepare(self, problem, case):
        ready = super().prepare(problem, case)
        return Ready(lambda: [x * 1.01 for x in ready.call()])


class WrongGradient(TooLarge):
    name = "wrong-gradient"

    def prepare(self, problem, case):
        ready = contenders.MagiEager.prepare(self, problem, case)

        def call():
            out, *gradients = ready.call()
            return [out, *(x.flip(0) for x in gradients)]

        return Ready(call)


class Raises(TooLarge):
    name = "raises"

    def prepare(self, problem, case):
        raise RuntimeError("no such thing\nas a second line")


def test_what_is_wrong_is_caught_and_not_timed(monkeypatch):
    taking_part = (contenders.MagiEager, TooLarge, WrongGradient, Raises)
    monkeypatch.setattr(run, "CONTENDERS", taking_part)
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
    assert run.fault(found["raises", "fwd"]).startswith("eager, 192 tokens, fwd, raises: Runtime")


class OneBlockLess(contenders.MaskOnly):
    name = "one-block-less"

    def prepare(self, problem, case):
        ready = super().prepare(problem, case)

        def call():
            partial, *others = ready.call()
            return [partial - torch.eye(*partial.shape[-2:], dtype=partial.dtype), *others]

        return Ready(call, ready.renew)


def test_masks_are_made_and_held_to_the_slices(monkeypatch):
    masks = (contenders.MaskOnly, contenders.MagiMaskOnly, OneBlockLess)
    monkeypatch.setattr(run, "CONTENDERS", masks)
    rows = execute(Settings(**{**vars(SMALL), "rows": ("masks",), "tokens": (2000,)}))
    status = {row["contender"]: row["status"] for row in rows}
    assert status == {"pytorch-mask": "ok", "magi-mask": "ok", "one-block-less": "wrong"}
    assert rows[2]["reason"].startswith("partial blocks: relative error")


def test_a_model_of_another_mask_is_caught():
    problem, contender = Problem(SMALL, 2048), contenders.Magi()
    case = Case(row_of("training_outside"), 2048, 2, "fwdbwd")
    model = contender._model = contenders._build(problem, case, None)
    tokens, targets, document, _ = contenders.Packs(problem, case).make(0)

    def results(lengths):
        loss = model(tokens, targets, document, lengths)
        return [loss, *torch.autograd.grad(loss, checks.checked_parameters(model))]

    lengths = problem.lengths(0)
    assert len(lengths) > 1
    assert contender.check(problem, case, results(lengths)).passed
    check = contender.check(problem, case, results([2048]))
    assert all(check.errors[name] > 0.125 for name in check.errors if name != "loss")


def test_where_ours_stays_on_flex_attention_it_is_not_timed(monkeypatch):
    monkeypatch.setattr(run, "CONTENDERS", (contenders.MagiEager,))
    kept = SimpleNamespace(reasons=("a reason",))
    reports = iter([[], [kept], [kept], [kept]])
    monkeypatch.setattr(run, "lowering_report", lambda: SimpleNamespace(refused=next(reports)))
    for row in execute():
        assert row["status"] == "unsupported"
        assert row["reason"] == "stays on FlexAttention: a reason"


def test_what_has_no_time_left_is_not_begun(monkeypatch):
    monkeypatch.setattr(run, "CONTENDERS", (contenders.MagiEager,))
    rows = execute(Settings(**{**vars(SMALL), "seconds": 1e-9}))
    assert [row["status"] for row in rows] == ["timeout"] * 2
    assert rows[0]["reason"] == "not begun: no time left of 1e-09 s"


def timed(name, times_ms, **more):
    row = {"contender": name, "label": name.upper(), "is_ours": False, "status": "ok"}
    place = {"group": "layers", "row": "layers_outside", "tokens": 2048, "layers": 4, "pass": "fwd"}
    return row | place | run.summary(Turns(times_ms, 5, 0)) | more


def test_ratios_are_of_medians_and_to_ours():
    rows = [timed("peer", [4.0, 6.0, 50.0]), timed("ours", [3.0, 1.0, 4.0], is_ours=True)]
    lost = {**rows[0], "contender": "lost", "label": "LOST", "status": "oom", "reason": "too large"}
    del lost["ms"]
    run.compare([*rows, lost])
    assert [row["ms"] for row in rows] == [6.0, 3.0]
    assert [row["ratio"] for row in rows] == [2.0, 1.0]
    assert "ratio" not in lost
    assert (rows[0]["min_ms"], rows[0]["max_ms"], rows[0]["rounds"]) == (4.0, 50.0, 3)
    rows[0] |= {"kernels": 3.0, "launches": 1.0}
    header, (line,) = group_table([*rows, lost])
    cells = dict(zip(header, line, strict=True))
    assert cells["PEER, ms"] == "1.500"  # a layer of four
    assert cells["OURS, ms"] == "0.750"
    assert cells["LOST, ms"] == "oom"
    assert (cells["PEER, ratio"], cells["LOST, ratio"]) == ("2.00", "-")
    assert (cells["kernels"], cells["launches"], cells["recompiled"]) == ("3, -", "1, -", "0, 0")
    assert without_number([*rows, lost]) == [["LOST", "oom", "too large", "layers_outside", "1"]]
    text = to_markdown({"device": "a card"}, [*rows, lost])
    assert text.startswith("# Wall time of attention and of training steps, a card\n")
    assert "| BlockMask from outside | 2K | 4 | forward | 1.500 |" in text


def test_without_ours_there_is_no_ratio():
    rows = [timed("peer", [1.0])]
    run.compare(rows)
    assert "ratio" not in rows[0]


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
    problem = Problem(SMALL, 4096)
    case = Case(row_of("new_layout"), 4096, 1, "fwd")
    masks, others = (contenders.Masks(problem, case) for _ in range(2))
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
    problem = Problem(SMALL, 256)
    for name in ("outside", "inside"):
        masks = contenders.Masks(problem, Case(row_of(name), 256, 1, "fwd"))
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
        by_document = model(tokens, tokens, document, [40, 88])
        made_inside = model(tokens, tokens, document)
        from_outside = model(tokens, tokens, document, causal_within(document))
        other = model(tokens, tokens, document, [128])
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
