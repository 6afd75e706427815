"""The tile sizes of kernels, and which masks they run well: the only place with tile numbers.

Pure functions of the problem: no environment, no globals, no second table in the device code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.plan import PlanTiles


@dataclass(frozen=True)
class ForwardConfig:
    """The shape of the Hopper forward kernel; each number is a template parameter of `csrc/sm90/forward/config.cuh`.

    A thread block is one producer warpgroup and `num_consumers` consumer warpgroups of 64 query rows each. With two
    `q_buffers` the next Q arrives while a tile is in work; the output leaves through the buffer of its Q. The
    producer of a launch without remote keys has a branch for their tensor maps too if it `always_takes_remote_keys`:
    the assembler's code is faster there.
    """

    num_consumers: int
    block_cols: int
    k_stages: int
    v_stages: int
    q_buffers: int
    producer_registers: int
    consumer_registers: int
    always_takes_remote_keys: bool = False

    @property
    def tile_rows(self) -> int:
        return 64 * self.num_consumers

    @property
    def num_threads(self) -> int:
        return 128 * (self.num_consumers + 1)


# By head_dim: the largest blocks whose buffers fit in 227 KB and whose accumulators fit in registers.
_FORWARD = {
    64: ForwardConfig(3, 112, 4, 4, 2, 32, 160, always_takes_remote_keys=True),
    96: ForwardConfig(3, 80, 3, 3, 2, 32, 160),
    128: ForwardConfig(3, 80, 3, 3, 2, 32, 160),
    192: ForwardConfig(2, 80, 3, 2, 1, 40, 232),
    256: ForwardConfig(2, 64, 3, 2, 1, 40, 232),
}

# With bit blocks, of which a tile is as high as one and a block as wide, or half of one; and with score programs, which
# need registers.
_FORWARD_BITS = {
    64: ForwardConfig(2, 128, 4, 4, 2, 40, 232),
    96: ForwardConfig(2, 128, 3, 2, 2, 40, 232),
    128: ForwardConfig(2, 128, 3, 2, 2, 40, 232),
    192: ForwardConfig(2, 64, 4, 3, 1, 40, 232),
    256: ForwardConfig(2, 64, 3, 2, 1, 40, 232),
}

# With block maps whose blocks have 64 keys; those of 128 keys are walked as bit blocks are.
_FORWARD_MAP_64 = {
    64: ForwardConfig(3, 64, 8, 8, 2, 32, 160),
    96: ForwardConfig(3, 64, 5, 5, 1, 32, 160),
    128: ForwardConfig(3, 64, 5, 5, 1, 32, 160),
    192: _FORWARD_BITS[192],
    256: _FORWARD_BITS[256],
}

_PRODUCER_THAT_ASKS, _CONSUMERS_THAT_ASK = 56, 152  # registers, of three consumers

# Half of the L2 cache of an H100 or H200: the rest is for Q, O and what is on its way out.
_L2_SECTION_BYTES = 32 * 2**20
# A rank of many has few queries and many keys. The last section ends when its longest tile does, so where sections keep
# the SMs busy less than so many times, it had better be of more heads. To read K and V again costs less, if several
# query heads share them.
_SECTION_WAVES = 20

HOPPER_HEAD_DIMS = tuple(_FORWARD)  # those of the backward too


def hopper_head_dim(problem: AttnProblem) -> int:
    """The head_dim of the Hopper kernels for `problem`: the first of `HOPPER_HEAD_DIMS` that has room for both of its
    own, which are at most the last one."""
    widest = max(problem.head_dim, problem.head_dim_v)
    return next(head_dim for head_dim in HOPPER_HEAD_DIMS if head_dim >= widest)


def is_between_hopper_head_dims(problem: AttnProblem) -> bool:
    """True if the Hopper kernels run `problem` as one of a larger head_dim or head_dim_v; they may spill a few
    registers then."""
    return not problem.head_dim == problem.head_dim_v == hopper_head_dim(problem)


def forward_config(problem: AttnProblem) -> ForwardConfig:
    """The Hopper forward kernel for `problem`."""
    if problem.block_map is not None and problem.block_map.keys == 64:
        config = _FORWARD_MAP_64[hopper_head_dim(problem)]
        if not may_ask(problem) or config.num_consumers < 3:
            return config
        registers = _PRODUCER_THAT_ASKS, _CONSUMERS_THAT_ASK
        return replace(config, producer_registers=registers[0], consumer_registers=registers[1])
    is_larger = problem.has_bits or problem.has_score or problem.block_map is not None
    return (_FORWARD_BITS if is_larger else _FORWARD)[hopper_head_dim(problem)]


# Of the kernel of gradients of captured tensors, which keeps dO beside Q: the buffers of K and of V.
_TABLE_GRADIENT_STAGES = {64: (3, 3), 96: (2, 2), 128: (2, 2), 192: (2, 2), 256: (2, 1)}


def table_gradients_config(problem: AttnProblem) -> ForwardConfig:
    """The Hopper kernel of gradients of tensors that a score_mod captures: tiles and blocks are those of the forward,
    whose plan it walks."""
    k_stages, v_stages = _TABLE_GRADIENT_STAGES[hopper_head_dim(problem)]
    return replace(forward_config(problem), k_stages=k_stages, v_stages=v_stages, q_buffers=1)


@dataclass(frozen=True)
class BackwardConfig:
    """The shape of the Hopper backward kernel; each number is a template parameter of `csrc/sm90/backward/config.cuh`.

    A thread block is one producer warpgroup, one that computes dq and two consumer warpgroups: of 64 keys each, or,
    where there are no registers for both gradients, of the same 64 keys, one with dk and one with dv. Then `num_ctas`
    of them share a tile of `tile_rows` keys. `block_cols` are the queries of a block, `stages` the buffers of Q,
    `dout_stages` those of dO and `score_stages` those of dS. With `rounds_dq` it makes dq of sums that are complete
    while it is at work on others, which pays where the loop leaves the issue slots for it, and where sums have no
    order.
    """

    block_cols: int
    stages: int
    dout_stages: int
    score_stages: int
    producer_registers: int
    dq_registers: int
    consumer_registers: int
    rounds_dq: bool
    num_ctas: int = 1

    tile_rows = 128
    num_threads = 128 * 4

    @property
    def tile_warps(self) -> int:
        """The warps that have gradients of a tile's keys."""
        return 8 * self.num_ctas


