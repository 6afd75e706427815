// Slices to a plan without the host: what `build_tile_plan` computes, one thread block for each of the two walks.
//
//   slices -> rectangles -> their borders -> regions -> tiles -> (tile, rectangle) pairs -> stairs -> runs -> the order
//   of the tiles
#include "common/block.cuh"
#include "common/search.cuh"
#include "common/tile_plan.cuh"
#include "planner/cost.cuh"
#include "planner/rects.cuh"
#include "planner/staircase.cuh"

namespace ffa {

constexpr int kMovesRightEdge = 1;   // bits of a mask type
constexpr int kMovesLeftEdge = 2;
constexpr int kTileCost = FFA_TILE_COST;
constexpr int kMostSteps = 32;                             // of stairs that a row meets as many rectangles of
constexpr bool kHasBits = FFA_HAS_BITS;                    // whether a slice may have a bit block
constexpr int kThreads = kHasBits ? 512 : 1024;            // more have too few registers
constexpr unsigned long long kBehindSlices = 1ull << 62;   // keys of slices with bits, and of pairs with them
constexpr unsigned long long kBehindAll = 1ull << 63;

// One walk: its sizes, and where its result goes. Rows are queries in the first, keys in the second.
struct Walk {
    Tile* tiles;     // [num_tiles]
    Run* runs;       // [max_runs]
    Edges* edges;    // [total_rows, kLanes], or null, and then there are no stairs
    int* scratch;    // [scratch_words], 8-byte aligned
    int num_tiles;   // those left over become tiles without rows
    int max_runs;    // with max_bit_runs
    int max_regions;
    int total_rows;
    int tile_rows;
    int block_cols;
    int num_sorted;   // the power of two from num_tiles up
    int num_slices;
    int max_bit_runs;
};

struct TilePlanParams {
    const int* q_ranges;     // [num_slices, 2]
    const int* k_ranges;     // [num_slices, 2]
    const int* mask_types;   // [num_slices]
    long long* flag;         // becomes 1 where max_runs is not enough, and then no tile has a run
    Walk walks[2];
};

static_assert(sizeof(Walk) == 72 && sizeof(TilePlanParams) == 176, "packed by magi_compile/kernels/sm90/params.py");

class Planner {
public:
    __device__ Planner(const TilePlanParams& params, int walk)
        : params_(params), walk_(params.walks[walk]), is_transposed_(walk == 1), num_words_(walk_.total_rows / 32 + 1) {
        int* next = walk_.scratch;
        const auto take = [&next](int count) {
            int* const array = next;
            next += count;
            return array;
        };
        order_ = reinterpret_cast<unsigned long long*>(take(2 * walk_.num_sorted));
        run_keys_ = reinterpret_cast<unsigned long long*>(take(2 * walk_.max_runs));
        slice_keys_ = reinterpret_cast<unsigned long long*>(take(2 * walk_.num_slices));
        borders_ = reinterpret_cast<unsigned*>(take(num_words_));
        starts_ = reinterpret_cast<unsigned*>(take(num_words_));
        candidate_begin_ = take(walk_.max_regions);
        reached_ = take(walk_.max_regions + 1);
        begun_ = take(walk_.max_regions);
        region_begin_ = take(walk_.max_regions + 1);
        region_tile_ = take(walk_.max_regions);
        tile_begin_ = take(walk_.num_tiles);
        tile_end_ = take(walk_.num_tiles);
        pair_count_ = take(walk_.num_tiles);
        pair_begin_ = take(walk_.num_tiles);
        run_count_ = take(walk_.num_tiles);
        run_begin_ = take(walk_.num_tiles);
        step_count_ = take(walk_.num_tiles);
        cost_ = take(walk_.num_tiles);
        document_of_ = take(walk_.num_tiles);
        document_cost_ = reinterpret_cast<unsigned*>(take(walk_.num_tiles));
        pair_slice_ = take(walk_.max_runs);
        pair_tile_ = take(walk_.max_runs);
        slice_at_ = take(walk_.max_runs);
        steps_ = reinterpret_cast<Step*>(take(sizeof(Step) / sizeof(int) * walk_.max_runs));
        slice_order_ = take(walk_.num_slices);
        slice_merged_ = take(walk_.num_slices);
        slice_pairs_ = take(walk_.num_slices);
        rects_ = reinterpret_cast<Rect*>(take(sizeof(Rect) / sizeof(int) * walk_.num_slices));
        columns_ = reinterpret_cast<Rect*>(take(sizeof(Rect) / sizeof(int) * walk_.num_slices));
        goes_on_ = reinterpret_cast<unsigned*>(take(walk_.num_slices / 32 + 1));
        most_pairs_ = reinterpret_cast<unsigned*>(take(1));
        num_slices_ = take(1);
    }

