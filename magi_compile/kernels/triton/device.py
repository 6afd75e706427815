"""The device code of the Triton kernel: each program owns one tile of one head and walks its runs.

A tensor of rows is `(base, strides)`, with the strides (token, head, dim), and a walk is `(tiles, runs, edges, bits)`.
An interval is `(lo, hi, col_end)`: the columns `[lo, hi)` that each row sees of a run, and where the columns of the run
end. With `S.has_bits` behind it stand the row of bits that is each row's, of a block (`plan/bit_runs.py`), or -1, and
the first column of the run. `S` is the `KernelSizes` of `kernel.py`.

Scores are in base 2: `qk * factors[0]`; with a softcap `tanh(qk * factors[0]) * factors[1]`; with a score program
`SCORES(qk * factors[0], ...) * factors[1]`. `SCORES`, `SLOPES` and `ADD_GRADIENTS` are functions that `score_source.py`
makes of the program, and None without one, like what they are given. A `score` is `(factors, numbering, captured)`:
`numbering` is `(seqlen_q, seqlen_k, nheads)` of its `ScoreCall`, and `captured` is `(tables, sizes, symbols)`. With a
program all blocks are masked: no pair counts, or has its gradients added, which is not there.
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
def of_head(tensor, head):
    """The rows of a head."""
    base, strides = tensor
    return base + head * strides[1], strides


@triton.jit
def load_rows(
    tensor,
    row,
    live,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """`[ROWS, PADDED]` from `row` on; 0 beyond `DIM`, and if `IS_MASKED` where not `live`."""
    base, strides = tensor
    dim = tl.arange(0, PADDED)
    start = base + row.to(tl.int64) * strides[0]
    pointers = start + tl.arange(0, ROWS)[:, None] * strides[0] + dim[None, :] * strides[2]
    if IS_MASKED:
        block = tl.load(pointers, mask=live[:, None] & (dim < DIM)[None, :], other=0.0)
    elif DIM != PADDED:
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
def row_interval(walk, index, rows):
    """A run, and the columns of it that each row sees; rows outside of it see nothing."""
    _, runs, edges, _ = walk
    run = runs + index * RUN_FIELDS
    in_run = (rows >= tl.load(run)) & (rows < tl.load(run + 1))
    col_end = tl.load(run + 3)
    lo = tl.maximum(rows + tl.load(run + 4), tl.load(run + 2))
    hi = tl.minimum(rows + tl.load(run + 5), col_end)
    lane = tl.load(run + 10)
    if lane > 0:
        edge = edges + (rows * LANES + lane - 1) * 2
        lo = tl.load(edge, mask=in_run, other=0)
        hi = tl.load(edge + 1, mask=in_run, other=0)
    code = tl.load(run + 11)
    bit_row = tl.where(code > 0, code - 1 + rows - tl.load(run), -1)
    return run, (lo, tl.where(in_run, hi, lo), col_end, bit_row, tl.load(run + 6))


@triton.jit
def is_visible(cols, interval, walk, S: tl.constexpr, ROWS_ARE_KEYS: tl.constexpr):
    lo, hi, _, bit_row, first = interval
    visible = (cols[None, :] >= lo[:, None]) & (cols[None, :] < hi[:, None])
    if S.has_bits:
        step = (cols - first)[None, :]
        row = bit_row[:, None]
        if ROWS_ARE_KEYS:
            place = (row // BIT_ROWS * BIT_ROWS + step).to(tl.int64) * BIT_WORDS
            bit = row % BIT_ROWS + step * 0
        else:
            place = (row + step * 0).to(tl.int64) * BIT_WORDS
            bit = step + row * 0
        word = tl.load(walk[3] + place + bit // 32, mask=visible & (row >= 0), other=-1)
        visible = visible & (((word >> (bit & 31)) & 1) != 0)
    return visible


@triton.jit
def hide(
    values, other, visible, cols, interval, walk, S: tl.constexpr, ROWS_ARE_KEYS: tl.constexpr
):
    """`other` at hidden pairs. `visible` is there with a program, which needs it;
    else it would hold registers while products run."""
    if visible is None:
        visible = is_visible(cols, interval, walk, S, ROWS_ARE_KEYS)
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
def block_start(run, index, S: tl.constexpr, IS_MASKED: tl.constexpr, ALL_MASKED: tl.constexpr):
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
    return tl.load(run + 6) + block * S.block_cols


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
def change_scores(qk, place, visible, score, S: tl.constexpr, SCORES: tl.constexpr):
    """Scores in base 2, and what `differentiate_scores` takes: those before a program, or the derivative of the cap."""
    factors, _, captured = score
    scores = qk * factors[0]
    kept = scores
    if SCORES is not None:
        scores = SCORES(kept, *place, visible, captured) * factors[1]
    elif S.has_softcap:
        tanh = 2 * tl.sigmoid(2 * scores) - 1
        scores = tanh * factors[1]
        kept = 1 - tanh * tanh
    return scores, kept


@triton.jit
def differentiate_scores(g, kept, place, visible, score, S: tl.constexpr, SLOPES: tl.constexpr):
    """The gradient of `qk * softmax_scale` from `g`, that of the changed scores."""
    if SLOPES is not None:
        g = SLOPES(g, kept, *place, visible, score[2])
    elif S.has_softcap:
        g *= kept
    return g


@triton.jit
def finite_lse(lse, SCORES: tl.constexpr):
    """0 where a program has left a row without a score, so that nothing computes -inf - -inf."""
    if SCORES is not None:
        lse = tl.where(lse == -float("inf"), 0.0, lse)
    return lse


@triton.jit
def zeros(ROWS: tl.constexpr, COLS: tl.constexpr = None):
    return tl.zeros([ROWS] if COLS is None else [ROWS, COLS], tl.float32)


@triton.jit
def begin_tile(walk, nheads):
    """The tile of this program, the number of its head, and the rows of the tile."""
    tile = walk[0] + (tl.program_id(0) // nheads) * TILE_FIELDS
    head = (tl.program_id(0) % nheads).to(tl.int64)
    return tile, head, tl.load(tile), tl.load(tile + 1)


@triton.jit(do_not_specialize=["total_q"])
def forward_kernel(
    q,
    k,
    v,
    out,
    lse_ptr,
    max_scores_ptr,
    walk,
    total_q,
    nheads_q,
    qhead_per_kvhead,
    score,
    S: tl.constexpr,
    SCORES: tl.constexpr,
    HAS_MAX_SCORES: tl.constexpr,
):
    """out and lse of one q tile and head, and its largest scores; the heads of a tile run together,
    to share K and V."""
    tile, head, row_begin, row_end = begin_tile(walk, nheads_q)
    if row_begin == row_end:
        return

    rows = row_begin + tl.arange(0, S.tile_rows)
    live = rows < row_end
    b, h, query = queries_of(rows[:, None], head, score[1])
    all_masked: tl.constexpr = SCORES is not None
    kv_head = head // qhead_per_kvhead
    k_rows, v_rows = of_head(k, kv_head), of_head(v, kv_head)
    q_block = load_rows(of_head(q, head), row_begin, live, S.tile_rows, S.dim, S.padded_dim, True)
    acc = zeros(S.tile_rows, S.padded_dim_v)
    row_sum = zeros(S.tile_rows)
    row_max = row_sum - float("inf")

    for index in range(tl.load(tile + 2), tl.load(tile + 3)):
        run, interval = row_interval(walk, index, rows)
        for is_masked in tl.static_range(all_masked, 2):
            for block in range(count_blocks(run, is_masked, all_masked)):
                # One step of online softmax: the rows of the tile meet the keys from `col` on.
                col = block_start(run, block, S, is_masked, all_masked)
                cols = col + tl.arange(0, S.block_cols)
                is_there = cols < interval[2]
                visible = None
                if SCORES is not None:
                    visible = is_visible(cols, interval, walk, S, False)
                k_block = load_rows(
                    k_rows, col, is_there, S.block_cols, S.dim, S.padded_dim, is_masked
                )
                qk = tl.dot(q_block, tl.trans(k_block), input_precision="ieee")
                place = b, h, query, keys_of(cols[None, :], score[1])
                scores, _ = change_scores(qk, place, visible, score, S, SCORES)
                if is_masked:
                    scores = hide(scores, -float("inf"), visible, cols, interval, walk, S, False)
                new_max = tl.maximum(row_max, tl.max(scores, 1))
                finite_max = new_max
                if is_masked:
                    # A row that has seen nothing yet must not compute -inf - -inf.
                    finite_max = tl.where(new_max == -float("inf"), 0.0, new_max)
                p = tl.exp2(scores - finite_max[:, None])
                rescale = tl.exp2(row_max - finite_max)
                row_sum = row_sum * rescale + tl.sum(p, 1)
                row_max = new_max
                v_block = load_rows(
                    v_rows, col, is_there, S.block_cols, S.dim_v, S.padded_dim_v, is_masked
                )
                p = p.to(v_block.dtype)
                acc = tl.dot(p, v_block, acc * rescale[:, None], input_precision="ieee")

    sees_nothing = row_sum == 0.0
    value = acc / tl.where(sees_nothing, 1.0, row_sum)[:, None]
    lse = tl.where(sees_nothing, -float("inf"), (row_max + tl.log2(row_sum)) * LN_2)
    store_rows(of_head(out, head), row_begin, live, value, S.dim_v)
    tl.store(lse_ptr + head * total_q + rows, lse, mask=live)
    if HAS_MAX_SCORES:
        # Each becomes the largest of itself and of these, -inf where nothing is visible; a row has one tile.
        pointers, largest = max_scores_ptr + head * total_q + rows, row_max * LN_2
        before = tl.load(pointers, mask=live, other=0.0)
        tl.store(pointers, tl.maximum(before, largest), mask=live)


@triton.jit(do_not_specialize=["total_q"])
def delta_kernel(
    out,
    dout,
    dlse,
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
    value = load_rows(of_head(out, head), row, live, ROWS, DIM_V, PADDED_DIM_V, True)
    gradient = load_rows(of_head(dout, head), row, live, ROWS, DIM_V, PADDED_DIM_V, True)
    delta = tl.sum(value.to(tl.float32) * gradient.to(tl.float32), 1)
    if HAS_DLSE:
        dlse_ptr, dlse_strides = dlse
        pointers = dlse_ptr + head * dlse_strides[0] + rows.to(tl.int64) * dlse_strides[1]
        delta -= tl.load(pointers, mask=live, other=0.0)
    tl.store(delta_ptr + head * total_q + rows, delta, mask=live)


@triton.jit(do_not_specialize=["total_q"])
def dq_kernel(
    q,
    k,
    v,
    dout,
    lse_ptr,
    delta_ptr,
    dq,
    walk,
    total_q,
    nheads_q,
    qhead_per_kvhead,
    softmax_scale,
    score,
    totals,
    S: tl.constexpr,
    SCORES: tl.constexpr,
    SLOPES: tl.constexpr,
    ADD_GRADIENTS: tl.constexpr,
):
    """dq of one q tile and head, and what its pairs give to the gradients of captured tensors, `totals`."""
    tile, head, row_begin, row_end = begin_tile(walk, nheads_q)
    if row_begin == row_end:
        return

    rows = row_begin + tl.arange(0, S.tile_rows)
    live = rows < row_end
    b, h, query = queries_of(rows[:, None], head, score[1])
    all_masked: tl.constexpr = SCORES is not None
    kv_head = head // qhead_per_kvhead
    k_rows, v_rows = of_head(k, kv_head), of_head(v, kv_head)
    q_block = load_rows(of_head(q, head), row_begin, live, S.tile_rows, S.dim, S.padded_dim, True)
    dout_block = load_rows(
        of_head(dout, head), row_begin, live, S.tile_rows, S.dim_v, S.padded_dim_v, True
    )
    lse = tl.load(lse_ptr + head * total_q + rows, mask=live, other=0.0)
    lse = finite_lse(lse, SCORES)
    delta = tl.load(delta_ptr + head * total_q + rows, mask=live, other=0.0)
    sums = zeros(S.tile_rows, S.padded_dim)

    for index in range(tl.load(tile + 2), tl.load(tile + 3)):
        run, interval = row_interval(walk, index, rows)
        for is_masked in tl.static_range(all_masked, 2):
            for block in range(count_blocks(run, is_masked, all_masked)):
                col = block_start(run, block, S, is_masked, all_masked)
                cols = col + tl.arange(0, S.block_cols)
                is_there = cols < interval[2]
                visible = None
                if SCORES is not None:
                    visible = is_visible(cols, interval, walk, S, False)
                k_block = load_rows(
                    k_rows, col, is_there, S.block_cols, S.dim, S.padded_dim, is_masked
                )
                v_block = load_rows(
                    v_rows, col, is_there, S.block_cols, S.dim_v, S.padded_dim_v, is_masked
                )
                qk = tl.dot(q_block, tl.trans(k_block), input_precision="ieee")
                dp = tl.dot(dout_block, tl.trans(v_block), input_precision="ieee")
                place = b, h, query, keys_of(cols[None, :], score[1])
                scores, kept = change_scores(qk, place, visible, score, S, SCORES)
                g = tl.exp2(scores - (lse * LOG2_E)[:, None]) * (dp - delta[:, None])
                if ADD_GRADIENTS is not None:
                    ADD_GRADIENTS(totals, g, kept, *place, visible, score[2])
                dscores = differentiate_scores(g, kept, place, visible, score, S, SLOPES)
                if is_masked:
                    dscores = hide(dscores, 0.0, visible, cols, interval, walk, S, False)
                dscores = dscores.to(k_block.dtype)
                sums = tl.dot(dscores, k_block, sums, input_precision="ieee")

    store_rows(of_head(dq, head), row_begin, live, sums * softmax_scale, S.dim)


@triton.jit(do_not_specialize=["total_q"])
def dkdv_kernel(
    q,
    k,
    v,
    dout,
    lse_ptr,
    delta_ptr,
    dk,
    dv,
    walk,
    total_q,
    nheads_kv,
    qhead_per_kvhead,
    softmax_scale,
    score,
    S: tl.constexpr,
    SCORES: tl.constexpr,
    SLOPES: tl.constexpr,
):
    """dk and dv of one k tile and kv head; the sum over its q heads stays in registers."""
    tile, kv_head, row_begin, row_end = begin_tile(walk, nheads_kv)
    if row_begin == row_end:
        return

    rows = row_begin + tl.arange(0, S.tile_rows)
    live = rows < row_end
    keys = keys_of(rows[:, None], score[1])
    all_masked: tl.constexpr = SCORES is not None
    k_block = load_rows(
        of_head(k, kv_head), row_begin, live, S.tile_rows, S.dim, S.padded_dim, True
    )
    v_block = load_rows(
        of_head(v, kv_head), row_begin, live, S.tile_rows, S.dim_v, S.padded_dim_v, True
    )
    dk_sums = zeros(S.tile_rows, S.padded_dim)
    dv_sums = zeros(S.tile_rows, S.padded_dim_v)

    run_begin = tl.load(tile + 2)
    run_end = tl.load(tile + 3)
    for head_in_group in range(qhead_per_kvhead):
        head = kv_head * qhead_per_kvhead + head_in_group
        q_rows, dout_rows = of_head(q, head), of_head(dout, head)
        lse_base, delta_base = lse_ptr + head * total_q, delta_ptr + head * total_q
        for index in range(run_begin, run_end):
            run, interval = row_interval(walk, index, rows)
            for is_masked in tl.static_range(all_masked, 2):
                for block in range(count_blocks(run, is_masked, all_masked)):
                    # As in the k walk of a plan, keys are the rows and queries the columns of the scores.
                    col = block_start(run, block, S, is_masked, all_masked)
                    cols = col + tl.arange(0, S.block_cols)
                    is_there = cols < interval[2]
                    visible = None
                    if SCORES is not None:
                        visible = is_visible(cols, interval, walk, S, True)
                    q_block = load_rows(
                        q_rows, col, is_there, S.block_cols, S.dim, S.padded_dim, is_masked
                    )
                    dout_block = load_rows(
                        dout_rows, col, is_there, S.block_cols, S.dim_v, S.padded_dim_v, is_masked
                    )
                    if is_masked:
                        lse = tl.load(lse_base + cols, mask=is_there, other=0.0)
                        delta = tl.load(delta_base + cols, mask=is_there, other=0.0)
                    else:
                        lse = tl.load(lse_base + cols)
                        delta = tl.load(delta_base + cols)
                    lse = finite_lse(lse, SCORES)
                    kq = tl.dot(k_block, tl.trans(q_block), input_precision="ieee")
                    b, h, query = queries_of(cols[None, :], head, score[1])
                    place = b, h, query, keys
                    scores, kept = change_scores(kq, place, visible, score, S, SCORES)
                    p = tl.exp2(scores - (lse * LOG2_E)[None, :])
                    if is_masked:
                        p = hide(p, 0.0, visible, cols, interval, walk, S, True)
                    p_block = p.to(dout_block.dtype)
                    dv_sums = tl.dot(p_block, dout_block, dv_sums, input_precision="ieee")
                    dp = tl.dot(v_block, tl.trans(dout_block), input_precision="ieee")
                    g = p * (dp - delta[None, :])
                    dscores = differentiate_scores(g, kept, place, visible, score, S, SLOPES)
                    if SLOPES is not None:
                        # A program may give nan of a hidden pair.
                        dscores = tl.where(visible, dscores, 0.0)
                    dscores = dscores.to(q_block.dtype)
                    dk_sums = tl.dot(dscores, q_block, dk_sums, input_precision="ieee")

    store_rows(of_head(dk, kv_head), row_begin, live, dk_sums * softmax_scale, S.dim)
    store_rows(of_head(dv, kv_head), row_begin, live, dv_sums, S.dim_v)
