"""The custom ops of attention: schemas, implementations, fakes, autograd. Functional, with fresh outputs.

magi::plan        slices -> how the chosen kernel walks them, packed; nothing where that is found out in each call
                  (`plans_in_graph`)
magi::attention   attention over slices -> (out, lse, max_scores), differentiable: becomes, where it is called,
magi::ffa_fwd     its values
magi::ffa_bwd     its gradients -> (dq, dk, dv, those of captured tensors)

Every feature is an argument that has a default: bit blocks, a score program, largest scores, tensors by entries of the
batch. A result that was not asked for has no elements.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_compile import _compat
from magi_compile._checks import on_failure, raise_pending
from magi_compile._kept import Made, Memo, forget_all
from magi_compile.kernels.base import (
    AttnProblem,
    CompiledKernel,
    Grads,
    Kernel,
    Saved,
    in_output_layout,
    new_max_scores,
    output_like,
)
from magi_compile.kernels.plan import BlockMap, Plan, pack, unpack
from magi_compile.kernels.select import problem_on, select
from magi_compile.masks import AttnSlices
from magi_compile.ops.arguments import AttentionOptions, Numbering, short
from magi_compile.ops.define import define_differentiable, gradients
from magi_compile.ops.layout import by_entries, packed
from magi_compile.ops.repeatable import define_repeatable, hand_over_to_launcher
from magi_compile.ops.scale import Scaled, scale_of_kernel
from magi_compile.ops.sharding import register_rules
from magi_compile.ops.validation import check_op, check_op_gradients
from magi_compile.score.program import ScoreCall, ScoreProgram

_lib = torch.library.Library("magi", "DEF")
on_failure(forget_all)


# plan


class Chosen(NamedTuple):
    """The kernel that runs a call, and its problem."""

    kernel: Kernel
    problem: AttnProblem


@lru_cache(maxsize=1024)
def chosen_for(
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int, int, int],
    softmax_scale: float,
    softcap: float,
    kernel: str | None,
    has_bits: bool = False,
    has_score: bool = False,
    has_max_scores: bool = False,
    block_map: BlockMap | None = None,
) -> Chosen:
    """The kernel and the problem for such tensors, cached: a call is too short to choose each time.

    Raises ValueError for a block map of other heads, whose lines a kernel would look for behind its own.
    """
    if block_map is not None and block_map.heads not in (1, heads[0]):
        raise ValueError(
            f"`plan` has block lists of {block_map.heads} heads, which must be 1 or those of `q`, {heads[0]}"
        )
    problem = problem_on(device, dtype, heads, softmax_scale, softcap)
    problem = replace(
        problem,
        has_bits=has_bits,
        has_score=has_score,
        has_max_scores=has_max_scores,
        block_map=block_map,
    )
    return Chosen(select(problem, kernel).kernel, problem)


def _plan(
    q_ranges: Tensor,
    k_ranges: Tensor,
    mask_types: Tensor,
    total_q: int,
    total_k: int,
    dtype: torch.dtype,
    nheads_q: int,
    nheads_kv: int,
    head_dim: int,
    head_dim_v: int,
    softcap: float,
    kernel: str,
    bits: Tensor | None = None,
    has_score: bool = False,
) -> list[Tensor]:
    heads = (nheads_q, nheads_kv, head_dim, head_dim_v)
    chosen, problem = chosen_for(
        *(q_ranges.device, dtype, heads, 1.0, softcap, kernel or None),
        has_bits=bits is not None,
        has_score=has_score,
    )
    if not chosen.plans_in_graph:
        return []
    slices = AttnSlices.unchecked(q_ranges, k_ranges, mask_types, total_q, total_k, bits)
    plan = chosen.plan(slices, problem)
    is_ahead = _compat.is_fake(q_ranges) and _compat.is_in_use(q_ranges.device)
    if is_ahead and isinstance(chosen, CompiledKernel):
        chosen.begin_plan(plan, problem)
    return pack(plan)


# Shapes depend on shapes alone, so the plan of fake slices is the fake plan.
define_repeatable(
    _lib,
    "plan(Tensor q_ranges, Tensor k_ranges, Tensor mask_types, SymInt total_q, SymInt total_k, ScalarType dtype, int "
    "nheads_q, int nheads_kv, int head_dim, int head_dim_v, float softcap, str kernel, Tensor? bits=None, bool "
    "has_score=False) -> Tensor[]",
    *(_plan, _plan),
)

# Plans of slices on a CPU, by what the slices are: comparing them costs little there.
_by_content: OrderedDict[Hashable, Plan] = OrderedDict()
_MOST_BY_CONTENT = 32


def _plan_of(kernel: Kernel, slices: AttnSlices | None, problem: AttnProblem) -> Plan:
    """The plan of a call that brings none."""
    if slices is None:
        raise ValueError("`slices` and `plan` must not both be empty")
    # A call may be the first in inference mode and the next one not, to which tensors of that mode are of no use.
    with torch.inference_mode(False):
        if slices.device.type != "cpu":
            return kernel.plan(slices, problem)
        totals = slices.seqlen_q, slices.seqlen_k
        key = (kernel.name, kernel.plan_key(problem), totals, *map(_bytes_of, slices.lists))
        if key not in _by_content:
            slices.check_bounds()  # somebody may have written to them, uncounted or in front of a compiled graph
            _by_content[key] = unpack(pack(kernel.plan(slices, problem)))
        _by_content.move_to_end(key)
        if len(_by_content) > _MOST_BY_CONTENT:
            _by_content.popitem(last=False)
        return _by_content[key]


def _bytes_of(x: Tensor) -> bytes:
    x = x.contiguous()
    return ctypes.string_at(x.data_ptr(), x.nbytes)


# Plans of slices, as long as those live: shared by all layers.
_plans: Memo[list[Tensor]] = Memo(256, lambda plan: plan)


def plan_of_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: AttnSlices,
    softcap: float,
    kernel: str,
    *,
    has_score: bool = False,
) -> list[Tensor]:
    """The plan that a call of `magi::attention` takes along: forward and backward then walk the same one.

    In a graph it is a value of the graph, and made again whenever that runs, like all of a CUDA graph. In eager code it
    is kept until somebody writes to the slices; what is written to tensors of inference mode nobody counts.
    """
    totals, heads = (q.shape[0], k.shape[0]), (q.shape[1], k.shape[1], q.shape[2], v.shape[2])
    if torch.compiler.is_compiling() or _compat.is_traced(q):
        rest = (*totals, q.dtype, *heads, softcap, kernel, *short((slices.bits, has_score), 0))
        return torch.ops.magi.plan(*slices.lists, *rest)  # type: ignore[no-any-return]
    chosen, problem = chosen_for(
        *(q.device, q.dtype, heads, 1.0, softcap, kernel or None),
        has_bits=slices.bits is not None,
        has_score=has_score,
    )

    def make() -> Made:
        slices.check_writes()
        return Made(pack(_plan_of(chosen, slices, problem)), slices.tensors())

    return _plans.get((slices,), (chosen.name, chosen.plan_key(problem)), make, q.device)


# ffa_fwd, ffa_bwd: no autograd of their own, and so called from compiled graphs without a detour through it


class _KernelCall(NamedTuple):
    kernel: Kernel
    problem: AttnProblem
    scaled: Scaled
    slices: AttnSlices | None
    plan: Plan
    score: ScoreCall | None


def _prepared(options: AttentionOptions, q: Tensor, k: Tensor, v: Tensor) -> _KernelCall:
    """The call of packed tensors as a kernel takes it."""
    (total_q, nheads_q, head_dim), (total_k, nheads_kv, head_dim_v) = q.shape, v.shape
    scaled = Scaled.of(q, options.softmax_scale, options.score)
    made = unpack(options.plan) if options.plan else None
    heads = (nheads_q, nheads_kv, head_dim, head_dim_v)
    block_map = None if made is None else made.block_map
    chosen, problem = _chosen(options, q, heads, scaled.softmax_scale, block_map)
    slices = None
    if options.slices:
        if len(options.slices) != 3:
            raise ValueError(
                f"`slices` must be [q_ranges, k_ranges, mask_types], got {len(options.slices)} "
                "tensors; bit blocks are `bits`"
            )
        q_ranges, k_ranges, mask_types = options.slices
        lists = (q_ranges, k_ranges, mask_types)
        slices = AttnSlices.unchecked(*lists, total_q, total_k, options.bits)
    plan = _plan_of(chosen, slices, problem) if made is None else made
    score = _score_of(options, options.numbering)
    return _KernelCall(chosen, problem, scaled, slices, plan, score)


def _chosen(
    options: AttentionOptions,
    q: Tensor,
    heads: tuple[int, int, int, int],
    softmax_scale: float,
    block_map: BlockMap | None,
) -> Chosen:
    return chosen_for(
        *(q.device, q.dtype, heads, softmax_scale, options.softcap, options.kernel or None),
        has_bits=options.bits is not None,
        has_score=bool(options.score),
        has_max_scores=options.return_max_scores,
        block_map=block_map,
    )


def _score_of(options: AttentionOptions, numbering: Sequence[int]) -> ScoreCall | None:
    if not options.score:
        return None
    of_rows = Numbering.of(numbering)
    return ScoreCall(
        *(ScoreProgram.parse(options.score), options.tables or (), options.symbols or ()),
        *(of_rows.seqlen_q, of_rows.seqlen_k, of_rows.nheads if of_rows.by_head else 1),
    )


def _begin(
    options: AttentionOptions,
    qkv: tuple[Tensor, ...],
    begin: Callable[[CompiledKernel, AttnProblem, ScoreCall | None], None],
) -> None:
    """Has a kernel begin to compile for packed fake tensors, whose sizes it is given as they are in the call that is
    traced."""
    q, k, v = qkv
    if not _compat.is_in_use(q.device):
        return
    sizes = (q.shape[1], k.shape[1], q.shape[2], v.shape[2])
    nheads_q, nheads_kv, head_dim, head_dim_v = (_compat.size_at_hand(x) for x in sizes)
    scale = scale_of_kernel(options.softmax_scale, options.score)
    numbering = [_compat.size_at_hand(x) for x in options.numbering]
    # Whatever speaks against it, the call will say.
    with suppress(Exception):
        block_map = unpack(options.plan).block_map if options.plan else None
        chosen = _chosen(options, q, (nheads_q, nheads_kv, head_dim, head_dim_v), scale, block_map)
        if isinstance(chosen.kernel, CompiledKernel):
            begin(chosen.kernel, chosen.problem, _score_of(options, numbering))


def _packed(numbering: Sequence[int], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors by entries as packed ones; packed ones stay as they are."""
    by_head = bool(numbering) and bool(Numbering.of(numbering).by_head)
    return tuple(packed(x, by_head=by_head) for x in tensors)


