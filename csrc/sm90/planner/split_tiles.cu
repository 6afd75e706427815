// Cuts long tiles of the walk by q into splits, where tiles and heads are too few to keep the SMs busy: one thread
// block behind the plan.
//
// Every head has its share of the SMs, which draw the tiles in their order. A tile that would not end by a deadline, if
// it were drawn when its turn comes, is cut into as many splits as it takes, or more, so that an SM may walk a round or
// two of them. Each warp tries its own deadline and rounds, the last one has no deadline; the one that ends first, the
// merge included, is what is walked, if it gains enough.
#include "common/block.cuh"
#include "common/tile_plan.cuh"
#include "planner/cost.cuh"

namespace ffa {

constexpr int kTileCost = FFA_TILE_COST;
constexpr int kSplitCost = FFA_SPLIT_COST;
constexpr int kMergeCost = FFA_MERGE_COST;
constexpr int kMergeLaunchCost = FFA_MERGE_LAUNCH_COST;
constexpr int kMostTiles = FFA_MOST_TILES;
constexpr int kMostPlayed = 256;   // tiles of a head, and waves: those behind them are short, and level what is before
constexpr int kMostWaves = 8;
constexpr int kRounds = 2;
constexpr int kDeadlines = 5;
constexpr int kTries = kRounds * kDeadlines + 1;
constexpr int kSmsOfLane = 5;                // at most, 32 times that in all
constexpr int kLeastGain = FFA_LEAST_GAIN;   // a 20th of the time
// The more SMs are busy, the slower each one is, by a third from none to all (the chip runs at its power limit): all
// work takes a third of an SM's share longer than that, whole or in splits.
constexpr int kPower = FFA_POWER;
constexpr int kThreads = 512;
static_assert(32 * kTries <= kThreads, "each try has a warp of its own");

struct SplitTilesParams {
    const Tile* tiles;   // [num_tiles]
    const Run* runs;     // [num_runs]
    Run* split_runs;     // [2 * num_runs + max_splits]: the runs, then those of splits
    Tile* split_tiles;   // [num_tiles + max_splits]: the tiles in their order, whole or in splits, then padding
    Cut* cuts;           // [max_splits / 2], those of no splits behind the others
    int* split_shifts;   // [num_tiles + max_splits]
    int num_tiles;       // at most kMostTiles
    int num_runs;
    int max_splits;
    int num_sms;        // for each head, at most 32 * kSmsOfLane
    int least_blocks;   // of a split
    int tile_rows;
    int block_cols;
};

static_assert(sizeof(SplitTilesParams) == 80, "packed by magi_compile/kernels/sm90/params.py");

// What the threads share.
__shared__ struct {
    int cost[kMostTiles];   // of a tile's runs
    int num_blocks[kMostTiles];
    int first_split[kMostTiles], first_cut[kMostTiles], first_run[kMostTiles];
    short num_splits[kTries][kMostPlayed];
    int ends[kTries];
} notes;

class Cutter {
public:
    __device__ explicit Cutter(const SplitTilesParams& params) : params_(params) {}

    __device__ void run() {
        measure();
        for_each_warp(kTries, [&](int number) {
            notes.ends[number] = params_.num_sms <= 32 ? play<1>(number) : play<kSmsOfLane>(number);
        });
        const int whole = kTries - 1;
        int best = whole;
        for (int number = 0; number < whole; ++number) {
            best = notes.ends[number] < notes.ends[best] ? number : best;
        }
        const int end = notes.ends[best];
        best_ = end + (end + share_ / kPower) / kLeastGain < notes.ends[whole] ? best : whole;
        hand_out();
    }

private:
    __device__ void measure() {
        num_tiles_ = prefix_sum(
            params_.num_tiles, [&](int i) { return int(params_.tiles[i].row_begin < params_.tiles[i].row_end); },
            [](int, int) {});
        num_played_ = min(min(num_tiles_, kMostPlayed), kMostWaves * params_.num_sms);
        for_each(num_tiles_, [&](int tile) {
            const Tile t = params_.tiles[tile];
            int cost = 0, num_blocks = 0;
            for (int i = t.run_begin; i < t.run_end; ++i) {
                const Run& run = params_.runs[i];
                num_blocks += run.num_blocks;
                cost += cost_of(run);
            }
            notes.cost[tile] = cost;
            notes.num_blocks[tile] = num_blocks;
        });
        const int all = prefix_sum(num_tiles_, [&](int tile) { return notes.cost[tile] + kTileCost; }, [](int, int) {});
        share_ = (all + params_.num_sms - 1) / params_.num_sms;
    }

    // Notes the number of splits of each tile. Returns when the last one has ended, merged.
    template <int kPerLane>
    __device__ int play(int number) {
        Workers<kPerLane> sms(params_.num_sms);
        const int max_splits = number == kTries - 1 ? 0 : params_.max_splits;
        const int step = number / kRounds;   // fine near the best that there could be
        const int deadline = share_ + kTileCost + kSplitCost + share_ / 32 * step * step;
        const int round = deadline / (number % kRounds + 1);
        int splits_in_all = 0;
        for (int tile = 0; tile < num_played_; ++tile) {
            const int begin = sms.first_free();
            const int until = deadline - begin, cost = notes.cost[tile];
            int splits = 1;
            if (cost + kTileCost > until) {
                splits = wanted_splits(tile, min(until, round), max_splits - splits_in_all);
            }
            notes.num_splits[number][tile] = splits;
            if (splits == 1) {
                sms.work(begin, cost + kTileCost, 1);
                continue;
            }
            splits_in_all += splits;
            const int of_split = (cost + splits - 1) / splits + kTileCost + kSplitCost;
            for (int left = splits; left > 0;) {
                left = sms.work(sms.first_free(), of_split, left);
            }
        }
        const int merge = splits_in_all > 0 ? kMergeLaunchCost + kMergeCost * splits_in_all / params_.num_sms : 0;
        return max(sms.last_free(), share_ + kSplitCost * splits_in_all / params_.num_sms) + merge;
    }

