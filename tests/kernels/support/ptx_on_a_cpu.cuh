// `csrc/sm90/common/ptx.cuh` for a CPU: the threads of some blocks take turns in one thread, and change where one waits
// for others. Matmuls and bulk writes are done when their thread waits for them. Loads arrive when nobody gets on, in
// any order; or, with a seed, at once, with turns at random. Fences do nothing here. What never ends is found: `launch`
// returns false.
#pragma once

#include "fibers.cuh"

#include <algorithm>
#include <numeric>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <vector>

#define __device__
#define __global__
#ifndef __shared__
#define __shared__
#endif
#define __align__(bytes)
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__

using std::max;
using std::min;

struct float2 {
    float x, y;
};

struct alignas(16) float4 {
    float x, y, z, w;
};

struct alignas(16) int4 {
    int x, y, z, w;
};

struct alignas(8) uint2 {
    unsigned x, y;
};

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

inline float2 make_float2(float x, float y) { return {x, y}; }

struct Index {
    unsigned x, y;
};

static Index threadIdx, blockIdx, blockDim, gridDim;

// ---- threads in turns

namespace turns {

constexpr int kMemoryBytes = 227 * 1024 + 1024;
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
static Thread* thread;
static long progress;
static bool is_late;     // what is asked for is done when nobody else gets on; else at once, with turns at random
static unsigned state;   // of random()

inline unsigned random(unsigned count) {
    state = state * 1664525u + 1013904223u;
    return (state >> 8) % count;
}

inline void yield() { fibers::yield(); }

inline const uint64_t* Meeting::meet(int index, int count, uint64_t word) {
    const int mine = turn;
    words[mine % 2][index] = word;
    arrive(count);
    while (turn == mine) {
        yield();
    }
    return words[mine % 2];
}

inline const uint64_t* meet_warp(uint64_t word) {
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

inline void swap_memory(unsigned char* x, char* y) {
    static unsigned char kept[kMemoryBytes];
    std::memcpy(kept, x, kMemoryBytes);
    std::memcpy(x, y, kMemoryBytes);
    std::memcpy(y, kept, kMemoryBytes);
}

// Runs kernel() in all threads of a grid, so many blocks side by side; `memory` is what the threads of each share.
// False where threads wait for what never comes.
// Clusters are of one block or of two, which begin together.
template <class Kernel>
bool launch(Index grid, int num_threads, unsigned char* memory, int num_at_once, unsigned seed, int cluster,
            Kernel kernel) {
    static Kernel* running;
    running = &kernel;
    is_late = seed == 0;
    state = seed;
    gridDim = grid;
    blockDim = {static_cast<unsigned>(num_threads), 1};
    void (*const body)() = [] {
        (*running)();
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
        swap_memory(memory, block->memory.data());
        const bool is_left = go_on();
        swap_memory(memory, block->memory.data());
        if (is_left) {
            resident.splice(resident.end(), resident, resident.begin());
        } else {
            if (block->peer) {
                block->peer->peer = nullptr;
            }
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

inline void __syncthreads() {
    turns::block->named[0].meet(threadIdx.x, turns::block->threads.size(), 0);
    ++turns::progress;   // nobody polls with it
}

inline void __syncwarp() { turns::meet_warp(0); }

inline bool __any_sync(unsigned, bool flag) {
    const uint64_t* const flags = turns::meet_warp(flag);
    return std::any_of(flags, flags + 32, [](uint64_t x) { return x != 0; });
}

inline bool __all_sync(unsigned, bool flag) { return !__any_sync(0xffffffff, !flag); }

inline unsigned __ballot_sync(unsigned, bool flag) {
    const uint64_t* const flags = turns::meet_warp(flag);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) {
        bits |= static_cast<unsigned>(flags[lane]) << lane;
    }
    return bits;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }

inline int __reduce_min_sync(unsigned, int value) {
    const uint64_t* const values = turns::meet_warp(static_cast<unsigned>(value));
    return *std::min_element(values, values + 32);   // none is negative
}

inline int __reduce_max_sync(unsigned, int value) {
    const uint64_t* const values = turns::meet_warp(static_cast<unsigned>(value));
    return *std::max_element(values, values + 32);
}

inline int __reduce_add_sync(unsigned, int value) {
    const uint64_t* const values = turns::meet_warp(static_cast<unsigned>(value));
    return static_cast<int>(std::accumulate(values, values + 32, uint64_t{0}));
}

inline int __shfl_sync(unsigned, int value, int lane) { return static_cast<int>(turns::meet_warp(value)[lane]); }

inline int __shfl_up_sync(unsigned, int value, int distance) {
    const int lane = threadIdx.x % 32;
    return static_cast<int>(turns::meet_warp(value)[lane >= distance ? lane - distance : lane]);
}

inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
inline unsigned __float_as_uint(float value) { return __builtin_bit_cast(unsigned, value); }

inline unsigned __shfl_xor_sync(unsigned, unsigned value, int distance) {
    ++turns::progress;   // nobody polls with it
    return static_cast<unsigned>(turns::meet_warp(value)[threadIdx.x % 32 ^ distance]);
}

inline float __shfl_xor_sync(unsigned, float value, int distance) {
    return __uint_as_float(turns::meet_warp(__float_as_uint(value))[threadIdx.x % 32 ^ distance]);
}

inline void __threadfence() {}
inline void __threadfence_system() {}
template <class Value>
Value __ldcg(const Value* pointer) {
    return *pointer;
}
template <class Integer>
Integer atomicAdd(Integer* x, Integer y) {
    return (*x += y) - y;
}

template <class Integer>
Integer atomicMin(Integer* x, Integer y) {
    const Integer before = *x;
    *x = min(before, y);
    return before;
}

inline int atomicOr(int* x, int y) {
    const int before = *x;
    *x |= y;
    return before;
}

inline int atomicMax(int* x, int y) { return *x = max(*x, y); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }

namespace ffa {

using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

struct bfloat16 {
    uint16_t bits;
};

struct float16 {
    uint16_t bits;
};

// What the test makes of a tensor: x is the innermost of three dimensions.
struct alignas(64) TensorMap {
    char* address;
    long long sizes[3], y_bytes, z_bytes;
    long long box_cols, box_rows;
    long long element_bytes, is_swizzled;
    long long unused[6];
};

alignas(1024) unsigned char memory[turns::kMemoryBytes];   // shared memory; it begins at 1024
int warp_sums[32];                                         // that of common/block.cuh, which one thread block uses

inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - memory) + 1024;
}

inline unsigned char* shared(uint32_t address) { return memory + (address - 1024); }

// ---- mbarrier

struct Barrier {
    uint16_t arrivals, missing;
    int bytes : 31;
    unsigned phase : 1;

    void settle() {
        ++turns::progress;
        if (missing == 0 && bytes == 0) {
            missing = arrivals;
            phase ^= 1;
        }
    }
};

inline Barrier& barrier_of(uint64_t& word) { return reinterpret_cast<Barrier&>(word); }

inline void mbarrier_init(uint64_t& word, uint32_t arrivals) {
    barrier_of(word) = {static_cast<uint16_t>(arrivals), static_cast<uint16_t>(arrivals), 0, 0};
}

inline void fence_mbarrier_init() {}

inline void mbarrier_arrive(uint64_t& word) {
    --barrier_of(word).missing;
    barrier_of(word).settle();
}

inline void mbarrier_arrive_expect_tx(uint64_t& word, uint32_t bytes) {
    barrier_of(word).bytes += bytes;
    mbarrier_arrive(word);
}

inline void complete(uint64_t& word, uint32_t bytes) {
    barrier_of(word).bytes -= bytes;
    barrier_of(word).settle();
}

inline bool mbarrier_test_wait(uint64_t& word, uint32_t phase) { return barrier_of(word).phase != phase; }

inline void mbarrier_wait(uint64_t& word, uint32_t phase) {
    while (!mbarrier_test_wait(word, phase)) {
        turns::yield();
    }
}

inline void mbarrier_wait_together(uint64_t& word, uint32_t phase) {
    mbarrier_wait(word, phase);
    __syncwarp();
}

inline void st_shared_if(bool condition, uint32_t& destination, uint32_t value) {
    if (condition) {
        destination = value;
    }
}

inline void mbarrier_arrive_if(bool condition, uint64_t& word) {
    if (condition) {
        mbarrier_arrive(word);
    }
}

inline bool elect_one() { return threadIdx.x % 32 == 0; }

inline void barrier_sync(uint32_t id, uint32_t threads) {
    turns::block->named[id].meet(threadIdx.x % threads, threads, 0);
}

inline void barrier_arrive(uint32_t id, uint32_t threads) { turns::block->named[id].arrive(threads); }

// ---- copies

constexpr uint32_t kRowBytes = 128;

// 16-byte chunks of a row of 128 bytes trade places with the row.
inline uint32_t swizzled(uint32_t address) { return address ^ (address / kRowBytes % 8) << 4; }

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

inline uint32_t box_bytes(const TensorMap& map) { return map.box_rows * map.box_cols * map.element_bytes; }

// A box that will lie at that address; `destination` is where it is meanwhile.
inline void load_box(char* destination, uint32_t address, const TensorMap& map, uint64_t& barrier, int x, int y,
                     int z) {
    for_each_in_box(map, address, x, y, z, [&](uint32_t offset, const char* from) {
        char* const to = destination + offset;
        from ? std::memcpy(to, from, map.element_bytes) : std::memset(to, 0, map.element_bytes);
    });
    complete(barrier, box_bytes(map));
}

inline void tma_load_3d(void* destination, const TensorMap& map, uint64_t& barrier, int x, int y, int z) {
    turns::copy([=, &barrier] {
        load_box(static_cast<char*>(destination), shared_address(destination), map, barrier, x, y, z);
    });
}

inline void cp_async_bulk_load(void* destination, const void* source, uint32_t bytes, uint64_t& barrier) {
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

inline void tma_store_3d(const TensorMap& map, const void* source, int x, int y, int z) {
    bulk_write(source, box_bytes(map), [=](const char* taken) {
        for_each_in_box(map, shared_address(source), x, y, z, [&](uint32_t offset, char* to) {
            if (to) {
                std::memcpy(to, taken + offset, map.element_bytes);
            }
        });
    });
}

inline void cp_reduce_async_bulk_add(float* destination, uint32_t source, uint32_t bytes) {
    bulk_write(shared(source), bytes, [=](const char* taken) {
        for (uint32_t i = 0; i < bytes / sizeof(float); ++i) {
            destination[i] += reinterpret_cast<const float*>(taken)[i];
        }
    });
}

inline void cp_async_bulk_commit_group() {
    turns::thread->reads.commit();
    turns::thread->writes.commit();
}

template <int kPending>
void cp_async_bulk_wait_group_read() {
    turns::thread->reads.wait(kPending);
}

template <int kPending>
void cp_async_bulk_wait_group() {
    turns::thread->reads.wait(kPending);
    turns::thread->writes.wait(kPending);
}

inline void fence_proxy_async_shared() {}
inline void fence_proxy_async_global() {}

// ---- clusters of two thread blocks

inline int num_clusters() { return gridDim.x / 2; }

// Of the block that is not at work, whose memory lies elsewhere meanwhile.
inline char* at_peer(uint32_t address) { return turns::block->peer->memory.data() + (address - 1024); }

inline uint64_t& barrier_at_peer(uint64_t& barrier) {
    return *reinterpret_cast<uint64_t*>(at_peer(shared_address(&barrier)));
}

inline void mbarrier_arrive_at_rank_if(bool condition, uint64_t& barrier, int rank) {
    if (condition) {
        mbarrier_arrive(rank == static_cast<int>(blockIdx.x % 2) ? barrier : barrier_at_peer(barrier));
    }
}

inline void cp_async_bulk_to_peer(uint32_t destination, uint32_t source, uint32_t bytes, uint64_t& barrier, int) {
    turns::copy([=, &barrier] {
        std::memcpy(at_peer(destination), shared(source), bytes);
        complete(barrier_at_peer(barrier), bytes);
    });
}

inline void tma_load_3d_to_both(void* destination, const TensorMap& map, uint64_t& barrier, int x, int y, int z) {
    tma_load_3d(destination, map, barrier, x, y, z);
    turns::copy([=, &barrier] {
        const uint32_t address = shared_address(destination);
        load_box(at_peer(address), address, map, barrier_at_peer(barrier), x, y, z);
    });
}

inline void st_async_to_peer(int& destination, int word, uint64_t& barrier, int) {
    turns::copy([=, &destination, &barrier] {
        std::memcpy(at_peer(shared_address(&destination)), &word, sizeof(word));
        complete(barrier_at_peer(barrier), sizeof(word));
    });
}

inline void cluster_arrive() {
    ++*turns::block->cluster_arrivals;
    ++turns::thread->cluster_arrivals;
    ++turns::progress;
}

inline void cluster_wait() {
    const long all = 2 * turns::block->threads.size() * turns::thread->cluster_arrivals;
    while (*turns::block->cluster_arrivals < all) {
        turns::yield();
    }
}

// ---- between thread blocks

inline void griddepcontrol_launch_dependents() {}
inline void griddepcontrol_wait() {}

inline int load_acquire(const int* pointer) {
    turns::yield();
    return *pointer;
}

inline void fence_acq_rel() {}
inline void nanosleep(uint32_t) {}

inline void add_release(int* pointer, int value) {
    *pointer += value;
    ++turns::progress;
}

inline int load_shared(const int& word) { return word; }
inline void store_shared(int& word, int value) { word = value; }

inline void add_relaxed_if(bool condition, int* pointer, int value) {
    if (condition) {
        add_release(pointer, value);
    }
}

inline void add_relaxed_if(bool condition, float* pointer, float value) {
    if (condition) {
        *pointer += value;
        ++turns::progress;
    }
}

inline void add_relaxed_if(bool condition, float* pointer, const float4& value) {
    if (condition) {
        const float values[] = {value.x, value.y, value.z, value.w};
        for (int i = 0; i < 4; ++i) {
            pointer[i] += values[i];
        }
        ++turns::progress;
    }
}

// ---- registers and conversions

template <int>
void setmaxnreg_inc() {}
template <int>
void setmaxnreg_dec() {}

inline float ex2(float x) { return std::exp2(x); }
inline float tanh_approx(float x) { return std::tanh(x); }

inline float widened(uint16_t bits) { return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16); }

inline uint32_t rounded(float x) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x);
    return bits + 0x7fff + (bits >> 16 & 1) >> 16;
}

template <class Element>
uint32_t pack(float low, float high) {
    if constexpr (__is_same(Element, float16)) {
        return uint32_t(__builtin_bit_cast(uint16_t, _Float16(high))) << 16 |
               __builtin_bit_cast(uint16_t, _Float16(low));
    }
    return rounded(high) << 16 | rounded(low);
}

template <class Element>
float2 unpack(uint32_t packed) {
    if constexpr (__is_same(Element, float16)) {
        return {float(__builtin_bit_cast(_Float16, uint16_t(packed))),
                float(__builtin_bit_cast(_Float16, uint16_t(packed >> 16)))};
    }
    return {widened(packed), widened(packed >> 16)};
}

template <class Element>
float dot_pair(uint32_t x, uint32_t y) {
    static_assert(__is_same(Element, bfloat16), "the other one is not here");
    return widened(x) * widened(y) + widened(x >> 16) * widened(y >> 16);
}

inline void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const int lane = threadIdx.x % 32;
    const auto* const rows = turns::meet_warp(address);
    const uint32_t values[] = {a, b, c, d};
    for (int i = 0; i < 4; ++i) {
        std::memcpy(shared(static_cast<uint32_t>(rows[8 * i + lane / 4]) + lane % 4 * 4), &values[i], 4);
    }
}

