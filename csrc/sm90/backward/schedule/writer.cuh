// How the agenda of the backward pass comes about: passes, directions, parts of tiles and steps.
//
//   Passes. Under most masks with long walks, thread blocks at work at a time are at different queries of all heads of
//   a group, more than the L2 cache holds. So there some query heads of each group have a pass over all tiles, and what
//   a tile's keys have of them is handed on to the next pass, in fp32. Of two passes over a tile the first one began
//   first, so that nobody waits for long. Full and causal masks need none: what follows keeps their thread blocks close
//   together.
//
//   Under a block map, thread blocks are anywhere in the queries: there a pass is for one head, and where its queries
//   are more than stay in the cache, for some of these.
//
//   Directions. Thread blocks that start together on a document walk from its last queries to the first. Under a causal
//   mask they end one after the other, the shortest tile first; those that follow walk the other way, close behind one
//   another, and end together.
//
//   Parts. A tile that would take longer than all thread blocks need for what is left, is divided among several by
//   query heads of the group: the longest ones of uneven masks, and the last ones, where thread blocks would run out of
//   work at different times. Nobody waits: the last part to come to its end adds up what all have left, in fp32. Where
//   tiles are few, a part takes one and a half shares of all work at most.
//
//   Steps. Under a full mask thread blocks that start together read the same queries for long, and share them in the L2
//   cache if they stay together: without, those of 128K tokens drift apart on an H100, and take half as long again.
#pragma once

#include "backward/schedule/agenda.cuh"
#include "backward/schedule/walk.cuh"
#include "common/block.cuh"
#include "common/tile_plan.cuh"

namespace ffa::backward {

// The least divisor of the group by which no part of so many blocks of queries is longer than a thread block's share of
// what is left.
__device__ __forceinline__ int parts_within(int blocks, int group, int num_blocks, float left) {
    const float shares = static_cast<float>(blocks) * num_blocks;
    int parts = 1;
#pragma unroll 1
    while (parts < group && (parts * left < shares || group % parts != 0)) {
        ++parts;
    }
    return parts;
}

constexpr float kFewWaves = FFA_FEW_WAVES;
constexpr float kShareOfFew = FFA_SHARE_OF_FEW;   // more parts of few tiles cost more than idle blocks do
constexpr int kLeastVisits =
    FFA_LEAST_VISITS;   // of a part, where tiles are not few: less does not pay for what it leaves behind
constexpr int kLeastVisitsInStep = FFA_LEAST_VISITS_IN_STEP;   // of a tile: shorter walks do not drift apart

// Writes the agenda, by one thread block; so many warps have gradients of a tile's keys.
template <int kBlockCols, int kTileWarps>
class AgendaWriter {
public:
    struct Params {
        const Tile* tiles;   // [num_tiles], document by document
        const Run* runs;
        Agenda agenda;
        int* scratch;   // [3 * num_tiles + 1], and an int for each tile of each section where groups have several heads
        int num_tiles;
        int num_slots;   // a part each
        int qhead_per_kvhead;
        int num_blocks;             // of threads, or clusters of them, that will draw from the agenda
        int is_one_way;             // all walks are from the last queries to the first
        int most_heads_of_pass;     // of a group, that keep all blocks busy; 0 where there is one pass for all of them
        int blocks_of_cache;        // of queries of a head, that stay in the L2 cache
        int least_visits_of_pass;   // of a tile, in the mean: less does not pay for handing on
        int passes_of_map;          // of a block map: one, or each for one head and some of the queries; 0 for others
    };

    static_assert(sizeof(Params) == 112, "packed by magi_compile/kernels/sm90/params.py");

    __device__ __forceinline__ explicit AgendaWriter(const Params& params) : params_(params), agenda_(params.agenda) {}

    // Returns the order in which rows of dq will be complete, but for tiles that walk head by head.
    __device__ DqOrder write() {
        measure();
        const int num_passes = passes();
        const int num_entries = num_passes > 1                 ? list_passes(num_passes)
                                : params_.qhead_per_kvhead > 1 ? list_parts()
                                                               : list_tiles();
        const int num_arrivals = params_.num_slots * agenda_.heads_per_section * kTileWarps;
        compact_for_each(num_arrivals, [&](int i) { agenda_.arrivals[i] = 0; });
        const int waves_in_step = items_in_step(num_entries) / params_.num_blocks;
        compact_for_each(waves_in_step, [&](int wave) { *agenda_.counters->steps(wave) = 0; });
        compact_for_each(1, [&](int) {
            agenda_.counters->ticket = 0;
            agenda_.counters->num_in_step = waves_in_step * params_.num_blocks;
            *agenda_.num_entries = num_entries;
        });
        return {agenda_.heads_per_section * params_.qhead_per_kvhead, params_.passes_of_map > 0 ? 1 : num_passes};
    }

private:
    // Of a tile, and the slot of the first one.
    struct alignas(4) Parts {
        short slot, num;
    };