    __device__ void run() {
        count_slices();
        sort_slices();
        join_slices();
        go_down_the_steps();
        cut_rows();
        const bool fits = meet();
        sort_pairs();
        merge();
        hand_out();
        if (!fits) {
            for_each(1, [&](int) { *params_.flag = 1; });
        }
    }

private:
    __device__ __forceinline__ int num_slices() const { return *num_slices_; }
    __device__ __forceinline__ bool has_bits(int i) const { return kHasBits && params_.mask_types[i] >= kFirstBits; }
    __device__ __forceinline__ Rect rect_of_slice(int i) const {
        const int q_begin = params_.q_ranges[2 * i], q_end = params_.q_ranges[2 * i + 1];
        const int k_begin = params_.k_ranges[2 * i], k_end = params_.k_ranges[2 * i + 1];
        const int mask_type = has_bits(i) ? 0 : params_.mask_types[i];
        return Rect{q_begin,
                    q_end,
                    k_begin,
                    k_end,
                    mask_type & kMovesLeftEdge ? k_begin - q_begin : -kNoDiagonal,
                    mask_type & kMovesRightEdge ? k_end - q_end + 1 : kNoDiagonal}
            .trimmed();
    }

    // Behind the last one there is room for more: for far more than there are, where a row may see many intervals.
    __device__ void count_slices() {
        const int count =
            end_of(walk_.num_slices, [&](int i) { return params_.q_ranges[2 * i] < params_.q_ranges[2 * i + 1]; });
        for_each(1, [&](int) { *num_slices_ = count; });
    }

    // Notes after which slices one goes on.
    template <class GoesOn>
    __device__ void find_chains(GoesOn goes_on) {
        for_each(num_slices() / 32 + 1, [&](int word) { goes_on_[word] = 0; });
        for_each(num_slices() - 1, [&](int i) {
            if (goes_on(i)) {
                atomicOr(&goes_on_[i / 32], 1u << (i % 32));
            }
        });
    }

    __device__ __forceinline__ bool goes_on(int i) const { return i >= 0 && (goes_on_[i / 32] >> i % 32 & 1) != 0; }

    __device__ __forceinline__ int last_of_chain(int i) const {
        int word = i / 32;
        unsigned ends = ~goes_on_[word] & ~0u << i % 32;
        while (ends == 0) {
            ends = ~goes_on_[++word];   // the last slice does not go on
        }
        return 32 * word + __ffs(ends) - 1;
    }

    // By column and row, behind them those with bits in their order, and those without area last. Often they are.
    __device__ void sort_slices() {
        const int count = num_slices();
        for_each(count, [&](int i) {
            const Rect r = rect_of_slice(i);
            const unsigned long long place =
                static_cast<unsigned long long>(r.col_begin) << 32 | static_cast<unsigned>(r.row_begin);
            const unsigned long long number = static_cast<unsigned>(i);
            slice_keys_[i] = r.row_begin >= r.row_end ? kBehindAll | number
                             : has_bits(i)            ? kBehindSlices | number
                                                      : place;
            slice_order_[i] = i;
        });
        for_each(1, [&](int) { *most_pairs_ = 0; });
        for_each(count - 1, [&](int i) {
            if (slice_keys_[i] > slice_keys_[i + 1]) {
                *most_pairs_ = 1;
            }
        });
        if (*most_pairs_ > 0) {
            slice_order_ = sort_by_key(slice_keys_, count, count, slice_order_, slice_merged_,
                                       [&](int) { return Range{0, count}; });
        }
    }

    // Of a slice in its order now.
    __device__ __forceinline__ bool is_of_bits(int i) const { return has_bits(slice_order_[i]); }

