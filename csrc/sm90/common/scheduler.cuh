// Which (tile, head) a thread block of a walk by queries works on next: the plan's tiles, longest first, for one L2
// section of heads after another. The first item of a block is its index; the others are drawn from a counter, so that
// no block waits while another has work left.
#pragma once

#include "common/ptx.cuh"
#include "common/tile_plan.cuh"

namespace ffa {

struct Schedule {
    const Tile* tiles;   // [num_tiles], of each head behind one another where heads have masks of their own
    int* ticket;         // [1], zero at launch; unused where every block has one item at most
    int num_tiles;
    int num_heads;
    int heads_per_section;   // divides num_heads
    int tiles_of_head;       // from the tiles of a head to those of the next one: 0 where all have the same
};

struct WorkItem {
    int tile;
    int head;
};

class Scheduler {
public:
    __device__ __forceinline__ explicit Scheduler(const Schedule& schedule) : Scheduler(schedule, blockIdx.x) {}

    __device__ __forceinline__ Scheduler(const Schedule& schedule, int item) : schedule_(schedule), item_(item) {}

    __device__ __forceinline__ bool has_work() const { return item_ < num_items(); }

    __device__ __forceinline__ WorkItem item() const {
        const int heads = schedule_.heads_per_section;
        const int section = item_ / items_of_section();
        const int within = item_ - section * items_of_section();
        const int tile = within / heads;
        return {tile, section * heads + within - tile * heads};
    }

    // Of the first item behind this one's section.
    __device__ __forceinline__ int section_end() const { return (item_ / items_of_section() + 1) * items_of_section(); }

    // For padding tiles, which are the last of their section: nobody needs to draw the rest of it.
    __device__ __forceinline__ void leave_section() {
        const int next_section = section_end();
        if (num_items() > gridDim.x) {
            atomicMax(schedule_.ticket, next_section - static_cast<int>(gridDim.x));
        }
    }

    __device__ __forceinline__ void advance() {
        item_ = gridDim.x < num_items() ? gridDim.x + atomicAdd(schedule_.ticket, 1) : num_items();
    }

private:
    // Computed anew each time: the one thread that schedules has few registers.
    __device__ __forceinline__ int num_items() const { return num_tiles() * schedule_.num_heads; }

    __device__ __forceinline__ int items_of_section() const { return num_tiles() * schedule_.heads_per_section; }

    __device__ __forceinline__ int num_tiles() const { return opaque(schedule_.num_tiles); }

    const Schedule& schedule_;
    int item_;
};

}   // namespace ffa
