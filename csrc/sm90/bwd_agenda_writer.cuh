// How the agenda of the backward pass comes about: chapters, directions and parts of tiles.
//
//   Chapters. In front of the first document's other tiles may be many that see all its queries, as a prefix does. Such walks
//   start together and end together. All heads have them first: between them, others would start at any time.
//
//   Directions. Thread blocks that start together on a document walk from its last queries to the first. Under a causal
//   mask they end one after the other, the shortest tile first; those that follow walk the other way, close behind one
//   another, and end together.
//
//   Parts. A tile that would take longer than all thread blocks need for what is left, is divided among several by query
//   heads of the group: the longest ones of uneven masks, and the last ones, where thread blocks would run out of work at
//   different times. Nobody waits: the last part to come to its end adds up what all have left, in fp32.
//
//   Steps. Under a full mask and in the first chapter, thread blocks that start together read the same queries for long, and
//   share them in the L2 cache if they stay together.
#pragma once

#include "block.cuh"
#include "bwd_agenda.cuh"
#include "bwd_walk.cuh"
#include "plan.cuh"

namespace ffa {

constexpr int kFewWaves = 3;
constexpr int kChapterWaves = 2;   // at least, of all heads
constexpr float kFewTilesShare = 1.5f;
constexpr int kLeastVisits = 24;   // of a part, where tiles are not few: less does not pay for what it leaves behind
constexpr int kLeastVisitsInStep = 512;   // of a tile: shorter walks do not drift apart

// Writes the agenda, by one thread block.
template <int kBlockCols>
class AgendaWriter {
public:
    struct Params {
        const Tile* tiles;   // [num_tiles], document by document
        const Run* runs;
        Agenda agenda;
        int* scratch;   // [3 * num_tiles + 1], and an int for each tile of each section where groups have several heads
        int num_tiles;
        int first_slot;   // of these tiles; those in front are other tiles'
        int num_slots;   // a part each
        int qhead_per_kvhead;
        int num_blocks;   // of threads, that will draw from the agenda
        int is_one_way;   // all walks are from the last queries to the first
        const Tile* tiles_behind;   // [num_tiles], of which about half are left when these are over; or null
    };

    static_assert(sizeof(Params) == 104, "packed by magi_compile/kernels/cuda/backward.py");

    __device__ __forceinline__ explicit AgendaWriter(const Params& params)
        : params_(params),
          agenda_(params.agenda),
          num_sections_(agenda_.num_heads / agenda_.heads_per_section),
          blocks_before_(params.scratch),
          document_of_(blocks_before_ + params.num_tiles + 1),
          document_begin_(document_of_ + params.num_tiles),
          slot_of_(document_begin_ + params.num_tiles) {}