# By head_dim: dk and dv are sums in registers, which is what limits the blocks.
_BACKWARD = {
    64: BackwardConfig(128, 2, 2, 2, 32, 64, 208, False),
    96: BackwardConfig(64, 3, 3, 2, 32, 80, 200, True),
    128: BackwardConfig(64, 3, 3, 2, 32, 64, 208, True),
    192: BackwardConfig(64, 3, 2, 2, 32, 64, 208, True, num_ctas=2),
    256: BackwardConfig(64, 2, 2, 2, 32, 64, 208, True, num_ctas=2),
}
_BACKWARD_CAPPED = {  # with soft-cap, or a score program
    **_BACKWARD,
    64: BackwardConfig(64, 3, 3, 2, 32, 64, 208, False),
}

BACKWARD_ROWS = 64  # of a thread block of the kernel in front, which only streams

#: Macros of `csrc/sm90/backward/schedule/writer.cuh`: with fewer waves tiles are few; how many shares of
#: all work a part of few tiles may take; how many blocks of queries a part of many tiles has
#: at least, and a tile whose thread blocks keep together.
AGENDA_NUMBERS = {
    "few_waves": 3,
    "share_of_few": 1.5,
    "least_visits": 24,
    "least_visits_in_step": 512,
}

# Tiles of one head read the same queries at about the same time: fewer heads at a time share more of them in the L2
# cache. Where all heads together keep the SMs busy less than three times, one section balances better than several;
# tiles of a single query head cannot be in parts, and balance better where they are many.
_BACKWARD_LEAST_WAVES, _BACKWARD_MANY_WAVES = 0.85, 3

