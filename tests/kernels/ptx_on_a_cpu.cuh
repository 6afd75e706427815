// `csrc/sm90/ptx.cuh` for a CPU: the threads of a block take turns in one thread, and change where one waits for others.
// Copies and matmuls are done where they are asked for. What never ends is found: `launch` returns false.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __align__(bytes)
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

using std::max;
using std::min;

struct float2 {
    float x, y;
};

struct int4 {
    int x, y, z, w;
};

inline float2 make_float2(float x, float y) { return {x, y}; }

struct Index {
    unsigned x;
};

static Index threadIdx, blockIdx, gridDim;

// ---- threads in turns

namespace turns {

constexpr int kStackBytes = 1 << 16;
constexpr int kIdleRounds = 100;   // without anybody getting on: they wait for what never comes

static std::vector<ucontext_t> threads;
static ucontext_t home;
static int current;
static long progress;

inline void yield() { swapcontext(&threads[current], &home); }

// All of some threads meet; each brings a word and may then read those of all.
struct Meeting {
    uint64_t words[2][512];
    int num_there = 0;
    int turn = 0;

    const uint64_t* meet(int index, int count, uint64_t word) {
        const int mine = turn;
        words[mine % 2][index] = word;
        ++progress;
        if (++num_there == count) {
            num_there = 0;
            ++turn;
        }
        while (turn == mine) {
            yield();
        }
        return words[mine % 2];
    }
};

static Meeting warps[16], named[16];

inline const uint64_t* meet_warp(uint64_t word) { return warps[threadIdx.x / 32].meet(threadIdx.x % 32, 32, word); }

// Runs kernel() in all threads of a grid, one block after the other.
template <class Kernel>
bool launch(int num_blocks, int num_threads, Kernel kernel) {
    static Kernel* running;
    running = &kernel;
    std::vector<char> stacks(static_cast<size_t>(num_threads) * kStackBytes);
    for (int block = 0; block < num_blocks; ++block) {
        for (Meeting& meeting : warps) {
            meeting = {};
        }
        for (Meeting& meeting : named) {
            meeting = {};
        }
        std::vector<char> is_done(num_threads, 0);
        static std::vector<char>* done;
        done = &is_done;
        threads.assign(num_threads, {});
        blockIdx.x = block;
        gridDim.x = num_blocks;
        for (int i = 0; i < num_threads; ++i) {
            getcontext(&threads[i]);
            threads[i].uc_stack.ss_sp = &stacks[static_cast<size_t>(i) * kStackBytes];
            threads[i].uc_stack.ss_size = kStackBytes;
            threads[i].uc_link = &home;
            void (*const body)() = [] {
                (*running)();
                (*done)[current] = 1;
                ++progress;
            };
            makecontext(&threads[i], body, 0);
        }
        for (int idle = 0, left = num_threads; left > 0;) {
            const long before = progress;
            left = 0;
            for (current = 0; current < num_threads; ++current) {
                if (!is_done[current]) {
                    threadIdx.x = current;
                    swapcontext(&home, &threads[current]);
                    left += !is_done[current];
                }
            }
            idle = progress == before ? idle + 1 : 0;
            if (idle > kIdleRounds) {
                return false;
            }
        }
    }
    return true;
}

}  // namespace turns

inline void __syncthreads() { turns::named[0].meet(threadIdx.x, turns::threads.size(), 0); }

inline void __syncwarp() { turns::meet_warp(0); }

inline bool __any_sync(unsigned, bool flag) {
    const uint64_t* const flags = turns::meet_warp(flag);
    return std::any_of(flags, flags + 32, [](uint64_t x) { return x != 0; });
}

inline bool __all_sync(unsigned, bool flag) { return !__any_sync(0xffffffff, !flag); }

inline float __shfl_xor_sync(unsigned, float value, int distance) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    word = static_cast<uint32_t>(turns::meet_warp(word)[threadIdx.x % 32 ^ distance]);
    std::memcpy(&value, &word, 4);
    return value;
}

inline int atomicAdd(int* x, int y) { return (*x += y) - y; }
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

// What the test makes of a tensor [rows, heads, head_dim].
struct alignas(64) TensorMap {
    char* address;
    long long rows, heads, head_dim, row_bytes, head_bytes, box_rows;
    long long unused[9];
};

alignas(1024) unsigned char memory[227 * 1024 + 1024];   // shared memory; it begins at 1024

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

inline void mbarrier_arrive_if(bool condition, uint64_t& word) {
    if (condition) {
        mbarrier_arrive(word);
    }
}

inline void barrier_sync(uint32_t id, uint32_t threads) {
    turns::named[id].meet(threadIdx.x % threads, threads, 0);
}

// ---- copies

constexpr uint32_t kRowBytes = 128;

// 16-byte chunks of a row of 128 bytes trade places with the row.
inline uint32_t swizzled(uint32_t address) { return address ^ (address / kRowBytes % 8) << 4; }

