// How the agenda of the backward pass comes about: chapters, directions and parts of tiles.
//
//   Chapters. Where one document is all there is, many tiles in a row may walk the same long way: a prefix that all queries
//   see, or the keys of other ranks. Such walks start together and end together. All heads have them first, as many as are
//   whole waves: between others, or with some of them left to start late, each thread block would be at other queries. What
//   is left of them comes last.
//
//   Turns. Heads come in turns of one section or, under a mask of one document, of so many sections that a turn keeps the SMs busy for
//   whole waves: then thread blocks that start together also end with it. Where there are several documents, waves are ragged
//   anyway, and fewer heads at a time have more of their queries in the L2 cache.
//
//   Directions. Thread blocks that start together on a document walk from its last queries to the first. Under a causal
//   mask they end one after the other, the shortest tile first; those that follow walk the other way, close behind one
//   another, and end together.
//
//   Parts. A tile that would take longer than all thread blocks need for what is left, is divided among several by query
//   heads of the group: the longest ones of uneven masks, and the last ones, where thread blocks would run out of work at
//   different times. Nobody waits: the last part to come to its end adds up what all have left, in fp32.
//
//   Steps. Under a full mask and in chapters, thread blocks that start together read the same queries for long, and share
//   them in the L2 cache if they stay together.
#pragma once

#include "block.cuh"
#include "bwd_agenda.cuh"
#include "bwd_walk.cuh"
#include "plan.cuh"