def _ffa_fwd(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    raise_pending()
    options = AttentionOptions(*rest)
    if options.by_entry:
        q, k, v = _packed(options.numbering, q, k, v)
    check_op(q, k, v)
    kernel, problem, scaled, slices, plan, score = _prepared(options, q, k, v)
    if kernel.prepares_calls:
        hand_over_to_launcher()
    max_scores = new_max_scores(q) if options.return_max_scores else None
    _begin_backward_of_eager(options, kernel, problem, score, (q, k, v))
    out, lse = kernel.forward(
        *(scaled.q, k, v, slices, plan, problem), score=score, max_scores=max_scores
    )
    out = _by_entry(in_output_layout(q, out), options)
    return out, lse, lse.new_empty(0) if max_scores is None else max_scores


def _begin_backward_of_eager(
    options: AttentionOptions,
    kernel: Kernel,
    problem: AttnProblem,
    score: ScoreCall | None,
    qkv: tuple[Tensor, ...],
) -> None:
    """Begins to compile the backward while the forward is compiled and runs, where tensors need gradients: those of
    graphs do not say so, and have begun it already."""
    compiled = _as_compiled(kernel)  # type: ignore[arg-type]  # hashed by identity
    if compiled is None:
        return
    of_tables = [x.requires_grad for x in options.tables or ()]
    if any((*of_tables, *(x.requires_grad for x in qkv))):
        # Whatever speaks against it, the backward will say; under `torch.no_grad()` there is none.
        with suppress(Exception):
            wanted = wanted_tables(options.score, of_tables)
            deterministic = torch.are_deterministic_algorithms_enabled()
            compiled.begin_backward(problem, score, wanted=wanted, deterministic=deterministic)


@lru_cache(maxsize=64)
def _as_compiled(kernel: Kernel) -> CompiledKernel | None:
    """The kernel, if it is one of these: to ask costs 20 microseconds."""
    return kernel if isinstance(kernel, CompiledKernel) else None


def _by_entry(out: Tensor, options: AttentionOptions) -> Tensor:
    if not options.by_entry:
        return out
    of_rows = Numbering.of(options.numbering)
    return by_entries(out, of_rows.batch, of_rows.seqlen_q, of_rows.nheads)


def _ffa_fwd_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    options = AttentionOptions(*rest)
    if options.by_entry:
        q, k, v = _packed(options.numbering, q, k, v)
    check_op(q, k, v)
    if options.plan:
        plan = unpack(options.plan)
        _begin(options, (q, k, v), lambda kernel, *of_call: kernel.begin_forward(plan, *of_call))
    out = _by_entry(output_like(q, v.shape[2]), options)
    rows = (q.shape[1], q.shape[0])
    lse = q.new_empty(rows, dtype=torch.float32)
    max_scores = lse.new_empty(rows if options.return_max_scores else 0)
    return out.new_empty_strided(out.shape, out.stride()), lse, max_scores


def _ffa_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    raise_pending()
    options, inputs = AttentionOptions.of_backward(*rest), (q, k, v)
    dout, q, k, v, out = _packed(options.numbering, dout, q, k, v, out)
    check_op_gradients(dout, dlse, q, k, v, out, lse)
    kernel, problem, scaled, slices, plan, score = _prepared(options, q, k, v)
    sums = new_sums(options.tables or (), options.wanted or (), q)
    if score is not None and options.wanted:
        tables = options.tables or ()
        parts = split_sums(sums, tables, options.wanted)
        score = score._replace(sums=dict(zip(options.wanted, parts, strict=True)))
    dq, dk, dv = kernel.backward(
        *(Grads(dout, dlse), Saved(scaled.q, k, v, out, lse), slices, plan, problem),
        score=score,
        deterministic=options.deterministic,
    )
    found = zip(inputs, (scaled.gradient(dq), dk, dv), strict=True)
    dq, dk, dv = (_like(x, gradient) for x, gradient in found)
    return dq, dk, dv, sums


def _like(x: Tensor, gradient: Tensor) -> Tensor:
    """The packed gradient of `x`, by entries where that is."""
    if x.dim() == 3:
        return gradient
    batch, nheads, seqlen, _ = x.shape
    return by_entries(gradient, batch, seqlen, nheads)


def new_sums(tables: Sequence[Tensor], wanted: Sequence[int], q: Tensor) -> Tensor:
    """Zeros for the gradients of those of the captured tensors that are wanted, one behind the other: fp32, on a CPU
    fp64 if one of them is."""
    some = [tables[number] for number in wanted]
    is_wide = q.device.type == "cpu" and any(x.dtype == torch.float64 for x in some)
    dtype = torch.float64 if is_wide else torch.float32
    return q.new_zeros(sum(x.numel() for x in some), dtype=dtype)


def split_sums(sums: Tensor, tables: Sequence[Tensor], wanted: Sequence[int]) -> list[Tensor]:
    """The gradient of each of the captured tensors that are `wanted`, views of `sums`."""
    some = [tables[number] for number in wanted]
    begins = accumulate((x.numel() for x in some), initial=0)  # a torch.Size would guard its own
    return [
        sums.narrow(0, begin, x.numel()).view(x.shape)
        for begin, x in zip(begins, some, strict=False)
    ]


def wanted_tables(score: str, needs_gradient: Sequence[bool]) -> list[int]:
    """The numbers of the captured tensors whose gradients a backward makes: of those that need one, the ones that the
    score program `score` has gradients of."""
    if not score:
        return []
    return [i for i in ScoreProgram.parse(score).differentiable_tables if needs_gradient[i]]


def gradients_of_tables(
    sums: Tensor, tables: Sequence[Tensor], wanted: Sequence[int]
) -> list[Tensor | None]:
    """The gradient of each captured tensor from the `sums` of those that are wanted; None for the others."""
    if not tables:
        return []
    found = dict(zip(wanted, split_sums(sums, tables, wanted), strict=True))
    # Each in memory of its own, because leaves keep it.
    copies = len(wanted) > 1
    return [found[i].to(x.dtype, copy=copies) if i in found else None for i, x in enumerate(tables)]


def _ffa_bwd_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, q, k, v, _, _, *rest = args
    options = AttentionOptions.of_backward(*rest)
    rows = _packed(options.numbering, q, k, v)
    asked: Any = {"wanted": options.wanted or (), "deterministic": options.deterministic}
    _begin(options, rows, lambda kernel, *of_call: kernel.begin_backward(*of_call, **asked))
    grads = (_like(x, of_x.new_empty(of_x.shape)) for x, of_x in zip((q, k, v), rows, strict=True))
    dq, dk, dv = (x.new_empty_strided(x.shape, x.stride()) for x in grads)
    return dq, dk, dv, new_sums(options.tables or (), options.wanted or (), q)


_OPTIONS = "Tensor? bits=None, Tensor[]? tables=None, SymInt[] symbols=[], str score='', SymInt[] numbering=[]"
_FWD = (
    "(Tensor q, Tensor k, Tensor v, Tensor[] slices, Tensor[] plan, float softmax_scale, float softcap, str kernel, "
    f"{_OPTIONS}, bool by_entry=False, bool return_max_scores=False) -> (Tensor, Tensor, Tensor)"
)
_BWD = (
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor[] slices, Tensor[] plan, "
    f"float softmax_scale, float softcap, str kernel, bool deterministic, {_OPTIONS}, int[] wanted=[]) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
define_repeatable(_lib, f"ffa_fwd{_FWD}", _ffa_fwd, _ffa_fwd_fake)
define_repeatable(_lib, f"ffa_bwd{_BWD}", _ffa_bwd, _ffa_bwd_fake)


# attention: what is differentiable, made of the two


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rest: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, *tables: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        options = AttentionOptions(*rest)
        out, lse, max_scores = torch.ops.magi.ffa_fwd.default(q, k, v, *rest)
        bits = [] if options.bits is None else [options.bits]
        lists = [(q, k, v, out, lse), options.slices, options.plan, bits, tables]
        ctx.save_for_backward(*(x for tensors in lists for x in tensors))
        ctx.sizes = [len(tensors) for tensors in lists]
        ctx.options = options._replace(slices=(), plan=(), bits=None, tables=None)
        ctx.mark_non_differentiable(max_scores)  # nor are those of FlexAttention
        ctx.set_materialize_grads(False)
        return out, lse, max_scores

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None
    ) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        of_call, slices, plan, bits, tables = ([next(saved) for _ in range(n)] for n in ctx.sizes)
        if dout is None and dlse is None:
            return (None,) * (4 + len(tables))
        q, k, v, out, lse = of_call
        if dout is None:
            dout = torch.zeros_like(out)
        wanted = wanted_tables(ctx.options.score, ctx.needs_input_grad[4:])
        options = ctx.options._replace(
            slices=slices,
            plan=plan,
            bits=bits[0] if bits else None,
            tables=tables,
            # In a compiled graph that of the compilation: Dynamo compiles again where it changes.
            deterministic=torch.are_deterministic_algorithms_enabled(),
            wanted=wanted,
        )
        tensors = (dout, dlse, q, k, v, out, lse)
        op = torch.ops.magi.ffa_bwd.default
        dq, dk, dv, sums = gradients(op, *tensors, *options.short_of_backward())
        return (None, dq, dk, dv, *gradients_of_tables(sums, tables, wanted))


define_differentiable(
    *(_lib, f"attention{_FWD}", torch.ops.magi.ffa_fwd.default, _Attention, register_rules),
    tables_at=AttentionOptions._fields.index("tables"),
)
