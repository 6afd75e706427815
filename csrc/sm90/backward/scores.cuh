// What a score program makes of the scores of a tile of the backward kernel, keys by queries, and the slopes of that;
// or nothing where there is none.
#pragma once

#include "common/ptx.cuh"
#include "scores/places.cuh"

namespace ffa::backward {

template <class Config, bool kHasScore = Config::kHasScore>
class TileScores {
public:
    __device__ __forceinline__ TileScores(const typename Config::Params&, int) {}
    __device__ __forceinline__ void move_to(int, int) {}
};

// A new score and how it changes with the old one.
struct ScoreAndSlope {
    float score, slope;
};

// Of a thread, which has `key` and `key + 8`: what depends on them is computed once a tile, and what depends on batch
// entry and head, mostly once a block.
template <class Config>
class TileScores<Config, true> {
    using Score = typename Config::Score;

public:
    __device__ __forceinline__ TileScores(const typename Config::Params& params, int key)
        : params_(params), columns_(params.score.queries), keys_{Key(params, key), Key(params, key + 8)} {}

    // `first` is the first query of a block.
    __device__ __forceinline__ void move_to(int first, int head) {
        columns_.move_to(first, head);
        const Entry entry = columns_.entry();
        of_entry_ = Score::entry(params_.score, entry.b, entry.h);
    }

    // visit(i, queries) for each 8 queries of the block, of which a thread has two.
    template <class Visit>
    __device__ __forceinline__ void for_each_pair(Visit visit) const {
        if (__all_sync(0xffffffff, columns_.have_one_entry())) {
            columns_.for_each_pair([&](int i, const Place& left, const Place& right) {
                const Query queries[2] = {Query(params_, of_entry_, left), Query(params_, of_entry_, right)};
                visit(i, queries);
            });
        } else {
            columns_.for_each_pair_of_entries([&](int i, const Place& left, const Place& right) {
                const Query queries[2] = {Query(params_, left), Query(params_, right)};
                visit(i, queries);
            });
        }
    }

    struct Query {
        __device__ __forceinline__ Query(const typename Config::Params& params, const Place& query)
            : Query(params, Score::entry(params.score, query.b, query.h), query) {}

        __device__ __forceinline__ Query(const typename Config::Params& params, const typename Score::Entry& entry,
                                         const Place& query)
            : place(query), of_entry(entry), of_row(Score::row(params.score, entry, query)) {}

        Place place;
        typename Score::Entry of_entry;
        typename Score::Row of_row;
    };

    // Of a product of a query and the key `half`.
    __device__ __forceinline__ float score(float product, const Query& query, int half) const {
        const Key& key = keys_[half];
        return Score::score(params_.score, query.of_entry, query.of_row, key.of_key, query.place, key.place,
                            product * params_.cap_scale);
    }

    __device__ __forceinline__ ScoreAndSlope score_and_slope(float product, const Query& query, int half) const {
        const Key& key = keys_[half];
        return {score(product, query, half), Score::slope(params_.score, query.of_entry, query.of_row, key.of_key,
                                                          query.place, key.place, product * params_.cap_scale)};
    }

    // The exponents of P to base 2, of scores that began with -lse / scale, where the program adds to a score what does
    // not depend on it.
    template <int kCount>
    __device__ __forceinline__ void shift(float (&scores)[kCount]) const {
        for_each_pair([&](int i, const Query(&queries)[2]) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float& x = scores[4 * i + 2 * half + j];
                    x = score(x, queries[j], half) * params_.scale_log2;
                }
            }
        });
    }

private:
    struct Key {
        __device__ __forceinline__ Key(const typename Config::Params& params, int key)
            : place(entry_of(params.score.keys, key, 0).place(key)), of_key(Score::key(params.score, place)) {}

        Place place;
        typename Score::Key of_key;
    };

    const typename Config::Params& params_;
    Columns<Config::kBlockCols> columns_;
    const Key keys_[2];
    typename Score::Entry of_entry_;
};

}   // namespace ffa::backward