    __device__ void write() {
        measure();
        const int num_entries = params_.qhead_per_kvhead > 1 ? list_parts() : list_tiles();
        const int num_arrivals = params_.num_slots * agenda_.heads_per_section * kAgendaArrivals;
        const int first_arrival = params_.first_slot * agenda_.heads_per_section * kAgendaArrivals;
        for_each(num_arrivals, [&](int i) { agenda_.arrivals[first_arrival + i] = 0; });
        const int waves_in_step = items_in_step(num_entries) / params_.num_blocks;
        for_each(waves_in_step, [&](int wave) { *agenda_.counters->steps(wave) = 0; });
        for_each(1, [&](int) {
            agenda_.counters->ticket = 0;
            agenda_.counters->num_in_step = waves_in_step * params_.num_blocks;
            agenda_.counters->num_unfinished = num_tiles_ * agenda_.num_heads * kAgendaArrivals;
            *agenda_.num_entries = num_entries;
        });
    }

private:
    __device__ void measure() {
        num_tiles_ = prefix_sum(
            params_.num_tiles, [&](int i) { return int(params_.tiles[i].row_begin < params_.tiles[i].row_end); },
            [](int, int) {});
        num_blocks_ = prefix_sum(
            num_tiles_, [&](int i) { return blocks_of_tile<kBlockCols>(params_.tiles[i], params_.runs); },
            [&](int i, int before) { blocks_before_[i] = before; });
        for_each(1, [&](int) { blocks_before_[num_tiles_] = num_blocks_; });
        if (params_.tiles_behind != nullptr) {
            blocks_behind_ = prefix_sum(
                params_.num_tiles, [&](int i) { return blocks_of_tile<kBlockCols>(params_.tiles_behind[i], params_.runs); },
                [](int, int) {}) / 2;
        }
        tiles_of_chapter_ = params_.qhead_per_kvhead > 1 ? tiles_of_prefix() : 0;
        const int num_documents = prefix_sum(
            num_tiles_, [&](int i) { return int(starts_document(i)); },
            [&](int i, int before) {
                const int document = before + starts_document(i) - 1;
                document_of_[i] = document;
                if (starts_document(i)) {
                    document_begin_[document] = i;
                }
            });
        const bool is_one_document = num_documents == (tiles_of_chapter_ > 0 ? 2 : 1);
        const int items_of_section = (num_tiles_ - tiles_of_chapter_) * agenda_.heads_per_section;
        waves_of_section_ = is_one_document ? (items_of_section + params_.num_blocks / 2) / params_.num_blocks : 0;
    }

    // How many tiles in front are as long as the first one, if enough for a chapter and others of their document follow.
    __device__ int tiles_of_prefix() const {
        const auto is_other = [&](int i) { return blocks_of(i) != blocks_of(0) || last_query(i) != last_query(0); };
        const int found = first_of(num_tiles_, is_other, agenda_.counters->ticket);
        const bool others_follow = found < num_tiles_ && last_query(found) == last_query(0);
        return others_follow && found * agenda_.num_heads >= kChapterWaves * params_.num_blocks ? found : 0;
    }

    __device__ __forceinline__ int blocks_of(int tile) const { return blocks_before_[tile + 1] - blocks_before_[tile]; }

    // Tiles that end with the same query are taken for one document; so are those of the first chapter.
    __device__ __forceinline__ bool starts_document(int i) const {
        return i == 0 || i == tiles_of_chapter_ || last_query(i) != last_query(i - 1);
    }

    __device__ __forceinline__ int last_query(int i) const {
        const Tile& tile = params_.tiles[i];
        return tile.run_begin < tile.run_end ? params_.runs[tile.run_end - 1].col_end : -1;
    }

    // Those of the first chapter, or of all if they see as many queries, in front of the first tile in parts: thread blocks that
    // start together on these also end together.
    __device__ int items_in_step(int num_entries) const {
        const int blocks = num_tiles_ > 0 ? blocks_of(0) : 0;
        int& scratch = agenda_.counters->ticket;
        const bool are_equal = first_of(num_tiles_, [&](int i) { return blocks_of(i) != blocks; }, scratch) == num_tiles_;
        const int num_tiles = are_equal ? num_tiles_ : tiles_of_chapter_;
        const auto has_parts = [&](int i) { return agenda_.entries[i].num_parts > 1; };
        const int num_whole = min(num_tiles * num_sections_, first_of(num_entries, has_parts, scratch));
        const bool pays = blocks * params_.qhead_per_kvhead >= kLeastVisitsInStep;
        return pays ? num_whole * agenda_.heads_per_section : 0;
    }

    // A tile for the heads of a section, and the tiles that its chapter has.
    struct Place {
        int section;
        int tile;
        int first_of_chapter;
        int end_of_chapter;
    };

    __device__ __forceinline__ Place place(int i) const {
        const int in_first = tiles_of_chapter_ * num_sections_;
        const int first = i < in_first ? 0 : tiles_of_chapter_;
        const int end = i < in_first ? tiles_of_chapter_ : num_tiles_;
        const int in_chapter = i < in_first ? i : i - in_first;
        return {in_chapter / (end - first), first + in_chapter % (end - first), first, end};
    }

