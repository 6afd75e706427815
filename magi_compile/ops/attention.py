"""The public attention functions: `flex_flash_attention` on packed tensors and slices, and `flex_attention`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from magi_compile import _compat
from magi_compile._compat import has_torch_function_mode
from magi_compile._kept import Made, Memo
from magi_compile.kernels.base import AttnProblem, KernelName
from magi_compile.kernels.scored import ScoreNeeds
from magi_compile.kernels.select import problem_of, select
from magi_compile.masks import AttnSlices
from magi_compile.masks.arguments import check_flag
from magi_compile.masks.block_mask import Converted, convert_any_block_mask, reached_by
from magi_compile.masks.evaluation.block_lists import BlockLists
from magi_compile.masks.evaluation.sizes import Heads
from magi_compile.ops.arguments import AttentionOptions, Numbering
from magi_compile.ops.aux_request import asks_for_max_scores, returned
from magi_compile.ops.dtensors import (
    PACKED,
    PADDED,
    are_distributed,
    as_dtensors,
    block_mask_of,
    firsts_of,
    shards_of,
    shifted_score_mod,
)
from magi_compile.ops.layout import by_entries, in_memory_order, memory_order
from magi_compile.ops.library import plan_of_call
from magi_compile.ops.masks.plan_lists import plan_of_block_mask
from magi_compile.ops.over_ranks import carried_by, replacements
from magi_compile.ops.score_mod import ScoreMod, trace_score_mod
from magi_compile.ops.sinks import check_sinks, lse_with_sinks, out_with_sinks
from magi_compile.ops.validation import (
    as_autocast,
    check_mapping,
    check_options,
    check_packed,
    check_padded,
    check_qkv,
)
from magi_compile.score.program import ScoreProgram, UnsupportedScoreModError
from magi_compile.score.read import TracedScore, trace_score_program

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask


class AttnOutput(NamedTuple):
    """The result of attention over packed rows.

    Attributes:
        out: `[total_q, nheads_q, head_dim_v]`, the dtype of q; rows that see nothing are 0.
        lse: `[nheads_q, total_q]`, fp32, natural logarithm of the sum of exponentiated scores; -inf for rows that
            see nothing. Differentiable.
        max_scores: `[nheads_q, total_q]`, fp32, the largest score of each row, as the softmax takes it: times
            `softmax_scale`, and capped; -inf for rows that see nothing. No sink is among the scores. Not
            differentiable. None where they were not asked for.
    """

    out: Tensor
    lse: Tensor
    max_scores: Tensor | None = None


def flex_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: AttnSlices,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kernel: KernelName | None = None,
    return_max_scores: bool = False,
) -> AttnOutput:
    """Attention of packed tokens over a list of slices.

    Equivalent to `softmax(where(slices.to_dense(), q @ k.T * softmax_scale, -inf)) @ v` for every head, without
    the matrix; q head h reads kv head `h // (nheads_q // nheads_kv)`.

    Args:
        q: `[total_q, nheads_q, head_dim]`, fp32, bf16 or fp16; under autocast it is cast to its dtype, like k and v. q,
            k and v may be DTensors, with heads sharded on any mesh dimensions, and keys and values sharded alike or
            replicated. Results are then DTensors too.
        k: `[total_k, nheads_kv, head_dim]`, the dtype and device of q; nheads_kv divides nheads_q.
        v: `[total_k, nheads_kv, head_dim_v]`.
        slices: what each row sees, on the device of q; see `AttnSlices`.
        softmax_scale: factor of the scores; None stands for `head_dim ** -0.5`.
        softcap: scores become `softcap * tanh(scores / softcap)`; 0.0 for none.
        sinks: `[nheads_q]`, one more score of each head in every softmax, with a value of 0; any floating-point dtype,
            on the device of q, differentiable. A DTensor where q is one. None for none.
        kernel: the only kernel to use ("hopper", "fa4", "triton", "cpu", "reference"); None chooses.
        return_max_scores: whether to return the largest score of each row as well, as QK-clip needs them.

    Returns:
        `AttnOutput(out, lse, max_scores)`; max_scores is None without return_max_scores.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: shapes, dtypes or devices do not fit together; the message names argument and values.
        NotImplementedError: no kernel runs this problem; the message lists every kernel's reasons.
    """
    check_flag("return_max_scores", return_max_scores)
    q, k, v = as_autocast(q, k, v)
    given: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "kernel": kernel,
        "return_max_scores": return_max_scores,
    }
    if sinks is not None:
        out, lse, max_scores = flex_flash_attention(q, k, v, slices, **given)
        check_sinks(sinks, q)
        out = out_with_sinks(out, lse, sinks, heads_first=False)
        return AttnOutput(out, lse_with_sinks(lse, sinks), max_scores)
    if has_torch_function_mode():  # context parallelism
        handle: Any = handle_torch_function
        return handle(flex_flash_attention, (), q, k, v, slices, **given)  # type: ignore[no-any-return]
    if (over_ranks := replacements()) is not None:
        return over_ranks.flex_flash_attention(q, k, v, slices, **given)  # type: ignore[no-any-return]
    shards = None
    if are_distributed(q, k, v):
        shards = shards_of({"q": q, "k": k, "v": v}, PACKED)
        check_qkv(q, k, v)
        q, k, v = shards[:3]
    check_packed(q, k, v, slices)
    check_options("softmax_scale", softmax_scale, softcap, kernel)
    if softmax_scale is None:
        softmax_scale = q.shape[2] ** -0.5
    rest = (slices, softmax_scale, softcap, kernel or "")
    output = _attend(q, k, v, *rest, return_max_scores=return_max_scores)
    return AttnOutput(*as_dtensors(shards, PACKED, *output))


def _kernel_of_eager_call(problem: AttnProblem, scored: _Scored | None = None) -> str:
    """The kernel of a call with bit blocks or a score program: eager code has no FlexAttention to stay on, so that
    Triton's runs on a GPU what the CUDA kernels refuse."""
    score = None if scored is None else scored.needs
    return select(problem, score=score, may_be_slower=True).kernel.name


