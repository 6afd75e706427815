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
from magi_compile.kernels.heuristics import ForwardConfig, forward_config, heads_per_section
from magi_compile.kernels.merge import merge_prior

ELEMENTS = {torch.bfloat16: "bfloat16", torch.float16: "float16"}

_STORE_ROWS = 16  # each warp stores its own rows
_PARAMS_BYTES = 640
# What follows the four tensor maps in ForwardParams.
_SCALARS = struct.Struct("<7Q3i4x2i2fi")


@cache
def forward_variant(problem: AttnProblem, config: ForwardConfig) -> Variant:
    """The kernel to compile for `problem` in the shape of `config`."""
    defines = {
        "FFA_ELEMENT": ELEMENTS[problem.dtype],
        "FFA_HEAD_DIM": problem.head_dim,
        "FFA_BLOCK_COLS": config.block_cols,
        "FFA_K_STAGES": config.k_stages,
        "FFA_V_STAGES": config.v_stages,
        "FFA_Q_BUFFERS": config.q_buffers,
        "FFA_CONSUMERS": config.num_consumers,
        "FFA_PRODUCER_REGISTERS": config.producer_registers,
        "FFA_CONSUMER_REGISTERS": config.consumer_registers,
        "FFA_HAS_SOFTCAP": str(problem.softcap != 0.0).lower(),
    }
    return Variant("fwd.cu", "ffa_forward", tuple((k, str(v)) for k, v in defines.items()))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_tiles: Tensor,
    q_runs: Tensor,
    problem: AttnProblem,
    *,
    prior: ForwardOutput | None = None,
    out_dtype: torch.dtype | None = None,
    config: ForwardConfig | None = None,
) -> ForwardOutput:
    """Attention of `q [total_q, nheads_q, head_dim]` over the q walk of a plan, on torch's current stream.

    Args:
        q: `[total_q, nheads_q, head_dim]`.
        k: `[total_k, nheads_kv, head_dim]`.
        v: `[total_k, nheads_kv, head_dim]`.
        q_tiles: of the plan, for the tile sizes of `config`.
        q_runs: of the plan.
        problem: what `CudaKernel.refusals` finds nothing against.
        prior: attention of `q` over other keys, to be merged with this one; its `out` in fp32.
        out_dtype: of the output, that of `q` by default, or fp32.
        config: instead of the one for `problem`.

    Raises:
        TypeError: if `prior` or `out_dtype` has another dtype.
    """
    out_dtype = out_dtype or q.dtype
    if out_dtype not in (q.dtype, torch.float32):
        raise TypeError(
            f"`out_dtype` must be {q.dtype} like `q`, or torch.float32, got {out_dtype}"
        )
    if prior is not None and prior.out.dtype != torch.float32:
        raise TypeError(f"`prior.out` must be torch.float32, got {prior.out.dtype}")
    total_q, nheads_q, head_dim = q.shape
    device = q.device
    if total_q == 0 or k.shape[0] == 0:
        out = torch.zeros(q.shape, dtype=q.dtype, device=device)
        lse = torch.full((nheads_q, total_q), -math.inf, device=device)
        return merge_prior(ForwardOutput(out, lse), prior, out_dtype)
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return forward(
                q, k, v, q_tiles, q_runs, problem, prior=prior, out_dtype=out_dtype, config=config
            )

    config = config or forward_config(problem)
    q, k, v = tma_compatible(q), tma_compatible(k), tma_compatible(v)
    out = q.new_empty((total_q, nheads_q, head_dim), dtype=out_dtype)
    lse = q.new_empty((nheads_q, total_q), dtype=torch.float32)
    prior_out, prior_lse = (x.contiguous() for x in prior) if prior else (None, None)
    is_out_wide = out_dtype != q.dtype
    stream = torch.cuda.current_stream(device).cuda_stream
    num_items = q_tiles.shape[0] * nheads_q
    grid = min(num_items, num_sms(device.index))
    ticket = zero_word(stream, device) if num_items > grid else None

    score_scale = problem.softcap or problem.softmax_scale
    maps = (
        tensor_map(q, config.tile_rows),
        tensor_map(k, config.block_cols),
        tensor_map(v, config.block_cols),
        bytes(TENSOR_MAP_BYTES) if is_out_wide else tensor_map(out, _STORE_ROWS),
    )
    params = bytearray(_PARAMS_BYTES)
    params[: len(maps) * TENSOR_MAP_BYTES] = b"".join(maps)
    _SCALARS.pack_into(
        params,
        len(maps) * TENSOR_MAP_BYTES,
        out.data_ptr(),
        lse.data_ptr(),
        _address(prior_out),
        _address(prior_lse),
        q_runs.data_ptr(),
        q_tiles.data_ptr(),
        _address(ticket),
        q_tiles.shape[0],
        nheads_q,
        heads_per_section(problem, k.shape[0]),
        total_q,
        problem.qhead_per_kvhead,
        score_scale * math.log2(math.e),
        problem.softmax_scale / problem.softcap if problem.softcap else 0.0,
        is_out_wide,
    )
    function = load_function(forward_variant(problem, config), device.index)
    launch(function, grid, config.num_threads, params, stream)
    return ForwardOutput(out, lse)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
