"""The parameters of the kernels of `csrc/sm90`, field by field as in the sources; `tests/kernels/sm90/test_params.py`
asks the compiler whether they are."""

from __future__ import annotations

from functools import cache

from magi_compile.kernels.sm90.runtime.structs import ADDRESS, FLOAT, INT, LONG, TENSOR_MAP, Struct


def _addresses(*names: str) -> dict[str, object]:
    return dict.fromkeys(names, ADDRESS)


def _ints(*names: str) -> dict[str, object]:
    return dict.fromkeys(names, INT)


# common/scheduler.cuh, forward/params.cuh, forward/combine.cu, planner/split_tiles.cu

SCHEDULE = Struct(
    "Schedule",
    _addresses("tiles", "ticket")
    | _ints("num_tiles", "num_heads", "heads_per_section", "tiles_of_head"),
)
FORWARD = Struct(
    "forward::ForwardParams",
    {"q": TENSOR_MAP, "k": (TENSOR_MAP, 2), "v": (TENSOR_MAP, 2), "out": TENSOR_MAP}
    | _addresses("out_rows", "lse", "wide_out", "wide_lse", "prior_out", "prior_lse")
    | {"wide_rows": LONG}
    | _addresses("runs", "edges", "split_shifts")
    | {"schedule": SCHEDULE}
    | _ints("total_q", "qhead_per_kvhead", "remote_begin")
    | {"scale_log2": FLOAT, "cap_scale": FLOAT, "out_row_stride": LONG, "out_head_stride": LONG}
    | _addresses("max_scores"),
)
SEQUENCES = Struct("Sequences", _ints("length", "heads"))


def _score_params(num_words: int) -> dict[str, object]:
    """The fields of a score program; words of 8 bytes, some of them addresses."""
    score = Struct(
        f"ScoreParams<{num_words}>",
        {"queries": SEQUENCES, "keys": SEQUENCES, "words": (ADDRESS, num_words)},
    )
    return {"score": score}


@cache
def params_of(base: Struct, has_bits: bool = False, num_words: int | None = None) -> Struct:
    """The parameters of a main kernel of attention.

    Args:
        base: `FORWARD` or `BACKWARD`, the fields of every such kernel.
        has_bits: whether it reads bit blocks, or blocks of its map ask.
        num_words: those of its score program, which reads bit blocks as well; None without one.

    Returns:
        The struct of the kernel that is compiled for these.
    """
    room, _, name = base.name.partition("::")
    if num_words is not None:
        fields = _addresses("bits", "table") | _score_params(num_words)
        return Struct(f"{room}::Scored{name}<{num_words}>", fields, base=base)
    return (
        Struct(f"{room}::Bits{name}", _addresses("bits", "table"), base=base) if has_bits else base
    )


EARLY_FORWARD = Struct(
    "forward::EarlyForwardParams",
    {"lists": (SCHEDULE, 3)}
    | _addresses("remote_tiles", "num_begun_splits", "num_stored")
    | _ints("split_rows", "first_behind"),
    base=FORWARD,
)
MERGE = Struct(
    "forward::MergeParams",
    _addresses("split_out", "split_lse", "out", "lse", "cuts")
    | {"out_row_stride": LONG, "out_head_stride": LONG}
    | _ints("num_cuts", "tile_rows", "num_heads", "total_q", "split_rows"),
)
SPLIT_TILES = Struct(
    "SplitTilesParams",
    _addresses("tiles", "runs", "split_runs", "split_tiles", "cuts", "split_shifts")
    | _ints("num_tiles", "num_runs", "max_splits", "num_sms")
    | _ints("least_blocks", "tile_rows", "block_cols"),
)

EARLY_TILES = Struct(
    "EarlyTilesParams",
    _addresses("tiles", "runs", "parted_runs", "remote_tiles", "remote_splits", "local_tiles")
    | _addresses("split_tiles", "order", "run_mid", "split_of", "before")
    | _ints("num_tiles", "num_splits", "num_sorted", "remote_begin"),
)

# planner/tile_plan.cu

WALK = Struct(
    "Walk",
    _addresses("tiles", "runs", "edges", "scratch")
    | _ints("num_tiles", "max_runs", "max_regions", "total_rows")
    | _ints("tile_rows", "block_cols", "num_sorted", "num_slices", "max_bit_runs"),
)
TILE_PLAN = Struct(
    "TilePlanParams",
    _addresses("q_ranges", "k_ranges", "mask_types", "flag") | {"walks": (WALK, 2)},
)

# backward/params.cuh, backward/preprocess.cu, backward/postprocess.cu

