"""The device code of the Triton kernel: each program owns one tile of one head and walks its runs.

A tensor of rows is `(base, strides)`, with the strides (token, head, dim). An interval is `(lo, hi, col_end)`: the
columns `[lo, hi)` that each row sees of a run, and where the columns of the run end. With `HAS_BITS` behind it stand
the row of bits that is each row's, of a block (`plan/bit_runs.py`), or -1, and the first column of the run.

Scores are in base 2: `qk * factors[0]`; with a softcap `tanh(qk * factors[0]) * factors[1]`; with a score program
`SCORES(qk * factors[0], ...) * factors[1]`. `SCORES`, `SLOPES` and `ADD_GRADIENTS` are functions that `score_source.py`
makes of the program, and None without one, like what they are given: `numbering` is `(seqlen_q, seqlen_k, nheads)` of
its `ScoreCall`, and `captured` is `(tables, sizes, symbols)`. With a program all blocks are masked: no pair counts, or
has its gradients added, which is not there.
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
    tensor,
    row,
    live,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """`[ROWS, PADDED_DIM]` from `row` on; 0 beyond `DIM`, and if `IS_MASKED` where not `live`."""
    base, strides = tensor
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
def store_rows(tensor, row, live, block, DIM: tl.constexpr):
    """The `live` rows of `block`, up to `DIM`, to the rows from `row` on."""
    base, strides = tensor
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
def hide(
    values,
    other,
    visible,
    cols,
    interval,
    bits_ptr,
    HAS_BITS: tl.constexpr,
    ROWS_ARE_KEYS: tl.constexpr,
):
    """`other` at hidden pairs. `visible` is there with a program, which needs it;
    else it would hold registers while products run."""
    if visible is None:
        visible = is_visible(cols, interval, bits_ptr, HAS_BITS, ROWS_ARE_KEYS)
    return tl.where(visible, values, other)


@triton.jit
def count_blocks(run, IS_MASKED: tl.constexpr, ALL_MASKED: tl.constexpr):
    """The numbers of blocks of a run that need the mask, or need none."""
    if ALL_MASKED:
        count = tl.load(run + 7)
    else:
        num_masked = tl.load(run + 8) + tl.load(run + 9)
        if IS_MASKED:
            count = num_masked
        else:
            count = tl.load(run + 7) - num_masked
    return count


@triton.jit
def block_start(
    run, index, BLOCK_COLS: tl.constexpr, IS_MASKED: tl.constexpr, ALL_MASKED: tl.constexpr
):
    """The first column of the `index`-th block that needs the mask, or that needs none."""
    if ALL_MASKED:
        block = index
    else:
        num_lead = tl.load(run + 8)
        if IS_MASKED:
            num_full = tl.load(run + 7) - num_lead - tl.load(run + 9)
            block = index + tl.where(index < num_lead, 0, num_full)
        else:
            block = index + num_lead
    return tl.load(run + 6) + block * BLOCK_COLS


@triton.jit
def queries_of(rows, head, numbering):
    """Batch entry, head and query of packed rows, for a score program; where heads are batch entries `head` is 0."""
    queries = rows, rows, rows
    if numbering is not None:
        entry = rows // numbering[0]
        seqlen_q, _, nheads = numbering
        queries = entry // nheads, entry % nheads + head.to(tl.int32), rows % seqlen_q
    return queries


@triton.jit
def keys_of(rows, numbering):
    """The keys of packed rows, for a score program."""
    if numbering is not None:
        rows = rows % numbering[1]
    return rows


@triton.jit
def change_scores(
    qk, place, visible, factors, captured, HAS_SOFTCAP: tl.constexpr, SCORES: tl.constexpr
):
    """Scores in base 2, and what `differentiate_scores` takes: those before a program, or the derivative of the cap."""
    scores = qk * factors[0]
    kept = scores
    if SCORES is not None:
        scores = SCORES(kept, *place, visible, captured) * factors[1]
    elif HAS_SOFTCAP:
        tanh = 2 * tl.sigmoid(2 * scores) - 1
        scores = tanh * factors[1]
        kept = 1 - tanh * tanh
    return scores, kept


@triton.jit
def differentiate_scores(
    g, kept, place, visible, captured, HAS_SOFTCAP: tl.constexpr, SLOPES: tl.constexpr
):
    """The gradient of `qk * softmax_scale` from `g`, that of the changed scores."""
    if SLOPES is not None:
        g = SLOPES(g, kept, *place, visible, captured)
    elif HAS_SOFTCAP:
        g *= kept
    return g


@triton.jit
def finite_lse(lse, SCORES: tl.constexpr):
    """0 where a program has left a row without a score, so that nothing computes -inf - -inf."""
    if SCORES is not None:
        lse = tl.where(lse == -float("inf"), 0.0, lse)
    return lse


@triton.jit
def attend_block(
    acc,
    row_sum,
    row_max,
    q,
    k_rows,
    v_rows,
    col,
    interval,
    queries,
    factors,
    bits_ptr,
    numbering,
    captured,
    BLOCK_COLS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BITS: tl.constexpr,
    IS_MASKED: tl.constexpr,
    SCORES: tl.constexpr,
):
    """One step of online softmax: the rows of the tile meet the keys from `col` on."""
    cols = col + tl.arange(0, BLOCK_COLS)
    live = cols < interval[2]
    visible = None
    if SCORES is not None:
        visible = is_visible(cols, interval, bits_ptr, HAS_BITS, False)
    k = load_rows(k_rows, col, live, BLOCK_COLS, DIM, q.shape[1], IS_MASKED)
    qk = tl.dot(q, tl.trans(k), input_precision="ieee")
    b, h, query = queries
    place = b, h, query, keys_of(cols[None, :], numbering)
    scores, _ = change_scores(qk, place, visible, factors, captured, HAS_SOFTCAP, SCORES)
    if IS_MASKED:
        scores = hide(scores, -float("inf"), visible, cols, interval, bits_ptr, HAS_BITS, False)
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    finite_max = new_max
    if IS_MASKED:
        # A row that has seen nothing yet must not compute -inf - -inf.
        finite_max = tl.where(new_max == -float("inf"), 0.0, new_max)
    p = tl.exp2(scores - finite_max[:, None])
    rescale = tl.exp2(row_max - finite_max)
    row_sum = row_sum * rescale + tl.sum(p, 1)
    v = load_rows(v_rows, col, live, BLOCK_COLS, DIM_V, acc.shape[1], IS_MASKED)
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
    numbering,
    captured,
    TILE_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    PADDED_DIM_V: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BITS: tl.constexpr,
    SCORES: tl.constexpr,
    HAS_MAX_SCORES: tl.constexpr,
):
    """out and lse of one q tile and head, and its largest scores; the heads of a tile run together,
    to share K and V."""
    tile = tiles_ptr + (tl.program_id(0) // nheads_q) * TILE_FIELDS
    head = (tl.program_id(0) % nheads_q).to(tl.int64)
    kv_head = head // qhead_per_kvhead
    row_begin = tl.load(tile)
    row_end = tl.load(tile + 1)
    if row_begin == row_end:
        return

    rows = row_begin + tl.arange(0, TILE_ROWS)
    live = rows < row_end
    queries = queries_of(rows[:, None], head, numbering)
    all_masked: tl.constexpr = SCORES is not None
    q_rows = q_ptr + head * q_strides[1], q_strides
    k_rows = k_ptr + kv_head * k_strides[1], k_strides
    v_rows = v_ptr + kv_head * v_strides[1], v_strides
    q = load_rows(q_rows, row_begin, live, TILE_ROWS, DIM, PADDED_DIM, True)
    acc = tl.zeros([TILE_ROWS, PADDED_DIM_V], tl.float32)
    row_sum = tl.zeros([TILE_ROWS], tl.float32)
    row_max = tl.full([TILE_ROWS], -float("inf"), tl.float32)

    for index in range(tl.load(tile + 2), tl.load(tile + 3)):
        run = runs_ptr + index * RUN_FIELDS
        interval = row_interval(run, edges_ptr, rows)
        for is_masked in tl.static_range(all_masked, 2):
            for block in range(count_blocks(run, is_masked, all_masked)):
                acc, row_sum, row_max = attend_block(
                    acc,
                    row_sum,
                    row_max,
                    q,
                    k_rows,
                    v_rows,
                    block_start(run, block, BLOCK_COLS, is_masked, all_masked),
                    interval,
                    queries,
                    factors,
                    bits_ptr,
                    numbering,
                    captured,
                    BLOCK_COLS,
                    DIM,
                    DIM_V,
                    HAS_SOFTCAP,
                    HAS_BITS,
                    is_masked,
                    SCORES,
                )

    sees_nothing = row_sum == 0.0
    out = acc / tl.where(sees_nothing, 1.0, row_sum)[:, None]
    lse = tl.where(sees_nothing, -float("inf"), (row_max + tl.log2(row_sum)) * LN_2)
    out_rows = out_ptr + head * out_strides[1], out_strides
    store_rows(out_rows, row_begin, live, out, DIM_V)
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
    out_rows = out_ptr + head * out_strides[1], out_strides
    dout_rows = dout_ptr + head * dout_strides[1], dout_strides
    out = load_rows(out_rows, row, live, ROWS, DIM_V, PADDED_DIM_V, True)
    dout = load_rows(dout_rows, row, live, ROWS, DIM_V, PADDED_DIM_V, True)
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
    k_rows,
    v_rows,
    col,
    interval,
    queries,
    factors,
    bits_ptr,
    numbering,
    captured,
    totals,
    BLOCK_COLS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BITS: tl.constexpr,
    IS_MASKED: tl.constexpr,
    SCORES: tl.constexpr,
    SLOPES: tl.constexpr,
    ADD_GRADIENTS: tl.constexpr,
):
    """Adds what the keys from `col` on give to dq, less its factor softmax_scale,
    and to the gradients of captured tensors."""
    cols = col + tl.arange(0, BLOCK_COLS)
    live = cols < interval[2]
    visible = None
    if SCORES is not None:
        visible = is_visible(cols, interval, bits_ptr, HAS_BITS, False)
    k = load_rows(k_rows, col, live, BLOCK_COLS, DIM, q.shape[1], IS_MASKED)
    v = load_rows(v_rows, col, live, BLOCK_COLS, DIM_V, dout.shape[1], IS_MASKED)
    qk = tl.dot(q, tl.trans(k), input_precision="ieee")
    dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
    b, h, query = queries
    place = b, h, query, keys_of(cols[None, :], numbering)
    scores, kept = change_scores(qk, place, visible, factors, captured, HAS_SOFTCAP, SCORES)
    g = tl.exp2(scores - (lse * LOG2_E)[:, None]) * (dp - delta[:, None])
    if ADD_GRADIENTS is not None:
        ADD_GRADIENTS(totals, g, kept, *place, visible, captured)
    dscores = differentiate_scores(g, kept, place, visible, captured, HAS_SOFTCAP, SLOPES)
    if IS_MASKED:
        dscores = hide(dscores, 0.0, visible, cols, interval, bits_ptr, HAS_BITS, False)
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
    numbering,
    captured,
    totals,
    TILE_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    PADDED_DIM_V: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BITS: tl.constexpr,
    SCORES: tl.constexpr,
    SLOPES: tl.constexpr,
    ADD_GRADIENTS: tl.constexpr,
):
    """dq of one q tile and head, and what its pairs give to the gradients of captured tensors, `totals`."""
    tile = tiles_ptr + (tl.program_id(0) // nheads_q) * TILE_FIELDS
    head = (tl.program_id(0) % nheads_q).to(tl.int64)
    kv_head = head // qhead_per_kvhead
    row_begin = tl.load(tile)
    row_end = tl.load(tile + 1)
    if row_begin == row_end:
        return

    rows = row_begin + tl.arange(0, TILE_ROWS)
    live = rows < row_end
    queries = queries_of(rows[:, None], head, numbering)
    all_masked: tl.constexpr = SCORES is not None
    q_rows = q_ptr + head * q_strides[1], q_strides
    dout_rows = dout_ptr + head * dout_strides[1], dout_strides
    k_rows = k_ptr + kv_head * k_strides[1], k_strides
    v_rows = v_ptr + kv_head * v_strides[1], v_strides
    q = load_rows(q_rows, row_begin, live, TILE_ROWS, DIM, PADDED_DIM, True)
    dout = load_rows(dout_rows, row_begin, live, TILE_ROWS, DIM_V, PADDED_DIM_V, True)
    lse = tl.load(lse_ptr + head * total_q + rows, mask=live, other=0.0)
    lse = finite_lse(lse, SCORES)
    delta = tl.load(delta_ptr + head * total_q + rows, mask=live, other=0.0)
    dq = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)

    for index in range(tl.load(tile + 2), tl.load(tile + 3)):
        run = runs_ptr + index * RUN_FIELDS
        interval = row_interval(run, edges_ptr, rows)
        for is_masked in tl.static_range(all_masked, 2):
            for block in range(count_blocks(run, is_masked, all_masked)):
                dq = dq_block(
                    dq,
                    q,
                    dout,
                    lse,
                    delta,
                    k_rows,
                    v_rows,
                    block_start(run, block, BLOCK_COLS, is_masked, all_masked),
                    interval,
                    queries,
                    factors,
                    bits_ptr,
                    numbering,
                    captured,
                    totals,
                    BLOCK_COLS,
                    DIM,
                    DIM_V,
                    HAS_SOFTCAP,
                    HAS_BITS,
                    is_masked,
                    SCORES,
                    SLOPES,
                    ADD_GRADIENTS,
                )

    dq *= softmax_scale
    dq_rows = dq_ptr + head * dq_strides[1], dq_strides
    store_rows(dq_rows, row_begin, live, dq, DIM)


@triton.jit
def dkdv_block(
    dk,
    dv,
    k,
    v,
    q_rows,
    dout_rows,
    lse_base,
    delta_base,
    col,
    interval,
    head,
    keys,
    factors,
    bits_ptr,
    numbering,
    captured,
    BLOCK_COLS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BITS: tl.constexpr,
    IS_MASKED: tl.constexpr,
    SCORES: tl.constexpr,
    SLOPES: tl.constexpr,
):
    """Adds what the queries from `col` on give to dv, and to dk less its factor softmax_scale.

    As in the k walk of a plan, keys are the rows and queries the columns of the scores.
    """
    cols = col + tl.arange(0, BLOCK_COLS)
    live = cols < interval[2]
    visible = None
    if SCORES is not None:
        visible = is_visible(cols, interval, bits_ptr, HAS_BITS, True)
    q = load_rows(q_rows, col, live, BLOCK_COLS, DIM, k.shape[1], IS_MASKED)
    dout = load_rows(dout_rows, col, live, BLOCK_COLS, DIM_V, v.shape[1], IS_MASKED)
    if IS_MASKED:
        lse = tl.load(lse_base + cols, mask=live, other=0.0)
        delta = tl.load(delta_base + cols, mask=live, other=0.0)
    else:
        lse = tl.load(lse_base + cols)
        delta = tl.load(delta_base + cols)
    lse = finite_lse(lse, SCORES)
    kq = tl.dot(k, tl.trans(q), input_precision="ieee")
    b, h, query = queries_of(cols[None, :], head, numbering)
    place = b, h, query, keys
    scores, kept = change_scores(kq, place, visible, factors, captured, HAS_SOFTCAP, SCORES)
    p = tl.exp2(scores - (lse * LOG2_E)[None, :])
    if IS_MASKED:
        p = hide(p, 0.0, visible, cols, interval, bits_ptr, HAS_BITS, True)
    dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
    dp = tl.dot(v, tl.trans(dout), input_precision="ieee")
    g = p * (dp - delta[None, :])
    dscores = differentiate_scores(g, kept, place, visible, captured, HAS_SOFTCAP, SLOPES)
    if SLOPES is not None:
        dscores = tl.where(visible, dscores, 0.0)  # a program may give nan of a hidden pair
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
    numbering,
    captured,
    TILE_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    PADDED_DIM_V: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BITS: tl.constexpr,
    SCORES: tl.constexpr,
    SLOPES: tl.constexpr,
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
    keys = keys_of(rows[:, None], numbering)
    all_masked: tl.constexpr = SCORES is not None
    k_rows = k_ptr + kv_head * k_strides[1], k_strides
    v_rows = v_ptr + kv_head * v_strides[1], v_strides
    k = load_rows(k_rows, row_begin, live, TILE_ROWS, DIM, PADDED_DIM, True)
    v = load_rows(v_rows, row_begin, live, TILE_ROWS, DIM_V, PADDED_DIM_V, True)
    dk = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
    dv = tl.zeros([TILE_ROWS, PADDED_DIM_V], tl.float32)

    run_begin = tl.load(tile + 2)
    run_end = tl.load(tile + 3)
    for head_in_group in range(qhead_per_kvhead):
        head = kv_head * qhead_per_kvhead + head_in_group
        for index in range(run_begin, run_end):
            run = runs_ptr + index * RUN_FIELDS
            interval = row_interval(run, edges_ptr, rows)
            for is_masked in tl.static_range(all_masked, 2):
                for block in range(count_blocks(run, is_masked, all_masked)):
                    dk, dv = dkdv_block(
                        dk,
                        dv,
                        k,
                        v,
                        (q_ptr + head * q_strides[1], q_strides),
                        (dout_ptr + head * dout_strides[1], dout_strides),
                        lse_ptr + head * total_q,
                        delta_ptr + head * total_q,
                        block_start(run, block, BLOCK_COLS, is_masked, all_masked),
                        interval,
                        head,
                        keys,
                        factors,
                        bits_ptr,
                        numbering,
                        captured,
                        BLOCK_COLS,
                        DIM,
                        DIM_V,
                        HAS_SOFTCAP,
                        HAS_BITS,
                        is_masked,
                        SCORES,
                        SLOPES,
                    )

    dk *= softmax_scale
    dk_rows = dk_ptr + kv_head * dk_strides[1], dk_strides
    store_rows(dk_rows, row_begin, live, dk, DIM)
    dv_rows = dv_ptr + kv_head * dv_strides[1], dv_strides
    store_rows(dv_rows, row_begin, live, dv, DIM_V)