inline void ldmatrix_x4(uint32_t address, uint32_t (&values)[4]) {
    const int lane = threadIdx.x % 32;
    const auto* const rows = turns::meet_warp(address);
    for (int i = 0; i < 4; ++i) {
        std::memcpy(&values[i], shared(static_cast<uint32_t>(rows[8 * i + lane / 4]) + lane % 4 * 4), 4);
    }
}

inline int uniform(int number) {
    const auto* const numbers = turns::meet_warp(static_cast<uint32_t>(number));
    int largest = number;
    for (int i = 0; i < 32; ++i) {
        largest = max(largest, static_cast<int>(static_cast<uint32_t>(numbers[i])));
    }
    return largest;
}

inline uint32_t zero_after(float) { return 0; }
inline int opaque(int number) { return number; }

// ---- wgmma

// A matmul is one of all four warps, which none of them begins without the others.
inline void wgmma_fence() { turns::block->warpgroups[threadIdx.x / 128].meet(threadIdx.x % 128, 128, 0); }
inline void wgmma_commit_group() { turns::thread->matmuls.commit(); }
template <int kPending>
void wgmma_wait_group() {
    if (!turns::is_late) {
        turns::yield();   // so that others may write too early to what it reads
    }
    turns::thread->matmuls.wait(kPending);
}
template <int kCount>
void pin(float (&)[kCount]) {}

