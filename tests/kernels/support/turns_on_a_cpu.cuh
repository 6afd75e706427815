// Threads in turns, for `ptx_on_a_cpu.cuh`: what is the same for every kernel.
#pragma once

#include "fibers.cuh"

#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <numeric>
#include <vector>

namespace turns {

constexpr int kIdleRounds = 4000;   // without anybody getting on: they wait for what never comes

static long num_meetings;   // no progress by themselves: threads that poll together meet without end

// All of some threads meet; each brings a word and may then read those of all.
struct Meeting {
    uint64_t words[2][512];
    int num_there = 0;
    int turn = 0;

    void arrive(int count) {
        if (++num_there == count) {
            num_there = 0;
            ++turn;
            ++num_meetings;
        }
    }

    const uint64_t* meet(int index, int count, uint64_t word);
};

using Action = std::function<void()>;

// What a thread has asked for and not waited for, in groups.
struct Groups {
    std::vector<Action> open;
    std::deque<std::vector<Action>> closed;

    void commit() {
        closed.push_back(std::move(open));
        open.clear();
    }

    void wait(size_t num_pending) {
        for (; closed.size() > num_pending; closed.pop_front()) {
            for (const Action& action : closed.front()) {
                action();
            }
        }
    }
};

struct Thread : fibers::Fiber {
    long cluster_arrivals = 0;
    Groups matmuls, reads, writes;
};

struct Block {
    Index index;
    Block* peer = nullptr;                    // of a cluster of two
    std::shared_ptr<long> cluster_arrivals;   // of all threads of both
    std::vector<Thread> threads;
    std::unique_ptr<char[]> stacks;
    std::vector<char> memory;   // while others are at work
    Meeting warps[16], warpgroups[4], named[16];
    int pauses[16] = {};          // of warps, in rounds
    std::vector<Action> copies;   // on their way
    int idle = 0;
};

static Block* block;
static Block* owner;   // of what is in memory
static Thread* thread;
static bool is_late;     // what is asked for is done when nobody else gets on; else at once, with turns at random
static unsigned state;   // of random()

inline unsigned random(unsigned count) {
    state = state * 1664525u + 1013904223u;
    return (state >> 8) % count;
}

IN_TURNS void yield() { fibers::yield(); }

inline const uint64_t* Meeting::meet(int index, int count, uint64_t word) {
    const int mine = turn;
    words[mine % 2][index] = word;
    arrive(count);
    while (turn == mine) {
        yield();
    }
    return words[mine % 2];
}

IN_TURNS const uint64_t* meet_warp(uint64_t word) {
    return block->warps[threadIdx.x / 32].meet(threadIdx.x % 32, 32, word);
}

// Some time later; nobody waits for it in groups.
inline void copy(Action action) {
    if (is_late) {
        block->copies.push_back(std::move(action));
    } else {
        action();
    }
}

// The threads of a block, each about to run body().
inline void start(Block& block, Index index, int num_threads, void (*body)()) {
    block.index = index;
    block.threads.resize(num_threads);
    block.stacks.reset(new char[num_threads * fibers::kStackBytes]);
    block.memory.assign(kMemoryBytes, -1);   // NaN
    for (int i = 0; i < num_threads; ++i) {
        fibers::prepare(block.threads[i], &block.stacks[i * fibers::kStackBytes], body);
    }
}

// Once around all threads of the block; whether some are left.
inline bool go_around() {
    const int num_warps = block->threads.size() / 32;
    const int first = is_late ? 0 : random(num_warps);
    bool is_left = false;
    for (int warp = 0; warp < num_warps; ++warp) {
        int& pause = block->pauses[(warp + first) % num_warps];
        if (!is_late && --pause < 0 && random(32) == 0) {
            pause = random(64);
        }
        for (int lane = 0; lane < 32; ++lane) {
            const int i = (warp + first) % num_warps * 32 + lane;
            thread = &block->threads[i];
            if (!thread->is_done && pause <= 0) {
                threadIdx.x = i;
                fibers::resume(*thread);
            }
            is_left |= !thread->is_done;
        }
    }
    return is_left;
}

// A block, until nobody gets on; whether threads are left.
inline bool go_on() {
    constexpr int kPatience = 8;   // rounds
    bool is_left = true;
    for (int quiet = 0; is_left && quiet < kPatience && (is_late || random(64) != 0); ++quiet) {
        const long before = progress, meetings_before = num_meetings;
        is_left = go_around();
        if (progress == before && num_meetings == meetings_before && !block->copies.empty()) {
            std::swap(block->copies[random(block->copies.size())], block->copies.back());
            const Action one = std::move(block->copies.back());
            block->copies.pop_back();
            one();
        }
        if (progress != before) {
            quiet = -1;
            block->idle = 0;
        }
        ++block->idle;
    }
    return is_left;
}

// `memory` is that of the block, and what was there of another one goes back to it.
inline void take_memory(unsigned char* memory) {
    if (owner != block) {
        if (owner) {
            std::memcpy(owner->memory.data(), memory, kMemoryBytes);
        }
        std::memcpy(memory, block->memory.data(), kMemoryBytes);
        owner = block;
    }
}

IN_TURNS bool launch(Index grid, int num_threads, unsigned char* memory, int num_at_once, unsigned seed, int cluster,
                     void (*kernel)(const void*), const void* params) {
    static void (*running)(const void*);
    static const void* given;
    running = kernel;
    given = params;
    owner = nullptr;
    is_late = seed == 0;
    state = seed;
    gridDim = grid;
    blockDim = {static_cast<unsigned>(num_threads), 1};
    void (*const body)() = [] {
        running(given);
        thread->reads.wait(0);
        thread->writes.wait(0);
        ++progress;
        fibers::end();
    };
    std::list<Block> resident;
    for (unsigned next = 0; next < grid.x * grid.y || !resident.empty();) {
        while (next < grid.x * grid.y && resident.size() + cluster <= max(num_at_once, cluster)) {
            for (int rank = 0; rank < cluster; ++rank, ++next) {
                resident.emplace_back();
                start(resident.back(), {next % grid.x, next / grid.x}, num_threads, body);
            }
            if (cluster == 2) {
                Block &second = resident.back(), &first = *std::prev(resident.end(), 2);
                first.peer = &second;
                second.peer = &first;
                first.cluster_arrivals = second.cluster_arrivals = std::make_shared<long>(0);
            }
        }
        if (!is_late) {
            resident.splice(resident.end(), resident, resident.begin(),
                            std::next(resident.begin(), random(resident.size())));
        }
        block = &resident.front();
        blockIdx = block->index;
        take_memory(memory);
        const bool is_left = go_on();
        if (is_left) {
            resident.splice(resident.end(), resident, resident.begin());
        } else {
            if (block->peer) {
                block->peer->peer = nullptr;
            }
            owner = nullptr;
            resident.pop_front();
        }
        if (!resident.empty() &&
            std::all_of(resident.begin(), resident.end(), [](const Block& x) { return x.idle > kIdleRounds; })) {
            return false;
        }
    }
    return true;
}

}   // namespace turns

