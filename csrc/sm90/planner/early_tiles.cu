// The walk by q for a forward that begins before its remote keys are there: one thread block behind the plan.
//
// Each tile's local runs come first. Tiles that see remote keys are a list, and those that do not are another, both in
// the order of the plan: most expensive first. A tile that sees both kinds may be cut in two; what it sees of local
// keys is a split then, and those with the most come first.
#include "common/block.cuh"
#include "common/tile_plan.cuh"
#include "planner/cost.cuh"

namespace ffa {

constexpr int kThreads = 512;

struct EarlyTilesParams {
    const Tile* tiles;           // [num_tiles], those without rows behind the others
    const Run* runs;             // [num_runs], each of local or of remote columns
    Run* parted_runs;            // [num_runs]
    Tile* remote_tiles;          // [num_tiles], those of each list in front of tiles without rows
    RemoteTile* remote_splits;   // [num_tiles], of the remote tiles
    Tile* local_tiles;           // [num_tiles]
    Tile* split_tiles;           // [num_splits]
    unsigned long long* order;   // [num_sorted], scratch, as what follows
    int* run_mid;                // [num_tiles]: the first remote run
    int* split_of;               // [num_tiles]
    int* before;                 // [num_tiles]
    int num_tiles;
    int num_splits;   // at most num_tiles
    int num_sorted;   // the power of two from num_tiles up
    int remote_begin;
};

static_assert(sizeof(EarlyTilesParams) == 104, "packed by magi_compile/kernels/sm90/params.py");

class EarlyTiles {
public:
    __device__ explicit EarlyTiles(const EarlyTilesParams& params) : params_(params) {}

    __device__ void run() {
        for_each(params_.num_tiles, [&](int tile) { part(tile); });
        for_each(params_.num_sorted - params_.num_tiles, [&](int i) {
            const int behind = params_.num_tiles + i;
            params_.order[behind] = longest_first(0, behind);
        });
        sort(params_.order, params_.num_sorted, [](unsigned long long a, unsigned long long b) { return a < b; });
        for_each(params_.num_splits, [&](int split) {
            const int tile = static_cast<int>(params_.order[split] & ~0u);
            params_.split_tiles[split] = listed(tile, is_cut(tile), run_begin(tile), params_.run_mid[tile]);
            if (is_cut(tile)) {
                params_.split_of[tile] = split;
            }
        });
        list([&](int tile) { return sees_remote(tile); },
             [&](int place, int tile, bool is_in) {
                 params_.remote_tiles[place] = listed(tile, is_in, run_begin(tile), run_end(tile));
                 params_.remote_splits[place] = {params_.run_mid[tile], params_.split_of[tile]};
             });
        list([&](int tile) { return has_rows(tile) && !sees_remote(tile); },
             [&](int place, int tile, bool is_in) {
                 params_.local_tiles[place] = listed(tile, is_in, run_begin(tile), params_.run_mid[tile]);
             });
    }

private:
    __device__ __forceinline__ bool has_rows(int tile) const {
        return params_.tiles[tile].row_begin < params_.tiles[tile].row_end;
    }
    __device__ __forceinline__ int run_begin(int tile) const {
        return has_rows(tile) ? params_.tiles[tile].run_begin : 0;
    }
    __device__ __forceinline__ int run_end(int tile) const { return has_rows(tile) ? params_.tiles[tile].run_end : 0; }
    __device__ __forceinline__ bool sees_remote(int tile) const { return params_.run_mid[tile] < run_end(tile); }
    __device__ __forceinline__ bool is_cut(int tile) const {
        return sees_remote(tile) && run_begin(tile) < params_.run_mid[tile];
    }

    // A tile, or one without rows in its place.
    __device__ __forceinline__ Tile listed(int tile, bool is_in, int begin, int end) const {
        const Tile t = params_.tiles[tile];
        return {is_in ? t.row_begin : t.row_end, t.row_end, begin, end};
    }

    __device__ void part(int tile) const {
        int next = run_begin(tile), cost = 0;
        for (int i = run_begin(tile); i < run_end(tile); ++i) {
            const Run run = params_.runs[i];
            if (run.col_begin < params_.remote_begin) {
                params_.parted_runs[next++] = run;
                cost += cost_of(run);
            }
        }
        params_.run_mid[tile] = next;
        for (int i = run_begin(tile); i < run_end(tile); ++i) {
            const Run run = params_.runs[i];
            if (run.col_begin >= params_.remote_begin) {
                params_.parted_runs[next++] = run;
            }
        }
        params_.split_of[tile] = kNoSplit;
        params_.order[tile] = longest_first(is_cut(tile) ? cost + 1 : 0, tile);   // splits in front
    }

    // put(place, tile, is_in(tile)) for all tiles, first those of which is_in holds, in their order.
    template <class IsIn, class Put>
    __device__ void list(IsIn is_in, Put put) const {
        const int num_in = prefix_sum(
            params_.num_tiles, [&](int tile) { return int(is_in(tile)); },
            [&](int tile, int before) { params_.before[tile] = before; });
        for_each(params_.num_tiles, [&](int tile) {
            const int before = params_.before[tile];
            const bool is_first = is_in(tile);
            put(is_first ? before : num_in + tile - before, tile, is_first);
        });
    }

    const EarlyTilesParams& params_;
};

}   // namespace ffa

extern "C" __global__ void __launch_bounds__(ffa::kThreads)
    ffa_early_tiles(const __grid_constant__ ffa::EarlyTilesParams params) {
    ffa::EarlyTiles(params).run();
}