namespace ffa {

constexpr int kFewWaves = 3;
constexpr int kMostChapters = 4;
constexpr int kChapterWaves = 2;   // at least, of all heads
constexpr float kFewTilesShare = 1.5f;
constexpr int kLeastVisits = 24;   // of a part, where tiles are not few: less does not pay for what it leaves behind
constexpr int kLeastVisitsInStep = 512;   // of a tile: shorter walks do not drift apart
constexpr int kLeastVisitsOfChapter = 1024;   // of a tile: what shorter walks read stays in the L2 cache anyway

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
        int first_slot;   // of these tiles; those in front are other tiles'
        int num_slots;   // a part each
        int qhead_per_kvhead;
        int num_blocks;   // of threads, or clusters of them, that will draw from the agenda
        int is_one_way;   // all walks are from the last queries to the first
        int sections_at_once;   // of a turn, under a mask of one document; divides the number of sections
        const Tile* tiles_behind;   // [num_tiles], of which about half are left when these are over; or null
    };

    static_assert(sizeof(Params) == 112, "packed by magi_compile/kernels/cuda/backward.py");

    __device__ __forceinline__ explicit AgendaWriter(const Params& params)
        : params_(params),
          agenda_(params.agenda),
          num_sections_(agenda_.num_heads / agenda_.heads_per_section),
          blocks_before_(params.scratch),
          document_of_(blocks_before_ + params.num_tiles + 1),
          document_begin_(document_of_ + params.num_tiles),
          parts_of_(reinterpret_cast<Parts*>(document_begin_ + params.num_tiles)) {}

    __device__ void write() {
        measure();
        const int num_entries = params_.qhead_per_kvhead > 1 ? list_parts() : list_tiles();
        const int num_arrivals = params_.num_slots * agenda_.heads_per_section * kTileWarps;
        const int first_arrival = params_.first_slot * agenda_.heads_per_section * kTileWarps;
        for_each(num_arrivals, [&](int i) { agenda_.arrivals[first_arrival + i] = 0; });
        const int waves_in_step = items_in_step(num_entries) / params_.num_blocks;
        for_each(waves_in_step, [&](int wave) { *agenda_.counters->steps(wave) = 0; });
        for_each(1, [&](int) {
            agenda_.counters->ticket = 0;
            agenda_.counters->num_in_step = waves_in_step * params_.num_blocks;
            agenda_.counters->num_unfinished = num_tiles_ * agenda_.num_heads * kTileWarps;
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
        const int num_documents = prefix_sum(
            num_tiles_, [&](int i) { return int(starts_document(i)); },
            [&](int i, int before) {
                const int document = before + starts_document(i) - 1;
                document_of_[i] = document;
                if (starts_document(i)) {
                    document_begin_[document] = i;
                }
            });
        num_others_ = num_tiles_;
        blocks_of_others_ = num_blocks_;
        if (num_documents == 1) {
            at_once_ = params_.sections_at_once;
            find_chapters();
            waves_of_turn_ = (num_others_ * heads_at_once() + params_.num_blocks / 2) / params_.num_blocks;
        }
    }

    // Of a tile, and the slot of the first one.
    struct alignas(4) Parts {
        short slot, num;
    };

    // Tiles in a row whose walks are alike.
    struct Chapter {
        int begin;
        int num_tiles;
        int blocks;   // of each
        int num_first;   // entries that come first
    };

    // Of groups of one head none: their tiles are never in parts, and the last ones would end at different times. Where
    // additions have the order of tiles, so have walks.
    __device__ void find_chapters() {
        if (params_.qhead_per_kvhead == 1 || params_.is_one_way) {
            return;
        }
        const int least = (kChapterWaves * params_.num_blocks + agenda_.num_heads - 1) / agenda_.num_heads;
        const int num_begins = max(num_tiles_ - least + 1, 0);
        int from = 0;
        while (num_chapters_ < kMostChapters) {
            const auto is_begin = [&](int i) { return i >= from && begins_chapter(i, least); };
            const int begin = first_of(num_begins, is_begin, agenda_.counters->ticket);
            if (begin == num_begins) {
                break;
            }
            const auto is_other = [&](int i) { return i >= begin + least && !are_alike(i, begin); };
            const int end = first_of(num_tiles_, is_other, agenda_.counters->ticket);
            const int num_first = entries_of_waves(end - begin);
            if (num_first > 0 && end - begin < num_tiles_) {
                chapters_[num_chapters_++] = {begin, end - begin, blocks_of(begin), num_first};
                num_others_ -= end - begin;
                blocks_of_others_ -= (end - begin) * blocks_of(begin);
            }
            from = end;
        }
    }

    // Of so many tiles, those that are whole waves.
    __device__ __forceinline__ int entries_of_waves(int num_tiles) const {
        int waves = num_tiles * agenda_.num_heads / params_.num_blocks;
        while (waves * params_.num_blocks % agenda_.heads_per_section != 0) {
            --waves;
        }
        return waves * params_.num_blocks / agenda_.heads_per_section;
    }

    __device__ __forceinline__ int heads_at_once() const { return at_once_ * agenda_.heads_per_section; }

    __device__ __forceinline__ bool begins_chapter(int i, int num_tiles) const {
        bool begins = blocks_of(i) * params_.qhead_per_kvhead >= kLeastVisitsOfChapter;
        for (int k = 1; k < num_tiles && begins; ++k) {
            begins = are_alike(i, i + k);
        }
        return begins;
    }

    __device__ __forceinline__ bool are_alike(int i, int j) const {
        const Tile &one = params_.tiles[i], &other = params_.tiles[j];
        const int num_runs = one.run_end - one.run_begin;
        bool are = other.run_end - other.run_begin == num_runs;
        for (int r = 0; r < num_runs && are; ++r) {
            const Run &run = params_.runs[one.run_begin + r], &like = params_.runs[other.run_begin + r];
            are = run.col_end == like.col_end && run.first / kBlockAlignment == like.first / kBlockAlignment;
        }
        return are;
    }

    __device__ __forceinline__ int blocks_of(int tile) const { return blocks_before_[tile + 1] - blocks_before_[tile]; }

    // Tiles that end with the same query are taken for one document.
    __device__ __forceinline__ bool starts_document(int i) const {
        return i == 0 || last_query(i) != last_query(i - 1);
    }

    __device__ __forceinline__ int last_query(int i) const {
        const Tile& tile = params_.tiles[i];
        return tile.run_begin < tile.run_end ? params_.runs[tile.run_end - 1].col_end : -1;
    }

    // Those that come first of chapters, or all if they see as many queries, in front of the first tile in parts: thread
    // blocks that start together on these also end together.
    __device__ int items_in_step(int num_entries) const {
        const int blocks = num_tiles_ > 0 ? blocks_of(0) : 0;
        int& scratch = agenda_.counters->ticket;
        const bool are_equal = first_of(num_tiles_, [&](int i) { return blocks_of(i) != blocks; }, scratch) == num_tiles_;
        const auto has_parts = [&](int i) { return agenda_.entries[i].num_parts > 1; };
        const int num_whole = first_of(num_entries, has_parts, scratch);
        const bool pays = are_equal && blocks * params_.qhead_per_kvhead >= kLeastVisitsInStep;
        int of_chapters = 0;
#pragma unroll 1
        for (int c = 0; c < num_chapters_; ++c) {
            of_chapters += chapters_[c].num_first;
        }
        return min(num_whole, pays ? num_tiles_ * num_sections_ : of_chapters) * agenda_.heads_per_section;
    }

    // A tile for the heads of a section.
    struct Place {
        int section;
        int tile;
        int index;   // of those of the section that are in no chapter, or kInChapter
        long long blocks_before;   // for one head of each section, of what comes before it
    };

    static constexpr int kInChapter = -1;

    __device__ __forceinline__ Place place(int i) const {
        long long before = 0;
#pragma unroll 1
        for (int c = 0; c < num_chapters_; ++c) {
            const Chapter& chapter = chapters_[c];
            if (i < chapter.num_first) {
                return in_chapter(chapter, i, before);
            }
            i -= chapter.num_first;
            before += 1ll * chapter.num_first * chapter.blocks;
        }
        const int num_others = num_others_ * num_sections_;
        if (i < num_others) {
            return in_no_chapter(i, before);
        }
        i -= num_others;
        before += 1ll * num_sections_ * blocks_of_others_;
#pragma unroll 1
        for (int c = 0; c < num_chapters_; ++c) {
            const Chapter& chapter = chapters_[c];
            const int num_last = chapter.num_tiles * num_sections_ - chapter.num_first;
            if (i < num_last) {
                return in_chapter(chapter, chapter.num_first + i, before - 1ll * chapter.num_first * chapter.blocks);
            }
            i -= num_last;
            before += 1ll * num_last * chapter.blocks;
        }
        return {};   // there are no more
    }

    // The section of place `i` of some tiles, of which it is tile `index`.
    struct InTurn {
        int section, index;
    };

    __device__ __forceinline__ InTurn in_turn(int i, int num_tiles) const {
        const int turn = i / (num_tiles * at_once_), left = i % (num_tiles * at_once_);
        return {turn * at_once_ + left % at_once_, left / at_once_};
    }

    // `before` is what comes before the chapter.
    __device__ __forceinline__ Place in_chapter(const Chapter& chapter, int i, long long before) const {
        const auto [section, index] = in_turn(i, chapter.num_tiles);
        return {section, chapter.begin + index, kInChapter, before + 1ll * i * chapter.blocks};
    }

    // `before` is what comes before the first one.
    __device__ __forceinline__ Place in_no_chapter(int i, long long before) const {
        const auto [section, index] = in_turn(i, num_others_);
        int tile = index, of_chapters = 0;
#pragma unroll 1
        for (int c = 0; c < num_chapters_; ++c) {
            const Chapter& chapter = chapters_[c];
            if (tile >= chapter.begin) {
                tile += chapter.num_tiles;
                of_chapters += chapter.num_tiles * chapter.blocks;
            }
        }
        const long long turns_before = section / at_once_;
        before += at_once_ * (turns_before * blocks_of_others_ + blocks_before_[tile] - of_chapters) +
                  section % at_once_ * blocks_of(tile);
        return {section, tile, index, before};
    }

    __device__ int list_tiles() {
        for_each(num_sections_ * num_tiles_, [&](int i) { agenda_.entries[i] = entry(i, 1, 0); });
        return num_sections_ * num_tiles_;
    }

    __device__ int list_parts() {
        const int num_places = num_sections_ * num_tiles_;
        for_each(num_places, [&](int i) { parts_of_[i] = {0, static_cast<short>(wanted_parts(i))}; });
        const auto slots = [&](int i) { return parts_of_[i].num > 1 ? parts_of_[i].num : 0; };
        prefix_sum(num_places, slots, [&](int i, int slot) {
            Parts& parts = parts_of_[i];
            const bool have_room = slot + parts.num <= params_.num_slots;
            parts = have_room ? Parts{static_cast<short>(slot), parts.num} : Parts{0, 1};
        });
        return prefix_sum(num_places, [&](int i) { return int(parts_of_[i].num); }, [&](int i, int first) {
            const Parts parts = parts_of_[i];
            const AgendaEntry of_place = entry(i, parts.num, parts.slot);
            for (int part = 0; part < parts.num; ++part) {
                agenda_.entries[first + part] = of_place;
                agenda_.entries[first + part].part = static_cast<short>(part);
            }
        });
    }

    // The first part of so many.
    __device__ __forceinline__ AgendaEntry entry(int i, int num_parts, int slot) const {
        const Place at = place(i);
        const int in_document = at.index - document_begin_[document_of_[at.tile]];
        const int wave = at.section / at_once_ * waves_of_turn_ + in_document * heads_at_once() / params_.num_blocks;
        const bool is_ascending = !params_.is_one_way && at.index != kInChapter && wave % 2 != 0;
        return {at.tile,
                at.section * agenda_.heads_per_section,
                0,
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
        const long long behind = 1ll * num_sections_ * (num_blocks_ + blocks_behind_) - at.blocks_before;
        const float left = is_few ? kFewTilesShare * num_sections_ * (all + blocks_behind_) : behind;
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
    int *const blocks_before_, *const document_of_, *const document_begin_;
    Parts* const parts_of_;   // of the tile at each place
    int num_tiles_ = 0;    // that have rows
    int num_blocks_ = 0;   // of queries, in all of them, for one head
    int blocks_behind_ = 0;   // the same of what comes behind them
    Chapter chapters_[kMostChapters];
    int num_chapters_ = 0;
    int num_others_, blocks_of_others_;   // of tiles in none of them
    int at_once_ = 1;   // sections of a turn
    int waves_of_turn_ = 0;   // of these tiles, where one document is all there is
};

}  // namespace ffa
