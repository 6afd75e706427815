"""Selection of the kernel for a problem: the first of `KERNELS` that refuses nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from magi_compile.kernels.base import AttnProblem, Kernel
from magi_compile.kernels.mapped import MappedKernel, block_map_of
from magi_compile.kernels.scored import ScoredKernel, ScoreNeeds
from magi_compile.plan.block_map import ListShape

# "module:class" by name, in order of preference. Resolved at first use: importing this module touches no GPU.
KERNELS: dict[str, str] = {
    "hopper": "magi_compile.kernels.sm90:HopperKernel",
    "fa4": "magi_compile.kernels.fa4:Fa4Kernel",
    "triton": "magi_compile.kernels.triton:TritonKernel",
    "cpu": "magi_compile.kernels.cpu:CpuKernel",
    "reference": "magi_compile.kernels.reference:ReferenceKernel",
}

OLD_NAMES = {"cuda": "hopper"}  # by which callers may still ask

# Never chosen for a user who did not ask: the oracle takes anything, at the price of a dense fp64 score matrix;
# flash-attn-4 is slower than "hopper" on Hopper GPUs, and has not run here on Blackwell.
ONLY_IF_FORCED = frozenset({"reference", "fa4"})

# Never chosen for bit blocks or score programs of a user who did not ask for it by name.
SLOWER_THAN_FLEX = frozenset({"triton"})


class Selection(NamedTuple):
    """The kernel for a problem.

    Attributes:
        kernel: it runs the problem; the same instance every time.
        passed_over: the reasons against each kernel that comes before it, by name.
    """

    kernel: Kernel
    passed_over: dict[str, tuple[str, ...]]


def select(
    problem: AttnProblem,
    force: str | None = None,
    score: ScoreNeeds | None = None,
    *,
    may_be_slower: bool = False,
) -> Selection:
    """The kernel that runs `problem`, and why others were passed over.

    `force` is the name of the only kernel to consider; None considers all but those of `ONLY_IF_FORCED`. `score` is
    the program that the kernel has to run, where it is known. A kernel that is slower than FlexAttention will do where
    `may_be_slower`, for callers that cannot stay there. Raises ValueError if `force` names no kernel, and
    NotImplementedError if every considered kernel refuses; the message lists all reasons.
    """
    force = OLD_NAMES.get(force, force) if force else None
    if force is None:
        considered = [name for name in KERNELS if name not in ONLY_IF_FORCED]
    elif force in KERNELS:
        considered = [force]
    else:
        raise ValueError(f"`force` must be one of {', '.join(KERNELS)}, got {force!r}")
    passed_over: dict[str, tuple[str, ...]] = {}
    for name in considered:
        reasons = refusals(name, problem, score)
        if not reasons and force is None and not may_be_slower:
            reasons = _slower_than_flex(name, problem)
        if not reasons:
            return Selection(load(name), passed_over)
        passed_over[name] = tuple(reasons)
    listed = "\n".join(f"  {name}: {why}" for name, whys in passed_over.items() for why in whys)
    raise NotImplementedError(f"no kernel can run {problem}:\n{listed}")


def select_for_lists(
    problem: AttnProblem,
    shape: ListShape,
    force: str | None = None,
    score: ScoreNeeds | None = None,
) -> tuple[AttnProblem, Selection]:
    """The kernel that walks block lists of `shape`, whose lengths may be SymInts, and the problem with the block map
    of these lists, see `select`. Raises NotImplementedError if no kernel walks them; the message says why."""
    problem = replace(problem, block_map=block_map_of(shape))
    selection = select(problem, force, score)
    kernel = selection.kernel
    assert isinstance(kernel, MappedKernel)  # others refuse
    if reasons := kernel.list_refusals(shape):
        raise NotImplementedError(f"kernel {kernel.name!r} {'; '.join(reasons)}")
    return problem, selection


def refusals(name: str, problem: AttnProblem, score: ScoreNeeds | None = None) -> list[str]:
    """Every reason why the kernel called `name` cannot run `problem`, with `score` where it is known; empty when it
    can."""
    try:
        kernel = load(name)
    except ImportError as error:
        # A CPU build of PyTorch lacks the bindings that it imports, and would not run it with them.
        if name == "hopper" and problem.device_type != "cuda":
            return [f"needs a CUDA device, got {problem.device_type!r}"]
        return [f"cannot be imported: {error}"]
    reasons = kernel.refusals(problem)
    if problem.block_map is not None and not isinstance(kernel, MappedKernel):
        return [*reasons, "walks no block lists without slices"]
    if not problem.has_score:
        return reasons
    if not isinstance(kernel, ScoredKernel):
        return [*reasons, "has no score_mods but a scale and a soft-cap"]
    if reasons or score is None:
        return reasons
    reasons = kernel.score_refusals(problem, score)
    if score.wants_table_gradients and problem.block_map is not None:
        reasons = [*reasons, "has no gradients of captured tensors beside block lists"]
    return reasons


def _slower_than_flex(name: str, problem: AttnProblem) -> list[str]:
    """The reason why the kernel called `name` runs `problem` only by name."""
    if name not in SLOWER_THAN_FLEX:
        return []
    slower = ["bit blocks"] * problem.has_bits + ["score_mods"] * problem.has_score
    why = f"only where kernel {name!r} is asked for by name: it is slower than FlexAttention with them"
    return [f"runs {what} {why}" for what in slower]


@cache
def load(name: str) -> Kernel:
    """The kernel called `name`, as in `KERNELS` or in `OLD_NAMES`: one instance, made when it is first asked for.
    Raises ImportError if something that it needs is not installed."""
    if name in OLD_NAMES:
        return load(OLD_NAMES[name])
    module_name, _, class_name = KERNELS[name].partition(":")
    module = importlib.import_module(module_name)
    if not hasattr(module, class_name):
        raise ImportError(f"cannot import name {class_name!r} from {module_name!r}")
    return getattr(module, class_name)()


@cache
def arch_of(device: torch.device) -> tuple[int, int] | None:
    """The CUDA compute capability of a device; None for those that are not GPUs."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def problem_on(
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int, int, int],
    softmax_scale: float,
    softcap: float = 0.0,
) -> AttnProblem:
    """The problem of attention on `device`; `heads` are nheads_q, nheads_kv, head_dim and head_dim_v."""
    return AttnProblem(device.type, arch_of(device), dtype, *heads, softmax_scale, softcap)


