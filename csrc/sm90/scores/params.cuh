// What the parameters of a kernel have beside its own where a score program changes the scores.
#pragma once

#include "functions/tables.cuh"
#include "scores/places.cuh"

namespace ffa {

// `words` are what the program captures: see magi_compile/kernels/sm90/scores/source.py.
template <int kNumWords>
struct ScoreParams {
    Sequences queries, keys;
    Int words[kNumWords];

    __device__ __forceinline__ Int word(int i) const { return words[i]; }
    __device__ __forceinline__ int size(int i) const { return static_cast<int>(words[i]); }
};

}   // namespace ffa