class _Scored(NamedTuple):
    """A score program, the tensors that it takes, and how packed rows are numbered."""

    program: ScoreProgram
    tables: list[Tensor]
    numbering: Numbering

    @property
    def needs(self) -> ScoreNeeds:
        """The score program and its gradients that a kernel has to run. Under
        `torch.use_deterministic_algorithms(True)` no kernel of a GPU has gradients of tables, and the backward says
        so."""
        dtypes, ranks = tuple(x.dtype for x in self.tables), tuple(x.dim() for x in self.tables)
        has_order = torch.are_deterministic_algorithms_enabled()
        wants_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in self.tables)
        return ScoreNeeds(self.program, dtypes, ranks, wants_gradients and not has_order)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: AttnSlices | None,
    softmax_scale: float,
    softcap: float,
    kernel: str = "",
    *,
    scored: _Scored | None = None,
    return_max_scores: bool = False,
    plan: list[Tensor] | None = None,
) -> AttnOutput:
    """Attention over `slices`, or over a `plan` that says all without these."""
    given = float(softmax_scale), float(softcap), kernel
    rest: tuple[Any, ...] = ([], plan, *given)
    bits = None
    if slices is not None:
        bits = slices.bits
        rest = _with_slices((q, k, v), slices, *given, scored, return_max_scores)
    if bits is not None or scored is not None or return_max_scores:
        options = AttentionOptions(*rest)._replace(bits=bits, return_max_scores=return_max_scores)
        if scored is not None:
            program, tables, numbering = scored
            options = options._replace(tables=tables, score=program.text, numbering=numbering)
        rest = options.short()
    out, lse, max_scores = torch.ops.magi.attention(q, k, v, *rest)
    return AttnOutput(out, lse, max_scores if return_max_scores else None)


