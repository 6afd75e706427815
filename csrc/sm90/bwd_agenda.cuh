// What thread blocks of the backward pass work on, in which order, and which way they walk: a list of entries that the
// kernel in front writes (bwd_agenda_writer.cuh), and from which blocks draw one item after another.
//
// Heads of keys come in sections, and in each the tiles as the plan has them, document by document: what is worked on at a
// time reads the same queries, which then come from the L2 cache.
#pragma once

namespace ffa {

constexpr int kNoWave = -1;
constexpr int kAgendaArrivals = 8;   // of a tile in parts: one for each warp

// An item for each head of its section.
struct alignas(16) AgendaEntry {
    int tile;
    int first_head;       // of the section, of keys
    short part;           // of so many as the tile is divided into
    short num_parts;
    short slot;           // of its first part: where parts leave what they have
    short is_ascending;   // the walk is from the first queries to the last
};

static_assert(sizeof(AgendaEntry) == 16, "magi_compile/kernels/cuda/backward.py makes room for it");

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
    int* arrivals;      // [num_slots][heads_per_section][kAgendaArrivals]: parts of a tile that have come to their end
    float* partials;    // [num_slots][heads_per_section][warp][dv, dk]: 16 rows, as the warp's lanes hold them
    int num_heads;      // of keys
    int heads_per_section;   // divides num_heads
};

static_assert(sizeof(Agenda) == 48, "packed by magi_compile/kernels/cuda/backward.py");

// The items of one thread block: the first is its index, the others are drawn from a counter, so that no block waits while
// another has work left.
class AgendaReader {
public:
    __device__ __forceinline__ explicit AgendaReader(const Agenda& agenda) : agenda_(agenda), item_(blockIdx.x) {}

    __device__ __forceinline__ bool has_work() const { return item_ < num_items(); }

    __device__ __forceinline__ const AgendaEntry& entry() const {
        return agenda_.entries[item_ / agenda_.heads_per_section];
    }

    __device__ __forceinline__ int head_in_section() const { return item_ % agenda_.heads_per_section; }

    __device__ __forceinline__ void advance() {
        item_ = gridDim.x < num_items() ? gridDim.x + atomicAdd(&agenda_.counters->ticket, 1) : num_items();
    }

    // The item's, or kNoWave where nobody waits for others.
    __device__ __forceinline__ int wave_in_step() const {
        return item_ < agenda_.counters->num_in_step ? item_ / int(gridDim.x) : kNoWave;
    }

private:
    __device__ __forceinline__ int num_items() const { return *agenda_.num_entries * agenda_.heads_per_section; }

    const Agenda& agenda_;
    int item_;
};

}  // namespace ffa