# What tiles at work at a time may read in all, of q, dout and sums of dq: measured on an H100, whose L2 cache has 50
# MB, and on an H200, which has 60.
_SMALL_L2_BYTES = 55 * 2**20
_BACKWARD_CACHED_BYTES, _BACKWARD_CACHED_BYTES_OF_SMALL_L2 = 48 * 2**20, 24 * 2**20
_MAP_CACHED_BYTES, _MAP_CACHED_BYTES_OF_SMALL_L2 = 44 * 2**20, 36 * 2**20
_LEAST_VISITS_OF_PASS = 64  # less does not pay for handing dk and dv on


# With a score program that does more than add to the score, whose slopes are kept beside P: two warpgroups share the
# keys, as where heads are wider, and plans have the same tiles.
_BACKWARD_WITH_SLOPES = {128: BackwardConfig(64, 3, 3, 3, 32, 64, 208, True, num_ctas=2)}


def backward_config(problem: AttnProblem, *, keeps_slopes: bool = False) -> BackwardConfig:
    """The Hopper backward kernel for `problem`; `keeps_slopes` for a score program that does more than add to the
    score."""
    head_dim = hopper_head_dim(problem)
    if keeps_slopes and head_dim in _BACKWARD_WITH_SLOPES and problem.block_map is None:
        return _BACKWARD_WITH_SLOPES[head_dim]
    has_small_blocks = problem.softcap or problem.has_score or problem.block_map is not None
    config = (_BACKWARD_CAPPED if has_small_blocks else _BACKWARD)[head_dim]
    # Nobody counts the visits of a block map, so the kernel behind makes dq.
    return config if problem.block_map is None else replace(config, rounds_dq=False)


class MapLines(NamedTuple):
    """The lines of bits of a tile of a block map: one, or one for each 64 of its rows.

    Attributes:
        q: of a tile of queries.
        k: of a tile of keys.
    """

    q: int
    k: int


def map_lines(problem: AttnProblem) -> MapLines:
    """The lines of the tiles of `problem`; none where it has no block map."""
    if problem.block_map is None:
        return MapLines(0, 0)
    q_rows, k_rows = forward_config(problem).tile_rows, BackwardConfig.tile_rows
    return MapLines(
        1 if problem.block_map.rows % q_rows == 0 else q_rows // 64,
        1 if problem.block_map.keys % k_rows == 0 and not has_table(problem) else k_rows // 64,
    )


def map_intervals(problem: AttnProblem) -> int:
    """The most key intervals that a query sees beside a block map; 0 where there is no map, or it says all."""
    return 0 if problem.block_map is None else problem.block_map.intervals


def has_table(problem: AttnProblem) -> bool:
    """True if blocks of a block map begin and end anywhere, and kernels look up which columns a row sees."""
    return problem.block_map is not None and problem.block_map.has_table > 0


def may_ask(problem: AttnProblem) -> bool:
    """True if blocks of a block map may ask."""
    return map_intervals(problem) > 0 or has_table(problem)


def backward_sections(problem: AttnProblem, num_tiles: int, num_sms: int) -> int:
    """The number of key-value heads that the backward works on at a time, `num_tiles` of each: the fewest that keep the
    SMs busy; all, where they do so less than three times. Of block maps one, and the next as SMs become free: tiles at
    work are anywhere in the queries of their heads."""
    if problem.block_map is not None:
        return 1
    waves = {
        heads: num_tiles * heads / num_sms
        for heads in _divisors(problem.nheads_kv)
        if num_tiles * heads >= _BACKWARD_LEAST_WAVES * num_sms
    }
    if waves.get(problem.nheads_kv, 0) < _BACKWARD_MANY_WAVES:
        return problem.nheads_kv
    if problem.qhead_per_kvhead == 1:
        return min(heads for heads, n in waves.items() if n >= _BACKWARD_MANY_WAVES)
    return min(waves)