    // Where things lie in scratch: of each tile, blocks of tiles before it and its document, of each document its first
    // tile, and the parts of the tile at each place. No register keeps that.
    __device__ __forceinline__ int* blocks_before() const { return params_.scratch; }
    __device__ __forceinline__ int* document_of() const { return blocks_before() + params_.num_tiles + 1; }
    __device__ __forceinline__ int* document_begin() const { return document_of() + params_.num_tiles; }
    __device__ __forceinline__ Parts* parts_of() const {
        return reinterpret_cast<Parts*>(document_begin() + params_.num_tiles);
    }

    __device__ void measure() {
        num_tiles_ = compact_prefix_sum(
            params_.num_tiles, [&](int i) { return int(params_.tiles[i].row_begin < params_.tiles[i].row_end); },
            [](int, int) {});
        num_blocks_ = compact_prefix_sum(
            num_tiles_, [&](int i) { return blocks_of_tile<kBlockCols>(params_.tiles[i], params_.runs); },
            [&](int i, int before) { blocks_before()[i] = before; });
        compact_for_each(1, [&](int) { blocks_before()[num_tiles_] = num_blocks_; });
        compact_prefix_sum(
            num_tiles_, [&](int i) { return int(starts_document(i)); },
            [&](int i, int before) {
                const int document = before + starts_document(i) - 1;
                document_of()[i] = document;
                if (starts_document(i)) {
                    document_begin()[document] = i;
                }
            });
    }

    __device__ __forceinline__ int blocks_of(int tile) const {
        return blocks_before()[tile + 1] - blocks_before()[tile];
    }

    __device__ __forceinline__ int num_sections() const { return agenda_.num_heads / agenda_.heads_per_section; }

    // Of a section, where there is one document.
    __device__ __forceinline__ int waves_of_section() const {
        const bool is_one = document_of()[num_tiles_ - 1] == 0;
        const int items = num_tiles_ * agenda_.heads_per_section;
        return is_one ? (items + params_.num_blocks / 2) / params_.num_blocks : 0;
    }

    // Tiles that end with the same query are taken for one document.
    __device__ __forceinline__ bool starts_document(int i) const {
        return i == 0 || last_query(i) != last_query(i - 1);
    }

    __device__ __forceinline__ int last_query(int i) const {
        const Tile& tile = params_.tiles[i];
        return tile.run_begin < tile.run_end ? params_.runs[tile.run_end - 1].col_end : -1;
    }

    // Whole waves in front of the first tile in parts, under a full mask whose walks are long: thread blocks that start
    // together on these also end together.
    __device__ int items_in_step(int num_entries) const {
        if (params_.passes_of_map > 0) {
            return 0;   // tiles are those of a mean head, and thread blocks anywhere in the queries
        }
        const int blocks = num_tiles_ > 0 ? blocks_of(0) : 0;
        int& scratch = agenda_.counters->ticket;
        const bool are_equal =
            first_of(num_tiles_, [&](int i) { return blocks_of(i) != blocks; }, scratch) == num_tiles_;
        if (!are_equal || blocks * params_.qhead_per_kvhead < kLeastVisitsInStep) {
            return 0;
        }
        const auto has_parts = [&](int i) { return agenda_.entries[i].num_parts > 1; };
        return first_of(num_entries, has_parts, scratch) * agenda_.heads_per_section;
    }

    // How many, if a group's walks are longer than what stays in the L2 cache, with as many heads each as do: unless
    // walks are all alike, or each is as much shorter than the one before as under a causal mask, or what is handed on
    // would cost too much.
    __device__ int passes() const {
        if (params_.passes_of_map > 0) {
            return params_.passes_of_map;
        }
        const int group = params_.qhead_per_kvhead;
        const int mean_blocks = num_blocks_ / max(num_tiles_, 1);
        if (params_.most_heads_of_pass == 0 || mean_blocks * group <= params_.blocks_of_cache) {
            return 1;
        }
        int heads = max(min(params_.most_heads_of_pass, params_.blocks_of_cache / mean_blocks), 1);
#pragma unroll 1
        while (group % heads != 0) {
            --heads;
        }
        const auto more_than_next = [&](int i) { return blocks_of(i) - blocks_of(i + 1); };
        const auto is_uneven = [&](int i) { return abs(more_than_next(i) - more_than_next(0)) > 1; };
        const int num_pairs = num_tiles_ - 1;
        const bool are_even = first_of(num_pairs, is_uneven, agenda_.counters->ticket) >= num_pairs;
        return are_even || mean_blocks * heads < params_.least_visits_of_pass ? 1 : group / heads;
    }