// Calls use(value in shared memory, value in the tensor or null) for all values of a box of some rows.
template <class Use>
void for_each_in_box(const TensorMap& map, uint32_t shared_begin, int rows, int x, int y, int z, Use use) {
    for (int row = 0; row < rows; ++row) {
        for (int col = 0; col < 64; ++col) {
            const bool is_inside = y + row >= 0 && y + row < map.rows && x + col < map.head_dim && z < map.heads;
            char* const value = map.address + (y + row) * map.row_bytes + z * map.head_bytes + 2 * (x + col);
            const uint32_t address = swizzled(shared_begin + row * kRowBytes + 2 * col);
            use(reinterpret_cast<uint16_t*>(shared(address)), reinterpret_cast<uint16_t*>(is_inside ? value : nullptr));
        }
    }
}

inline void tma_load_3d(void* destination, const TensorMap& map, uint64_t& barrier, int x, int y, int z) {
    for_each_in_box(map, shared_address(destination), map.box_rows, x, y, z,
                    [](uint16_t* to, const uint16_t* from) { *to = from ? *from : 0; });
    complete(barrier, map.box_rows * kRowBytes);
}

inline void cp_async_bulk_load(void* destination, const void* source, uint32_t bytes, uint64_t& barrier) {
    std::memcpy(destination, source, bytes);
    complete(barrier, bytes);
}

inline void tma_store_3d(const TensorMap& map, const void* source, int x, int y, int z) {
    for_each_in_box(map, shared_address(source), map.box_rows, x, y, z, [](const uint16_t* from, uint16_t* to) {
        if (to) {
            *to = *from;
        }
    });
}

inline void cp_async_bulk_commit_group() {}
template <int>
void cp_async_bulk_wait_group_read() {}
inline void fence_proxy_async_shared() {}

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
    static_assert(__is_same(Element, bfloat16), "the other one is not here");
    return rounded(high) << 16 | rounded(low);
}

inline void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const int lane = threadIdx.x % 32;
    const auto* const rows = turns::meet_warp(address);
    const uint32_t values[] = {a, b, c, d};
    for (int i = 0; i < 4; ++i) {
        std::memcpy(shared(static_cast<uint32_t>(rows[8 * i + lane / 4]) + lane % 4 * 4), &values[i], 4);
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

inline void wgmma_fence() {}
inline void wgmma_commit_group() {}
template <int>
void wgmma_wait_group() {}
template <int kCount>
void pin(float (&)[kCount]) {}

inline uint32_t wgmma_descriptor(const void* tile, uint32_t leading_bytes) {
    return (leading_bytes >> 4) << 16 | (shared_address(tile) & 0x3FFFF) >> 4;
}

enum class Major { K = 0, MN = 1 };

// The value `along` places along a row of 128 bytes, in the row `across`; rows longer than that go on in another slab.
inline float operand(uint32_t descriptor, int across, int along) {
    const uint32_t begin = (descriptor & 0x3FFF) << 4, slab_bytes = descriptor >> 16 << 4;
    const uint32_t address = begin + along / 64 * slab_bytes + across * kRowBytes + along % 64 * 2;
    uint16_t bits;
    std::memcpy(&bits, shared(swizzled(address)), 2);
    return widened(bits);
}

template <class Element, int kN>
struct Wgmma {
    // Of this thread: rows lane / 4 and 8 further of its warp, columns 2 * (lane % 4) and 1 further of every 8.
    template <class A, class B>
    static void multiply(float (&d)[kN / 2], A a, B b, bool accumulate) {
        const int lane = threadIdx.x % 32;
        for (int i = 0; i < kN / 2; ++i) {
            const int half = i / 2 % 2, col = i / 4 * 8 + 2 * (lane % 4) + i % 2;
            float sum = accumulate ? d[i] : 0.f;
            for (int k = 0; k < 16; ++k) {
                sum += a(half, k) * b(k, col);
            }
            d[i] = sum;
        }
    }

    template <Major kMajorA, Major kMajorB>
    static void ss(float (&d)[kN / 2], uint32_t a, uint32_t b, int accumulate) {
        static_assert(kMajorA == Major::K && kMajorB == Major::K, "as the forward kernel has them");
        const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
        multiply(
            d, [&](int half, int k) { return operand(a, row + 8 * half, k); },
            [&](int k, int col) { return operand(b, col, k); }, accumulate);
    }

    template <Major kMajorB>
    static void rs(float (&d)[kN / 2], const uint32_t* a, uint32_t b, int accumulate) {
        static_assert(kMajorB == Major::MN, "as the forward kernel has it");
        float values[2][16];   // rows of A, which the four lanes of a quad hold together
        for (int i = 0; i < 4; ++i) {
            const auto* const words = turns::meet_warp(a[i]) + threadIdx.x % 32 / 4 * 4;
            for (int col = 0; col < 8; ++col) {
                values[i % 2][i / 2 * 8 + col] = widened(static_cast<uint16_t>(words[col / 2] >> col % 2 * 16));
            }
        }
        multiply(
            d, [&](int half, int k) { return values[half][k]; },
            [&](int k, int col) { return operand(b, k, col); }, accumulate);
    }
};

}  // namespace ffa
