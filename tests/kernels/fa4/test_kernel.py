"""The kernel on a CPU: refusals, selection, and what it asks of flash-attn-4, in whose place dense attention stands."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from magi_compile.kernels.base import AttnProblem, ForwardOutput, Grads, Saved
from magi_compile.kernels.fa4 import Fa4Kernel
from magi_compile.kernels.fa4 import kernel as module
from magi_compile.kernels.heuristics import FA4_HEAD_DIMS, plan_tiles
from magi_compile.kernels.reference import exact_backward, exact_forward
from magi_compile.kernels.select import refusals, select
from magi_compile.masks.slices import AttnSlices
from tests.kernels.support.prior import check_prior
from tests.support.cases import CAUSAL, MASKS, Case, HeadShape, one, varlen, windows
from tests.support.numerics import assert_attention_close, run_kernel
from tests.support.pairwise import sparsely

BLACKWELL = AttnProblem("cuda", (10, 0), torch.bfloat16, 8, 2, 128, 128, 0.1)
HOPPER = replace(BLACKWELL, device_arch=(9, 0))
MASK = {case.name: case for case in MASKS}


@pytest.fixture
def installed(monkeypatch):
    """As if the package were there."""
    monkeypatch.setattr(module, "_why_no_package", lambda: ())


# Refusals and selection


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device_type": "cpu"}, "needs a CUDA device, got 'cpu'"),
        ({"device_arch": (8, 0)}, r"needs compute capability 9.0, 10.0 or 10.3, got \(8, 0\)"),
        ({"device_arch": (12, 0)}, r"needs compute capability 9.0, 10.0 or 10.3, got \(12, 0\)"),
        ({"dtype": torch.float32}, "needs bfloat16 or float16, got torch.float32"),
        ({"head_dim": 80, "head_dim_v": 80}, r"needs a head_dim of \(64, 96, 128\), got 80"),
        ({"head_dim": 256, "head_dim_v": 256}, r"needs a head_dim of \(64, 96, 128\), got 256"),
        ({"head_dim_v": 64}, "needs head_dim_v equal to head_dim 128, got 64"),
        ({"softcap": 5.0}, "has no exact soft-cap, got softcap=5.0"),
        ({"has_bits": True}, "has no bit blocks"),
        ({"has_max_scores": True}, "has no largest scores of rows"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_refusals(installed, changes, reason):
    (found,) = Fa4Kernel().refusals(replace(BLACKWELL, **changes))
    with pytest.raises(ValueError, match=reason):
        raise ValueError(found)


@pytest.mark.parametrize("arch", [(9, 0), (10, 0), (10, 3)], ids=str)
@pytest.mark.parametrize("head_dim", FA4_HEAD_DIMS)
def test_refuses_nothing_else(installed, arch, head_dim):
    problem = replace(BLACKWELL, device_arch=arch, head_dim=head_dim, head_dim_v=head_dim)
    assert Fa4Kernel().refusals(problem) == []


def test_score_programs_are_refused(installed):
    reasons = refusals("fa4", replace(BLACKWELL, has_score=True))
    assert reasons == ["has no score_mods but a scale and a soft-cap"]


def check_missing(monkeypatch, reason):
    module._why_no_package.cache_clear()
    try:
        (found,) = Fa4Kernel().refusals(BLACKWELL)
        with pytest.raises(ValueError, match=reason):
            raise ValueError(found)
        with pytest.raises(NotImplementedError, match=f"fa4: {reason}"):
            select(BLACKWELL, "fa4")
    finally:
        module._why_no_package.cache_clear()


def test_without_the_package(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(module, "version", missing)
    check_missing(monkeypatch, "flash-attn-4 is not installed: pip install flash-attn-4==4.0.0b36")


def test_with_another_version(monkeypatch):
    monkeypatch.setattr(module, "version", lambda name: "4.0.0b7")
    check_missing(monkeypatch, "needs flash-attn-4 4.0.0b36, got 4.0.0b7")


def test_with_a_package_that_does_not_import(monkeypatch):
    def broken():
        raise RuntimeError("no driver")

    monkeypatch.setattr(module, "version", lambda name: "4.0.0b36")
    monkeypatch.setattr(module, "_interface", broken)
    check_missing(monkeypatch, "flash-attn-4 cannot be imported: RuntimeError: no driver")


@pytest.mark.parametrize("arch", [(9, 0), (10, 0), (10, 3)], ids=str)
def test_runs_by_name_alone(installed, arch):
    pytest.importorskip("triton")
    problem = replace(HOPPER, device_arch=arch)
    assert select(problem, "fa4").kernel.name == "fa4"
    assert select(problem).kernel.name in ("hopper", "triton")
    odd = replace(problem, head_dim=80, head_dim_v=80)
    with pytest.raises(NotImplementedError, match="fa4: needs a head_dim"):
        select(odd, "fa4")


# What flash-attn-4 is asked for


class Lists(NamedTuple):
    """`BlockSparseTensorsTorch`, as far as it is used."""

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor
    full_block_idx: torch.Tensor
    cu_total_m_blocks: None = None
    cu_block_idx_offsets: None = None
    block_size: tuple[int, int] | None = None


class Mod(NamedTuple):
    """A mask_mod: how it looks up its bounds, and whose rows they are."""

    kind: str
    size: int
    by_key: bool


def shown_by_mod(mod: Mod, bounds, num_rows, num_cols):
    """What `mask_mods.py` shows, dense."""
    shown = torch.zeros(num_rows, num_cols, dtype=torch.bool)
    column = torch.arange(num_cols)
    for row in range(num_rows):
        if mod.kind == "unrolled":
            own = bounds.view(-1, mod.size, 2)[row]
            shown[row] = ((column >= own[:, :1]) & (column < own[:, 1:])).any(0)
        else:
            own = bounds[bounds[row] : bounds[row + 1]]
            assert len(own) < 2**mod.size
            shown[row] = torch.bucketize(column, own, right=True) % 2 == 1
    return shown


def shown_by_lists(lists: Lists, shown, by_key):
    """What is left of `shown` where blocks are listed; those that are listed as full are."""
    rows, columns = lists.block_size[::-1] if by_key else lists.block_size
    num_rows, num_cols = (
        -(-n // size) for n, size in zip(shown.shape, (rows, columns), strict=True)
    )
    assert lists.mask_block_idx.shape == lists.full_block_idx.shape == (1, 1, num_rows, num_cols)
    result = torch.zeros_like(shown)
    for counts, indices, is_full in (
        (lists.mask_block_cnt, lists.mask_block_idx, False),
        (lists.full_block_cnt, lists.full_block_idx, True),
    ):
        for row, count in enumerate(counts[0, 0].tolist()):
            listed = indices[0, 0, row, :count].tolist()
            assert listed == sorted(set(listed)), (
                "a kernel knows by the order which block is the last"
            )
            for col in listed:
                place = (
                    slice(row * rows, (row + 1) * rows),
                    slice(col * columns, (col + 1) * columns),
                )
                result[place] = True if is_full else shown[place]
    return result


class Package:
    """Dense attention behind the functions of flash-attn-4 that the kernel calls."""

    def __init__(self):
        self.calls = []

    def dense(
        self,
        q,
        k,
        by_key,
        *,
        mask_mod=None,
        aux_tensors=None,
        block_sparse_tensors=None,
        causal=False,
        window_size_left=None,
        window_size_right=None,
        **varlen,
    ):
        num_q, num_k = q.shape[-3], k.shape[-3]
        self.calls.append("lists" if mask_mod else "varlen" if varlen else "one document")
        if mask_mod is not None:
            assert mask_mod.by_key == by_key
            sizes = (num_k, num_q) if by_key else (num_q, num_k)
            shown = shown_by_mod(mask_mod, aux_tensors[0], *sizes)
            shown = shown_by_lists(block_sparse_tensors, shown, by_key)
            return shown.t() if by_key else shown
        ends = ([0, num_q], [0, num_k])
        if varlen:
            ends = [varlen[f"cu_seqlens_{side}"] for side in "qk"]
            assert all(x.dtype == torch.int32 for x in ends)
            longest = int(ends[0].diff().max())
            assert varlen["max_seqlen_q"] == varlen["max_seqlen_k"] == longest
        window = window_size_left, window_size_right
        return AttnSlices.from_cu_seqlens(*ends, causal=causal, window=window).to_dense()

    def _flash_attn_fwd(self, q, k, v, *, softmax_scale, pack_gqa, return_lse, out, lse, **mask):
        assert return_lse
        assert pack_gqa in (None, False)
        slices = AttnSlices.from_dense(self.dense(q, k, False, **mask).contiguous())
        if q.dim() == 4:
            q, k, v, out, lse = (x.squeeze(0) for x in (q, k, v, out, lse))
        exact = exact_forward(q, k, v, slices, softmax_scale)
        out.copy_(exact.out)
        lse.copy_(exact.lse)

    def _flash_attn_bwd(self, q, k, v, out, dout, lse, *, softmax_scale, dq, dk, dv, dlse, **mask):
        slices = AttnSlices.from_dense(self.dense(q, k, True, **mask).contiguous())
        tensors = (q, k, v, out, dout, lse, dq, dk, dv, dlse)
        if q.dim() == 4:
            tensors = (None if x is None else x.squeeze(0) for x in tensors)
        q, k, v, out, dout, lse, dq, dk, dv, dlse = tensors
        assert q.dtype == out.dtype == dout.dtype
        exact = exact_backward(Grads(dout, dlse), Saved(q, k, v, out, lse), slices, softmax_scale)
        for given, gradient in zip((dq, dk, dv), exact, strict=True):
            given.copy_(gradient)


@pytest.fixture
def package(monkeypatch):
    fake = Package()
    monkeypatch.setattr(module, "_interface", lambda: fake)
    mods = SimpleNamespace(
        unrolled=lambda most, *, by_key: Mod("unrolled", most, by_key),
        unrolled_of_32_keys=lambda most: Mod("unrolled", most, False),
        searched=lambda steps, *, by_key: Mod("searched", steps, by_key),
    )
    monkeypatch.setitem(sys.modules, "magi_compile.kernels.fa4.mask_mods", mods)
    sparse = SimpleNamespace(BlockSparseTensorsTorch=Lists)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.block_sparsity", sparse)
    return fake


def check(case: Case, arch, with_dlse=True):
    problem = replace(case.problem(torch.bfloat16), device_arch=arch)
    inputs, slices = case.inputs(torch.bfloat16), case.slices()
    results = run_kernel(Fa4Kernel(), inputs, slices, problem, with_dlse)
    assert_attention_close(results, inputs, slices, problem, with_dlse)


def masks_on(arch, step):
    return sparsely([(x, arch) for x in MASKS], step, [f"{x.name}-sm_{arch[0]}0" for x in MASKS])


@pytest.mark.parametrize(("case", "arch"), [*masks_on((9, 0), 2), *masks_on((10, 0), 3)])
def test_asks_for_the_mask(package, case, arch):
    check(case, arch)


@pytest.mark.parametrize("head_dim", FA4_HEAD_DIMS)
def test_head_dims(package, head_dim):
    case = replace(MASK["random_257x391_seed0"], heads=HeadShape(4, 2, head_dim, head_dim))
    check(case, (9, 0), with_dlse=False)


@pytest.mark.parametrize("most_unrolled", [0, 1], ids=["all_searched", "few_unrolled"])
def test_searches_among_many_intervals(package, monkeypatch, most_unrolled):
    monkeypatch.setattr(module, "_MOST_UNROLLED", most_unrolled)
    check(MASK["random_257x391_seed1"], (10, 0))
    check(MASK["holes"], (10, 0))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (one(CAUSAL, 300), "one document"),
        (one(CAUSAL, 200, 333), "one document"),
        (windows("window", [700], 50, 0), "one document"),
        (varlen("documents", [300, 400], CAUSAL), "varlen"),
        (windows("windows", [300, 400], 50, 20), "varlen"),
        (varlen("short_documents", [30] * 20, CAUSAL), "lists"),
        (MASK["shared_prefix"], "lists"),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_takes_the_shortest_way(package, case, expected):
    check(case, (10, 0))
    assert package.calls == [expected] * 2


@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=["as_q", "fp32"])
def test_merges_with_a_prior(package, monkeypatch, out_dtype):
    monkeypatch.setattr(module, "plan_tiles", lambda problem, name: plan_tiles(BLACKWELL, name))
    check_prior(Fa4Kernel(), MASK["random_257x391_seed1"], torch.bfloat16, out_dtype, "cpu")


@pytest.mark.parametrize(("total_q", "total_k"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_attend(package, total_q, total_k):
    case = Case("nothing", total_q, total_k, [], heads=HeadShape(4, 2, 64, 64))
    check(case, (10, 0))
    assert package.calls == []


def test_gradients_are_contiguous(package):
    """As the fake of the op says, whatever the strides of the inputs are."""
    case = MASK["shared_prefix"]
    problem = replace(case.problem(torch.bfloat16), device_arch=(10, 0))
    q, k, v, dout, _ = case.inputs(torch.bfloat16)
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
    slices, kernel = case.slices(), Fa4Kernel()
    plan = kernel.plan(slices, problem)
    out, lse = kernel.forward(q, k, v, slices, plan, problem)
    assert out.stride() == q.stride()
    grads = kernel.backward(
        Grads(dout, None), Saved(q, k, v, out, lse), slices, plan, problem, deterministic=False
    )
    assert all(x.is_contiguous() for x in grads)


def test_a_plan_for_other_blocks_is_refused(package):
    case = MASK["shared_prefix"]
    slices, (q, k, v, *_) = case.slices(), case.inputs(torch.bfloat16)
    problem = replace(case.problem(torch.bfloat16), device_arch=(10, 0))
    plan = Fa4Kernel().plan(slices, replace(problem, device_arch=(9, 0)))
    with pytest.raises(ValueError, match="`plan` must be made for PlanTiles"):
        Fa4Kernel().forward(q, k, v, slices, plan, problem)


def test_what_is_left_to_triton(package, monkeypatch):
    """Backward passes that repeat bit for bit, and all that has a plan of Triton's kernel."""
    kernel, case = Fa4Kernel(), MASK["shared_prefix"]
    problem = replace(case.problem(torch.bfloat16), device_arch=(10, 0))
    q, k, v, dout, _ = case.inputs(torch.bfloat16)
    slices = case.slices()
    plan = kernel.plan(slices, problem)
    out, lse = kernel.forward(q, k, v, slices, plan, problem)
    asked = []

    def forward(*arguments, **options):
        asked.append(("forward", arguments[4]))
        return ForwardOutput(out, lse)

    def backward(grads, saved, slices, plan, problem, *, deterministic):
        asked.append(("backward", plan))
        assert deterministic

    monkeypatch.setattr(kernel._triton, "forward", forward)
    monkeypatch.setattr(kernel._triton, "backward", backward)
    of_triton = kernel._triton.plan(slices, replace(problem, device_type="cpu"))
    monkeypatch.setattr(kernel._triton, "plan", lambda slices, problem: of_triton)
    kernel.forward(q, k, v, slices, of_triton, problem)
    arguments = (Grads(dout, None), Saved(q, k, v, out, lse), slices)
    kernel.backward(*arguments, plan, problem, deterministic=True)
    kernel.backward(*arguments, of_triton, problem, deterministic=True)
    assert [name for name, _ in asked] == ["forward", "backward", "backward"]
    assert all(plan is of_triton for _, plan in asked)
    assert package.calls == ["lists"]
