// What a score program makes of the scores of a tile of the forward kernel, or nothing where there is none.
#pragma once

#include "scores/places.cuh"
#include "scores/row.cuh"

namespace ffa::forward {

template <class Config, bool kHasScore = Config::kHasScore>
class TileScores {
public:
    __device__ __forceinline__ TileScores(const typename Config::Params&, int, int) {}
};

// Of a thread, which has `row` and `row + 8`: what depends on them is computed once a tile.
template <class Config>
class TileScores<Config, true> {
    using Score = typename Config::Score;

public:
    __device__ __forceinline__ TileScores(const typename Config::Params& params, int row, int head)
        : params_(params), columns_(params.score.keys), rows_{Row(params, row, head), Row(params, row + 8, head)} {}

    // The new scores of a block of keys.
    template <int kCount>
    __device__ __forceinline__ void change(float (&scores)[kCount], int first) {
        const auto change_pair = [&](int i, const Place& left, const Place& right) {
            change_column(scores + 4 * i, left);
            change_column(scores + 4 * i + 1, right);
        };
        columns_.move_to(first, 0);
        if (__all_sync(0xffffffff, columns_.have_one_entry())) {
            columns_.for_each_pair(change_pair);
        } else {
            columns_.for_each_pair_of_entries(change_pair);
        }
    }

private:
    using Row = ScoreRow<Score, typename Config::Params>;

    __device__ __forceinline__ void change_column(float* scores, const Place& key) const {
        const typename Score::Key of_key = Score::key(params_.score, key);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Row& row = rows_[half];
            scores[2 * half] = Score::score(params_.score, row.of_entry, row.of_row, of_key, row.place, key,
                                            scores[2 * half] * params_.cap_scale);
        }
    }

    const typename Config::Params& params_;
    Columns<Config::kBlockCols> columns_;
    const Row rows_[2];
};

}   // namespace ffa::forward
