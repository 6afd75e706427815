"""The forward kernel of `csrc/sm90/forward/kernel.cu`: its variants, its parameters and its launch."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_compile.kernels.base import AttnProblem, ForwardOutput, output_like, output_stride
from magi_compile.kernels.heuristics import (
    ForwardConfig,
    forward_config,
    has_table,
    heads_per_section,
    is_between_hopper_head_dims,
    map_intervals,
    map_lines,
    may_ask,
)
from magi_compile.kernels.mapped import intervals_offset, table_offset
from magi_compile.kernels.merge import merge_prior
from magi_compile.kernels.sm90.params import FORWARD, params_of
from magi_compile.kernels.sm90.runtime.calls import Buffer, Call, Launch
from magi_compile.kernels.sm90.runtime.driver import (
    Layout,
    are_tma_layouts,
    load_function,
    num_sms,
    on_device,
    routed,
    rows_map,
)
from magi_compile.kernels.sm90.runtime.nvrtc import Variant
from magi_compile.kernels.sm90.runtime.structs import Pointer, TensorMap
from magi_compile.kernels.sm90.scores.arguments import ScoreArguments, score_arguments
from magi_compile.kernels.sm90.scores.source import ScoreSource
from magi_compile.plan.tiles import Walk
from magi_compile.score.program import ScoreCall

ELEMENTS = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
NO_REMOTE_KEYS = 2**31 - 1

_STORE_ROWS = 16  # each warp stores its own rows

# The buffers of a forward call: those given, and the first ones made.
Q, K, V, TILES, RUNS, EDGES, PRIOR_OUT, PRIOR_LSE, BITS, MAX_SCORES = range(10)
OUT, LSE, OTHER = range(10, 13)

# Where results are and what they are merged with, in the fields of ForwardParams: of each pair both are there or none.
NO_RESULTS: dict[str, Any] = dict.fromkeys(
    ("out_rows", "lse", "wide_out", "wide_lse", "prior_out", "prior_lse")
)


@cache
def forward_variant(
    problem: AttnProblem,
    config: ForwardConfig,
    *,
    has_stairs: bool = False,
    is_early: bool = False,
    score: ScoreSource | None = None,
) -> Variant:
    """The kernel to compile for `problem` in the shape of `config`; `is_early` if it begins before remote keys are
    there, `has_stairs` if a run may have a lane, with a `score` program where `problem` has one. Runs that may have
    bits may have lanes."""
    assert problem.has_score == (score is not None)
    defines = {
        "FFA_ELEMENT": ELEMENTS[problem.dtype],
        "FFA_COLS": problem.head_dim,
        "FFA_COLS_OF_V": problem.head_dim_v,
        "FFA_BLOCK_COLS": config.block_cols,
        "FFA_K_STAGES": config.k_stages,
        "FFA_V_STAGES": config.v_stages,
        "FFA_Q_BUFFERS": config.q_buffers,
        "FFA_CONSUMERS": config.num_consumers,
        "FFA_PRODUCER_REGISTERS": config.producer_registers,
        "FFA_CONSUMER_REGISTERS": config.consumer_registers,
        "FFA_HAS_SOFTCAP": problem.softcap != 0.0,
        "FFA_HAS_STAIRS": has_stairs or problem.has_bits,
        "FFA_HAS_BITS": problem.has_bits,
        "FFA_MAP_LINES": map_lines(problem).q,
        "FFA_MAP_INTERVALS": map_intervals(problem),
        "FFA_MAP_TABLE": has_table(problem),
        "FFA_HAS_REMOTE_KEYS": is_early or config.always_takes_remote_keys,
        "FFA_IS_EARLY": is_early,
        "FFA_HAS_MAX_SCORES": problem.has_max_scores,
        **score_defines(score),
    }
    return Variant.of(
        "forward/kernel.cu",
        "ffa_forward",
        defines,
        headers=score_headers(score),
        may_spill=score is not None
        or is_between_hopper_head_dims(problem)
        or map_intervals(problem) > 1,
    )


def score_defines(score: ScoreSource | None) -> dict[str, object]:
    """The macros that say which score program a kernel has."""
    is_there = score is not None
    return {"FFA_HAS_SCORE": is_there, "FFA_SCORE": "Score" if is_there else "NoScore"}


def score_headers(score: ScoreSource | None) -> tuple[tuple[str, str], ...]:
    """The headers of a variant; of what a user's program makes, nobody can say how many registers it needs."""
    return () if score is None else (("score_mod.cuh", score.text),)


