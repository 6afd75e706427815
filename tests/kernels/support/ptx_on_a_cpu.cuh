// `csrc/sm90/common/ptx.cuh` for a CPU: the threads of some blocks take turns in one thread, and change where one waits
// for others. Matmuls and bulk writes are done when their thread waits for them. Loads arrive when nobody gets on, in
// any order; or, with a seed, at once, with turns at random. Fences do nothing here. What never ends is found: `launch`
// returns false.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

// What need not know the kernel is in `turns_on_a_cpu.cuh`: compiled with the rest, or once for all kernels.
#ifdef TURNS_ARE_APART
#define STATE inline
#define IN_TURNS
#else
#define STATE static
#define IN_TURNS inline
#endif

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

STATE Index threadIdx, blockIdx, blockDim, gridDim;

// ---- threads in turns

namespace turns {

constexpr int kMemoryBytes = 227 * 1024 + 1024;

STATE long progress;

void yield();
const uint64_t* meet_warp(uint64_t word);   // those of all threads of the warp

// Runs kernel(params) in all threads of a grid, so many blocks side by side; `memory` is what the threads of each
// share. False where threads wait for what never comes.
// Clusters are of one block or of two, which begin together.
bool launch(Index grid, int num_threads, unsigned char* memory, int num_at_once, unsigned seed, int cluster,
            void (*kernel)(const void*), const void* params);

}   // namespace turns

void __syncthreads();
bool __any_sync(unsigned, bool flag);
unsigned __ballot_sync(unsigned, bool flag);
int __reduce_min_sync(unsigned, int value);
int __reduce_max_sync(unsigned, int value);
int __reduce_add_sync(unsigned, int value);

inline void __syncwarp() { turns::meet_warp(0); }

inline bool __all_sync(unsigned, bool flag) { return !__any_sync(0xffffffff, !flag); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }

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

// Shared memory; it begins at 1024.
alignas(1024) STATE unsigned char memory[turns::kMemoryBytes];
// That of common/block.cuh, which one thread block uses.
STATE int warp_sums[32];

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

void barrier_sync(uint32_t id, uint32_t threads);
void barrier_arrive(uint32_t id, uint32_t threads);

// ---- copies

constexpr uint32_t kRowBytes = 128;

// 16-byte chunks of a row of 128 bytes trade places with the row.
inline uint32_t swizzled(uint32_t address) { return address ^ (address / kRowBytes % 8) << 4; }

void tma_load_3d(void* destination, const TensorMap& map, uint64_t& barrier, int x, int y, int z);
void cp_async_bulk_load(void* destination, const void* source, uint32_t bytes, uint64_t& barrier);
void tma_store_3d(const TensorMap& map, const void* source, int x, int y, int z);
void cp_reduce_async_bulk_add(float* destination, uint32_t source, uint32_t bytes);
void cp_async_bulk_commit_group();
void wait_for_reads(int num_pending);
void wait_for_writes(int num_pending);

template <int kPending>
void cp_async_bulk_wait_group_read() {
    wait_for_reads(kPending);
}

template <int kPending>
void cp_async_bulk_wait_group() {
    wait_for_reads(kPending);
    wait_for_writes(kPending);
}

inline void fence_proxy_async_shared() {}
inline void fence_proxy_async_global() {}

// ---- clusters of two thread blocks

inline int num_clusters() { return gridDim.x / 2; }

void mbarrier_arrive_at_rank_if(bool condition, uint64_t& barrier, int rank);
void cp_async_bulk_to_peer(uint32_t destination, uint32_t source, uint32_t bytes, uint64_t& barrier, int);
void tma_load_3d_to_both(void* destination, const TensorMap& map, uint64_t& barrier, int x, int y, int z);
void st_async_to_peer(int& destination, int word, uint64_t& barrier, int);
void cluster_arrive();
void cluster_wait();

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

void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d);
void ldmatrix_x4(uint32_t address, uint32_t (&values)[4]);
int uniform(int number);

inline uint32_t zero_after(float) { return 0; }
inline int opaque(int number) { return number; }

// ---- wgmma

// A matmul is one of all four warps, which none of them begins without the others.
void wgmma_fence();
void wgmma_commit_group();
void wait_for_matmuls(int num_pending);

template <int kPending>
void wgmma_wait_group() {
    wait_for_matmuls(kPending);
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

struct Operand {
    uint32_t descriptor;
    Major major;
    uint32_t high;   // of its descriptor
};

// d += a * b in this thread: rows lane / 4 and 8 further of its warp, columns 2 * (lane % 4) and 1 further of every 8.
void multiply(float* d, int num_columns, Operand a, Operand b, bool accumulate);

// The same with rows of A that the four lanes of a quad hold together.
void multiply(float* d, int num_columns, const uint32_t (&a)[4], Operand b, bool accumulate);

template <class Element, int kN>
struct Wgmma {
    template <Major kMajorA, Major kMajorB, uint32_t kHighA = kDescriptorHigh, uint32_t kHighB = kDescriptorHigh>
    static void ss(float (&d)[kN / 2], uint32_t a, uint32_t b, int accumulate) {
        multiply(d, kN, Operand{a, kMajorA, kHighA}, Operand{b, kMajorB, kHighB}, accumulate);
    }

    template <Major kMajorB>
    static void rs(float (&d)[kN / 2], const uint32_t* a, uint32_t b, int accumulate) {
        const uint32_t words[] = {a[0], a[1], a[2], a[3]};
        multiply(d, kN, words, Operand{b, kMajorB, kDescriptorHigh}, accumulate);
    }
};

}   // namespace ffa

#if !defined(TURNS_ARE_APART) || defined(TURNS_ARE_HERE)
#include "turns_on_a_cpu.cuh"
#endif