IN_TURNS void __syncthreads() {
    turns::block->named[0].meet(threadIdx.x, turns::block->threads.size(), 0);
    ++turns::progress;   // nobody polls with it
}

IN_TURNS bool __any_sync(unsigned, bool flag) {
    const uint64_t* const flags = turns::meet_warp(flag);
    return std::any_of(flags, flags + 32, [](uint64_t x) { return x != 0; });
}

IN_TURNS unsigned __ballot_sync(unsigned, bool flag) {
    const uint64_t* const flags = turns::meet_warp(flag);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) {
        bits |= static_cast<unsigned>(flags[lane]) << lane;
    }
    return bits;
}

IN_TURNS int __reduce_min_sync(unsigned, int value) {
    const uint64_t* const values = turns::meet_warp(static_cast<unsigned>(value));
    return *std::min_element(values, values + 32);   // none is negative
}

IN_TURNS int __reduce_max_sync(unsigned, int value) {
    const uint64_t* const values = turns::meet_warp(static_cast<unsigned>(value));
    return *std::max_element(values, values + 32);
}

IN_TURNS int __reduce_add_sync(unsigned, int value) {
    const uint64_t* const values = turns::meet_warp(static_cast<unsigned>(value));
    return static_cast<int>(std::accumulate(values, values + 32, uint64_t{0}));
}