def forward(
    qkv: tuple[Tensor, ...],
    walk: Walk,
    problem: AttnProblem,
    *,
    bits: Tensor | None = None,
    prior: ForwardOutput | None = None,
    out_dtype: torch.dtype | None = None,
    score: ScoreCall | None = None,
    max_scores: Tensor | None = None,
) -> ForwardOutput:
    """Attention of q over the q walk of a plan, on torch's current stream.

    Args:
        qkv: `[total_q, nheads_q, head_dim]`, and twice `[total_k, nheads_kv, head_dim]`.
        walk: the q walk of the plan.
        problem: what `HopperKernel.refusals` finds nothing against.
        bits: int32 `[num_blocks, BLOCK, WORDS]`, contiguous: the bit blocks of the mask, where `problem` has some.
        prior: attention of q over other keys, to be merged with this one; its `out` in fp32.
        out_dtype: of the output, that of q by default, or fp32.
        score: what becomes of the scores, where `problem` has a score program.
        max_scores: where the largest score of each row goes, where `problem` asks for it, see `Kernel.forward`.

    Returns:
        The output, and the log-sum-exp of each row.

    Raises:
        TypeError: if `prior` or `out_dtype` has another dtype.
    """
    assert (max_scores is not None) == problem.has_max_scores
    q, k, v = qkv
    out_dtype = out_dtype or q.dtype
    if out_dtype not in (q.dtype, torch.float32):
        raise TypeError(
            f"`out_dtype` must be {q.dtype} like `q`, or torch.float32, got {out_dtype}"
        )
    if prior is not None and prior.out.dtype != torch.float32:
        raise TypeError(f"`prior.out` must be torch.float32, got {prior.out.dtype}")
    if q.shape[0] == 0 or k.shape[0] == 0:
        return merge_prior(nothing_seen(q, v), prior, out_dtype)
    priors = [x.contiguous() for x in prior] if prior else [None, None]
    program, tables = given_score(score, problem, q, k)
    has_map = problem.block_map is not None
    num_tiles = walk.tiles.shape[0] // (problem.block_map.heads if problem.block_map else 1)
    has_stairs = walk.edges.shape[0] > 0 and not has_map
    shapes = (num_tiles, has_stairs, prior is not None, out_dtype, program)
    with on_device(q.device):
        qkv, call = routed(_call, qkv, problem, *shapes)
        out, lse, *_ = call.run([*qkv, *walk, *priors, bits, max_scores], q.device, tables)
    return ForwardOutput(out, lse)


def given_score(
    score: ScoreCall | None,
    problem: AttnProblem,
    q: Tensor,
    k: Tensor,
    q_walk: Walk | None = None,
) -> tuple[ScoreArguments | None, list[Tensor]]:
    """The arguments of kernels for a score program, if there is one, and the tensors behind those of the call; see
    `score_arguments`."""
    if score is None:
        return None, []
    return score_arguments(score, problem, q.shape[0], k.shape[0], q_walk)


def nothing_seen(q: Tensor, v: Tensor) -> ForwardOutput:
    """Attention of `q` over no keys, with values like `v`."""
    total_q, nheads_q, _ = q.shape
    out = output_like(q, v.shape[2]).zero_()
    lse = q.new_full((nheads_q, total_q), -math.inf, dtype=torch.float32)
    return ForwardOutput(out, lse)


@lru_cache(maxsize=1024)
def _call(
    layouts: tuple[Layout, ...],
    problem: AttnProblem,
    num_tiles: int,
    has_stairs: bool,
    has_prior: bool,
    out_dtype: torch.dtype,
    score: ScoreArguments | None,
    device_index: int,
) -> Call | None:
    """The prepared call for tensors q, k and v of such layouts; None where TMA cannot read them."""
    if not are_tma_layouts(layouts, problem.dtype):
        return None
    out, lse = results_of(layouts[0], problem)
    if out_dtype == problem.dtype:
        results = NO_RESULTS | {"out_rows": Pointer(OUT), "lse": Pointer(LSE)}
    else:
        out = Buffer.of(out.shape, out_dtype)
        results = NO_RESULTS | {"wide_out": Pointer(OUT), "wide_lse": Pointer(LSE)}
    if has_prior:
        results |= {"prior_out": Pointer(PRIOR_OUT), "prior_lse": Pointer(PRIOR_LSE)}
    is_wide = has_prior or out_dtype != problem.dtype
    made, launch = forward_launch(
        ForwardShape(layouts, problem, num_tiles, has_stairs, score, device_index),
        out if out_dtype == problem.dtype else None,
        **results,
        wide_rows=out.shape[0] if is_wide else 0,
        tiles=Pointer(TILES),
        runs=Pointer(RUNS),
        edges=Pointer(EDGES),
        split_shifts=None,
        remote_begin=NO_REMOTE_KEYS,
    )
    return Call((out, lse, *made), (launch,))


def results_of(of_q: Layout, problem: AttnProblem) -> tuple[Buffer, Buffer]:
    """The output for a q of such a layout, in its dtype, and the lse."""
    (total_q, nheads_q, _), _ = of_q
    stride = output_stride(*of_q, problem.head_dim_v)
    out = Buffer((total_q, nheads_q, problem.head_dim_v), stride, problem.dtype)
    return out, Buffer.of((nheads_q, total_q), torch.float32)