    // All tiles for some query heads of each group, the last ones first, as heads that are walked one after the other
    // are anyway.
    __device__ int list_passes(int passes) {
        const int num_entries = num_tiles_ * num_sections() * passes;
        compact_for_each(num_entries, [&](int i) {
            const int turn = i / num_tiles_, tile = i % num_tiles_;
            agenda_.entries[i] = {tile,
                                  static_cast<short>(turn / passes * agenda_.heads_per_section),
                                  static_cast<short>(passes - 1 - turn % passes),
                                  static_cast<short>(passes),
                                  static_cast<short>(tile),
                                  static_cast<short>(turn),
                                  false};
        });
        return num_entries;
    }

    // A tile for the heads of a section.
    struct Place {
        int section, tile;
    };

    __device__ __forceinline__ Place place(int i) const { return {i / num_tiles_, i % num_tiles_}; }

    // For one head of each section.
    __device__ __forceinline__ long long blocks_in_front(const Place& at) const {
        return 1ll * at.section * num_blocks_ + blocks_before()[at.tile];
    }

    __device__ int list_tiles() {
        compact_for_each(num_sections() * num_tiles_, [&](int i) { agenda_.entries[i] = entry(i, 1, 0); });
        return num_sections() * num_tiles_;
    }

    __device__ int list_parts() {
        const int num_places = num_sections() * num_tiles_;
        const float waves = static_cast<float>(num_tiles_ * agenda_.num_heads) / params_.num_blocks;
        const bool are_few = waves < kFewWaves;
        compact_for_each(num_places, [&](int i) {
            const int parts = are_few ? parts_of_few(place(i).tile) : parts_of_many(place(i));
            parts_of()[i] = {0, static_cast<short>(parts)};
        });
        const auto slots = [&](int i) { return parts_of()[i].num > 1 ? parts_of()[i].num : 0; };
        compact_prefix_sum(num_places, slots, [&](int i, int slot) {
            Parts& parts = parts_of()[i];
            const bool have_room = slot + parts.num <= params_.num_slots;
            parts = have_room ? Parts{static_cast<short>(slot), parts.num} : Parts{0, 1};
        });
        return compact_prefix_sum(
            num_places, [&](int i) { return int(parts_of()[i].num); },
            [&](int i, int first) {
                const Parts parts = parts_of()[i];
                const AgendaEntry of_place = entry(i, parts.num, parts.slot);
#pragma unroll 1
                for (int part = 0; part < parts.num; ++part) {
                    agenda_.entries[first + part] = of_place;
                    agenda_.entries[first + part].part = static_cast<short>(part);
                }
            });
    }

    // The first part of so many.
    __device__ __forceinline__ AgendaEntry entry(int i, int num_parts, int slot) const {
        const auto [section, tile] = place(i);
        const int in_document = tile - document_begin()[document_of()[tile]];
        const int wave = section * waves_of_section() + in_document * agenda_.heads_per_section / params_.num_blocks;
        return {tile,
                static_cast<short>(section * agenda_.heads_per_section),
                0,
                static_cast<short>(num_parts),
                static_cast<short>(num_parts > 1 ? slot : 0),
                AgendaEntry::kNoTurn,
                static_cast<short>(!params_.is_one_way && wave % 2 != 0)};
    }

    // None of them is longer than a thread block's share of all work, one and a half times.
    __device__ __forceinline__ int parts_of_few(int tile) const {
        const float all = static_cast<float>(agenda_.num_heads) * num_blocks_;
        return parts_within(blocks_of(tile), params_.qhead_per_kvhead, params_.num_blocks, kShareOfFew * all);
    }

    // None of them is longer than a thread block's share of the work that is left.
    __device__ __forceinline__ int parts_of_many(const Place& at) const {
        const int group = params_.qhead_per_kvhead, blocks = blocks_of(at.tile);
        const long long left = 1ll * num_sections() * num_blocks_ - blocks_in_front(at);
        int parts =
            parts_within(blocks, group, params_.num_blocks, static_cast<float>(left) * agenda_.heads_per_section);
#pragma unroll 1
        while (parts > 1 && (blocks * group < parts * kLeastVisits || group % parts != 0)) {
            --parts;
        }
        return parts;
    }

    const Params& params_;
    const Agenda& agenda_;
    int num_tiles_ = 0;    // that have rows
    int num_blocks_ = 0;   // of queries, in all of them, for one head
};

}   // namespace ffa::backward