    // For one head of each section, from this place on, with what comes behind these tiles.
    __device__ __forceinline__ float blocks_left(const Place& place) const {
        const int before_chapter = blocks_before_[place.first_of_chapter];
        const float of_chapter = blocks_before_[place.end_of_chapter] - before_chapter;
        const float behind = num_blocks_ - blocks_before_[place.end_of_chapter];
        return of_chapter - (blocks_before_[place.tile] - before_chapter) + (num_sections_ - 1 - place.section) * of_chapter +
               num_sections_ * (behind + blocks_behind_);
    }

    __device__ int list_tiles() {
        for_each(num_sections_ * num_tiles_, [&](int i) { agenda_.entries[i] = entry(i, 0, 1, 0); });
        return num_sections_ * num_tiles_;
    }

    __device__ int list_parts() {
        const auto slots = [&](int i) { return wanted_parts(i) > 1 ? wanted_parts(i) : 0; };
        prefix_sum(num_sections_ * num_tiles_, slots, [&](int i, int slot) { slot_of_[i] = slot; });
        const auto parts = [&](int i) { return slot_of_[i] + slots(i) <= params_.num_slots ? wanted_parts(i) : 1; };
        return prefix_sum(num_sections_ * num_tiles_, parts, [&](int i, int first) {
            const int num_parts = parts(i);
            for (int part = 0; part < num_parts; ++part) {
                agenda_.entries[first + part] = entry(i, part, num_parts, slot_of_[i]);
            }
        });
    }

    __device__ __forceinline__ AgendaEntry entry(int i, int part, int num_parts, int slot) const {
        const Place at = place(i);
        const int in_document = at.tile - document_begin_[document_of_[at.tile]];
        const int wave = at.section * waves_of_section_ + in_document * agenda_.heads_per_section / params_.num_blocks;
        const bool is_ascending = !params_.is_one_way && at.tile >= tiles_of_chapter_ && wave % 2 != 0;
        return {at.tile,
                at.section * agenda_.heads_per_section,
                static_cast<short>(part),
                static_cast<short>(num_parts),
                static_cast<short>(num_parts > 1 ? params_.first_slot + slot : 0),
                static_cast<short>(is_ascending)};
    }

    // The least divisor of the group by which no part is longer than a thread block's share of the work that is left;
    // where tiles are few, than one and a half shares of all work, since more parts would cost more than idle blocks do.
    __device__ __forceinline__ int wanted_parts(int i) const {
        const Place at = place(i);
        const int group = params_.qhead_per_kvhead;
        const float blocks = blocks_of(at.tile);
        const float all = num_blocks_;
        const bool is_few = num_tiles_ * agenda_.num_heads < kFewWaves * params_.num_blocks;
        const float left = is_few ? kFewTilesShare * num_sections_ * (all + blocks_behind_) : blocks_left(at);
        const float shares = blocks * params_.num_blocks;   // of left * heads_per_section
        int parts = 1;
        while (parts < group && (parts * left * agenda_.heads_per_section < shares || group % parts != 0)) {
            ++parts;
        }
        while (!is_few && parts > 1 && (blocks * group < parts * kLeastVisits || group % parts != 0)) {
            --parts;
        }
        return parts;
    }

    const Params& params_;
    const Agenda& agenda_;
    const int num_sections_;
    int *const blocks_before_, *const document_of_, *const document_begin_, *const slot_of_;
    int num_tiles_ = 0;    // that have rows
    int num_blocks_ = 0;   // of queries, in all of them, for one head
    int blocks_behind_ = 0;   // the same of what comes behind them
    int tiles_of_chapter_ = 0;   // of the first one, if there are two
    int waves_of_section_ = 0;   // of the last chapter, where one document is all there is
};

}  // namespace ffa
