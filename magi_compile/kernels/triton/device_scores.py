"""The device code of attention with a score program: the walks of `device.py`, with scores that a generated function changes.

`SCORES`, `SLOPES` and `ADD_GRADIENTS` are the functions of `score_source.py`. Tuples hold what they read: the captured tensors, their
sizes one behind the other, and the captured ints. `numbering` is `(seqlen_q, seqlen_k, nheads)` of `ScoreCall`. All blocks are masked, so
that no pair counts, or has its gradients added, which is not there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from magi_compile.kernels.triton.device import (
    LN_2,
    LOG2_E,
    RUN_FIELDS,
    TILE_FIELDS,
    is_visible,
    load_rows,
    row_interval,
    store_rows,
    update_max_scores,
)


@triton.jit
def place_of(rows, head, numbering, BY_ENTRY: tl.constexpr):
    """Batch entry, head and query of packed rows."""
    entry = rows // numbering[0]
    query = rows % numbering[0]
    if BY_ENTRY:
        b = entry // numbering[2]
        h = entry % numbering[2]
    else:
        b = entry
        h = entry * 0 + head
    return b, h, query


@triton.jit(do_not_specialize=["total_q"])
def scored_forward_kernel(
    q_ptr,
    q_strides,
    k_ptr,
    k_strides,
    v_ptr,
    v_strides,
    out_ptr,
    out_strides,
    lse_ptr,
    max_scores_ptr,
    tiles_ptr,
    runs_ptr,
    edges_ptr,
    bits_ptr,
    total_q,
    nheads_q,
    qhead_per_kvhead,
    softmax_scale,
    numbering,
    tables,
    sizes,
    symbols,
    SCORES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    PADDED_DIM_V: tl.constexpr,
    HAS_BITS: tl.constexpr,
    BY_ENTRY: tl.constexpr,
    HAS_MAX_SCORES: tl.constexpr,
):
    """out and lse of one q tile and head, and its largest scores."""
    tile = tiles_ptr + (tl.program_id(0) // nheads_q) * TILE_FIELDS
    head = tl.program_id(0) % nheads_q
    kv_head = (head // qhead_per_kvhead).to(tl.int64)
    row_begin = tl.load(tile)
    row_end = tl.load(tile + 1)
    if row_begin == row_end:
        return

    rows = row_begin + tl.arange(0, TILE_ROWS)
    live = rows < row_end
    b, h, query = place_of(rows[:, None], head, numbering, BY_ENTRY)
    q_base = q_ptr + head.to(tl.int64) * q_strides[1]
    q = load_rows(q_base, q_strides, row_begin, live, TILE_ROWS, DIM, PADDED_DIM, True)
    acc = tl.zeros([TILE_ROWS, PADDED_DIM_V], tl.float32)
    row_sum = tl.zeros([TILE_ROWS], tl.float32)
    row_max = tl.full([TILE_ROWS], -float("inf"), tl.float32)

    for index in range(tl.load(tile + 2), tl.load(tile + 3)):
        run = runs_ptr + index * RUN_FIELDS
        interval = row_interval(run, edges_ptr, rows)
        for block in range(tl.load(run + 7)):
            col = tl.load(run + 6) + block * BLOCK_COLS
            cols = col + tl.arange(0, BLOCK_COLS)
            k_live = cols < interval[2]
            k_base = k_ptr + kv_head * k_strides[1]
            v_base = v_ptr + kv_head * v_strides[1]
            k = load_rows(k_base, k_strides, col, k_live, BLOCK_COLS, DIM, PADDED_DIM, True)
            v = load_rows(v_base, v_strides, col, k_live, BLOCK_COLS, DIM_V, PADDED_DIM_V, True)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * softmax_scale
            shown = is_visible(cols, interval, bits_ptr, HAS_BITS, False)
            kv = (cols % numbering[1])[None, :]
            scores = SCORES(scores, b, h, query, kv, shown, tables, sizes, symbols)
            scores = tl.where(shown, scores * LOG2_E, -float("inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            # A row without scores yet must not compute -inf - -inf.
            finite_max = tl.where(new_max == -float("inf"), 0.0, new_max)
            p = tl.exp2(scores - finite_max[:, None])
            rescale = tl.exp2(row_max - finite_max)
            row_sum = row_sum * rescale + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
            row_max = new_max

    sees_nothing = row_sum == 0.0
    out = acc / tl.where(sees_nothing, 1.0, row_sum)[:, None]
    lse = tl.where(sees_nothing, -float("inf"), (row_max + tl.log2(row_sum)) * LN_2)
    out_base = out_ptr + head.to(tl.int64) * out_strides[1]
    store_rows(out_base, out_strides, row_begin, live, out, DIM_V)
    tl.store(lse_ptr + head.to(tl.int64) * total_q + rows, lse, mask=live)
    if HAS_MAX_SCORES:
        pointers = max_scores_ptr + head.to(tl.int64) * total_q + rows
        update_max_scores(pointers, row_max * LN_2, live)


@triton.jit(do_not_specialize=["total_q"])
def scored_dq_kernel(
    q_ptr,
    q_strides,
    k_ptr,
    k_strides,
    v_ptr,
    v_strides,
    dout_ptr,
    dout_strides,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    dq_strides,
    tiles_ptr,
    runs_ptr,
    edges_ptr,
    bits_ptr,
    total_q,
    nheads_q,
    qhead_per_kvhead,
    softmax_scale,
    numbering,
    tables,
    sizes,
    symbols,
    totals,
    SCORES: tl.constexpr,
    SLOPES: tl.constexpr,
    ADD_GRADIENTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    PADDED_DIM_V: tl.constexpr,
    HAS_BITS: tl.constexpr,
    BY_ENTRY: tl.constexpr,
    HAS_TOTALS: tl.constexpr,
):
    """dq of one q tile and head, and what its pairs give to the gradients of the captured tensors."""
    tile = tiles_ptr + (tl.program_id(0) // nheads_q) * TILE_FIELDS
    head = tl.program_id(0) % nheads_q
    kv_head = (head // qhead_per_kvhead).to(tl.int64)
    row_begin = tl.load(tile)
    row_end = tl.load(tile + 1)
    if row_begin == row_end:
        return

    rows = row_begin + tl.arange(0, TILE_ROWS)
    live = rows < row_end
    b, h, query = place_of(rows[:, None], head, numbering, BY_ENTRY)
    wide_head = head.to(tl.int64)
    q_base = q_ptr + wide_head * q_strides[1]
    dout_base = dout_ptr + wide_head * dout_strides[1]
    q = load_rows(q_base, q_strides, row_begin, live, TILE_ROWS, DIM, PADDED_DIM, True)
    dout = load_rows(dout_base, dout_strides, row_begin, live, TILE_ROWS, DIM_V, PADDED_DIM_V, True)
    lse = tl.load(lse_ptr + wide_head * total_q + rows, mask=live, other=0.0)
    lse = tl.where(lse == -float("inf"), 0.0, lse)
    delta = tl.load(delta_ptr + wide_head * total_q + rows, mask=live, other=0.0)
    dq = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)

    for index in range(tl.load(tile + 2), tl.load(tile + 3)):
        run = runs_ptr + index * RUN_FIELDS
        interval = row_interval(run, edges_ptr, rows)
        for block in range(tl.load(run + 7)):
            col = tl.load(run + 6) + block * BLOCK_COLS
            cols = col + tl.arange(0, BLOCK_COLS)
            k_live = cols < interval[2]
            k_base = k_ptr + kv_head * k_strides[1]
            v_base = v_ptr + kv_head * v_strides[1]
            k = load_rows(k_base, k_strides, col, k_live, BLOCK_COLS, DIM, PADDED_DIM, True)
            v = load_rows(v_base, v_strides, col, k_live, BLOCK_COLS, DIM_V, PADDED_DIM_V, True)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * softmax_scale
            dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
            shown = is_visible(cols, interval, bits_ptr, HAS_BITS, False)
            kv = (cols % numbering[1])[None, :]
            new = SCORES(scores, b, h, query, kv, shown, tables, sizes, symbols)
            p = tl.where(shown, tl.exp2((new - lse[:, None]) * LOG2_E), 0.0)
            g = p * (dp - delta[:, None])
            slopes = SLOPES(g, scores, b, h, query, kv, shown, tables, sizes, symbols)
            slopes = tl.where(shown, slopes, 0.0)
            if HAS_TOTALS:
                ADD_GRADIENTS(totals, g, scores, b, h, query, kv, shown, tables, sizes, symbols)
            dq = tl.dot(slopes.to(k.dtype), k, dq, input_precision="ieee")

    dq *= softmax_scale
    store_rows(dq_ptr + wide_head * dq_strides[1], dq_strides, row_begin, live, dq, DIM)


@triton.jit(do_not_specialize=["total_q"])
def scored_dkdv_kernel(
    q_ptr,
    q_strides,
    k_ptr,
    k_strides,
    v_ptr,
    v_strides,
    dout_ptr,
    dout_strides,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dk_strides,
    dv_ptr,
    dv_strides,
    tiles_ptr,
    runs_ptr,
    edges_ptr,
    bits_ptr,
    total_q,
    nheads_kv,
    qhead_per_kvhead,
    softmax_scale,
    numbering,
    tables,
    sizes,
    symbols,
    SCORES: tl.constexpr,
    SLOPES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    PADDED_DIM_V: tl.constexpr,
    HAS_BITS: tl.constexpr,
    BY_ENTRY: tl.constexpr,
):
    """dk and dv of one k tile and kv head; keys are the rows and queries the columns of the scores."""
    tile = tiles_ptr + (tl.program_id(0) // nheads_kv) * TILE_FIELDS
    kv_head = (tl.program_id(0) % nheads_kv).to(tl.int64)
    row_begin = tl.load(tile)
    row_end = tl.load(tile + 1)
    if row_begin == row_end:
        return

    rows = row_begin + tl.arange(0, TILE_ROWS)
    live = rows < row_end
    kv = (rows % numbering[1])[:, None]
    k_base = k_ptr + kv_head * k_strides[1]
    v_base = v_ptr + kv_head * v_strides[1]
    k = load_rows(k_base, k_strides, row_begin, live, TILE_ROWS, DIM, PADDED_DIM, True)
    v = load_rows(v_base, v_strides, row_begin, live, TILE_ROWS, DIM_V, PADDED_DIM_V, True)
    dk = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
    dv = tl.zeros([TILE_ROWS, PADDED_DIM_V], tl.float32)

    for head_in_group in range(qhead_per_kvhead):
        head = kv_head * qhead_per_kvhead + head_in_group
        for index in range(tl.load(tile + 2), tl.load(tile + 3)):
            run = runs_ptr + index * RUN_FIELDS
            interval = row_interval(run, edges_ptr, rows)
            for block in range(tl.load(run + 7)):
                col = tl.load(run + 6) + block * BLOCK_COLS
                cols = col + tl.arange(0, BLOCK_COLS)
                q_live = cols < interval[2]
                b, h, query = place_of(cols[None, :], head.to(tl.int32), numbering, BY_ENTRY)
                q_base = q_ptr + head * q_strides[1]
                dout_base = dout_ptr + head * dout_strides[1]
                q = load_rows(q_base, q_strides, col, q_live, BLOCK_COLS, DIM, PADDED_DIM, True)
                dout = load_rows(
                    dout_base, dout_strides, col, q_live, BLOCK_COLS, DIM_V, PADDED_DIM_V, True
                )
                lse = tl.load(lse_ptr + head * total_q + cols, mask=q_live, other=0.0)
                lse = tl.where(lse == -float("inf"), 0.0, lse)
                delta = tl.load(delta_ptr + head * total_q + cols, mask=q_live, other=0.0)
                scores = tl.dot(k, tl.trans(q), input_precision="ieee") * softmax_scale
                shown = is_visible(cols, interval, bits_ptr, HAS_BITS, True)
                new = SCORES(scores, b, h, query, kv, shown, tables, sizes, symbols)
                p = tl.where(shown, tl.exp2((new - lse[None, :]) * LOG2_E), 0.0)
                dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
                dp = tl.dot(v, tl.trans(dout), input_precision="ieee")
                g = p * (dp - delta[None, :])
                slopes = SLOPES(g, scores, b, h, query, kv, shown, tables, sizes, symbols)
                slopes = tl.where(shown, slopes, 0.0)
                dk = tl.dot(slopes.to(q.dtype), q, dk, input_precision="ieee")

    dk *= softmax_scale
    store_rows(dk_ptr + kv_head * dk_strides[1], dk_strides, row_begin, live, dk, DIM)
    store_rows(dv_ptr + kv_head * dv_strides[1], dv_strides, row_begin, live, dv, DIM_V)
