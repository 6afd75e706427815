// A warpgroup of the kernel of gradients of captured tensors, that owns 64 rows of a tile. For each block of keys:
//
//     S = Q K^T, dP = dO V^T
//     P = exp2(new score - lse), dS = P (dP - delta)
//     for each look-up: dS times how the new score changes with what was looked up, added where that lies
#pragma once

#include "keys/key_block.cuh"
#include "common/pipeline.cuh"
#include "common/product.cuh"
#include "common/wgmma.cuh"
#include "scores/functions.cuh"
#include "scores/gradients/config.cuh"
#include "scores/gradients/sums.cuh"
#include "scores/places.cuh"
#include "scores/row.cuh"

namespace ffa::scores {

// Of the rows of a thread, `row` and `row + 8`.
template <class Config>
struct RowsOfGradients {
    using Row = ScoreRow<typename Config::Score, typename Config::Params>;

    __device__ __forceinline__ RowsOfGradients(const typename Config::Params& params, int row, int row_end, int head)
        : rows{Row(params, row, head), Row(params, row + 8, head)} {
        constexpr float kLog2E = 1.44269504088896341f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = row + 8 * half;
            minus_lse[half] = minus_delta[half] = 0.f;   // masks hide rows that see nothing, and rows of others
            if (r < row_end) {
                const float lse = params.lse[static_cast<long long>(head) * params.total_q + r];
                minus_lse[half] = lse == -kInfinity ? 0.f : lse * -kLog2E;
                const long long padded_row = static_cast<long long>(head) * params.padded_q + r;
                minus_delta[half] = statistic_of(params.stats[padded_row / kStatsQueries], Statistic::kOfDprobs,
                                                 static_cast<int>(padded_row % kStatsQueries));
            }
        }
        const Place& upper = rows[0].place;
        const Place& lower = rows[1].place;
        const int first_b = __shfl_sync(0xffffffff, upper.b, 0), first_h = __shfl_sync(0xffffffff, upper.h, 0);
        are_of_one_entry = __all_sync(
            0xffffffff, upper.b == first_b && lower.b == first_b && upper.h == first_h && lower.h == first_h);
    }

    __device__ __forceinline__ static float statistic_of(const Stats& stats, Statistic statistic, int query) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < kTerms; ++i) {
            sum += widen(stats.terms[static_cast<int>(statistic) * kTerms + i][query]);
        }
        return sum;
    }

    Row rows[2];
    bool are_of_one_entry;   // all rows of the warp
    float minus_lse[2];      // in base 2
    float minus_delta[2];
};

template <class Config>
class Consumer {
public:
    __device__ __forceinline__ Consumer(const typename Config::Params& params, SharedStorage<Config>& smem,
                                        int warpgroup)
        : params_(params),
          smem_(smem),
          warpgroup_(warpgroup),
          warp_(threadIdx.x / 32 % 4),
          lane_(threadIdx.x % 32),
          columns_(params.score.keys) {}

    __device__ __forceinline__ void run(const Tile& tile, int head) {
        const RowsOfGradients<Config> rows(params_, first_row(tile), tile.row_end, head);
        mbarrier_wait_together(smem_.q_full, 0);
        const uint32_t q = operand(smem_.q), dout = operand(smem_.dout);
        for (int left = uniform(smem_.num_blocks); left > 0; --left) {
            mbarrier_wait_together(smem_.k_full[k_.slot], k_.phase);
            const Visibility sees = visible(tile);
            if (sees == kNothing) {
                release_k();
                wait_for_v();
                release_v();
                continue;
            }
            Scores scores, dprobs;
            issue(scores, q, wgmma_descriptor(smem_.k[k_.slot], 0));
            wait_for_v();
            issue(dprobs, dout, wgmma_descriptor(smem_.v[v_.slot], 0));
            wgmma_wait_group<1>();
            pin(scores);
            mask(scores, sees, tile);
            const int first = uniform(smem_.blocks[k_.slot].first);
            release_k();
            wgmma_wait_group<0>();
            pin(dprobs);
            release_v();
            add(scores, dprobs, rows, first);
        }
#pragma unroll
        for (int i = 0; i < Score::kNumSums; ++i) {
            sums_[i].finish(params_.sums[i]);
        }
    }

private:
    using Element = typename Config::Element;
    using Score = typename Config::Score;
    static constexpr int kScores = Config::kBlockCols / 2;   // registers of a thread: 64 rows over 128 threads
    using Scores = float[kScores];

    template <class Slabs>
    __device__ __forceinline__ uint32_t operand(const Slabs& slabs) const {
        return uniform(wgmma_descriptor(&slabs[0][warpgroup_ * Config::kRows * Config::kSlabCols], 0));
    }

