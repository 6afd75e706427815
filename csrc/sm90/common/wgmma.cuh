// The matmuls of Hopper GPUs: descriptors of operands in shared memory, and the instructions.
#pragma once

#include "common/ptx.cuh"

namespace ffa {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Pins registers that a wgmma reads or writes: without it the compiler moves their uses into the asynchronous window.
template <int kCount>
__device__ __forceinline__ void pin(float (&registers)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        asm volatile("" : "+f"(registers[i])::"memory");
    }
}

// The low word of the descriptor of a shared-memory operand in 128-byte swizzle: its address, and the stride between
// 64-column slabs where it is read along its rows (MN-major; unused where it is read along its columns, K-major).
// Steps inside the operand are added as bytes / 16, the stride to a descriptor without one as `leading_stride`. wgmma
// takes descriptors from uniform registers.
__device__ constexpr uint32_t leading_stride(uint32_t bytes) { return (bytes >> 4) << 16; }

__device__ __forceinline__ uint32_t wgmma_descriptor(const void* tile, uint32_t leading_bytes) {
    return leading_stride(leading_bytes) | (shared_address(tile) & 0x3FFFF) >> 4;
}

// The high word of all of them: 128-byte swizzle, groups of 8 rows of 128 bytes.
constexpr uint32_t kDescriptorHigh = 1u << 30 | (8 * 128) >> 4;

// Of operands without a swizzle, in matrices of 8 rows of 16 bytes one behind the other: how far the next 8 rows of the
// operand, where it is read along them (K-major), or its next 8 columns lie; the low word tells where the next 16 bytes
// of a row do.
__device__ constexpr uint32_t plain_descriptor_high(uint32_t stride_bytes) { return stride_bytes >> 4; }

enum class Major { K = 0, MN = 1 };

// D[64, N] (+)= A[64, 16] B[16, N] in fp32, A from shared memory (ss) or from registers (rs).
template <class Element, int kN>
struct Wgmma;

#define FFA_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FFA_F16(d, i) FFA_F4(d, i), FFA_F4(d, i + 4), FFA_F4(d, i + 8), FFA_F4(d, i + 12)
#define FFA_F16_0(d) FFA_F16(d, 0)
#define FFA_F32(d) FFA_F16(d, 0), FFA_F16(d, 16)
#define FFA_F48(d) FFA_F32(d), FFA_F16(d, 32)
#define FFA_F40(d) FFA_F32(d), FFA_F4(d, 32), FFA_F4(d, 36)
#define FFA_F56(d) FFA_F48(d), FFA_F4(d, 48), FFA_F4(d, 52)
#define FFA_F64(d) FFA_F48(d), FFA_F16(d, 48)
#define FFA_F96(d) FFA_F64(d), FFA_F16(d, 64), FFA_F16(d, 80)
#define FFA_F128(d) FFA_F96(d), FFA_F16(d, 96), FFA_F16(d, 112)
#define FFA_R16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define FFA_R32                                                                                                  \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28," \
    "%29,%30,%31"
#define FFA_R40 FFA_R32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define FFA_R48 FFA_R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define FFA_R56 FFA_R48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define FFA_R64 FFA_R48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define FFA_R96                                                        \
    FFA_R64                                                            \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" \
    ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define FFA_R128                                                                   \
    FFA_R96                                                                        \
    ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
    ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// X0.. are the operand numbers after the accumulators.
