// What the lanes of a warp do side by side.
#pragma once

namespace ffa {

// A value of each lane.
template <class Value>
class PerLane {
public:
    __device__ __forceinline__ Value& operator[](int) { return value_; }

private:
    Value value_;
};

template <class Body>
__device__ __forceinline__ void for_each_lane(Body body) {
    body(static_cast<int>(threadIdx.x % 32));
}

// A bit for each lane.
template <class Flag>
__device__ __forceinline__ unsigned ballot(Flag flag) {
    return __ballot_sync(~0u, flag(static_cast<int>(threadIdx.x % 32)));
}

// By one lane.
template <class Body>
__device__ __forceinline__ void once(Body body) {
    if (threadIdx.x % 32 == 0) {
        body();
    }
}

}   // namespace ffa