    // rows keys^T
    __device__ __forceinline__ static void issue(Scores& product, uint32_t rows, uint32_t keys) {
        set_unread(product);
        issue_product<Element, Config::kHeadDim / 16, kKSlabBytes>(product, SharedRows<kQSlabBytes>{rows}, keys);
    }

    // What this warpgroup sees of the block.
    __device__ __forceinline__ Visibility visible(const Tile& tile) const {
        if (!__any_sync(0xffffffff, tile.row_begin + warpgroup_ * Config::kRows < tile.row_end)) {
            return kNothing;
        }
        return visibility_of_block<Config, true>(smem_.blocks[k_.slot], params_, tile, warpgroup_);
    }

    // Hidden scores become -inf, those of rows behind the tile too, which are another's.
    __device__ __forceinline__ void mask(Scores& scores, Visibility sees, const Tile& tile) const {
        const int row = first_row(tile);
        if (sees == kPartial) {
            mask_block<Config, true>(scores, smem_.blocks[k_.slot], params_, row, lane_);
        }
        if (__any_sync(0xffffffff, row + 8 >= tile.row_end)) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) {
                scores[i] = row + i / 2 % 2 * 8 < tile.row_end ? scores[i] : -kInfinity;
            }
        }
    }

    __device__ __forceinline__ void add(const Scores& scores, const Scores& dprobs, const RowsOfGradients<Config>& rows,
                                        int first) {
        const auto add_pair = [&](int i, const Place& left, const Place& right) {
            add_column(scores + 4 * i, dprobs + 4 * i, rows, 0, left);
            add_column(scores + 4 * i + 1, dprobs + 4 * i + 1, rows, 1, right);
        };
        columns_.move_to(first, 0);
        if (__all_sync(0xffffffff, columns_.have_one_entry())) {
            columns_.for_each_pair(add_pair);
        } else {
            columns_.for_each_pair_of_entries(add_pair);
        }
    }

    // Of column `j` of two; that of row `half` is at 2 * half.
    __device__ __forceinline__ void add_column(const float* scores, const float* dprobs,
                                               const RowsOfGradients<Config>& rows, int j, const Place& key) {
        const typename Score::Key of_key = Score::key(params_.score, key);
        bool counts[2];
        int places[Score::kNumSums][2];
        float values[Score::kNumSums][2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto& row = rows.rows[half];
            const float score = scores[2 * half] * params_.cap_scale;
            const float changed = Score::score(params_.score, row.of_entry, row.of_row, of_key, row.place, key, score);
            const float p = ex2(changed * params_.scale_log2 + rows.minus_lse[half]);
            const float dscore = p * (dprobs[2 * half] + rows.minus_delta[half]);
            counts[half] = scores[2 * half] != -kInfinity && p != 0.f;
            TableGradient found[Score::kNumSums];
            Score::gradients(params_.score, row.of_entry, row.of_row, of_key, row.place, key, score, found);
#pragma unroll
            for (int i = 0; i < Score::kNumSums; ++i) {
                places[i][half] = found[i].place;
                values[i][half] = counts[half] ? found[i].slope * dscore : 0.f;
            }
        }
#pragma unroll
        for (int i = 0; i < Score::kNumSums; ++i) {
            // A key has one place for all rows that are of one batch entry and head.
            const PlaceOf of = Score::place_of(i);
            if (of == PlaceOf::kRow) {
                sums_[i].add_to_rows(counts, places[i], values[i]);
            } else if (of == PlaceOf::kKey && rows.are_of_one_entry) {
                RunningSums::add_to_key(params_.sums[i], places[i][0], values[i][0] + values[i][1]);
            } else {
                sums_[i].add_to_pairs(params_.sums[i], j, counts, places[i], values[i]);
            }
        }
    }

    __device__ __forceinline__ int first_row(const Tile& tile) const {
        return tile.row_begin + warpgroup_ * Config::kRows + warp_ * kWarpRows + lane_ / 4;
    }

    __device__ __forceinline__ void wait_for_v() const { mbarrier_wait_together(smem_.v_full[v_.slot], v_.phase); }

    __device__ __forceinline__ void release_k() { release(smem_.k_empty, k_, lane_); }

    __device__ __forceinline__ void release_v() { release(smem_.v_empty, v_, lane_); }

    static constexpr int kQSlabBytes = Config::kQSlab * sizeof(Element);
    static constexpr int kKSlabBytes = Config::kKSlab * sizeof(Element);

    const typename Config::Params& params_;
    SharedStorage<Config>& smem_;
    const int warpgroup_;
    const int warp_;
    const int lane_;
    Columns<Config::kBlockCols> columns_;
    RunningSums sums_[Score::kNumSums];
    Position<Config::kKStages> k_;
    Position<Config::kVStages> v_;
};

}   // namespace ffa::scores