#define FFA_WGMMA(ELEMENT, TYPE, N, REGISTERS, OPERANDS, X0, X1, X2, X3, X4, X5, X6, X7)                               \
    template <>                                                                                                        \
    struct Wgmma<ELEMENT, N> {                                                                                         \
        template <Major kMajorA, Major kMajorB, uint32_t kHighA = kDescriptorHigh, uint32_t kHighB = kDescriptorHigh>  \
        static __device__ __forceinline__ void ss(float (&d)[N / 2], uint32_t a, uint32_t b, int accumulate) {         \
            asm volatile(                                                                                              \
                "{\n.reg .pred p;\n.reg .b64 a, b;\n"                                                                  \
                "setp.ne.b32 p, " X2                                                                                   \
                ", 0;\n"                                                                                               \
                "mov.b64 a, {" X0 ", " X5                                                                              \
                "};\n"                                                                                                 \
                "mov.b64 b, {" X1 ", " X6                                                                              \
                "};\n"                                                                                                 \
                "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGISTERS "}, a, b, p, 1, 1, " X3 \
                ", " X4 ";\n}"                                                                                         \
                : OPERANDS(d)                                                                                          \
                : "r"(a), "r"(b), "r"(accumulate), "n"(int(kMajorA)), "n"(int(kMajorB)), "r"(kHighA), "r"(kHighB));    \
        }                                                                                                              \
        template <Major kMajorB>                                                                                       \
        static __device__ __forceinline__ void rs(float (&d)[N / 2], const uint32_t* a, uint32_t b, int accumulate) {  \
            asm volatile(                                                                                              \
                "{\n.reg .pred p;\n.reg .b64 b;\n"                                                                     \
                "setp.ne.b32 p, " X5                                                                                   \
                ", 0;\n"                                                                                               \
                "mov.b64 b, {" X4 ", " X7                                                                              \
                "};\n"                                                                                                 \
                "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGISTERS "}, {" X0 "," X1 "," X2 \
                "," X3 "}, b, p, 1, 1, " X6 ";\n}"                                                                     \
                : OPERANDS(d)                                                                                          \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate), "n"(int(kMajorB)),              \
                  "r"(kDescriptorHigh));                                                                               \
        }                                                                                                              \
    };
#define FFA_WGMMA_SIZES(ELEMENT, TYPE)                                                                          \
    FFA_WGMMA(ELEMENT, TYPE, 32, FFA_R16, FFA_F16_0, "%16", "%17", "%18", "%19", "%20", "%21", "%22", "%23")    \
    FFA_WGMMA(ELEMENT, TYPE, 64, FFA_R32, FFA_F32, "%32", "%33", "%34", "%35", "%36", "%37", "%38", "%39")      \
    FFA_WGMMA(ELEMENT, TYPE, 80, FFA_R40, FFA_F40, "%40", "%41", "%42", "%43", "%44", "%45", "%46", "%47")      \
    FFA_WGMMA(ELEMENT, TYPE, 96, FFA_R48, FFA_F48, "%48", "%49", "%50", "%51", "%52", "%53", "%54", "%55")      \
    FFA_WGMMA(ELEMENT, TYPE, 112, FFA_R56, FFA_F56, "%56", "%57", "%58", "%59", "%60", "%61", "%62", "%63")     \
    FFA_WGMMA(ELEMENT, TYPE, 128, FFA_R64, FFA_F64, "%64", "%65", "%66", "%67", "%68", "%69", "%70", "%71")     \
    FFA_WGMMA(ELEMENT, TYPE, 192, FFA_R96, FFA_F96, "%96", "%97", "%98", "%99", "%100", "%101", "%102", "%103") \
    FFA_WGMMA(ELEMENT, TYPE, 256, FFA_R128, FFA_F128, "%128", "%129", "%130", "%131", "%132", "%133", "%134", "%135")
FFA_WGMMA_SIZES(bfloat16, "bf16")
FFA_WGMMA_SIZES(float16, "f16")
#undef FFA_WGMMA_SIZES
#undef FFA_WGMMA
#undef FFA_R128
#undef FFA_R96
#undef FFA_R64
#undef FFA_R56
#undef FFA_R48
#undef FFA_R40
#undef FFA_R32
#undef FFA_R16
#undef FFA_F128
#undef FFA_F96
#undef FFA_F64
#undef FFA_F56
#undef FFA_F48
#undef FFA_F40
#undef FFA_F32
#undef FFA_F16_0
#undef FFA_F16
#undef FFA_F4

}   // namespace ffa
