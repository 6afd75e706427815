"""The kernels of `csrc/sm90/backward` that a problem needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.heuristics import (
    AGENDA_NUMBERS,
    BACKWARD_ROWS,
    BackwardConfig,
    backward_config,
    has_table,
    hopper_head_dim,
    is_between_hopper_head_dims,
    map_intervals,
    map_lines,
    may_ask,
)
from magi_compile.kernels.sm90.forward.launch import ELEMENTS, score_defines, score_headers
from magi_compile.kernels.sm90.runtime.nvrtc import Variant
from magi_compile.kernels.sm90.scores.source import ScoreSource

STREAM_THREADS = 256  # of a thread block before and after


@lru_cache(maxsize=1024)
def backward_variants(
    problem: AttnProblem,
    deterministic: bool = False,
    score: ScoreSource | None = None,
) -> tuple[Variant, Variant, Variant]:
    """The kernels to compile for `problem`: before, main, after;
    main with a `score` program where `problem` has one."""
    assert problem.has_score == (score is not None)
    config = backward_config(problem, keeps_slopes=keeps_slopes(score))
    element = {"FFA_ELEMENT": ELEMENTS[problem.dtype], "FFA_HEAD_DIM": hopper_head_dim(problem)}
    of_q, of_v = {"FFA_COLS": problem.head_dim}, {"FFA_COLS_OF_V": problem.head_dim_v}
    rows = {**element, **of_v, "FFA_ROWS": BACKWARD_ROWS, "FFA_TILE_WARPS": config.tile_warps}
    cols = {"FFA_BLOCK_COLS": config.block_cols}
    main = {
        **element,
        **of_q,
        **of_v,
        **cols,
        "FFA_CTAS": config.num_ctas,
        "FFA_STAGES": config.stages,
        "FFA_DOUT_STAGES": config.dout_stages,
        "FFA_SCORE_STAGES": config.score_stages,
        "FFA_PRODUCER_REGISTERS": config.producer_registers,
        "FFA_DQ_REGISTERS": config.dq_registers,
        "FFA_CONSUMER_REGISTERS": config.consumer_registers,
        "FFA_HAS_SOFTCAP": problem.softcap != 0.0,
        "FFA_HAS_BITS": problem.has_bits,
        "FFA_MAP_LINES": map_lines(problem).k,
        "FFA_MAP_INTERVALS": map_intervals(problem),
        "FFA_MAP_TABLE": has_table(problem),
        "FFA_IS_DETERMINISTIC": deterministic,
        "FFA_ROUNDS_DQ": rounds_dq(config, deterministic),
        **score_defines(score),
    }
    main_variant = Variant.of("backward/kernel.cu", "ffa_backward", main)
    # Beside a soft-cap, and in the producer of a cluster, there are few registers for the words of a block map, and for
    # those of blocks that ask everywhere.
    is_short = config.num_ctas > 1 or problem.softcap or may_ask(problem)
    has_words = problem.block_map is not None and bool(is_short)
    may_spill = score is not None or has_words or is_between_hopper_head_dims(problem)
    return (
        Variant.of(
            "backward/preprocess.cu",
            "ffa_backward_preprocess",
            {**rows, **cols, **_macros(AGENDA_NUMBERS)},
        ),
        replace(main_variant, headers=score_headers(score), may_spill=may_spill),
        Variant.of(
            "backward/postprocess.cu",
            "ffa_backward_postprocess",
            {**element, **of_q, "FFA_THREADS": STREAM_THREADS},
        ),
    )


def keeps_slopes(score: ScoreSource | None) -> bool:
    """True if the main kernel keeps the slopes of a score program beside P."""
    return score is not None and not score.is_shift


def rounds_dq(config: BackwardConfig, deterministic: bool) -> bool:
    """True if the main kernel makes dq; else the one behind it does."""
    return config.rounds_dq and not deterministic


def _macros(numbers: Mapping[str, float]) -> dict[str, float]:
    return {f"FFA_{name.upper()}": value for name, value in numbers.items()}
