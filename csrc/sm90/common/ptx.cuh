// The sm_90a instructions these kernels use, one function each, named after the instruction.
// NVRTC compiles this without any system header, so the integer types are spelled out here.
#pragma once

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

// A CUtensorMap, passed by value inside a __grid_constant__ parameter.
struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarrier

__device__ __forceinline__ void mbarrier_init(uint64_t& barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t& barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t& barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(uint64_t& barrier, uint32_t phase) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(&barrier)), "r"(phase)
        : "memory");
    return done;
}

// Does not suspend the thread, as try_wait may.
__device__ __forceinline__ bool mbarrier_test_wait(uint64_t& barrier, uint32_t phase) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(&barrier)), "r"(phase)
        : "memory");
    return done;
}

__device__ __forceinline__ void mbarrier_wait(uint64_t& barrier, uint32_t phase) {
    while (!mbarrier_try_wait(barrier, phase)) {
    }
}

// By all lanes of a warp, after which they are known to be together.
__device__ __forceinline__ void mbarrier_wait_together(uint64_t& barrier, uint32_t phase) {
    while (!__all_sync(0xffffffff, mbarrier_try_wait(barrier, phase))) {
    }
}

// Without a branch.
__device__ __forceinline__ void mbarrier_arrive_if(bool condition, uint64_t& barrier) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%1];\n}" ::"r"(
                     uint32_t(condition)),
                 "r"(shared_address(&barrier))
                 : "memory");
}

__device__ __forceinline__ void st_shared_if(bool condition, uint32_t& destination, uint32_t value) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.shared.b32 [%1], %2;\n}" ::"r"(uint32_t(condition)),
                 "r"(shared_address(&destination)), "r"(value)
                 : "memory");
}

// One lane, always the same, of a warp whose lanes are all here. What it alone does is known to be done once: where a
// lane is picked by its number, the compiler makes loops over lanes of instructions that a warp has in common, as those
// of TMA.
__device__ __forceinline__ bool elect_one() {
    uint32_t is_elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(is_elected));
    return is_elected != 0;
}

// ---- named barriers

__device__ __forceinline__ void barrier_sync(uint32_t id, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Counts as one that waits, and goes on.
__device__ __forceinline__ void barrier_arrive(uint32_t id, uint32_t threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- TMA

__device__ __forceinline__ void tma_load_3d(void* destination, const TensorMap& map, uint64_t& barrier, int x, int y,
                                            int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
        "[%2];" ::"r"(shared_address(destination)),
        "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void cp_async_bulk_load(void* destination, const void* source, uint32_t bytes,
                                                   uint64_t& barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(destination)),
                 "l"(source), "r"(bytes), "r"(shared_address(&barrier))
                 : "memory");
}

__device__ __forceinline__ void tma_store_3d(const TensorMap& map, const void* source, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
                 "r"(shared_address(source)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// Adds fp32 numbers in shared memory to those in global memory; `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void cp_reduce_async_bulk_add(float* destination, uint32_t source, uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination),
                 "r"(source), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Orders this thread's shared-memory stores before reads by wgmma and TMA.
__device__ __forceinline__ void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Waits until every access of this thread's bulk copies is done, those to global memory included.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- clusters of two thread blocks

// Read again each time: no register keeps it.
__device__ __forceinline__ int num_clusters() {
    int count;
    asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(count));
    return count;
}

// Where one of the two has what this one has at a place in shared memory.
__device__ __forceinline__ uint32_t address_at_rank(uint32_t address, int rank) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// At the barrier of one of the two. Orders no memory between them: with a release at the scope of the cluster it would
// wait until all that this thread has written and added is everywhere.
__device__ __forceinline__ void mbarrier_arrive_at_rank_if(bool condition, uint64_t& barrier, int rank) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p mbarrier.arrive.shared::cluster.b64 _, [%1];\n}" ::"r"(
                     uint32_t(condition)),
                 "r"(address_at_rank(shared_address(&barrier), rank))
                 : "memory");
}

// To the same place in the other one's shared memory, as bulk loads arrive; all are multiples of 16 bytes.
__device__ __forceinline__ void cp_async_bulk_to_peer(uint32_t destination, uint32_t source, uint32_t bytes,
                                                      uint64_t& barrier, int peer) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     address_at_rank(destination, peer)),
                 "r"(source), "r"(bytes), "r"(address_at_rank(shared_address(&barrier), peer))
                 : "memory");
}

// To the same place in the shared memory of both, each of which has a barrier there.
__device__ __forceinline__ void tma_load_3d_to_both(void* destination, const TensorMap& map, uint64_t& barrier, int x,
                                                    int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(destination)),
        "l"(&map), "r"(shared_address(&barrier)), "r"(x), "r"(y), "r"(z), "h"(uint16_t(3))
        : "memory");
}