def _with_slices(
    qkv: tuple[Tensor, Tensor, Tensor],
    slices: AttnSlices,
    softmax_scale: float,
    softcap: float,
    kernel: str,
    scored: _Scored | None,
    return_max_scores: bool,
) -> tuple[Any, ...]:
    """The arguments behind v up to the kernel, with slices and their plan."""
    q, k, v = qkv
    if not slices.is_checked:
        totals = slices.seqlen_q, slices.seqlen_k
        lists: tuple[Tensor, Tensor, Tensor] = torch.ops.magi.checked_slices(*slices.lists, *totals)
        slices = AttnSlices.unchecked(*lists, *totals)
    has_bits, has_score = slices.bits is not None, scored is not None
    if (has_bits or has_score) and not kernel and not torch.compiler.is_compiling():
        problem = replace(
            problem_of(q, k, v, softmax_scale, softcap),
            has_bits=has_bits,
            has_score=has_score,
            has_max_scores=return_max_scores,
        )
        kernel = _kernel_of_eager_call(problem, scored)
    plan = plan_of_call(q, k, v, slices, softcap, kernel, has_score=has_score)
    return list(slices.lists), plan, softmax_scale, softcap, kernel


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: Any = None,
    *,
    return_aux: None = None,
) -> Tensor: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: BlockMask | None,
    scale: float | None,
    enable_gqa: bool,
    return_lse: Literal[True],
    kernel_options: Any = None,
    *,
    return_aux: None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True],
    kernel_options: Any = None,
    return_aux: None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest,
) -> tuple[Tensor, AuxOutput]: ...


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """`torch.nn.attention.flex_attention.flex_attention` on the kernels of this package, for eager code, on any device.

    Signature and results are PyTorch's. Inside torch.compile it is PyTorch's own operator, which the lowering replaces.
    The slices of a BlockMask, or the plan of its block lists, are kept as long as it lives, and derived again when
    anything that it is made of changes: its mask_mod, its block lists, a variable, an attribute or an item that the
    mask_mod reads, or the values of a tensor. Only writes that PyTorch does not count go unseen: through `.data`, and
    to the memory of `torch.from_numpy`.

    Args:
        query: `[B, Hq, L, E]`, fp32, bf16 or fp16. query, key and value may be DTensors: heads and batch entries
            sharded on any mesh dimensions, heads of key and value also replicated. Results are then DTensors too.
        key: `[B, Hkv, S, E]`; with a block_mask of B entries also one entry for all, like value.
        value: `[B, Hkv, S, Ev]`.
        score_mod: None, or any pointwise function of a score and its place; tensors that it captures may need
            gradients. More than a scale and a soft-cap runs on the CUDA kernels, on Triton's where these have no code
            for it, and on CPUs.
        block_mask: which keys a query sees; None for all.
        scale: factor of the scores; None stands for `E ** -0.5`.
        enable_gqa: allows Hkv to be a divisor of Hq.
        return_lse: whether to return the log-sum-exp of the scores as well.
        kernel_options: PyTorch's tuning options; ignored.
        return_aux: `AuxRequest(lse=True, max_scores=True)` returns an `AuxOutput` as well. max_scores `[B, Hq, L]`,
            fp32, are the largest scores of the rows, as the softmax takes them (behind scale and score_mod), -inf where
            nothing is visible; they have no gradients.

    Returns:
        out `[B, Hq, L, Ev]`; with return_lse `(out, lse [B, Hq, L])`; with return_aux `(out, AuxOutput)`.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: shapes, dtypes or devices do not fit together.
        NotImplementedError: the score_mod cannot be lowered, or no kernel runs the problem; the message lists the
            reasons.
    """
    from torch.nn.attention import flex_attention as flex

    has_mode, over_ranks = has_torch_function_mode(), replacements()
    arguments = (query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse)
    carried = None if has_mode or over_ranks is not None else carried_by(block_mask)
    if carried is not None:
        return carried(*arguments, kernel_options, return_aux=return_aux)
    if not has_mode and over_ranks is None and are_distributed(query, key, value):
        query, key, value = as_autocast(query, key, value)
        check_padded(query, key, value, None, enable_gqa)
        given = {"return_lse": return_lse, "return_aux": return_aux}
        return _of_dtensors(
            *(query, key, value, score_mod, block_mask),
            {"scale": scale, "enable_gqa": True, "kernel_options": kernel_options, **given},
        )
    if torch.compiler.is_compiling():  # by torch.export too, strict or not
        call: Any = flex.flex_attention  # its types know no overloads
        return call(*arguments, kernel_options, return_aux=return_aux)
    check_mapping("kernel_options", kernel_options)
    if has_mode:
        handle: Any = handle_torch_function
        return handle(flex_attention, (), *arguments, kernel_options, return_aux=return_aux)
    if over_ranks is not None:
        return over_ranks.flex_attention(*arguments, kernel_options, return_aux=return_aux)
    query, key, value = as_autocast(query, key, value)
    check_padded(query, key, value, block_mask, enable_gqa)
    check_options("scale", scale)
    if query.is_meta or _compat.is_traced(query):
        raise NotImplementedError(
            f"`query` must have values, because eager code looks at those of the mask, got {type(query).__name__} on "
            f"{query.device}; trace it by torch.compile or torch.export, or call flex_flash_attention with AttnSlices "
            "made outside of the trace"
        )
    return_max_scores = asks_for_max_scores(return_lse, return_aux)
    score, program = _read_score_mod(score_mod, query.device)
    batch, nheads_q, seqlen_q, head_dim = query.shape
    softmax_scale = score.scale * (1 / math.sqrt(head_dim) if scale is None else scale)
    needs, plan = None, []
    if program is not None:
        by_entry = Numbering(batch, nheads_q, seqlen_q, key.shape[2], 0)
        needs = _Scored(*program, by_entry).needs
    if block_mask is not None:
        problem = replace(
            problem_of(query, key, value, float(softmax_scale), float(score.softcap)),
            has_score=program is not None,
            has_max_scores=return_max_scores,
        )
        plan = plan_of_block_mask(block_mask, (batch, seqlen_q, key.shape[2]), problem, needs)
    mask = None if plan else _slices(block_mask, query, key)
    by_head = mask is not None and mask.is_by_head
    if key.shape[0] != batch:
        key, value = (x.expand(batch, -1, -1, -1) for x in (key, value))
    if by_head:
        q, k, v = (tensor.reshape(-1, 1, tensor.shape[3]) for tensor in (query, key, value))
    else:
        q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    scored = None
    if program is not None:
        sizes = (batch, nheads_q, seqlen_q, key.shape[2], int(by_head))
        scored = _Scored(*program, Numbering(*sizes))
    out, *of_rows = _attend(
        *(q, k, v, mask and mask.slices, softmax_scale, score.softcap),
        scored=scored,
        return_max_scores=return_max_scores,
        plan=plan,
    )
    out = by_entries(out, batch, seqlen_q, nheads_q)
    shape = (batch, nheads_q, seqlen_q)
    lse, max_scores = (_rows_by_entry(x, shape, by_head=by_head) for x in of_rows)
    assert lse is not None
    out = in_memory_order(out, memory_order(query.stride()))
    return returned(out, lse, max_scores, return_lse=return_lse, return_aux=return_aux)


