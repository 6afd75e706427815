// What a thread block of the forward kernel works on, item by item: a tile of a head, or a split of it.
//
// A launch that begins before remote keys are there shares its items with one that is enqueued behind their arrival.
// Those are tiles without remote keys, tiles with some, and as splits the local keys of these. Until a block from
// behind the arrival runs, and says so, blocks take the tiles without remote keys, and then splits. After that no split
// is begun any more: blocks take tiles with remote keys, of which they walk the local ones too unless a split has them,
// and then what is left without. No block waits for remote keys, so that none keeps its SM from what brings them; one
// that finds nothing to do ends, and one from behind the arrival has its place.
#pragma once

#include "common/scheduler.cuh"
#include "forward/config.cuh"
#include "forward/items.cuh"

namespace ffa::forward {

template <class Config>
class Items<Config, true> {
public:
    __device__ __forceinline__ explicit Items(const EarlyForwardParams& params) : params_(params) {
        if (blockIdx.x >= params_.first_behind) {
            end_splits();
        }
        advance();
    }

    __device__ __forceinline__ bool has_work() const { return item_ != kNone; }

    __device__ __forceinline__ WorkItem item() const { return at_item().item(); }

    __device__ __forceinline__ void advance() {
        if (num_begun_ == kUnknown) {
            num_begun_ = look_at_num_begun();
        }
        if (num_begun_ == kUnknown) {
            if (draw(kLocal) || draw(kSplits)) {
                return;
            }
            if (item_ < kEnded) {
                item_ = kNone;
                return;
            }
            num_begun_ = await_num_begun();
        }
        if (!draw(kRemote) && !draw(kLocal)) {
            item_ = kNone;
        }
    }

    // For padding tiles, which are the last of their section: nobody needs to draw the rest of it.
    __device__ __forceinline__ void leave_section() { atomicMax(list().ticket, at_item().section_end()); }

    // Without local keys where a split has them.
    __device__ __forceinline__ Tile tile(const WorkItem& item) {
        Tile tile = list().tiles[item.tile];
        split_ = {kNotASplit, 0};
        if (list_ == kSplits) {
            split_ = {shift_of(item.tile, tile), item_};
        } else if (list_ == kRemote) {
            const RemoteTile remote = params_.remote_tiles[item.tile];
            const int split_item = item_of_split(remote.split, item.head);
            if (remote.split != kNoSplit && split_item < num_begun_) {
                tile.run_begin = remote.run_mid;
                split_ = {shift_of(remote.split, tile), ~split_item};
            }
        }
        return tile;
    }

    __device__ __forceinline__ SplitOfTile split(const WorkItem&) const { return split_; }

private:
    __device__ __forceinline__ const Schedule& list() const { return params_.lists[list_]; }

    __device__ __forceinline__ Scheduler at_item() const { return Scheduler(list(), item_); }

    __device__ __forceinline__ bool draw(TileList from) {
        list_ = from;
        item_ = atomicAdd(list().ticket, 1);
        return item_ < opaque(list().num_tiles) * list().num_heads;
    }

    // The ticket of splits is beyond all items from here on, and who makes it so knows how many were begun.
    __device__ __forceinline__ void end_splits() {
        const Schedule& splits = params_.lists[kSplits];
        const int ticket = atomicOr(splits.ticket, kEnded);
        if (ticket < kEnded) {
            add_release(params_.num_begun_splits, min(ticket, opaque(splits.num_tiles) * splits.num_heads) + 1);
        }
        num_begun_ = await_num_begun();
    }

    // What was seen to arrive by who says how many splits were begun is there for this block too, and for its TMA.
    __device__ __forceinline__ int look_at_num_begun() const {
        const int num_begun = load_acquire(params_.num_begun_splits) - 1;
        fence_proxy_async_global();
        return num_begun;
    }

    // Once they are ended; the block that then says so waits for nobody.
    __device__ __forceinline__ int await_num_begun() const {
        int num_begun;
        while ((num_begun = look_at_num_begun()) == kUnknown) {
        }
        return num_begun;
    }

    __device__ __forceinline__ int item_of_split(int split, int head) const {
        const Schedule& splits = params_.lists[kSplits];
        const int heads = splits.heads_per_section, section = head / heads;
        return (section * opaque(splits.num_tiles) + split) * heads + head - section * heads;
    }

    __device__ __forceinline__ int shift_of(int split, const Tile& tile) const {
        return split * params_.split_rows - tile.row_begin;
    }

    static constexpr int kNone = -1;         // as item_
    static constexpr int kUnknown = -1;      // as num_begun_
    static constexpr int kEnded = 1 << 30;   // the ticket of splits from there on

    const EarlyForwardParams& params_;
    TileList list_;
    int item_;
    int num_begun_ = kUnknown;
    SplitOfTile split_;
};

}   // namespace ffa::forward
