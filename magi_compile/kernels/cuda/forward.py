"""The forward kernel of `csrc/sm90/fwd.cuh`: its variants and its launch."""

from __future__ import annotations

import math
import struct
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from cuda.bindings import driver
from torch import Tensor

from magi_compile.kernels.base import AttnProblem, ForwardOutput
from magi_compile.kernels.cuda.launch import (
    TENSOR_MAP_BYTES,
    current_stream,
    is_tma_layout,
    launch,
    load_function,
    num_sms,
    tensor_map,
    tma_compatible,
    zero_word,
)
from magi_compile.kernels.cuda.nvrtc import Variant
from magi_compile.kernels.heuristics import (
    ForwardConfig,
    forward_config,
    heads_per_section,
    tiles_in_sections,
)
from magi_compile.kernels.merge import merge_prior

ELEMENTS = {torch.bfloat16: "bfloat16", torch.float16: "float16"}

_STORE_ROWS = 16  # each warp stores its own rows
# What follows the tensor maps in ForwardParams: addresses, then what a route knows, to the end of the struct.
_ADDRESSES, _SCALARS = struct.Struct("<6Qq5Q"), struct.Struct("<7i2f60x")
_MAX_KNOWN_MAPS = 256
_NO_FAR_KEYS = 2**31 - 1

_Layouts = tuple[tuple[int, ...], ...]


class Walk(NamedTuple):
    """The tiles of one launch, their runs, and the edges of rows."""

    tiles: Tensor
    runs: Tensor
    edges: Tensor
    part_shifts: Tensor | None = (
        None  # int32 `[num_tiles]`, see ForwardParams; None: every tile is a part
    )


class Results(NamedTuple):
    """Where one launch leaves what it computes, and what it merges with. Of each pair both or none are there."""

    out: Tensor | None = None
    lse: Tensor | None = None
    wide_out: Tensor | None = None  # of parts
    wide_lse: Tensor | None = None
    prior_out: Tensor | None = None  # of parts
    prior_lse: Tensor | None = None

    @property
    def wide_rows(self) -> int:
        """How many rows of parts a head has."""
        lse = self.prior_lse if self.wide_lse is None else self.wide_lse
        return 0 if lse is None else lse.shape[1]


class Places(NamedTuple):
    """The addresses of a walk and of its results, as in ForwardParams; 0 for what is not there."""

    out: int
    lse: int
    wide_out: int
    wide_lse: int
    prior_out: int
    prior_lse: int
    wide_rows: int  # no address: that a head has
    runs: int
    edges: int
    part_shifts: int
    tiles: int


class FarKeys(NamedTuple):
    """Keys in memory of their own, which a walk sees as the columns from `begin` on, for a launch that may begin before they
    are there. TMA can read them, see `check_far_keys`."""

    k: Tensor
    v: Tensor
    begin: int
    params: bytes  # what EarlyForwardParams has beside ForwardParams


class _Route(NamedTuple):
    """What a launch needs besides addresses, for tensors of one layout."""

    function: driver.CUfunction
    grid: int
    num_threads: int
    has_ticket: bool
    scalars: bytes
    maps: dict[tuple[int, ...], bytes]  # the tensor maps, by the addresses of their tensors


@cache
def forward_variant(
    problem: AttnProblem,
    config: ForwardConfig,
    *,
    has_stairs: bool = False,
    is_early: bool = False,
) -> Variant:
    """The kernel to compile for `problem` in the shape of `config`; `is_early` if it begins before far keys are there,
    `has_stairs` if a run may have a lane."""
    defines = {
        "FFA_ELEMENT": ELEMENTS[problem.dtype],
        "FFA_HEAD_DIM": problem.head_dim,
        "FFA_BLOCK_COLS": config.block_cols,
        "FFA_K_STAGES": config.k_stages,
        "FFA_V_STAGES": config.v_stages,
        "FFA_Q_BUFFERS": config.q_buffers,
        "FFA_CONSUMERS": config.num_consumers,
        "FFA_MIN_BLOCKS_IN_TURNS": config.min_blocks_in_turns,
        "FFA_PRODUCER_REGISTERS": config.producer_registers,
        "FFA_CONSUMER_REGISTERS": config.consumer_registers,
        "FFA_HAS_SOFTCAP": str(problem.softcap != 0.0).lower(),
        "FFA_HAS_STAIRS": str(has_stairs).lower(),
        "FFA_HAS_FAR_KEYS": str(is_early or config.always_takes_far_keys).lower(),
        "FFA_IS_EARLY": str(is_early).lower(),
    }
    return Variant("fwd.cu", "ffa_forward", tuple((k, str(v)) for k, v in defines.items()))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_tiles: Tensor,
    q_runs: Tensor,
    q_edges: Tensor,
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
        q_edges: of the plan.
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
                *(q, k, v, q_tiles, q_runs, q_edges, problem),
                prior=prior,
                out_dtype=out_dtype,
                config=config,
            )

    out = q.new_empty((total_q, nheads_q, head_dim), dtype=out_dtype)
    lse = q.new_empty((nheads_q, total_q), dtype=torch.float32)
    priors = [x.contiguous() for x in prior] if prior else [None, None]
    if out_dtype == q.dtype:
        results = Results(out, lse, None, None, *priors)
    else:
        results = Results(None, None, out, lse, *priors)
    enqueue(q, k, v, None, Walk(q_tiles, q_runs, q_edges), results, problem, config)
    return ForwardOutput(out, lse)