def problem_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    softcap: float = 0.0,
    dtype: torch.dtype | None = None,
) -> AttnProblem:
    """The problem of attention of `q`, `k` and `v` (real or fake): packed, or `[B, H, S, D]`.

    `dtype` is what it computes in, that of `q` by default. Where a number of heads or a head size is dynamic, this is a
    guard.
    """
    heads = int(q.shape[1]), int(k.shape[1]), int(q.shape[-1]), int(v.shape[-1])
    return problem_on(q.device, dtype or q.dtype, heads, softmax_scale, softcap)


class MaskKernel(NamedTuple):
    """A kernel that evaluates masks.

    Attributes:
        run: evaluates one.
        begin: begins to compile what `run` launches for arguments like these, of which tensors may be fake.
    """

    run: Callable
    begin: Callable


@cache
def mask_slices_kernel(arch: tuple[int, int] | None) -> MaskKernel | None:
    """The kernel that evaluates mask programs on a GPU of compute capability `arch` in a few launches,
    `magi_compile.kernels.sm90.masks.mask_slices`; None where tensor operations do."""
    return _of_masks(arch, "mask_slices")


@cache
def mask_bits_kernel(arch: tuple[int, int] | None) -> MaskKernel | None:
    """The same of mask_mods that need bit blocks, `magi_compile.kernels.sm90.masks.mask_bits`."""
    return _of_masks(arch, "mask_bits")


def _of_masks(arch: tuple[int, int] | None, name: str) -> MaskKernel | None:
    if arch != (9, 0):
        return None
    try:
        module = importlib.import_module(f"magi_compile.kernels.sm90.masks.{name}")
    except ImportError:  # of cuda-bindings, without which there is no kernel called "hopper" either
        return None
    return MaskKernel(getattr(module, f"{name}_on_device"), getattr(module, f"begin_{name}"))
