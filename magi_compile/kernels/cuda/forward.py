"""The forward kernel of `csrc/sm90/fwd.cuh`: its variants and its launch."""

from __future__ import annotations

import math
import struct
from functools import cache

import torch
from torch import Tensor

from magi_compile.kernels.base import AttnProblem, ForwardOutput
from magi_compile.kernels.cuda.launch import (
    TENSOR_MAP_BYTES,
    launch,
    load_function,
    num_sms,
    tensor_map,
    tma_compatible,
    zero_word,
)
from magi_compile.kernels.cuda.nvrtc import Variant
from magi_compile.kernels.heuristics import forward_config, heads_per_section

ELEMENTS = {torch.bfloat16: "bfloat16", torch.float16: "float16"}

_STORE_ROWS = 16  # each warp stores its own rows
_PARAMS_BYTES = 640
# What follows the four tensor maps in ForwardParams.
_SCALARS = struct.Struct("<5Q3i4x2i2f")


@cache
def forward_variant(problem: AttnProblem) -> Variant:
    """The kernel to compile for `problem`."""
    config = forward_config(problem)
    defines = {
        "FFA_ELEMENT": ELEMENTS[problem.dtype],
        "FFA_HEAD_DIM": problem.head_dim,
        "FFA_BLOCK_COLS": config.block_cols,
        "FFA_K_STAGES": config.k_stages,
        "FFA_V_STAGES": config.v_stages,
        "FFA_OUT_SHARES_Q": str(config.out_shares_q).lower(),
        "FFA_CONSUMERS": config.num_consumers,
        "FFA_PRODUCER_REGISTERS": config.producer_registers,
        "FFA_CONSUMER_REGISTERS": config.consumer_registers,
        "FFA_HAS_SOFTCAP": str(problem.softcap != 0.0).lower(),
    }
    return Variant("fwd.cu", "ffa_forward", tuple((k, str(v)) for k, v in defines.items()))


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_tiles: Tensor, q_runs: Tensor, problem: AttnProblem
) -> ForwardOutput:
    """Attention of `q [total_q, nheads_q, head_dim]` over the q walk of a plan, on torch's current stream."""
    total_q, nheads_q, _ = q.shape
    device = q.device
    if total_q == 0 or k.shape[0] == 0:
        out = torch.zeros(q.shape, dtype=q.dtype, device=device)
        return ForwardOutput(out, torch.full((nheads_q, total_q), -math.inf, device=device))
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return forward(q, k, v, q_tiles, q_runs, problem)

    q, k, v = tma_compatible(q), tma_compatible(k), tma_compatible(v)
    out = torch.empty(q.shape, dtype=q.dtype, device=device)
    lse = torch.empty((nheads_q, total_q), dtype=torch.float32, device=device)
    config = forward_config(problem)
    stream = torch.cuda.current_stream(device).cuda_stream
    num_items = q_tiles.shape[0] * nheads_q
    grid = min(num_items, num_sms(device.index))
    ticket = zero_word(stream, device) if num_items > grid else None

    score_scale = problem.softcap or problem.softmax_scale
    params = bytearray(_PARAMS_BYTES)
    maps = (
        tensor_map(q, config.tile_rows),
        tensor_map(k, config.block_cols),
        tensor_map(v, config.block_cols),
        tensor_map(out, _STORE_ROWS),
    )
    params[: len(maps) * TENSOR_MAP_BYTES] = b"".join(maps)
    _SCALARS.pack_into(
        params,
        len(maps) * TENSOR_MAP_BYTES,
        out.data_ptr(),
        lse.data_ptr(),
        q_runs.data_ptr(),
        q_tiles.data_ptr(),
        ticket.data_ptr() if ticket is not None else 0,
        q_tiles.shape[0],
        nheads_q,
        heads_per_section(problem, k.shape[0]),
        total_q,
        problem.qhead_per_kvhead,
        score_scale * math.log2(math.e),
        problem.softmax_scale / problem.softcap if problem.softcap else 0.0,
    )
    function = load_function(forward_variant(problem), device.index)
    launch(function, grid, config.num_threads, params, stream)
    return ForwardOutput(out, lse)