def enqueue(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    far: FarKeys | None,
    walk: Walk,
    results: Results,
    problem: AttnProblem,
    config: ForwardConfig | None = None,
    free_sms: int = 0,
) -> None:
    """One launch on torch's current stream and device; `results` are contiguous. All SMs but `free_sms` take part."""
    walked = map(_address, (walk.runs, walk.edges, walk.part_shifts, walk.tiles))
    places = Places._make((*map(_address, results), results.wide_rows, *walked))
    num_tiles = walk.tiles.shape[0]
    enqueue_at(q, k, v, far, results.out, num_tiles, places, problem, config, free_sms)


def enqueue_at(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    far: FarKeys | None,
    out: Tensor | None,
    num_tiles: int,
    places: Places,
    problem: AttnProblem,
    config: ForwardConfig | None = None,
    free_sms: int = 0,
) -> None:
    """`enqueue` for a walk of `num_tiles` and results that lie anywhere."""
    tensors = (q, k, v) if far is None else (q, k, v, far.k, far.v)
    at = [x.data_ptr() for x in tensors]
    begin = _NO_FAR_KEYS
    layouts: _Layouts = (q.shape, q.stride(), k.shape, k.stride(), v.stride())
    if far is not None:
        begin = far.begin
        layouts = (*layouts, far.k.shape, far.k.stride(), far.v.stride())
    route = _route(
        *(problem, config, layouts, begin, num_tiles, places.edges != 0, q.device.index, free_sms)
    )
    if route is None or any(address % 16 for address in at):
        q, k, v = (tma_compatible(x) for x in (q, k, v))
        enqueue_at(q, k, v, far, out, num_tiles, places, problem, config, free_sms)
        return
    stream = current_stream(q.device)
    ticket = zero_word(stream, q.device) if route.has_ticket else None

    known = (*at, places.out)
    maps = route.maps.get(known)
    if maps is None:
        maps = _tensor_maps(q, k, v, far, out, config or forward_config(problem))
        if len(route.maps) >= _MAX_KNOWN_MAPS:
            route.maps.clear()
        route.maps[known] = maps
    pointers = _ADDRESSES.pack(*places, _address(ticket))
    params = maps + pointers + route.scalars + (far.params if far else b"")
    launch(route.function, route.grid, route.num_threads, params, stream)


@lru_cache(maxsize=1024)
def _route(
    problem: AttnProblem,
    config: ForwardConfig | None,
    layouts: _Layouts,
    far_begin: int,
    num_tiles: int,
    has_stairs: bool,
    device_index: int,
    free_sms: int,
) -> _Route | None:
    """How tensors of such layouts (the shape and strides of q and of k, the strides of v; of far keys those of k and v
    again) are launched; None where TMA can not read them."""
    q_shape, q_stride, *keys = layouts
    tensors = [(q_shape, q_stride)]
    for k_shape, k_stride, v_stride in zip(keys[::3], keys[1::3], keys[2::3], strict=True):
        tensors += [(k_shape, k_stride), (k_shape, v_stride)]
    if not all(is_tma_layout(shape, stride, problem.dtype) for shape, stride in tensors):
        return None
    config = config or forward_config(problem)
    total_q, nheads_q, _ = q_shape
    num_items = num_tiles * nheads_q
    sms = max(1, num_sms(device_index) - free_sms)
    grid = min(num_items, sms)
    score_scale = problem.softcap or problem.softmax_scale
    scalars = _SCALARS.pack(
        num_tiles,
        nheads_q,
        heads_per_section(problem, sum(shape[0] for shape in keys[::3]), num_tiles, sms),
        tiles_in_sections(problem, num_tiles, sms),
        total_q,
        problem.qhead_per_kvhead,
        far_begin,
        score_scale * math.log2(math.e),
        problem.softmax_scale / problem.softcap if problem.softcap else 0.0,
    )
    is_early = far_begin != _NO_FAR_KEYS
    variant = forward_variant(problem, config, has_stairs=has_stairs, is_early=is_early)
    function = load_function(variant, device_index)
    has_ticket = not is_early and num_items > grid
    return _Route(function, grid, config.num_threads, has_ticket, scalars, {})


def _tensor_maps(
    q: Tensor, k: Tensor, v: Tensor, far: FarKeys | None, out: Tensor | None, config: ForwardConfig
) -> bytes:
    nothing = bytes(TENSOR_MAP_BYTES)

    def keys(near: Tensor, of_far: Tensor | None) -> bytes:
        return b"".join(
            nothing if x is None else tensor_map(x, config.block_cols) for x in (near, of_far)
        )

    return b"".join(
        (
            tensor_map(q, config.tile_rows),
            keys(k, far and far.k),
            keys(v, far and far.v),
            nothing if out is None else tensor_map(out, _STORE_ROWS),
        )
    )


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