DQ_SUMS = Struct("backward::DqSums", {"data": ADDRESS, "row_groups": INT})
DQ_ITEMS = Struct(
    "backward::DqItems",
    {"sums": DQ_SUMS, "dq": ADDRESS}
    | _ints("total_q", "num_heads", "qhead_per_kvhead")
    | {"softmax_scale": FLOAT},
)
DQ_VISITS = Struct("backward::DqVisits", _addresses("done", "wanted", "turns"))
AGENDA = Struct(
    "backward::Agenda",
    _addresses("entries", "num_entries", "counters", "arrivals", "partials")
    | _ints("num_heads", "heads_per_section"),
)
AGENDA_WRITER = Struct(
    "backward::AgendaWriter::Params",
    _addresses("tiles", "runs")
    | {"agenda": AGENDA, "scratch": ADDRESS}
    | _ints("num_tiles", "num_slots", "qhead_per_kvhead", "num_blocks")
    | _ints("is_one_way", "most_heads_of_pass", "blocks_of_cache", "least_visits_of_pass")
    | _ints("passes_of_map"),
)
QUERY_LINES = Struct(
    "backward::QueryLines",
    _addresses("words")
    | _ints("seqlen", "rows", "lines_of_entry", "lines_of_head")
    | _ints("num_words", "blocks_of_tile", "tiles_of_entry"),
)
BACKWARD = Struct(
    "backward::BackwardParams",
    dict.fromkeys(("q", "dout", "k", "v", "stats", "dk", "dv"), TENSOR_MAP)
    | _addresses("dk_rows", "dv_rows")
    | {"dq": DQ_ITEMS, "visits": DQ_VISITS}
    | _addresses("dq_progress", "runs", "edges")
    | {"qhead_per_kvhead": INT, "scale_log2": FLOAT, "cap_scale": FLOAT, "tiles_of_head": INT}
    | {"tiles": ADDRESS, "agenda": AGENDA, "query_lines": QUERY_LINES},
)
PREPROCESS = Struct(
    "backward::PreprocessParams",
    _addresses("out", "dout", "lse", "dlse", "stats")
    | {"dq": DQ_SUMS}
    | _addresses("done", "wanted", "dq_progress")
    | dict.fromkeys(
        ("out_row_stride", "out_head_stride", "dout_row_stride", "dout_head_stride"), LONG
    )
    | {"total_q": INT, "lse_factor": FLOAT, "agenda": AGENDA_WRITER},
)
POSTPROCESS = Struct("backward::PostprocessParams", {"items": DQ_ITEMS, "progress": ADDRESS})

# scores/gradients/params.cuh


@cache
def table_gradients_params(num_words: int, num_sums: int) -> Struct:
    """The parameters of the kernel of gradients of captured tensors."""
    score = _score_params(num_words)["score"]
    return Struct(
        f"scores::TableGradientsParams<{num_words}, {num_sums}>",
        dict.fromkeys(("q", "dout", "k", "v"), TENSOR_MAP)
        | _addresses("lse", "stats", "runs", "edges", "bits")
        | {"sums": (ADDRESS, num_sums), "schedule": SCHEDULE}
        | _ints("total_q", "padded_q", "qhead_per_kvhead")
        | {"scale_log2": FLOAT, "cap_scale": FLOAT, "score": score},
    )


# masks/mask_slices.cuh, masks/mask_slices.cu, planner/block_map.cu, masks/block_lists.cu, masks/mask_bits.cuh,
# masks/mask_bits.cu

MASK_SLICES = Struct(
    "MaskSlicesParams",
    _addresses("q_ranges", "k_ranges", "mask_types", "intervals", "scratch", "broken")
    | _addresses("num_arrived")
    | _ints("batch", "seqlen_q", "seqlen_k", "capacity", "heads", "heads_per_group"),
)
BLOCK_LIST = Struct(
    "BlockList",
    _addresses("num_blocks", "indices")
    | {"num_blocks_strides": (LONG, 3), "indices_strides": (LONG, 4)}
    | _ints("num_heads", "num_columns"),
)
MAPPED_WALK = Struct(
    "MappedWalk",
    _addresses("tiles", "runs", "words", "asks")
    | _ints("tile_rows", "block_cols", "num_lines", "num_tiles", "num_words")
    | _ints("total_rows", "total_cols", "is_sorted"),
)
TABLE_WALK = Struct(
    "TableWalk", _addresses("blocks", "places", "lines") | _ints("num_blocks", "num_words")
)
BLOCK_TABLE = Struct(
    "BlockTable",
    _addresses("listed", "beside", "cells")
    | {"listed_strides": (LONG, 2), "beside_strides": (LONG, 2), "walks": (TABLE_WALK, 2)},
)
BLOCK_MAP = Struct(
    "BlockMapParams",
    {"lists": (BLOCK_LIST, 2)}
    | _addresses("given_intervals", "intervals", "spans")
    | _ints("num_intervals", "num_together", "seqlen_q")
    | _addresses("broken", "num_done", "counts")
    | {"flags": (ADDRESS, 3)}
    | _ints("batch", "heads", "block_rows", "block_keys", "num_q", "num_k", "list_words")
    | {"walks": (MAPPED_WALK, 2), "table": BLOCK_TABLE},
)
BLOCK_LISTS = Struct(
    "BlockListsParams",
    _addresses("intervals", "broken", "found", "num_done", "q_ranges", "k_ranges", "mask_types")
    | {"flags": (ADDRESS, 2), "partial": BLOCK_LIST, "full": BLOCK_LIST}
    | _ints("num_lanes", "batch", "seqlen_q", "seqlen_k", "block_rows", "block_keys")
    | _ints("num_checks", "capacity", "heads", "heads_per_group"),
)


def mask_program_params(num_words: int) -> Struct:
    """The parameters of the kernel of a program: words of 8 bytes are behind the common fields, and some of them are
    addresses."""
    return Struct("MaskProgramParams", {"fixed": MASK_SLICES, "words": (ADDRESS, num_words)})


MASK_BITS = Struct(
    "MaskBitsParams",
    _addresses("q_ranges", "k_ranges", "mask_types", "bits", "found", "num_done")
    | _addresses("partial", "full")
    | _ints("heads_q", "heads_kv", "seqlen_q", "seqlen_k")
    | _ints("list_batch", "list_heads", "list_rows", "list_keys"),
)


def mask_mod_params(num_words: int) -> Struct:
    """The parameters of the kernel of a mask_mod; words as for the kernel of a program."""
    return Struct("MaskModParams", {"fixed": MASK_BITS, "words": (ADDRESS, num_words)})