def _rows_by_entry(
    x: Tensor | None, shape: tuple[int, int, int], *, by_head: bool
) -> Tensor | None:
    """`[batch, nheads, seqlen]`, from a number for each packed row and head."""
    if x is None or by_head:
        return x if x is None else x.view(shape)
    batch, nheads, seqlen = shape
    return x.view(nheads, batch, seqlen).transpose(0, 1).contiguous()


def _read_score_mod(
    score_mod: Callable[..., Tensor] | None, device: torch.device
) -> tuple[ScoreMod, TracedScore | None]:
    """The scale and the soft-cap of a score_mod, or none of them and its program."""
    try:
        return trace_score_mod(score_mod), None
    except UnsupportedScoreModError:
        assert score_mod is not None
        return ScoreMod(), trace_score_program(score_mod, device)


def _of_dtensors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: BlockMask | None,
    others: dict[str, Any],
) -> Any:
    """`flex_attention` of DTensors; `others` are its arguments that no rank has to change."""
    shards = shards_of({"query": query, "key": key, "value": value}, PADDED)
    score_mod = shifted_score_mod(score_mod, *firsts_of(shards))
    block_mask = block_mask_of(block_mask, shards)
    result = flex_attention(*shards[:3], score_mod, block_mask, **others)
    if isinstance(result, Tensor):
        return as_dtensors(shards, PADDED, result)[0]
    out, second = result
    if isinstance(second, Tensor):
        return as_dtensors(shards, PADDED, out, second)
    out, *of_rows = as_dtensors(shards, PADDED, out, *second)
    return out, type(second)(*of_rows)


_derived: Memo[Converted] = Memo(256, lambda mask: mask.slices.tensors())


def _slices(block_mask: BlockMask | None, query: Tensor, key: Tensor) -> Converted:
    (batch, nheads_q, seqlen_q, _), (_, nheads_kv, seqlen_k, _) = query.shape, key.shape
    if block_mask is None:
        q_ranges = [(b * seqlen_q, (b + 1) * seqlen_q) for b in range(batch)]
        k_ranges = [(b * seqlen_k, (b + 1) * seqlen_k) for b in range(batch)]
        totals = batch * seqlen_q, batch * seqlen_k
        lists = q_ranges, k_ranges, [0] * batch
        with _compat.outside_of_modes():
            return Converted(AttnSlices.from_lists(*lists, *totals, device=query.device), [])
    heads = Heads(nheads_q, nheads_kv)

    def convert() -> Made:
        # Followed before it is called, since that may change it.
        reached = reached_by(block_mask)
        mask = convert_any_block_mask(block_mask, batch, heads)
        if mask.watched is None or not reached.is_unchanged():
            return Made(mask, None)
        lists = [
            x for x in (getattr(block_mask, name) for name in BlockLists._fields) if x is not None
        ]
        return Made(mask, [*mask.watched, *lists], reached.is_unchanged)

    return _derived.get((block_mask,), (batch, heads), convert, query.device, serves_capture=True)