    // Into how many splits a tile is cut of which none is to take longer than `duration`; `most` at most.
    __device__ __forceinline__ int wanted_splits(int tile, int duration, int most) const {
        most = min(most, notes.num_blocks[tile] / params_.least_blocks);
        const int of_split = max(duration - kTileCost - kSplitCost, 1);
        return most < 2 ? 1 : max(2, min(most, (notes.cost[tile] - 1) / of_split + 1));
    }

    __device__ __forceinline__ int num_splits(int tile) const {
        return tile < num_played_ ? notes.num_splits[best_][tile] : 1;
    }

    __device__ void hand_out() {
        const auto is_cut = [&](int tile) { return num_splits(tile) > 1; };
        const int num_splits_of_cuts = prefix_sum(
            num_tiles_, [&](int tile) { return is_cut(tile) ? num_splits(tile) : 0; },
            [&](int tile, int before) { notes.first_split[tile] = before; });
        const int num_cuts = prefix_sum(
            num_tiles_, [&](int tile) { return int(is_cut(tile)); },
            [&](int tile, int before) { notes.first_cut[tile] = before; });
        prefix_sum(
            num_tiles_,
            [&](int tile) {
                const Tile t = params_.tiles[tile];
                return is_cut(tile) ? t.run_end - t.run_begin + num_splits(tile) - 1 : 0;
            },
            [&](int tile, int before) { notes.first_run[tile] = params_.num_runs + before; });
        for_each(params_.num_runs, [&](int i) { params_.split_runs[i] = params_.runs[i]; });
        // For now, whose split each tile is to be and which one.
        for_each(num_tiles_, [&](int tile) {
            const int place = tile + notes.first_split[tile] - notes.first_cut[tile];
            for (int i = 0; i < num_splits(tile); ++i) {
                params_.split_tiles[place + i] = {tile, i, 0, 0};
            }
        });
        const int num_split_tiles = num_tiles_ + num_splits_of_cuts - num_cuts;
        for_each(num_split_tiles, [&](int place) {
            const Tile split = params_.split_tiles[place];
            cut(place, split.row_begin, split.row_end);
        });
        for_each(params_.num_tiles + params_.max_splits - num_split_tiles, [&](int i) {
            params_.split_tiles[num_split_tiles + i] = {0, 0, 0, 0};
            params_.split_shifts[num_split_tiles + i] = kNotASplit;
        });
        for_each(params_.max_splits / 2 - num_cuts, [&](int i) { params_.cuts[num_cuts + i] = {0, 0, 0, 0}; });
    }

    __device__ __forceinline__ void cut(int place, int tile, int split) const {
        const Tile t = params_.tiles[tile];
        if (num_splits(tile) == 1) {
            params_.split_tiles[place] = t;
            params_.split_shifts[place] = kNotASplit;
            return;
        }
        const int split_row = notes.first_split[tile] * params_.tile_rows;
        copy_runs(tile, split, params_.split_tiles[place]);
        params_.split_shifts[place] = split_row + split * params_.tile_rows - t.row_begin;
        if (split == 0) {
            params_.cuts[notes.first_cut[tile]] = {t.row_begin, t.row_end, split_row, num_splits(tile)};
        }
    }

    // The blocks of a split, as runs behind those of the splits before it: two neighbours have one run in common at
    // most.
    __device__ __forceinline__ void copy_runs(int tile, int split, Tile& copy) const {
        const Tile t = params_.tiles[tile];
        const int begin = blocks_before(tile, split), end = blocks_before(tile, split + 1);
        int before = 0, first = 0, next = 0;
        for (int i = t.run_begin; i < t.run_end && before < end; ++i) {
            Run run = params_.runs[i];
            const int lo = max(begin - before, 0);
            const int hi = min(end - before, run.num_blocks);
            before += run.num_blocks;
            if (lo < hi) {
                if (next == 0) {
                    first = next = notes.first_run[tile] + i - t.run_begin + split;
                }
                run.first += lo * params_.block_cols;
                run.num_lead = min(max(run.num_lead - lo, 0), hi - lo);
                run.num_trail = min(max(run.num_trail - (run.num_blocks - hi), 0), hi - lo);
                run.num_blocks = hi - lo;
                params_.split_runs[next++] = run;
            }
        }
        copy = {t.row_begin, t.row_end, first, next};
    }

    __device__ __forceinline__ int blocks_before(int tile, int split) const {
        return static_cast<long long>(notes.num_blocks[tile]) * split / num_splits(tile);
    }

    const SplitTilesParams& params_;
    int num_tiles_ = 0;    // that have rows
    int num_played_ = 0;   // of them, the first ones; the others stay whole
    int share_ = 0;        // an SM's, of all tiles
    int best_ = 0;         // try
};

}   // namespace ffa

extern "C" __global__ void __launch_bounds__(ffa::kThreads)
    ffa_split_tiles(const __grid_constant__ ffa::SplitTilesParams params) {
    ffa::Cutter(params).run();
}
