"""The backward kernels of `csrc/sm90/bwd*`: their variants and their launches."""

from __future__ import annotations

import ctypes
import math
import struct
from functools import lru_cache

import torch
from cuda.bindings import driver
from torch import Tensor

from magi_compile.kernels.base import AttnProblem, BackwardOutput
from magi_compile.kernels.cuda.forward import ELEMENTS
from magi_compile.kernels.cuda.launch import (
    TENSOR_MAP_BYTES,
    check,
    launch,
    load_function,
    num_sms,
    tensor_map,
    tma_compatible,
)
from magi_compile.kernels.cuda.nvrtc import Variant
from magi_compile.kernels.heuristics import (
    BACKWARD_ROWS,
    backward_config,
    backward_heads_per_section,
)
from magi_compile.plan.tiles import RUN_FIELDS

_STORE_ROWS = 16  # each warp stores its own rows
_DQ_GROUP_ROWS = 16
_STREAM_THREADS = 256  # of a thread block before and after
_PARAMS_BYTES = 1024
_RUN_COL_END, _RUN_FIRST = (RUN_FIELDS.index(name) for name in ("col_end", "first"))
# What follows the seven tensor maps in BackwardParams.
_SCALARS = struct.Struct("<3Qi4x5Q3i4xi3f")
_PREPROCESS = struct.Struct("<6Qi4x2Q4q2i")
_POSTPROCESS = struct.Struct("<Qi4xQif")