namespace ffa {

IN_TURNS void barrier_sync(uint32_t id, uint32_t threads) {
    turns::block->named[id].meet(threadIdx.x % threads, threads, 0);
}

IN_TURNS void barrier_arrive(uint32_t id, uint32_t threads) { turns::block->named[id].arrive(threads); }

// ---- copies

// Calls use(offset in shared memory, value in the tensor or null) for all values of a box.
template <class Use>
void for_each_in_box(const TensorMap& map, uint32_t shared_begin, int x, int y, int z, Use use) {
    for (int row = 0; row < map.box_rows; ++row) {
        for (int col = 0; col < map.box_cols; ++col) {
            const bool is_inside = x >= 0 && y + row >= 0 && z >= 0 && x + col < map.sizes[0] &&
                                   y + row < map.sizes[1] && z < map.sizes[2];
            char* const value = map.address + (y + row) * map.y_bytes + z * map.z_bytes + map.element_bytes * (x + col);
            const uint32_t address = shared_begin + (row * map.box_cols + col) * map.element_bytes;
            use((map.is_swizzled ? swizzled(address) : address) - shared_begin, is_inside ? value : nullptr);
        }
    }
}

inline void copy_element(char* to, const char* from, int bytes) {
    bytes == 2 ? std::memcpy(to, from, 2) : std::memcpy(to, from, bytes);   // the compiler knows how
}

inline uint32_t box_bytes(const TensorMap& map) { return map.box_rows * map.box_cols * map.element_bytes; }

// A box that will lie at that address; `destination` is where it is meanwhile.
inline void load_box(char* destination, uint32_t address, const TensorMap& map, uint64_t& barrier, int x, int y,
                     int z) {
    for_each_in_box(map, address, x, y, z, [&](uint32_t offset, const char* from) {
        char* const to = destination + offset;
        from ? copy_element(to, from, map.element_bytes) : void(std::memset(to, 0, map.element_bytes));
    });
    complete(barrier, box_bytes(map));
}

IN_TURNS void tma_load_3d(void* destination, const TensorMap& map, uint64_t& barrier, int x, int y, int z) {
    turns::copy([=, &barrier] {
        load_box(static_cast<char*>(destination), shared_address(destination), map, barrier, x, y, z);
    });
}

IN_TURNS void cp_async_bulk_load(void* destination, const void* source, uint32_t bytes, uint64_t& barrier) {
    turns::copy([=, &barrier] {
        std::memcpy(destination, source, bytes);
        complete(barrier, bytes);
    });
}

// Reads some shared memory, and later writes to global memory what was read.
template <class Write>
void bulk_write(const void* source, uint32_t bytes, Write write) {
    const auto taken = std::make_shared<std::vector<char>>(bytes);
    turns::thread->reads.open.push_back([=] { std::memcpy(taken->data(), source, bytes); });
    turns::thread->writes.open.push_back([=] { write(taken->data()); });
}

IN_TURNS void tma_store_3d(const TensorMap& map, const void* source, int x, int y, int z) {
    bulk_write(source, box_bytes(map), [=](const char* taken) {
        for_each_in_box(map, shared_address(source), x, y, z, [&](uint32_t offset, char* to) {
            if (to) {
                copy_element(to, taken + offset, map.element_bytes);
            }
        });
    });
}

IN_TURNS void cp_reduce_async_bulk_add(float* destination, uint32_t source, uint32_t bytes) {
    bulk_write(shared(source), bytes, [=](const char* taken) {
        for (uint32_t i = 0; i < bytes / sizeof(float); ++i) {
            destination[i] += reinterpret_cast<const float*>(taken)[i];
        }
    });
}

IN_TURNS void cp_async_bulk_commit_group() {
    turns::thread->reads.commit();
    turns::thread->writes.commit();
}

IN_TURNS void wait_for_reads(int num_pending) { turns::thread->reads.wait(num_pending); }
IN_TURNS void wait_for_writes(int num_pending) { turns::thread->writes.wait(num_pending); }

// ---- clusters of two thread blocks

// Of the block that is not at work, whose memory lies elsewhere meanwhile.
inline char* at_peer(uint32_t address) { return turns::block->peer->memory.data() + (address - 1024); }

inline uint64_t& barrier_at_peer(uint64_t& barrier) {
    return *reinterpret_cast<uint64_t*>(at_peer(shared_address(&barrier)));
}

IN_TURNS void mbarrier_arrive_at_rank_if(bool condition, uint64_t& barrier, int rank) {
    if (condition) {
        mbarrier_arrive(rank == static_cast<int>(blockIdx.x % 2) ? barrier : barrier_at_peer(barrier));
    }
}

IN_TURNS void cp_async_bulk_to_peer(uint32_t destination, uint32_t source, uint32_t bytes, uint64_t& barrier, int) {
    turns::copy([=, &barrier] {
        std::memcpy(at_peer(destination), shared(source), bytes);
        complete(barrier_at_peer(barrier), bytes);
    });
}

IN_TURNS void tma_load_3d_to_both(void* destination, const TensorMap& map, uint64_t& barrier, int x, int y, int z) {
    tma_load_3d(destination, map, barrier, x, y, z);
    turns::copy([=, &barrier] {
        const uint32_t address = shared_address(destination);
        load_box(at_peer(address), address, map, barrier_at_peer(barrier), x, y, z);
    });
}

IN_TURNS void st_async_to_peer(int& destination, int word, uint64_t& barrier, int) {
    turns::copy([=, &destination, &barrier] {
        std::memcpy(at_peer(shared_address(&destination)), &word, sizeof(word));
        complete(barrier_at_peer(barrier), sizeof(word));
    });
}

IN_TURNS void cluster_arrive() {
    ++*turns::block->cluster_arrivals;
    ++turns::thread->cluster_arrivals;
    ++turns::progress;
}

IN_TURNS void cluster_wait() {
    const long all = 2 * turns::block->threads.size() * turns::thread->cluster_arrivals;
    while (*turns::block->cluster_arrivals < all) {
        turns::yield();
    }
}

// ---- matrices of a warp

IN_TURNS void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const int lane = threadIdx.x % 32;
    const auto* const rows = turns::meet_warp(address);
    const uint32_t values[] = {a, b, c, d};
    for (int i = 0; i < 4; ++i) {
        std::memcpy(shared(static_cast<uint32_t>(rows[8 * i + lane / 4]) + lane % 4 * 4), &values[i], 4);
    }
}