    // Neighbours of which each goes on below the one before are one rectangle, where the first of them was; a sliding
    // window is two or three slices. The others are empty.
    __device__ void join_slices() {
        const auto rect_at = [&](int i) { return rect_of_slice(slice_order_[i]); };
        find_chains([&](int i) { return !is_of_bits(i + 1) && rect_at(i).goes_on(rect_at(i + 1)); });
        for_each(num_slices(), [&](int i) {
            rects_[i] = goes_on(i - 1) ? Rect::nothing() : rect_at(i).down_to(rect_at(last_of_chain(i)));
        });
    }

    // Neighbours that lead down in steps are also as many rectangles of new columns alone, each down to the last row.
    // Where tiles begin is seen best where rectangles have many rows, and few of them meet a tile where they have not.
    // Queries that look nothing up meet the columns too.
    __device__ void go_down_the_steps() {
        const bool is_limited = !is_transposed_ && !has_stairs();
        find_chains([&](int i) {
            return !(is_limited && i % kMostSteps == kMostSteps - 1) && !is_of_bits(i + 1) &&
                   rects_[i].leads_down(rects_[i + 1]);
        });
        for_each(num_slices(), [&](int i) {
            Rect r = rects_[i];
            if (goes_on(i)) {
                r.row_end = rects_[last_of_chain(i)].row_end;
            }
            if (goes_on(i - 1)) {
                r.col_begin = rects_[i - 1].col_end;
            }
            columns_[i] = r;
        });
        if (is_transposed_) {
            for_each(num_slices(), [&](int i) {
                rects_[i] = rects_[i].transposed();
                columns_[i] = columns_[i].transposed();
            });
        }
    }

    __device__ __forceinline__ const Rect* long_rects() const { return is_transposed_ ? rects_ : columns_; }
    __device__ __forceinline__ const Rect& rect(int i) const {
        return (is_transposed_ || !has_stairs() ? columns_ : rects_)[i];
    }

    __device__ __forceinline__ bool has_stairs() const { return walk_.edges != nullptr; }

    __device__ __forceinline__ Rect rect_in_tile(int slice, int tile) const {
        return rect(slice).clipped(tile_begin_[tile], tile_end_[tile]);
    }

    __device__ __forceinline__ int tile_of(int row) const { return count_up_to(tile_begin_, num_live_tiles_, row) - 1; }

    __device__ __forceinline__ void mark(int row) { atomicOr(&borders_[row / 32], 1u << (row % 32)); }

    // Whether no row in (row, row + tile_rows) is a border. The end of all rows is one.
    __device__ __forceinline__ bool starts_region(int row) const {
        const int last = row + walk_.tile_rows - 1;
        if (row == 0 || last >= walk_.total_rows) {
            return row == 0;
        }
        for (int word = (row + 1) / 32; word <= last / 32; ++word) {
            unsigned bits = borders_[word];
            bits &= word == (row + 1) / 32 ? ~0u << ((row + 1) % 32) : ~0u;
            bits &= word == last / 32 ? ~0u >> (31 - last % 32) : ~0u;
            if (bits != 0) {
                return false;
            }
        }
        return true;
    }

    // A border followed by at least a tile of rows without another one starts a region, unless more columns reach
    // across it than begin there; a region is tiled from its start, to the next one.
    __device__ void cut_rows() {
        for_each(num_words_, [&](int word) { borders_[word] = 0; });
        for_each(num_slices(), [&](int i) {
            const Rect r = long_rects()[i];
            mark(r.row_begin);
            mark(r.row_end);
        });
        for_each(1, [&](int) {
            mark(0);
            mark(walk_.total_rows);
        });
        for_each(num_words_, [&](int word) {
            unsigned starts = 0;
            for (unsigned bits = borders_[word]; bits != 0; bits &= bits - 1) {
                const int bit = __ffs(bits) - 1;
                starts |= starts_region(32 * word + bit) ? 1u << bit : 0u;
            }
            starts_[word] = starts;
        });
        const int num_candidates = compact_prefix_sum(
            num_words_, [&](int word) { return __popc(starts_[word]); },
            [&](int word, int candidate) {
                for (unsigned bits = starts_[word]; bits != 0; bits &= bits - 1) {
                    candidate_begin_[candidate++] = 32 * word + __ffs(bits) - 1;
                }
            });
        count_blocks_begun(num_candidates);
        const int num_regions = compact_prefix_sum(
            num_candidates, [&](int i) { return int(i == 0 || begun_[i] >= 0); },
            [&](int i, int region) {
                if (i == 0 || begun_[i] >= 0) {
                    region_begin_[region] = candidate_begin_[i];
                }
            });
        for_each(1, [&](int) { region_begin_[num_regions] = walk_.total_rows; });
        num_live_tiles_ = compact_prefix_sum(
            num_regions,
            [&](int region) {
                return (region_begin_[region + 1] - region_begin_[region] + walk_.tile_rows - 1) / walk_.tile_rows;
            },
            [&](int region, int tile) { region_tile_[region] = tile; });
        for_each(walk_.num_tiles, [&](int tile) {
            int begin = walk_.total_rows, end = walk_.total_rows;
            if (tile < num_live_tiles_) {
                const int region = count_up_to(region_tile_, num_regions, tile) - 1;
                begin = region_begin_[region] + (tile - region_tile_[region]) * walk_.tile_rows;
                end = min(begin + walk_.tile_rows, region_begin_[region + 1]);
            }
            tile_begin_[tile] = begin;
            tile_end_[tile] = end;
            pair_count_[tile] = 0;
        });
    }