def backward_variants(
    problem: AttnProblem, deterministic: bool = False
) -> tuple[Variant, Variant, Variant]:
    """The kernels to compile for `problem`: before, main, after."""
    config = backward_config(problem)
    element = {"FFA_ELEMENT": ELEMENTS[problem.dtype], "FFA_HEAD_DIM": problem.head_dim}
    rows = {**element, "FFA_ROWS": BACKWARD_ROWS}
    main = {
        **element,
        "FFA_BLOCK_COLS": config.block_cols,
        "FFA_STAGES": config.stages,
        "FFA_PRODUCER_REGISTERS": config.producer_registers,
        "FFA_CONSUMER_REGISTERS": config.consumer_registers,
        "FFA_HAS_SOFTCAP": str(problem.softcap != 0.0).lower(),
        "FFA_IS_DETERMINISTIC": str(deterministic).lower(),
    }
    return (
        _variant("bwd_preprocess.cu", "ffa_backward_preprocess", rows),
        _variant("bwd.cu", "ffa_backward", main),
        _variant("bwd_postprocess.cu", "ffa_backward_postprocess", rows),
    )


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    k_tiles: Tensor,
    k_runs: Tensor,
    problem: AttnProblem,
    *,
    deterministic: bool = False,
) -> BackwardOutput:
    """Gradients of attention over the k walk of a plan, on torch's current stream.

    dk and dv repeat bit for bit. dq is summed up by many thread blocks, in any order, or in that of the tiles where
    `deterministic` is set.
    """
    total_q, nheads_q, head_dim = q.shape
    total_k, nheads_kv, _ = k.shape
    device = q.device
    dk = torch.empty(k.shape, dtype=k.dtype, device=device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=device)
    if total_q == 0 or total_k == 0:
        return BackwardOutput(torch.zeros_like(q), dk.zero_(), dv.zero_())
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return backward(
                dout, dlse, q, k, v, out, lse, k_tiles, k_runs, problem, deterministic=deterministic
            )

    q, k, v, out, dout = (tma_compatible(x) for x in (q, k, v, out, dout))
    dq = torch.empty(q.shape, dtype=q.dtype, device=device)
    row_groups = -(-total_q // _DQ_GROUP_ROWS)
    padded_q = row_groups * _DQ_GROUP_ROWS
    dq_sum = torch.empty((nheads_q, padded_q, head_dim), dtype=torch.float32, device=device)
    stats = torch.empty((nheads_q, 2, padded_q), dtype=torch.float32, device=device)
    ticket = torch.empty(1, dtype=torch.int32, device=device)
    turns = visits = None
    if deterministic:
        turns = turns_of_tiles(k_tiles, k_runs, row_groups)
        visits = torch.empty((nheads_q, row_groups), dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream
    preprocess, main, postprocess = (
        load_function(variant, device.index)
        for variant in backward_variants(problem, deterministic)
    )
    row_blocks = (-(-total_q // BACKWARD_ROWS), nheads_q)

    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    before = _PREPROCESS.pack(
        out.data_ptr(),
        dout.data_ptr(),
        lse.data_ptr(),
        _address(dlse),
        stats.data_ptr(),
        dq_sum.data_ptr(),
        row_groups,
        _address(visits),
        ticket.data_ptr(),
        *out.stride()[:2],
        *dout.stride()[:2],
        total_q,
        padded_q,
    )
    launch(preprocess, row_blocks, _STREAM_THREADS, bytearray(before), stream, shared_bytes=0)

    config = backward_config(problem)
    grid = min(k_tiles.shape[0] * nheads_kv, num_sms(device.index))
    maps = (
        tensor_map(q, config.block_cols),
        tensor_map(dout, config.block_cols),
        tensor_map(k, config.tile_rows),
        tensor_map(v, config.tile_rows),
        _stats_map(stats.data_ptr(), nheads_q, total_q, padded_q, config.block_cols),
        tensor_map(dk, _STORE_ROWS),
        tensor_map(dv, _STORE_ROWS),
    )
    params = bytearray(_PARAMS_BYTES)
    params[: len(maps) * TENSOR_MAP_BYTES] = b"".join(maps)
    score_scale = problem.softcap or problem.softmax_scale
    _SCALARS.pack_into(
        params,
        len(maps) * TENSOR_MAP_BYTES,
        dk.data_ptr(),
        dv.data_ptr(),
        dq_sum.data_ptr(),
        row_groups,
        k_runs.data_ptr(),
        _address(turns),
        _address(visits),
        k_tiles.data_ptr(),
        ticket.data_ptr(),
        k_tiles.shape[0],
        nheads_kv,
        backward_heads_per_section(problem, k_tiles.shape[0], num_sms(device.index)),
        problem.qhead_per_kvhead,
        score_scale * math.log2(math.e),
        problem.softmax_scale / problem.softcap if problem.softcap else 0.0,
        problem.softmax_scale,
    )
    launch(main, grid, config.num_threads, params, stream, may_start_early=True)

    after = _POSTPROCESS.pack(
        dq_sum.data_ptr(), row_groups, dq.data_ptr(), total_q, problem.softmax_scale
    )
    launch(
        *(postprocess, row_blocks, _STREAM_THREADS, bytearray(after), stream),
        shared_bytes=0,
        may_start_early=True,
    )
    return BackwardOutput(dq, dk, dv)


def turns_of_tiles(k_tiles: Tensor, k_runs: Tensor, row_groups: int) -> Tensor:
    """How many additions to each 16 query rows come from the tiles before, int32 `[num_tiles, row_groups]`.

    A run adds once to every 16 rows between its first and its last column. Runs of no tile hold anything.
    """
    num_tiles = k_tiles.shape[0]
    run = torch.arange(k_runs.shape[0], device=k_runs.device)
    tile = _tile_of_run(k_tiles, run)
    is_walked = (k_tiles[tile, 2] <= run) & (run < k_tiles[tile, 3])
    first = torch.where(is_walked, k_runs[:, _RUN_FIRST], 0) // _DQ_GROUP_ROWS
    last = torch.where(is_walked, k_runs[:, _RUN_COL_END] - 1, -1) // _DQ_GROUP_ROWS
    steps = torch.zeros(num_tiles * (row_groups + 1), dtype=torch.int32, device=k_runs.device)
    one = is_walked.int()
    steps.index_add_(0, tile * (row_groups + 1) + first, one)
    steps.index_add_(0, tile * (row_groups + 1) + last + 1, -one)
    additions = steps.view(num_tiles, row_groups + 1)[:, :row_groups].cumsum(1, dtype=torch.int32)
    return additions.cumsum(0, dtype=torch.int32) - additions


def _tile_of_run(k_tiles: Tensor, run: Tensor) -> Tensor:
    """The tile whose runs hold `run`; anything for padding. Tiles come in the order of their cost."""
    run_begin, run_end = k_tiles[:, 2].long(), k_tiles[:, 3].long()
    run_end = torch.where(run_begin < run_end, run_end, run.shape[0] + 1)
    run_end, order = run_end.sort()
    at = torch.searchsorted(run_end, run, right=True)
    return order[at.clamp(max=k_tiles.shape[0] - 1)]


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _variant(source: str, entry: str, defines: dict[str, object]) -> Variant:
    return Variant(source, entry, tuple((name, str(value)) for name, value in defines.items()))


@lru_cache(maxsize=4096)
def _stats_map(address: int, nheads: int, rows: int, padded_rows: int, box_rows: int) -> bytes:
    """The TMA descriptor of fp32 `[nheads, 2, rows]` in memory of `padded_rows`, in boxes of both statistics."""
    encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        3,
        address,
        [driver.cuuint64_t(n) for n in (rows, 2, nheads)],
        [driver.cuuint64_t(4 * n) for n in (padded_rows, 2 * padded_rows)],
        [driver.cuuint32_t(n) for n in (box_rows, 2, 1)],
        [driver.cuuint32_t(1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(check(encoded).getPtr(), TENSOR_MAP_BYTES)
