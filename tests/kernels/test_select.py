"""Selection: the first kernel without refusals, and every reason where there is none."""

import subprocess
import sys
from dataclasses import replace
from typing import get_args

import pytest
import torch

from magi_compile.dtensor.planning.dispatch import STRATEGIES, StrategyName
from magi_compile.dtensor.transport.collectives import COLLECTIVES, CollectiveName
from magi_compile.kernels import select as select_module
from magi_compile.kernels.base import AttnProblem, KernelName
from magi_compile.kernels.cpu import CpuKernel
from magi_compile.kernels.scored import ScoreNeeds
from magi_compile.kernels.select import KERNELS, OLD_NAMES, load, refusals, select
from magi_compile.lowering.options import LoweringOptions
from magi_compile.score.program import ScoreProgram

PROBLEM = AttnProblem(
    device_type="cpu",
    device_arch=None,
    dtype=torch.float32,
    nheads_q=2,
    nheads_kv=1,
    head_dim=64,
    head_dim_v=64,
    softmax_scale=0.125,
)


class Picky:
    name = "picky"

    def refusals(self, problem):
        return ["needs a Tuesday", "needs a full moon"]


class AcceptsAll:
    name = "accepts_all"

    def refusals(self, problem):
        return []


@pytest.fixture
def registry(monkeypatch):
    """Replaces the registry by the given entries."""

    def install(**entries):
        monkeypatch.setattr(select_module, "KERNELS", entries)

    load.cache_clear()
    yield install
    load.cache_clear()


PICKY = f"{__name__}:Picky"
MISSING = "magi_compile.kernels.no_such_module:Kernel"
NO_CLASS = "magi_compile.kernels.base:NoSuchKernel"
ORACLE = KERNELS["reference"]


def test_first_kernel_without_refusals(registry):
    registry(picky=PICKY, oracle=ORACLE)
    kernel, passed_over = select(PROBLEM)
    assert kernel.name == "reference"
    assert select(PROBLEM).kernel is kernel
    assert passed_over == {"picky": ("needs a Tuesday", "needs a full moon")}


def test_cpu_problem_gets_the_cpu_kernel():
    kernel, passed_over = select(PROBLEM)
    assert kernel.name == "cpu"
    assert list(passed_over) == ["hopper", "triton"]


def test_the_oracle_runs_only_if_forced(registry):
    registry(picky=PICKY, reference=ORACLE)
    with pytest.raises(NotImplementedError, match="picky: needs a Tuesday"):
        select(PROBLEM)
    assert select(PROBLEM, force="reference") == (load("reference"), {})


def test_triton_runs_bit_blocks_on_a_gpu_only_if_forced(registry):
    """Of the kernel that is slower than FlexAttention with them."""
    registry(
        triton="tests.kernels.test_select:AcceptsAll", cpu="tests.kernels.test_select:AcceptsAll"
    )
    problem = replace(PROBLEM, device_type="cuda", device_arch=(9, 0), has_bits=True)
    assert select(problem).kernel is load("cpu")  # which accepts all here
    assert select(problem, "triton").kernel is load("triton")
    assert select(problem, may_be_slower=True).kernel is load("triton")
    assert select(replace(problem, has_bits=False)).kernel is load("triton")
    registry(triton="tests.kernels.test_select:AcceptsAll")
    with pytest.raises(
        NotImplementedError, match="triton: runs bit blocks only where kernel 'triton' is asked for"
    ):
        select(problem)


def test_all_reasons_are_listed(registry):
    registry(picky=PICKY, missing=MISSING, no_class=NO_CLASS)
    with pytest.raises(NotImplementedError) as error:
        select(PROBLEM)
    message = str(error.value)
    assert "float32, heads 2:1, head_dim 64:" in message
    for reason in (
        "picky: needs a Tuesday",
        "picky: needs a full moon",
        "missing: cannot be imported: No module named 'magi_compile.kernels.no_such_module'",
        "no_class: cannot be imported: cannot import name 'NoSuchKernel'",
    ):
        assert reason in message


def test_forced_kernel_that_refuses(registry):
    registry(picky=PICKY, oracle=ORACLE)
    with pytest.raises(NotImplementedError, match="needs a full moon"):
        select(PROBLEM, force="picky")


def test_forced_kernel_that_does_not_exist():
    with pytest.raises(
        ValueError,
        match=r"`force` must be one of hopper, fa4, triton, .* got 'fast'",
    ):
        select(PROBLEM, force="fast")