constexpr uint32_t leading_stride(uint32_t bytes) { return (bytes >> 4) << 16; }

inline uint32_t wgmma_descriptor(const void* tile, uint32_t leading_bytes) {
    return leading_stride(leading_bytes) | (shared_address(tile) & 0x3FFFF) >> 4;
}

constexpr uint32_t kDescriptorHigh = 1u << 30 | (8 * 128) >> 4;
constexpr uint32_t plain_descriptor_high(uint32_t stride_bytes) { return stride_bytes >> 4; }

enum class Major { K = 0, MN = 1 };

// The 16 terms of a row or column `outer`, or of two, of which the first is even.
template <Major kMajor, int kCount, uint32_t kHigh = kDescriptorHigh>
void operands(float (&values)[kCount][16], uint32_t descriptor, int outer) {
    const uint32_t begin = (descriptor & 0x3FFF) << 4, stride = descriptor >> 16 << 4;
    uint16_t bits[8];
    if (kHigh != kDescriptorHigh) {   // matrices of 8 x 16 bytes, with a stride along the terms and one across them
        for (int i = 0; i < kCount; ++i, ++outer) {
            for (int k = 0; k < 16; ++k) {
                const int row = (kMajor == Major::K ? outer : k) % 8, col = (kMajor == Major::K ? k : outer) % 8;
                std::memcpy(bits, shared(begin + outer / 8 * (kHigh << 4) + k / 8 * stride + row * 16 + col * 2), 2);
                values[i][k] = widened(bits[0]);
            }
        }
    } else if (kMajor == Major::K) {   // side by side in a row of 128 bytes
        for (int i = 0; i < kCount; ++i) {
            for (int half = 0; half < 2; ++half) {
                std::memcpy(bits, shared(swizzled(begin + (outer + i) * kRowBytes + half * 16)), 16);
                for (int k = 0; k < 8; ++k) {
                    values[i][half * 8 + k] = widened(bits[k]);
                }
            }
        }
    } else {   // each in a row of its own; rows longer than 128 bytes go on in another slab
        for (int k = 0; k < 16; ++k) {
            std::memcpy(bits, shared(swizzled(begin + outer / 64 * stride + outer % 64 * 2 + k * kRowBytes)),
                        kCount * 2);
            for (int i = 0; i < kCount; ++i) {
                values[i][k] = widened(bits[i]);
            }
        }
    }
}

