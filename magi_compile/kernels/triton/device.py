"""The device code of the Triton kernel: each program owns one tile of one head and walks its runs.

Strides are tuples (token, head, dim). Scores are `qk * factors[0]`, or, with a softcap,
`tanh(qk * factors[0]) * factors[1]`; both are in base 2. An interval is `(lo, hi, col_end)`: the
columns `[lo, hi)` that each row sees of a run, and where the columns of the run end. With `HAS_BITS` behind it stand the row of
bits that is each row's, of a block (`plan/bit_runs.py`), or -1, and the first column of the run.
"""

from __future__ import annotations

import triton
import triton.language as tl

# How many fields a tile and a run have, as `magi_compile/plan/tiles.py` orders them, and how many edges a row.
TILE_FIELDS = tl.constexpr(4)
RUN_FIELDS = tl.constexpr(12)
LANES = tl.constexpr(4)
# Rows of a bit block, and the words of each, as in `magi_compile/masks/bits.py`.
BIT_ROWS = tl.constexpr(128)
BIT_WORDS = tl.constexpr(4)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(
    base,
    strides,
    row,
    live,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """`[ROWS, PADDED_DIM]` from `row` on; 0 beyond `DIM`, and if `IS_MASKED` where not `live`."""
    dim = tl.arange(0, PADDED_DIM)
    start = base + row.to(tl.int64) * strides[0]
    pointers = start + tl.arange(0, ROWS)[:, None] * strides[0] + dim[None, :] * strides[2]
    if IS_MASKED:
        block = tl.load(pointers, mask=live[:, None] & (dim < DIM)[None, :], other=0.0)
    elif DIM != PADDED_DIM:
        block = tl.load(pointers, mask=(dim < DIM)[None, :], other=0.0)
    else:
        block = tl.load(pointers)
    return block


@triton.jit
def store_rows(base, strides, row, live, block, DIM: tl.constexpr):
    """The `live` rows of `block`, up to `DIM`, to the rows from `row` on."""
    dim = tl.arange(0, block.shape[1])
    start = base + row.to(tl.int64) * strides[0]
    pointers = (
        start + tl.arange(0, block.shape[0])[:, None] * strides[0] + dim[None, :] * strides[2]
    )
    mask = live[:, None] & (dim < DIM)[None, :]
    tl.store(pointers, block.to(base.dtype.element_ty), mask=mask)


@triton.jit
def row_interval(run, edges_ptr, rows):
    """The columns of a run that each row sees; rows outside of it see nothing."""
    in_run = (rows >= tl.load(run)) & (rows < tl.load(run + 1))
    col_end = tl.load(run + 3)
    lo = tl.maximum(rows + tl.load(run + 4), tl.load(run + 2))
    hi = tl.minimum(rows + tl.load(run + 5), col_end)
    lane = tl.load(run + 10)
    if lane > 0:
        edges = edges_ptr + (rows * LANES + lane - 1) * 2
        lo = tl.load(edges, mask=in_run, other=0)
        hi = tl.load(edges + 1, mask=in_run, other=0)
    code = tl.load(run + 11)
    bit_row = tl.where(code > 0, code - 1 + rows - tl.load(run), -1)
    return lo, tl.where(in_run, hi, lo), col_end, bit_row, tl.load(run + 6)


@triton.jit
def is_visible(cols, interval, bits_ptr, HAS_BITS: tl.constexpr, ROWS_ARE_KEYS: tl.constexpr):
    lo, hi, _, bit_row, first = interval
    visible = (cols[None, :] >= lo[:, None]) & (cols[None, :] < hi[:, None])
    if HAS_BITS:
        step = (cols - first)[None, :]
        row = bit_row[:, None]
        if ROWS_ARE_KEYS:
            place = (row // BIT_ROWS * BIT_ROWS + step).to(tl.int64) * BIT_WORDS
            bit = row % BIT_ROWS + step * 0
        else:
            place = (row + step * 0).to(tl.int64) * BIT_WORDS
            bit = step + row * 0
        word = tl.load(bits_ptr + place + bit // 32, mask=visible & (row >= 0), other=-1)
        visible = visible & (((word >> (bit & 31)) & 1) != 0)
    return visible


@triton.jit
def count_blocks(run, IS_MASKED: tl.constexpr):
    """The numbers of blocks of a run that need the mask, or need none."""
    num_masked = tl.load(run + 8) + tl.load(run + 9)
    if IS_MASKED:
        count = num_masked
    else:
        count = tl.load(run + 7) - num_masked
    return count


@triton.jit
def block_start(run, index, BLOCK_COLS: tl.constexpr, IS_MASKED: tl.constexpr):
    """The first column of the `index`-th block that needs the mask, or that needs none."""
    num_lead = tl.load(run + 8)
    if IS_MASKED:
        num_full = tl.load(run + 7) - num_lead - tl.load(run + 9)
        block = index + tl.where(index < num_lead, 0, num_full)
    else:
        block = index + num_lead
    return tl.load(run + 6) + block * BLOCK_COLS


@triton.jit
def cap_scores(qk, factors, HAS_SOFTCAP: tl.constexpr):
    """Scores in base 2, and the derivative of the cap."""
    scores = qk * factors[0]
    slope = scores
    if HAS_SOFTCAP:
        tanh = 2 * tl.sigmoid(2 * scores) - 1
        scores = tanh * factors[1]
        slope = 1 - tanh * tanh
    return scores, slope


@triton.jit
def attend_block(
    acc,
    row_sum,
    row_max,
    q,
    k_base,
    k_strides,
    v_base,
    v_strides,
    col,
    interval,
    factors,
    bits_ptr,
    BLOCK_COLS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BITS: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """One step of online softmax: the rows of the tile meet the keys from `col` on."""
    cols = col + tl.arange(0, BLOCK_COLS)
    live = cols < interval[2]
    k = load_rows(k_base, k_strides, col, live, BLOCK_COLS, DIM, q.shape[1], IS_MASKED)
    qk = tl.dot(q, tl.trans(k), input_precision="ieee")
    scores, _ = cap_scores(qk, factors, HAS_SOFTCAP)
    if IS_MASKED:
        visible = is_visible(cols, interval, bits_ptr, HAS_BITS, False)
        scores = tl.where(visible, scores, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    finite_max = new_max
    if IS_MASKED:
        # A row that has seen nothing yet must not compute -inf - -inf.
        finite_max = tl.where(new_max == -float("inf"), 0.0, new_max)
    p = tl.exp2(scores - finite_max[:, None])
    rescale = tl.exp2(row_max - finite_max)
    row_sum = row_sum * rescale + tl.sum(p, 1)
    v = load_rows(v_base, v_strides, col, live, BLOCK_COLS, DIM_V, acc.shape[1], IS_MASKED)
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, row_sum, new_max


@triton.jit
def update_max_scores(pointers, max_scores, live):
    """Each becomes the largest of itself and of these, -inf where nothing is visible; a row has one tile."""
    before = tl.load(pointers, mask=live, other=0.0)
    tl.store(pointers, tl.maximum(before, max_scores), mask=live)


@triton.jit(do_not_specialize=["total_q"])
def forward_kernel(
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
    factors,
    TILE_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    PADDED_DIM_V: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BITS: tl.constexpr,
    HAS_MAX_SCORES: tl.constexpr,
):
    """out and lse of one q tile and head, and its largest scores; the heads of a tile run together, to share K and V."""
    tile = tiles_ptr + (tl.program_id(0) // nheads_q) * TILE_FIELDS
    head = (tl.program_id(0) % nheads_q).to(tl.int64)
    kv_head = head // qhead_per_kvhead
    row_begin = tl.load(tile)
    row_end = tl.load(tile + 1)
    if row_begin == row_end:
        return

    rows = row_begin + tl.arange(0, TILE_ROWS)
    live = rows < row_end
    q_base = q_ptr + head * q_strides[1]
    k_base = k_ptr + kv_head * k_strides[1]
    v_base = v_ptr + kv_head * v_strides[1]
    q = load_rows(q_base, q_strides, row_begin, live, TILE_ROWS, DIM, PADDED_DIM, True)
    acc = tl.zeros([TILE_ROWS, PADDED_DIM_V], tl.float32)
    row_sum = tl.zeros([TILE_ROWS], tl.float32)
    row_max = tl.full([TILE_ROWS], -float("inf"), tl.float32)

    for index in range(tl.load(tile + 2), tl.load(tile + 3)):
        run = runs_ptr + index * RUN_FIELDS
        interval = row_interval(run, edges_ptr, rows)
        for is_masked in tl.static_range(2):
            for block in range(count_blocks(run, is_masked)):
                acc, row_sum, row_max = attend_block(
                    acc,
                    row_sum,
                    row_max,
                    q,
                    k_base,
                    k_strides,
                    v_base,
                    v_strides,
                    block_start(run, block, BLOCK_COLS, is_masked),
                    interval,
                    factors,
                    bits_ptr,
                    BLOCK_COLS,
                    DIM,
                    DIM_V,
                    HAS_SOFTCAP,
                    HAS_BITS,
                    is_masked,
                )

    sees_nothing = row_sum == 0.0
    out = acc / tl.where(sees_nothing, 1.0, row_sum)[:, None]
    lse = tl.where(sees_nothing, -float("inf"), (row_max + tl.log2(row_sum)) * LN_2)
    store_rows(out_ptr + head * out_strides[1], out_strides, row_begin, live, out, DIM_V)
    tl.store(lse_ptr + head * total_q + rows, lse, mask=live)
    if HAS_MAX_SCORES:
        update_max_scores(max_scores_ptr + head * total_q + rows, row_max * LN_2, live)


@triton.jit(do_not_specialize=["total_q"])
def delta_kernel(
    out_ptr,
    out_strides,
    dout_ptr,
    dout_strides,
    dlse_ptr,
    dlse_strides,
    delta_ptr,
    total_q,
    nheads_q,
    ROWS: tl.constexpr,
    DIM_V: tl.constexpr,
    PADDED_DIM_V: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):
    """delta = sum(dout * out) - dlse: what softmax subtracts from the gradient of its scores."""
    head = (tl.program_id(0) % nheads_q).to(tl.int64)
    row = (tl.program_id(0) // nheads_q) * ROWS
    rows = row + tl.arange(0, ROWS)
    live = rows < total_q
    out_base = out_ptr + head * out_strides[1]
    dout_base = dout_ptr + head * dout_strides[1]
    out = load_rows(out_base, out_strides, row, live, ROWS, DIM_V, PADDED_DIM_V, True)
    dout = load_rows(dout_base, dout_strides, row, live, ROWS, DIM_V, PADDED_DIM_V, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if HAS_DLSE:
        dlse = dlse_ptr + head * dlse_strides[0] + rows.to(tl.int64) * dlse_strides[1]
        delta -= tl.load(dlse, mask=live, other=0.0)
    tl.store(delta_ptr + head * total_q + rows, delta, mask=live)


@triton.jit
def dq_block(
    dq,
    q,
    dout,
    lse,
    delta,
    k_base,
    k_strides,
    v_base,
    v_strides,
    col,
    interval,
    factors,
    bits_ptr,
    BLOCK_COLS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BITS: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Adds what the keys from `col` on give to dq, less its factor softmax_scale."""
    cols = col + tl.arange(0, BLOCK_COLS)
    live = cols < interval[2]
    k = load_rows(k_base, k_strides, col, live, BLOCK_COLS, DIM, q.shape[1], IS_MASKED)
    v = load_rows(v_base, v_strides, col, live, BLOCK_COLS, DIM_V, dout.shape[1], IS_MASKED)
    qk = tl.dot(q, tl.trans(k), input_precision="ieee")
    dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
    scores, slope = cap_scores(qk, factors, HAS_SOFTCAP)
    dscores = tl.exp2(scores - (lse * LOG2_E)[:, None]) * (dp - delta[:, None])
    if HAS_SOFTCAP:
        dscores *= slope
    if IS_MASKED:
        visible = is_visible(cols, interval, bits_ptr, HAS_BITS, False)
        dscores = tl.where(visible, dscores, 0.0)
    return tl.dot(dscores.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["total_q"])
def dq_kernel(
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
    factors,
    TILE_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    PADDED_DIM_V: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BITS: tl.constexpr,
):
    """dq of one q tile and head."""
    tile = tiles_ptr + (tl.program_id(0) // nheads_q) * TILE_FIELDS
    head = (tl.program_id(0) % nheads_q).to(tl.int64)
    kv_head = head // qhead_per_kvhead
    row_begin = tl.load(tile)
    row_end = tl.load(tile + 1)
    if row_begin == row_end:
        return

    rows = row_begin + tl.arange(0, TILE_ROWS)
    live = rows < row_end
    q_base = q_ptr + head * q_strides[1]
    dout_base = dout_ptr + head * dout_strides[1]
    k_base = k_ptr + kv_head * k_strides[1]
    v_base = v_ptr + kv_head * v_strides[1]
    q = load_rows(q_base, q_strides, row_begin, live, TILE_ROWS, DIM, PADDED_DIM, True)
    dout = load_rows(dout_base, dout_strides, row_begin, live, TILE_ROWS, DIM_V, PADDED_DIM_V, True)
    lse = tl.load(lse_ptr + head * total_q + rows, mask=live, other=0.0)
    delta = tl.load(delta_ptr + head * total_q + rows, mask=live, other=0.0)
    dq = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)

    for index in range(tl.load(tile + 2), tl.load(tile + 3)):
        run = runs_ptr + index * RUN_FIELDS
        interval = row_interval(run, edges_ptr, rows)
        for is_masked in tl.static_range(2):
            for block in range(count_blocks(run, is_masked)):
                dq = dq_block(
                    dq,
                    q,
                    dout,
                    lse,
                    delta,
                    k_base,
                    k_strides,
                    v_base,
                    v_strides,
                    block_start(run, block, BLOCK_COLS, is_masked),
                    interval,
                    factors,
                    bits_ptr,
                    BLOCK_COLS,
                    DIM,
                    DIM_V,
                    HAS_SOFTCAP,
                    HAS_BITS,
                    is_masked,
                )

    dq *= softmax_scale
    store_rows(dq_ptr + head * dq_strides[1], dq_strides, row_begin, live, dq, DIM)


@triton.jit
def dkdv_block(
    dk,
    dv,
    k,
    v,
    q_base,
    q_strides,
    dout_base,
    dout_strides,
    lse_base,
    delta_base,
    col,
    interval,
    factors,
    bits_ptr,
    BLOCK_COLS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BITS: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Adds what the queries from `col` on give to dv, and to dk less its factor softmax_scale.

    As in the k walk of a plan, keys are the rows and queries the columns of the scores.
    """
    cols = col + tl.arange(0, BLOCK_COLS)
    live = cols < interval[2]
    q = load_rows(q_base, q_strides, col, live, BLOCK_COLS, DIM, k.shape[1], IS_MASKED)
    dout = load_rows(dout_base, dout_strides, col, live, BLOCK_COLS, DIM_V, v.shape[1], IS_MASKED)
    if IS_MASKED:
        lse = tl.load(lse_base + cols, mask=live, other=0.0)
        delta = tl.load(delta_base + cols, mask=live, other=0.0)
    else:
        lse = tl.load(lse_base + cols)
        delta = tl.load(delta_base + cols)
    kq = tl.dot(k, tl.trans(q), input_precision="ieee")
    scores, slope = cap_scores(kq, factors, HAS_SOFTCAP)
    p = tl.exp2(scores - (lse * LOG2_E)[None, :])
    if IS_MASKED:
        p = tl.where(is_visible(cols, interval, bits_ptr, HAS_BITS, True), p, 0.0)
    dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
    dp = tl.dot(v, tl.trans(dout), input_precision="ieee")
    dscores = p * (dp - delta[None, :])
    if HAS_SOFTCAP:
        dscores *= slope
    dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["total_q"])
def dkdv_kernel(
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
    factors,
    TILE_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    PADDED_DIM_V: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BITS: tl.constexpr,
):
    """dk and dv of one k tile and kv head; the sum over its q heads stays in registers."""
    tile = tiles_ptr + (tl.program_id(0) // nheads_kv) * TILE_FIELDS
    kv_head = (tl.program_id(0) % nheads_kv).to(tl.int64)
    row_begin = tl.load(tile)
    row_end = tl.load(tile + 1)
    if row_begin == row_end:
        return

    rows = row_begin + tl.arange(0, TILE_ROWS)
    live = rows < row_end
    k_base = k_ptr + kv_head * k_strides[1]
    v_base = v_ptr + kv_head * v_strides[1]
    k = load_rows(k_base, k_strides, row_begin, live, TILE_ROWS, DIM, PADDED_DIM, True)
    v = load_rows(v_base, v_strides, row_begin, live, TILE_ROWS, DIM_V, PADDED_DIM_V, True)
    dk = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
    dv = tl.zeros([TILE_ROWS, PADDED_DIM_V], tl.float32)

    run_begin = tl.load(tile + 2)
    run_end = tl.load(tile + 3)
    for head_in_group in range(qhead_per_kvhead):
        head = kv_head * qhead_per_kvhead + head_in_group
        for index in range(run_begin, run_end):
            run = runs_ptr + index * RUN_FIELDS
            interval = row_interval(run, edges_ptr, rows)
            for is_masked in tl.static_range(2):
                for block in range(count_blocks(run, is_masked)):
                    dk, dv = dkdv_block(
                        dk,
                        dv,
                        k,
                        v,
                        q_ptr + head * q_strides[1],
                        q_strides,
                        dout_ptr + head * dout_strides[1],
                        dout_strides,
                        lse_ptr + head * total_q,
                        delta_ptr + head * total_q,
                        block_start(run, block, BLOCK_COLS, is_masked),
                        interval,
                        factors,
                        bits_ptr,
                        BLOCK_COLS,
                        DIM,
                        DIM_V,
                        HAS_SOFTCAP,
                        HAS_BITS,
                        is_masked,
                    )

    dk *= softmax_scale
    store_rows(dk_ptr + kv_head * dk_strides[1], dk_strides, row_begin, live, dk, DIM)
    store_rows(dv_ptr + kv_head * dv_strides[1], dv_strides, row_begin, live, dv, DIM_V)