def test_refusals_of_one_kernel(registry):
    registry(picky=PICKY, oracle=ORACLE)
    assert refusals("picky", PROBLEM) == ["needs a Tuesday", "needs a full moon"]
    assert refusals("oracle", PROBLEM) == []


def test_each_kernel_is_asked_once(registry, monkeypatch):
    """Also for its score program, and only where it takes the rest of the problem."""
    asked = []

    class Scored(CpuKernel):
        def refusals(self, problem):
            asked.append("problem")
            return super().refusals(problem)

        def score_refusals(self, problem, needs):
            asked.append("score")
            return ["adds them up in any order"] if needs.wants_table_gradients else []

    monkeypatch.setattr("magi_compile.kernels.cpu.CpuKernel", Scored)
    registry(picky=PICKY, scored=KERNELS["cpu"])
    problem = replace(PROBLEM, has_score=True)
    program = ScoreProgram("score", "def score(score):\n    return score\n")
    needs = ScoreNeeds(program, (), (), wants_table_gradients=False)
    assert select(problem, score=needs).passed_over == {
        "picky": (
            "needs a Tuesday",
            "needs a full moon",
            "has no score_mods but a scale and a soft-cap",
        )
    }
    assert asked == ["problem", "score"]
    with pytest.raises(NotImplementedError, match="scored: adds them up in any order"):
        select(problem, score=needs._replace(wants_table_gradients=True))
    asked.clear()
    with pytest.raises(NotImplementedError, match="scored: needs tensors on the CPU, got cuda"):
        select(replace(problem, device_type="cuda"), score=needs)
    assert asked == ["problem"]


def test_import_loads_no_kernel():
    code = (
        "import sys, magi_compile.kernels.select as s; "
        "print([m for m in sys.modules if m in {e.split(':')[0] for e in s.KERNELS.values()}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["mask_slices", "mask_bits"])
def test_who_evaluates_masks(name, monkeypatch):
    """One CUDA source on Hopper, where the kernels of this package can be had; tensor operations elsewhere."""
    kernel_of = getattr(select_module, f"{name}_kernel")
    assert kernel_of(None) is None
    assert kernel_of((8, 0)) is None
    kernel_of.cache_clear()
    monkeypatch.setitem(sys.modules, f"magi_compile.kernels.sm90.masks.{name}", None)
    assert kernel_of((9, 0)) is None
    kernel_of.cache_clear()


def test_score_programs_need_a_kernel_that_has_them():
    problem = replace(PROBLEM, has_score=True)
    assert select(problem).kernel.name == "cpu"
    with pytest.raises(NotImplementedError, match="has no score_mods but a scale and a soft-cap"):
        select(problem, "reference")


def test_score_programs_on_a_gpu_are_for_those_who_ask():
    problem = replace(PROBLEM, device_type="cuda", device_arch=(9, 0), has_score=True)
    with pytest.raises(
        NotImplementedError, match="triton: runs score_mods only where kernel 'triton' is asked for"
    ):
        select(problem)
    assert "has no score_mods but a scale and a soft-cap" in refusals("fa4", problem)
    assert not any(
        "score_mods" in x for name in ("hopper", "triton") for x in refusals(name, problem)
    )


@pytest.mark.parametrize(
    ("head_dims", "name"),
    [
        ((128, 128), "hopper"),
        ((80, 80), "hopper"),
        ((192, 128), "hopper"),
        ((100, 100), "triton"),
    ],
    ids=str,
)
def test_head_dimensions_on_hopper(head_dims, name):
    pytest.importorskip("triton")
    pytest.importorskip("cuda.bindings")
    problem = replace(PROBLEM, device_type="cuda", device_arch=(9, 0), dtype=torch.bfloat16)
    head_dim, head_dim_v = head_dims
    assert select(replace(problem, head_dim=head_dim, head_dim_v=head_dim_v)).kernel.name == name


def test_old_name_of_the_hopper_kernel():
    """Callers may still ask for it as `cuda`; messages and results call it `hopper`."""
    problem = AttnProblem("cuda", (9, 0), torch.bfloat16, 8, 2, 128, 128, 1.0)
    assert load("cuda") is load("hopper")
    assert select(problem, "cuda").kernel.name == "hopper"


def test_names_for_type_checkers():
    assert set(get_args(KernelName)) == {*KERNELS, *OLD_NAMES}
    assert set(get_args(CollectiveName)) == {"auto", *COLLECTIVES}
    assert set(get_args(StrategyName)) == set(STRATEGIES)
    assert LoweringOptions(kernel="cuda").kernel == "hopper"
