// What is known of a query on which a score program is run.
#pragma once

#include "scores/places.cuh"

namespace ffa {

template <class Score, class Params>
struct ScoreRow {
    // `row` is packed, `head` that of the packed tensors.
    __device__ __forceinline__ ScoreRow(const Params& params, int row, int head) {
        const Entry entry = entry_of(params.score.queries, row, head);
        place = entry.place(row);
        of_entry = Score::entry(params.score, entry.b, entry.h);
        of_row = Score::row(params.score, of_entry, place);
    }

    Place place;
    typename Score::Entry of_entry;
    typename Score::Row of_row;
};

}   // namespace ffa