IN_TURNS void ldmatrix_x4(uint32_t address, uint32_t (&values)[4]) {
    const int lane = threadIdx.x % 32;
    const auto* const rows = turns::meet_warp(address);
    for (int i = 0; i < 4; ++i) {
        std::memcpy(&values[i], shared(static_cast<uint32_t>(rows[8 * i + lane / 4]) + lane % 4 * 4), 4);
    }
}

IN_TURNS int uniform(int number) {
    const auto* const numbers = turns::meet_warp(static_cast<uint32_t>(number));
    int largest = number;
    for (int i = 0; i < 32; ++i) {
        largest = max(largest, static_cast<int>(static_cast<uint32_t>(numbers[i])));
    }
    return largest;
}

// ---- wgmma

IN_TURNS void wgmma_fence() { turns::block->warpgroups[threadIdx.x / 128].meet(threadIdx.x % 128, 128, 0); }
IN_TURNS void wgmma_commit_group() { turns::thread->matmuls.commit(); }

IN_TURNS void wait_for_matmuls(int num_pending) {
    if (!turns::is_late) {
        turns::yield();   // so that others may write too early to what it reads
    }
    turns::thread->matmuls.wait(num_pending);
}

// Values of the 16 terms of `kCount` rows or columns; of two, the first is even.
template <int kCount>
using Terms = float[16][kCount];