template <class Element, int kN>
struct Wgmma {
    // Of this thread: rows lane / 4 and 8 further of its warp, columns 2 * (lane % 4) and 1 further of every 8.
    template <Major kMajorB, uint32_t kHighB = kDescriptorHigh>
    static void multiply(float (&d)[kN / 2], const float (&a)[2][16], uint32_t b, bool accumulate) {
        for (int at = 0; at < kN / 2; at += 4) {
            float of_columns[2][16], sums[4] = {};
            operands<kMajorB, 2, kHighB>(of_columns, b, at * 2 + threadIdx.x % 4 * 2);
            for (int i = 0; i < 4 && accumulate; ++i) {
                sums[i] = d[at + i];
            }
            for (int k = 0; k < 16; ++k) {
                sums[0] += a[0][k] * of_columns[0][k];
                sums[1] += a[0][k] * of_columns[1][k];
                sums[2] += a[1][k] * of_columns[0][k];
                sums[3] += a[1][k] * of_columns[1][k];
            }
            std::copy_n(sums, 4, &d[at]);
        }
    }

    template <Major kMajorA, Major kMajorB, uint32_t kHighA = kDescriptorHigh, uint32_t kHighB = kDescriptorHigh>
    static void ss(float (&d)[kN / 2], uint32_t a, uint32_t b, int accumulate) {
        turns::thread->matmuls.open.push_back([=, &d] {
            const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
            float values[2][16], one[1][16];
            for (int half = 0; half < 2; ++half) {
                operands<kMajorA, 1, kHighA>(one, a, row + half * 8);
                std::copy_n(one[0], 16, values[half]);
            }
            multiply<kMajorB, kHighB>(d, values, b, accumulate);
        });
    }

    template <Major kMajorB>
    static void rs(float (&d)[kN / 2], const uint32_t* a, uint32_t b, int accumulate) {
        struct {
            float values[2][16];   // rows of A, which the four lanes of a quad hold together
        } rows;
        for (int half = 0; half < 2; ++half) {
            const uint64_t pair = uint64_t{a[half + 2]} << 32 | a[half];
            const auto* const words = turns::meet_warp(pair) + threadIdx.x % 32 / 4 * 4;
            for (int k = 0; k < 16; ++k) {
                rows.values[half][k] = widened(static_cast<uint16_t>(words[k % 8 / 2] >> k / 8 * 32 + k % 2 * 16));
            }
        }
        turns::thread->matmuls.open.push_back([=, &d] { multiply<kMajorB>(d, rows.values, b, accumulate); });
    }
};

}   // namespace ffa