    // Those that a tile beginning at a candidate has in rectangles that begin there, less those of rectangles that
    // reach across it, which it would have anyway.
    __device__ void count_blocks_begun(int num_candidates) {
        for_each(num_candidates + 1, [&](int i) { reached_[i] = 0; });
        for_each(num_candidates, [&](int i) { begun_[i] = 0; });
        for_each(num_slices(), [&](int i) {
            const Rect r = long_rects()[i];
            const int behind =
                count_up_to(candidate_begin_, num_candidates, r.row_begin);   // candidates, from this one on
            const int end = count_up_to(candidate_begin_, num_candidates, r.row_end - 1);
            if (behind < end) {
                const int band = r.diag_lo == -kNoDiagonal ? kNoDiagonal : r.diag_hi - r.diag_lo;
                const int blocks = blocks_of(min(r.col_end - r.col_begin, band + walk_.tile_rows));
                atomicAdd(&reached_[behind], blocks);
                atomicAdd(&reached_[end], -blocks);
            }
            if (behind > 0 && candidate_begin_[behind - 1] == r.row_begin) {
                const int last_row = min(r.row_end, r.row_begin + walk_.tile_rows) - 1;
                atomicAdd(&begun_[behind - 1], blocks_of(min(r.col_end, last_row + r.diag_hi) - r.col_begin));
            }
        });
        compact_prefix_sum(
            num_candidates, [&](int i) { return reached_[i]; },
            [&](int i, int before) { begun_[i] -= before + reached_[i]; });
    }

    __device__ __forceinline__ int blocks_of(int cols) const { return ffa::blocks_of(cols, walk_.block_cols); }

    // All pairs of a tile and a slice with rows in common, by tile. Whether there was room.
    __device__ bool meet() {
        num_pairs_ = compact_prefix_sum(
            num_slices(),
            [&](int i) {
                const Rect r = rect(i);
                return r.row_begin < r.row_end ? tile_of(r.row_end - 1) - tile_of(r.row_begin) + 1 : 0;
            },
            [&](int i, int pairs) { slice_pairs_[i] = pairs; });
        const bool fits = num_pairs_of_bits() <= walk_.max_bit_runs &&
                          num_pairs_ - num_pairs_of_bits() <= walk_.max_runs - walk_.max_bit_runs;
        num_pairs_ = fits ? num_pairs_ : 0;
        for_each(num_pairs_, [&](int pair) {
            const int slice = count_up_to(slice_pairs_, num_slices(), pair) - 1;
            const int tile = tile_of(rect(slice).row_begin) + pair - slice_pairs_[slice];
            pair_slice_[pair] = slice;
            pair_tile_[pair] = tile;
            atomicAdd(&pair_count_[tile], 1);
        });
        compact_prefix_sum(
            walk_.num_tiles, [&](int tile) { return pair_count_[tile]; },
            [&](int tile, int begin) { pair_begin_[tile] = begin; });
        return fits;
    }

    // Slices with bits are behind the others.
    __device__ int num_pairs_of_bits() const {
        if (!kHasBits) {
            return 0;
        }
        const int first =
            partition_point(num_slices(), [&](int i) { return slice_keys_[slice_order_[i]] < kBehindSlices; });
        return first < num_slices() ? num_pairs_ - slice_pairs_[first] : 0;
    }