class ForwardShape(NamedTuple):
    """The shape of a forward pass, without addresses and the place of its results."""

    layouts: tuple[Layout, ...]  # of q, k and v, the buffers `Q`, `K` and `V`
    problem: AttnProblem
    num_tiles: int
    has_stairs: bool  # whether rows have edges
    score: ScoreArguments | None
    device_index: int


def forward_launch(
    shape: ForwardShape, out: Buffer | None, ticket: int = OTHER, **fields: Any
) -> tuple[tuple[Buffer, ...], Launch]:
    """A launch over all keys, and the buffers that it needs besides: the ticket of its schedule, if there is one.

    Args:
        shape: of the pass.
        out: the buffer `OUT`; None where all of the output is in fp32.
        ticket: which buffer the ticket will be.
        **fields: of ForwardParams: where results and the walk are. `tiles` is that of its schedule.

    Returns:
        The buffers and the launch.
    """
    layouts, problem, num_tiles, has_stairs, score, device_index = shape
    config = forward_config(problem)
    num_items = num_tiles * problem.nheads_q
    sms = num_sms(device_index)
    grid = min(num_items, sms)
    has_ticket = num_items > grid
    schedule = schedule_of(problem, layouts[1][0][0], num_tiles, sms) | {
        "tiles": fields.pop("tiles"),
        "ticket": Pointer(ticket) if has_ticket else None,
    }
    asks = may_ask(problem)
    num_words = None if score is None else len(score.words) + 1
    struct = params_of(FORWARD, problem.has_bits or asks, num_words)
    if problem.has_bits or asks or score is not None:
        fields |= {"bits": Pointer(BITS) if problem.has_bits else None, "table": None}
    totals = [x[0][0] for x in layouts[:2]]
    if map_intervals(problem) > 0:
        fields["bits"] = Pointer(EDGES, intervals_offset(problem, *totals))
    if has_table(problem):
        fields["table"] = Pointer(EDGES, table_offset(problem, *totals, by_keys=False))
    if score is not None:
        fields["score"] = score.fields
    params = struct.pack(
        **forward_fields((*layouts, None, None), problem, config, out), schedule=schedule, **fields
    )
    source = None if score is None else score.source
    variant = forward_variant(problem, config, has_stairs=has_stairs, score=source)
    made = (Buffer.of((1,), torch.int32, zeros=1),) if has_ticket else ()
    return made, Launch(load_function(variant, device_index), grid, config.num_threads, params)


def forward_fields(
    layouts: tuple[Layout | None, ...],
    problem: AttnProblem,
    config: ForwardConfig,
    out: Buffer | None,
    remote: tuple[int, int] = (0, 0),
) -> dict[str, Any]:
    """The fields of ForwardParams that follow from shapes.

    Args:
        layouts: of q, k, v, remote keys and remote values; None for what is not there.
        problem: what to compute.
        config: the shape of the kernel.
        out: the buffer `OUT`, if it is written to in the dtype of q.
        remote: the buffers of remote keys and values.

    Returns:
        The values by the names of the fields.
    """
    dtype, cols = problem.dtype, config.block_cols

    def mapped(buffer: int, layout: Layout | None, rows: int) -> TensorMap | None:
        return rows_map(Pointer(buffer), *layout, dtype, rows) if layout else None

    of_q, of_k, of_v, of_remote_k, of_remote_v = layouts
    assert of_q is not None
    return {
        "q": mapped(Q, of_q, config.tile_rows),
        "k": [mapped(K, of_k, cols), mapped(remote[0], of_remote_k, cols)],
        "v": [mapped(V, of_v, cols), mapped(remote[1], of_remote_v, cols)],
        "out": mapped(OUT, (out.shape, out.stride), _STORE_ROWS) if out else None,
        "out_row_stride": out.stride[0] if out else 0,
        "out_head_stride": out.stride[1] if out else 0,
        "total_q": of_q[0][0],
        "qhead_per_kvhead": problem.qhead_per_kvhead,
        "max_scores": Pointer(MAX_SCORES) if problem.has_max_scores else None,
        **scale_fields(problem),
    }


def scale_fields(problem: AttnProblem) -> dict[str, float]:
    """The factors of scores, before and after a soft-cap or score program, if there is one, to be in base 2."""
    cap = 1.0 if problem.has_score else problem.softcap
    return {
        "scale_log2": (cap or problem.softmax_scale) * math.log2(math.e),
        "cap_scale": problem.softmax_scale / cap if cap else 0.0,
    }


def schedule_of(problem: AttnProblem, total_k: int, num_tiles: int, sms: int) -> dict[str, Any]:
    """The fields of a Schedule besides addresses."""
    has_own_tiles = problem.block_map is not None and problem.block_map.heads > 1
    return {
        "tiles_of_head": num_tiles if has_own_tiles else 0,
        "num_tiles": num_tiles,
        "num_heads": problem.nheads_q,
        "heads_per_section": heads_per_section(problem, total_k, num_tiles, sms),
    }
