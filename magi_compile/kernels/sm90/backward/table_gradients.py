"""The launch of the kernel of `csrc/sm90/scores/gradients`: gradients of the tensors that a score_mod captures."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.heuristics import (
    ForwardConfig,
    hopper_head_dim,
    table_gradients_config,
)
from magi_compile.kernels.sm90.backward.workspace import DQ_GROUP_ROWS
from magi_compile.kernels.sm90.forward.launch import (
    ELEMENTS,
    scale_fields,
    schedule_of,
    score_headers,
)
from magi_compile.kernels.sm90.params import table_gradients_params
from magi_compile.kernels.sm90.runtime.calls import Launch
from magi_compile.kernels.sm90.runtime.driver import Layout, load_function, num_sms, rows_map
from magi_compile.kernels.sm90.runtime.nvrtc import Variant
from magi_compile.kernels.sm90.runtime.structs import Pointer
from magi_compile.kernels.sm90.scores.arguments import ScoreArguments
from magi_compile.kernels.sm90.scores.source import ScoreSource


class GradientsPlaces(NamedTuple):
    """The buffers of a call that the kernel reads and writes.

    Attributes:
        tensors: q, dout, k and v.
        lse: of the rows.
        stats: the statistics of the backward.
        bits: the bit blocks of the mask, if it has some.
    """

    tensors: tuple[int, int, int, int]
    lse: int
    stats: Pointer
    bits: int


@cache
def table_gradients_variant(
    problem: AttnProblem, config: ForwardConfig, source: ScoreSource
) -> Variant:
    """The kernel to compile for `problem`, with the `source` of a program with gradients."""
    defines = {
        "FFA_ELEMENT": ELEMENTS[problem.dtype],
        "FFA_HEAD_DIM": hopper_head_dim(problem),
        "FFA_BLOCK_COLS": config.block_cols,
        "FFA_K_STAGES": config.k_stages,
        "FFA_V_STAGES": config.v_stages,
        "FFA_CONSUMERS": config.num_consumers,
        "FFA_PRODUCER_REGISTERS": config.producer_registers,
        "FFA_CONSUMER_REGISTERS": config.consumer_registers,
        "FFA_HAS_BITS": problem.has_bits,
    }
    rest = {"headers": score_headers(source), "may_spill": True}
    return Variant.of("scores/gradients/kernel.cu", "ffa_table_gradients", defines, **rest)


def table_gradients_launch(
    layouts: tuple[Layout, ...],
    problem: AttnProblem,
    score: ScoreArguments,
    places: GradientsPlaces,
    device_index: int,
) -> tuple[Launch, ...]:
    """The launch, or none where no row is to be walked.

    Args:
        layouts: of q, dout, k and v.
        problem: what to compute.
        score: of a program with gradients; the q walk lies in front of the tensors that it reads.
        places: of buffers.
        device_index: of the GPU.

    Returns:
        One launch, which may start while the one in front of it ends, or none.
    """
    gradients = score.gradients
    assert gradients is not None
    if gradients.num_tiles == 0:
        return ()
    config = table_gradients_config(problem)
    (total_q, *_), (total_k, *_) = layouts[0][0], layouts[2][0]
    rows = (config.tile_rows, config.tile_rows, config.block_cols, config.block_cols)
    maps = [
        rows_map(Pointer(buffer), *layout, problem.dtype, box_rows)
        for buffer, layout, box_rows in zip(places.tensors, layouts, rows, strict=True)
    ]
    num_behind = len(gradients.source.tables)
    tiles, runs, edges = (Pointer(i - 3 - num_behind) for i in range(3))
    schedule = schedule_of(problem, total_k, gradients.num_tiles, num_sms(device_index))
    params = table_gradients_params(len(score.words) + 1, len(gradients.sums)).pack(
        **dict(zip(("q", "dout", "k", "v"), maps, strict=True)),
        lse=Pointer(places.lse),
        stats=places.stats,
        runs=runs,
        edges=edges,
        bits=Pointer(places.bits) if problem.has_bits else None,
        sums=[Pointer(number) for number in gradients.sums],
        schedule=schedule | {"tiles": tiles, "ticket": None},
        total_q=total_q,
        padded_q=-(-total_q // DQ_GROUP_ROWS) * DQ_GROUP_ROWS,
        qhead_per_kvhead=problem.qhead_per_kvhead,
        **scale_fields(problem),
        score=score.fields,
    )
    variant = table_gradients_variant(problem, config, gradients.source)
    grid = gradients.num_tiles * problem.nheads_q
    function = load_function(variant, device_index)
    return (Launch(function, grid, config.num_threads, params, may_start_early=True),)