    // The pairs of a tile by row and column, which no two have in common; those with bits behind them, by slice.
    __device__ void sort_pairs() {
        for_each(1, [&](int) { *most_pairs_ = 0; });
        for_each(walk_.num_tiles, [&](int tile) {
            run_count_[tile] = 0;
            atomicMax(most_pairs_, static_cast<unsigned>(pair_count_[tile]));
        });
        for_each(num_pairs_, [&](int pair) {
            const int tile = pair_tile_[pair];
            const int place = pair_begin_[tile] + atomicAdd(&run_count_[tile], 1);
            const Rect r = rect_in_tile(pair_slice_[pair], tile);
            run_keys_[place] = is_of_bits(pair_slice_[pair]) ? kBehindSlices | static_cast<unsigned>(pair_slice_[pair])
                                                             : static_cast<unsigned long long>(r.row_begin) << 32 |
                                                                   static_cast<unsigned>(r.col_begin);
            slice_at_[place] = pair_slice_[pair];
        });
        const int* const order = sort_by_key(run_keys_, num_pairs_, static_cast<int>(*most_pairs_), pair_slice_,
                                             pair_tile_, [&](int place) { return tile_around(place); });
        for_each(num_pairs_, [&](int i) { pair_tile_[i] = order[i]; });
        for_each(num_pairs_, [&](int i) { pair_slice_[i] = slice_at_[pair_tile_[i]]; });
    }

    // Where the pairs of a tile are, of which one is at `place`.
    __device__ __forceinline__ Range tile_around(int place) const {
        const int tile = count_up_to(pair_begin_, num_live_tiles_, place) - 1;
        return {pair_begin_[tile], pair_begin_[tile] + pair_count_[tile]};
    }

    // What a tile sees of its rectangles, and which of that are stairs; how many runs that makes.
    __device__ int find_stairs(int tile) const {
        Stairs stairs(steps_of(tile), kHasBits ? pairs_without_bits(tile) : num_pairs(tile), walk_.block_cols,
                      has_stairs());
        for (int i = 0; i < stairs.count(); ++i) {
            stairs.put(i, rect_in_tile(pair_slice_[pair_begin_[tile] + i], tile));
        }
        stairs.join_neighbours();
        step_count_[tile] = stairs.count();
        return stairs.find();
    }

    // Those with bits are behind them.
    __device__ __forceinline__ int pairs_without_bits(int tile) const {
        const int* const slices = pair_slice_ + pair_begin_[tile];
        return partition_point(num_pairs(tile), [&](int i) { return !is_of_bits(slices[i]); });
    }
    __device__ __forceinline__ int num_pairs(int tile) const { return num_pairs_ > 0 ? pair_count_[tile] : 0; }

    __device__ __forceinline__ Step* steps_of(int tile) const { return steps_ + pair_begin_[tile]; }

    __device__ void write_edges(const Rect& r, int lane) const {
        for (int row = r.row_begin; row < r.row_end; ++row) {
            walk_.edges[row * kLanes + lane - 1] = {max(r.col_begin, row + r.diag_lo), min(r.col_end, row + r.diag_hi)};
        }
    }

    __device__ void merge() {
        for_each(walk_.num_tiles, [&](int tile) {
            run_count_[tile] = find_stairs(tile);
            if constexpr (kHasBits) {
                run_count_[tile] += num_pairs(tile) - pairs_without_bits(tile);
            }
        });
        compact_prefix_sum(
            walk_.num_tiles, [&](int tile) { return run_count_[tile]; },
            [&](int tile, int begin) { run_begin_[tile] = begin; });
        for_each(walk_.num_tiles, [&](int tile) {
            int cost = tile < num_live_tiles_ ? kTileCost : 0;
            Run* next = walk_.runs + run_begin_[tile];
            const Step* const steps = steps_of(tile);
            for (int i = 0; i < step_count_[tile]; ++i) {
                const Step& step = steps[i];
                if (step.lane > 0) {
                    write_edges(step.rect, step.lane);
                    if (step.first != i) {
                        continue;
                    }
                }
                const Rect& bottom = steps[step.lane > 0 ? step.last : i].rect;
                const bool covers_tile = step.rect.row_begin == tile_begin_[tile] && bottom.row_end == tile_end_[tile];
                const Run run = run_from(step.rect, bottom, step.lane, covers_tile, walk_.block_cols);
                cost += cost_of(run);
                *next++ = run;
            }
            if constexpr (kHasBits) {
                for (int i = pairs_without_bits(tile); i < num_pairs(tile); ++i) {
                    *next = bit_run(tile, pair_slice_[pair_begin_[tile] + i]);
                    cost += (kBlockCost + kMaskCost) * next->num_blocks;
                    ++next;
                }
            }
            cost_[tile] = cost;
        });
    }