// A word, likewise.
__device__ __forceinline__ void st_async_to_peer(int& destination, int word, uint64_t& barrier, int peer) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];" ::"r"(
                     address_at_rank(shared_address(&destination), peer)),
                 "r"(word), "r"(address_at_rank(shared_address(&barrier), peer))
                 : "memory");
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// ---- between thread blocks

// Lets the next kernel of the stream start as soon as there is room. It sees what this one writes after its own
// `griddepcontrol_wait`, which every kernel that may start early begins with.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ int load_acquire(const int* pointer) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}

// Without a branch, behind which control flow would no longer be known to be that of all lanes.
__device__ __forceinline__ void add_relaxed_if(bool condition, int* pointer, int value) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p red.relaxed.gpu.global.add.s32 [%0], %1;\n}" ::"l"(pointer),
        "r"(value), "r"(uint32_t(condition))
        : "memory");
}

__device__ __forceinline__ void add_relaxed_if(bool condition, float* pointer, float value) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p red.relaxed.gpu.global.add.f32 [%0], %1;\n}" ::"l"(pointer),
        "f"(value), "r"(uint32_t(condition))
        : "memory");
}

// Adds four numbers at a multiple of 16 bytes.
__device__ __forceinline__ void add_relaxed_if(bool condition, float* pointer, float4 value) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
        "@p red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n}" ::"l"(pointer),
        "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(uint32_t(condition))
        : "memory");
}

// What was written in front of it is seen behind a fence of another thread, if a relaxed load in front of that one
// reads what a relaxed write behind this one wrote.
__device__ __forceinline__ void fence_acq_rel() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ __forceinline__ void nanosleep(uint32_t ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }

__device__ __forceinline__ void add_release(int* pointer, int value) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

// Of a word that others poll.
__device__ __forceinline__ int load_shared(const int& word) {
    int value;
    asm volatile("ld.volatile.shared::cta.s32 %0, [%1];" : "=r"(value) : "r"(shared_address(&word)) : "memory");
    return value;
}

__device__ __forceinline__ void store_shared(int& word, int value) {
    asm volatile("st.volatile.shared::cta.s32 [%0], %1;" ::"r"(shared_address(&word)), "r"(value) : "memory");
}

// Orders this thread's accesses of global memory by bulk copies before and after those by ordinary instructions. (One
// of all memory would also wait for what is on its way to the L2 cache.)
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- registers and conversions

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float tanh_approx(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

template <class Element>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<bfloat16>(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

template <>
__device__ __forceinline__ uint32_t pack<float16>(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

template <class Element>
__device__ __forceinline__ float2 unpack(uint32_t packed);

template <>
__device__ __forceinline__ float2 unpack<bfloat16>(uint32_t packed) {
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000)};
}

template <>
__device__ __forceinline__ float2 unpack<float16>(uint32_t packed) {
    float2 pair;
    asm("{\n.reg .b16 x, y;\nmov.b32 {x, y}, %2;\ncvt.f32.f16 %0, x;\ncvt.f32.f16 %1, y;\n}"
        : "=f"(pair.x), "=f"(pair.y)
        : "r"(packed));
    return pair;
}

// x.low * y.low + x.high * y.high
template <class Element>
__device__ __forceinline__ float dot_pair(uint32_t x, uint32_t y);

template <>
__device__ __forceinline__ float dot_pair<bfloat16>(uint32_t x, uint32_t y) {
    return __uint_as_float(x << 16) * __uint_as_float(y << 16) +
           __uint_as_float(x & 0xffff0000) * __uint_as_float(y & 0xffff0000);
}

template <>
__device__ __forceinline__ float dot_pair<float16>(uint32_t x, uint32_t y) {
    float sum;
    asm("{\n.reg .b16 x0, x1, y0, y1;\n.reg .f32 a0, a1, b0, b1;\n"
        "mov.b32 {x0, x1}, %1;\nmov.b32 {y0, y1}, %2;\n"
        "cvt.f32.f16 a0, x0;\ncvt.f32.f16 a1, x1;\ncvt.f32.f16 b0, y0;\ncvt.f32.f16 b1, y1;\n"
        "mul.f32 a0, a0, b0;\nfma.rn.f32 %0, a1, b1, a0;\n}"
        : "=f"(sum)
        : "r"(x), "r"(y));
    return sum;
}

__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t address, uint32_t (&rows)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(rows[0]), "=r"(rows[1]), "=r"(rows[2]), "=r"(rows[3])
                 : "r"(address)
                 : "memory");
}

// The same number, which is that of all lanes of the warp: the compiler may keep it in a uniform register.
__device__ __forceinline__ int uniform(int number) { return __reduce_max_sync(0xffffffff, number); }

// Zero, but the compiler does not know it: the grid has one dimension. What uses it cannot run before `value`
// is there.
__device__ __forceinline__ uint32_t zero_after(float value) { return __float_as_uint(value) & blockIdx.y; }

// The same number, of which the compiler knows nothing: it keeps no register for what could be computed ahead from it.
__device__ __forceinline__ int opaque(int number) {
    asm volatile("" : "+r"(number));
    return number;
}

}   // namespace ffa
