// What thread blocks of the backward pass work on, in which order, and which way they walk: a list of entries that the
// kernel in front writes (writer.cuh), and from which blocks draw one item after another (queue.cuh).
//
// Heads of keys come in sections, and in each the tiles as the plan has them, document by
// document: what is worked on at a time reads the same queries, which then come from the L2 cache.
#pragma once

namespace ffa::backward {

constexpr int kNoWave = -1;

// An item for each head of its section.
struct alignas(16) AgendaEntry {
    int tile;
    short first_head;   // of the section, of keys
    short part;         // of so many as the tile is divided into
    short num_parts;
    short slot;           // of its first part: where parts leave what they have; or the tile's, where they hand it on
    short turn;           // where parts hand on what they have: how many have had the slot before, else kNoTurn
    short is_ascending;   // the walk is from the first queries to the last

    static constexpr short kNoTurn = -1;
};

static_assert(sizeof(AgendaEntry) == 16, "magi_compile/kernels/sm90/backward/workspace.py makes room for it");

// Waves: items that thread blocks draw at about the same time, as many as there are blocks.
struct AgendaCounters {
    int ticket;        // zero at launch
    int num_in_step;   // items in front, whole waves of them, whose thread blocks stay together

    // What the thread blocks of a wave have walked, all together; zero at launch. They lie behind.
    __device__ __forceinline__ int* steps(int wave) { return &num_in_step + 1 + wave; }
};

struct Agenda {
    AgendaEntry* entries;
    int* num_entries;   // [1]
    AgendaCounters* counters;
    int* arrivals;     // [num_slots][heads_per_section][warps of a tile]: parts of a tile that have come to their end
    float* partials;   // [num_slots][heads_per_section][warp][dv, dk or one of them]: 16 rows, as the warp's lanes hold
                       // them
    int num_heads;     // of keys
    int heads_per_section;   // divides num_heads
};

static_assert(sizeof(Agenda) == 48, "packed by magi_compile/kernels/sm90/params.py");

// In which order rows of dq will be complete: those of so many heads after those of as many others.
struct DqOrder {
    int heads_of_turn;   // divides the number of heads, and is divided by that of a group
    int passes;          // of a turn, each with all rows of as many query heads of each group, the last ones first
};

}   // namespace ffa::backward