    // What a tile sees of a bit block: every block of columns needs the mask.
    __device__ Run bit_run(int tile, int slice) const {
        const Rect r = rect_in_tile(slice, tile);
        const int number = params_.mask_types[slice_order_[slice]] - kFirstBits;
        const int num_blocks = blocks_of(r.col_end - r.col_begin);
        return {r.row_begin,
                r.row_end,
                r.col_begin,
                r.col_end,
                -kNoDiagonal,
                kNoDiagonal,
                r.col_begin,
                num_blocks,
                0,
                num_blocks,
                0,
                1 + number * kBitBlock + r.row_begin - rect(slice).row_begin};
    }

    // The most expensive tile first, equal ones by row. Where rows are keys, a document's tiles stay together, by row:
    // each counts as much as the most expensive one.
    __device__ void hand_out() {
        if (is_transposed_) {
            level_documents();
        }
        for_each(walk_.num_sorted, [&](int tile) {
            const unsigned cost = tile < walk_.num_tiles ? cost_[tile] : 0;
            order_[tile] = longest_first(cost, tile);
        });
        sort(order_, walk_.num_sorted, [](unsigned long long a, unsigned long long b) { return a < b; });
        for_each(walk_.num_tiles, [&](int i) {
            const int tile = static_cast<int>(order_[i] & ~0u);
            walk_.tiles[i] = {tile_begin_[tile], tile_end_[tile], run_begin_[tile],
                              run_begin_[tile] + run_count_[tile]};
        });
    }

    // A document is neighbouring tiles whose first runs end in the same column.
    __device__ void level_documents() {
        const auto starts_document = [&](int tile) { return tile == 0 || first_end(tile) != first_end(tile - 1); };
        compact_prefix_sum(
            walk_.num_tiles, [&](int tile) { return int(starts_document(tile)); },
            [&](int tile, int before) {
                document_of_[tile] = before + starts_document(tile) - 1;
                document_cost_[tile] = 0;
            });
        for_each(walk_.num_tiles,
                 [&](int tile) { atomicMax(&document_cost_[document_of_[tile]], static_cast<unsigned>(cost_[tile])); });
        for_each(walk_.num_tiles, [&](int tile) { cost_[tile] = document_cost_[document_of_[tile]]; });
    }

    __device__ __forceinline__ int first_end(int tile) const {
        return run_count_[tile] > 0 ? walk_.runs[run_begin_[tile]].col_end : -1;
    }

    const TilePlanParams& params_;
    const Walk& walk_;
    const bool is_transposed_;
    const int num_words_;
    int num_live_tiles_ = 0;
    int num_pairs_ = 0;
    unsigned long long *order_, *run_keys_, *slice_keys_;
    unsigned *borders_, *starts_;                // a bit for each row
    int *candidate_begin_, *reached_, *begun_;   // of regions; blocks of rectangles
    int *region_begin_, *region_tile_;
    int *tile_begin_, *tile_end_, *pair_count_, *pair_begin_, *run_count_, *run_begin_, *step_count_, *cost_;
    int* document_of_;
    unsigned* document_cost_;   // of its most expensive tile
    int *pair_slice_, *pair_tile_, *slice_at_;
    Step* steps_;   // of the tiles, those of a tile where its pairs are
    int *slice_order_, *slice_merged_;
    Rect* rects_;                // of the slices, in their order
    Rect* columns_;              // where they lead down in steps
    unsigned* goes_on_;          // a bit for each of them
    int* slice_pairs_;           // how many pairs the slices before this one have
    unsigned* most_pairs_;       // of one tile
    volatile int* num_slices_;   // in memory: registers are short
};

}   // namespace ffa

extern "C" __global__ void __launch_bounds__(ffa::kThreads)
    ffa_tile_plan(const __grid_constant__ ffa::TilePlanParams params) {
    ffa::Planner(params, blockIdx.x).run();
}