class BackwardPasses(NamedTuple):
    """The division of the backward's work: passes over all tiles, each for some query heads of a group, with dk and dv
    handed on from one to the next. The kernel sees the tiles and decides: where all heads of a group together walk more
    blocks of queries than `cached_blocks`, for `most_heads` at most (never if that is 0), and no fewer than
    `least_visits` blocks in the mean."""

    most_heads: int = 0
    cached_blocks: int = 0
    least_visits: int = 0


def map_passes(problem: AttnProblem, total_q: int, l2_bytes: int) -> int:
    """The passes of the backward over the tiles of a block map; 0 where there is no map. Tiles at work at a time are
    anywhere in the queries, so that a pass is for one query head of a group, and for as many of its queries as stay in
    the cache."""
    if problem.block_map is None:
        return 0
    head_bytes = total_q // problem.block_map.batch * _query_bytes(problem)
    is_small = l2_bytes < _SMALL_L2_BYTES
    cached_bytes = _MAP_CACHED_BYTES_OF_SMALL_L2 if is_small else _MAP_CACHED_BYTES
    if head_bytes * problem.qhead_per_kvhead <= cached_bytes:
        return 1
    return int(problem.qhead_per_kvhead * -(-head_bytes // cached_bytes))


def backward_passes(
    problem: AttnProblem, num_tiles: int, section_heads: int, num_sms: int, l2_bytes: int
) -> BackwardPasses:
    """For `num_tiles` of each head: as many heads as tiles keep the SMs busy times,
    since items of several heads end later."""
    waves = num_tiles * section_heads / (_BACKWARD_LEAST_WAVES * num_sms)
    block_bytes = backward_config(problem).block_cols * _query_bytes(problem)
    group = problem.qhead_per_kvhead
    most_heads = min(int(waves), group) if group > 1 else 0
    is_small = l2_bytes < _SMALL_L2_BYTES
    cached_bytes = _BACKWARD_CACHED_BYTES_OF_SMALL_L2 if is_small else _BACKWARD_CACHED_BYTES
    return BackwardPasses(most_heads, cached_bytes // block_bytes, _LEAST_VISITS_OF_PASS)


def _query_bytes(problem: AttnProblem) -> int:
    """The bytes that the backward moves for a query of one head: q, dout and the sums of dq."""
    return hopper_head_dim(problem) * (2 * problem.dtype.itemsize + 4)


def heads_per_section(problem: AttnProblem, seqlen_k: int, num_tiles: int, num_sms: int) -> int:
    """The number of query heads that the forward works on at a time, `num_tiles` of each: so many that their K and V
    stay in the L2 cache, or more, where a section would be over too soon."""
    divisors, group = _divisors(problem.nheads_kv), problem.qhead_per_kvhead
    kv_bytes = 2 * seqlen_k * hopper_head_dim(problem) * problem.dtype.itemsize
    cached = max(n for n in divisors if n * kv_bytes <= _L2_SECTION_BYTES or n == 1)
    if group == 1:
        return cached
    least_heads = _SECTION_WAVES * num_sms / max(num_tiles, 1)
    lasting = min((n for n in divisors if n * group >= least_heads), default=problem.nheads_kv)
    return max(cached, lasting) * group


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


# Where heads are few, the q walk has room for tiles in splits, four at most for every SM. A tile of fewer blocks is
# over before another launch pays, and a split of fewer is mostly its own beginning and end. With many SMs for a head,
# one tile may take longer than all others together, however many they are; with few it is the last of two or three
# waves that is to be filled.
_CUT_LEAST_BLOCKS, SPLIT_LEAST_BLOCKS = 32, 8
_SPLITS_PER_SM = 4
_MANY_SMS, _FEW_WAVES, SPLITS_MOST_TILES = 8, 3, 512
#: Macros of `csrc/sm90/planner/split_tiles.cu`: splits are taken where they save one of so many parts of the time; all
#: work takes one of so many parts of an SM's share longer for the chip's power limit.
SPLIT_NUMBERS = {"least_gain": 20, "power": 3}


def forward_splits(problem: AttnProblem, seqlen_k: int, num_tiles: int, num_sms: int) -> int:
    """The room for splits of tiles in the forward's walk of `num_tiles`; 0 where no tile is cut.

    `seqlen_k` and `num_tiles` are ints or SymInts, of which nothing is asked: a graph has no guard on the answer.
    """
    sms = num_sms // problem.nheads_q
    if sms < 2:
        return 0
    most_tiles = SPLITS_MOST_TILES if sms >= _MANY_SMS else _FEW_WAVES * sms
    blocks = seqlen_k // forward_config(problem).block_cols
    is_long = torch.sym_min(1, blocks // _CUT_LEAST_BLOCKS)
    are_few = torch.sym_min(1, most_tiles // torch.sym_max(num_tiles, 1))
    room = torch.sym_min(_SPLITS_PER_SM * sms, num_tiles * (blocks // SPLIT_LEAST_BLOCKS))
    return room // 2 * 2 * is_long * are_few


@lru_cache(maxsize=1024)
def plan_tiles(problem: AttnProblem, kernel: str = "hopper") -> PlanTiles:
    """The tile sizes of a plan for `problem`, as the kernel called `kernel` walks it ("hopper", "fa4" or "triton")."""
    if kernel == "hopper":
        forward, backward = forward_config(problem), backward_config(problem)
        return PlanTiles(
            forward.tile_rows, forward.block_cols, backward.tile_rows, backward.block_cols
        )
    if kernel == "triton":
        triton = triton_config(problem)
        return PlanTiles(
            triton.q_tile_rows, triton.q_block_cols, triton.k_tile_rows, triton.k_block_cols
        )
    if kernel == "fa4":
        return fa4_blocks(problem)
    raise ValueError(f'`kernel` must be "hopper", "fa4" or "triton", got {kernel!r}')


# flash-attn-4: the blocks of its lists are its own tiles, which it takes from the head dimension. On Blackwell a thread
# block has two tiles of 128 queries; its backward could have pairs of tiles of 128 keys, which is not measured.
_FA4_BLACKWELL = PlanTiles(256, 128, 128, 128)
_FA4_HOPPER = {
    64: PlanTiles(192, 128, 128, 128),
    96: PlanTiles(192, 128, 128, 64),
    128: PlanTiles(128, 128, 128, 64),
}
FA4_HEAD_DIMS = tuple(_FA4_HOPPER)

# Documents that are shorter on average share blocks of lists: packed documents have tiles of their own.
FA4_LEAST_ROWS = 256


def fa4_blocks(problem: AttnProblem) -> PlanTiles:
    """The blocks of flash-attn-4's lists: of the forward by queries, and of the backward by keys."""
    return _FA4_HOPPER[problem.head_dim] if problem.device_arch == (9, 0) else _FA4_BLACKWELL


def fa4_group_is_packed(problem: AttnProblem) -> bool:
    """True if the query heads of a key-value head share a tile in flash-attn-4's forward, as they do by its own
    choice."""
    return 128 % problem.qhead_per_kvhead == 0


class CompileOptions(NamedTuple):
    """The compile options of one Triton kernel."""

    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class TritonConfig:
    """The tiles of the Triton kernels, powers of two, and how each kernel is compiled."""

    q_tile_rows: int
    q_block_cols: int
    k_tile_rows: int
    k_block_cols: int
    forward: CompileOptions
    dq: CompileOptions
    dkdv: CompileOptions


DELTA_ROWS = 64  # rows of a program of the kernel before the backward, which only streams

# 16-bit inputs, by head dimension, where a thread block has at least 163 KB of shared memory.
_TRITON = {
    64: TritonConfig(
        128, 64, 64, 64, CompileOptions(4, 3), CompileOptions(4, 3), CompileOptions(4, 3)
    ),
    128: TritonConfig(
        128, 64, 128, 64, CompileOptions(8, 3), CompileOptions(8, 3), CompileOptions(8, 2)
    ),
    256: TritonConfig(
        64, 32, 64, 32, CompileOptions(4, 2), CompileOptions(4, 2), CompileOptions(8, 2)
    ),
}
_TRITON_LARGE_SHARED_MEMORY = frozenset({(8, 0), (8, 7), (9, 0), (10, 0), (10, 3), (11, 0)})

# The 227 KB of Hopper hold more; measured on an H200.
_TRITON_HOPPER = {
    **_TRITON,
    256: TritonConfig(
        128, 32, 64, 64, CompileOptions(8, 3), CompileOptions(8, 2), CompileOptions(8, 2)
    ),
}

# Wide elements, and the 99 KB of the other GPUs.
_TRITON_SMALL = TritonConfig(
    64, 32, 32, 32, CompileOptions(4, 2), CompileOptions(4, 1), CompileOptions(4, 2)
)
_TRITON_SMALLEST = TritonConfig(
    32, 16, 16, 16, CompileOptions(4, 1), CompileOptions(4, 1), CompileOptions(4, 1)
)


def triton_config(problem: AttnProblem) -> TritonConfig:
    """The Triton kernels for `problem`: the largest tiles that fit in shared memory and in registers."""
    head_dim = max(problem.head_dim, problem.head_dim_v)
    is_wide = problem.dtype.itemsize > 2
    if is_wide or problem.device_arch not in _TRITON_LARGE_SHARED_MEMORY:
        return _TRITON_SMALLEST if is_wide and head_dim > 128 else _TRITON_SMALL
    table = _TRITON_HOPPER if problem.device_arch == (9, 0) else _TRITON
    config = next(config for size, config in table.items() if head_dim <= size)
    if not problem.has_bits and not problem.has_score:
        return config
    # Bits take the shared memory of a stage, score programs that of all. Not measured yet.
    forward, dq, dkdv = (
        launch._replace(num_stages=1 if problem.has_score else max(1, launch.num_stages - 1))
        for launch in (config.forward, config.dq, config.dkdv)
    )
    return replace(config, forward=forward, dq=dq, dkdv=dkdv)


# Of the default capacity: documents of 16 tokens on average, and no fewer than 256 slices.
_ROWS_PER_SLICE = 16
_MIN_CAPACITY = 256
# Of keys, where a row sees several of a mask that repeats: what kernels walk for shorter ones is more than the blocks
# of a BlockMask.
# Of a block table, whose lines have a bit for each block and token; of smaller blocks bit blocks need less memory.
MIN_TOKENS_OF_BLOCK = 8
MIN_PERIOD = 256
_FEW_PERIODS = 4  # of which all keys consist: then there is little to walk
MAX_BIT_BLOCKS = 1 << 18  # on a GPU: 512 MB, one mask of 64K queries and keys


def apply_now(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`."""
    return function(*args)


def slice_capacity(
    seqlen_q: Any,
    max_intervals: int,
    apply: Callable[..., Any] = apply_now,
    *,
    by_keys: bool = False,
) -> Any:
    """Room for the slices of one mask, where nobody says how many there are.

    `seqlen_q` is an int, or what `apply` takes for one, which computes `function(*args)`: at once, or by a node of a
    graph. `max_intervals` are the most key intervals that a row sees. Where `by_keys`, both are of keys and of rows
    that see one: then slices are made of keys, of which a causal run gives two.
    """
    rows = apply(operator.floordiv, seqlen_q, _ROWS_PER_SLICE)
    of_each = max(1, max_intervals) * (2 if by_keys else 1)
    return apply(operator.mul, apply(operator.add, rows, _MIN_CAPACITY), of_each)


def repeats_too_often(period: int, seqlen_k: int) -> bool:
    """True if kernels walk more for a mask that repeats after `period` keys than FlexAttention for its BlockMask."""
    return period < MIN_PERIOD and period * _FEW_PERIODS < seqlen_k
