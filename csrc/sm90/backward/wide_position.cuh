// Where a consumer of wide heads stands in the rings of a block. Rings that are as long share a position, and so registers.
#pragma once

#include "common/pipeline.cuh"

namespace ffa {

template <class Config>
class WidePosition {
public:
    __device__ __forceinline__ auto q() const { return q_; }

    // And of dS.
    __device__ __forceinline__ auto dout() const {
        if constexpr (Config::kDoutStages == Config::kStages) {
            return q_;
        } else {
            return dout_;
        }
    }

    __device__ __forceinline__ WidePosition before() const {
        WidePosition block;
        block.q_ = q_.before();
        block.dout_ = dout_.before();
        return block;
    }

    __device__ __forceinline__ void advance() {
        q_.advance();
        dout_.advance();
    }

private:
    Position<Config::kStages> q_;
    Position<Config::kDoutStages> dout_;
};

}  // namespace ffa