template <int kCount>
void read_plain(Terms<kCount>& terms, Operand x, int outer) {
    // Matrices of 8 x 16 bytes, with a stride along the terms and one across them.
    const uint32_t begin = (x.descriptor & 0x3FFF) << 4, stride = x.descriptor >> 16 << 4;
    for (int i = 0; i < kCount; ++i, ++outer) {
        for (int k = 0; k < 16; ++k) {
            const int row = (x.major == Major::K ? outer : k) % 8, col = (x.major == Major::K ? k : outer) % 8;
            uint16_t bits;
            std::memcpy(&bits, shared(begin + outer / 8 * (x.high << 4) + k / 8 * stride + row * 16 + col * 2), 2);
            terms[k][i] = widened(bits);
        }
    }
}

template <int kCount>
void read(Terms<kCount>& terms, Operand x, int outer) {
    const uint32_t begin = (x.descriptor & 0x3FFF) << 4, stride = x.descriptor >> 16 << 4;
    if (x.high != kDescriptorHigh) {
        read_plain(terms, x, outer);
    } else if (x.major == Major::K) {   // side by side in a row of 128 bytes
        for (int i = 0; i < kCount; ++i) {
            for (int half = 0; half < 2; ++half) {
                uint16_t bits[8];
                std::memcpy(bits, shared(swizzled(begin + (outer + i) * kRowBytes + half * 16)), 16);
                for (int k = 0; k < 8; ++k) {
                    terms[half * 8 + k][i] = widened(bits[k]);
                }
            }
        }
    } else {   // each in a row of its own; rows longer than 128 bytes go on in another slab
        for (int k = 0; k < 16; ++k) {
            uint16_t bits[kCount];
            std::memcpy(bits, shared(swizzled(begin + outer / 64 * stride + outer % 64 * 2 + k * kRowBytes)),
                        kCount * 2);
            for (int i = 0; i < kCount; ++i) {
                terms[k][i] = widened(bits[i]);
            }
        }
    }
}

using Four = float __attribute__((vector_size(16)));

// By one thread; each of the 16 terms of its two rows is there twice.
inline void multiply_now(float* d, int num_columns, const Four (&rows)[16], Operand b, bool accumulate) {
    for (int at = 0; at < num_columns / 2; at += 4) {
        Terms<2> of_columns;
        read<2>(of_columns, b, at * 2 + threadIdx.x % 4 * 2);
        Four sums = {};
        if (accumulate) {
            std::memcpy(&sums, &d[at], sizeof(sums));
        }
        for (int k = 0; k < 16; ++k) {
            const float x = of_columns[k][0], y = of_columns[k][1];
            sums += rows[k] * Four{x, y, x, y};
        }
        std::memcpy(&d[at], &sums, sizeof(sums));
    }
}

IN_TURNS void multiply(float* d, int num_columns, Operand a, Operand b, bool accumulate) {
    turns::thread->matmuls.open.push_back([=] {
        const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
        Terms<1> first, second;
        read<1>(first, a, row);
        read<1>(second, a, row + 8);
        Four rows[16];
        for (int k = 0; k < 16; ++k) {
            const float x = first[k][0], y = second[k][0];
            rows[k] = Four{x, x, y, y};
        }
        multiply_now(d, num_columns, rows, b, accumulate);
    });
}

IN_TURNS void multiply(float* d, int num_columns, const uint32_t (&a)[4], Operand b, bool accumulate) {
    struct {
        Four of_terms[16];
    } rows;
    for (int half = 0; half < 2; ++half) {
        const uint64_t pair = uint64_t{a[half + 2]} << 32 | a[half];
        const auto* const words = turns::meet_warp(pair) + threadIdx.x % 32 / 4 * 4;
        for (int k = 0; k < 16; ++k) {
            const float x = widened(static_cast<uint16_t>(words[k % 8 / 2] >> k / 8 * 32 + k % 2 * 16));
            rows.of_terms[k][2 * half] = rows.of_terms[k][2 * half + 1] = x;
        }
    }
    turns::thread->matmuls.open.push_back([=] { multiply_now(d, num_columns, rows.of_terms, b, accumulate); });
}

}   // namespace ffa
