// What the source of a score program uses beside the operators of functions/pointwise.cuh: functions of floats, numbers
// of 16 bits, which are floats that have been rounded, and look-ups. Floats are as exact as the compiler's options say.
#pragma once

#include "functions/pointwise.cuh"
#include "common/ptx.cuh"

namespace ffa {

template <class Element>
__device__ __forceinline__ float rounded_to(float x) {
    return unpack<Element>(pack<Element>(x, 0.f)).x;
}

namespace ops {

__device__ __forceinline__ float exp(float x) { return ::expf(x); }
__device__ __forceinline__ double exp(double x) { return ::exp(x); }
__device__ __forceinline__ float exp2(float x) { return ::exp2f(x); }
__device__ __forceinline__ double exp2(double x) { return ::exp2(x); }
__device__ __forceinline__ float expm1(float x) { return ::expm1f(x); }
__device__ __forceinline__ double expm1(double x) { return ::expm1(x); }
__device__ __forceinline__ float log(float x) { return ::logf(x); }
__device__ __forceinline__ double log(double x) { return ::log(x); }
__device__ __forceinline__ float log2(float x) { return ::log2f(x); }
__device__ __forceinline__ double log2(double x) { return ::log2(x); }
__device__ __forceinline__ float log1p(float x) { return ::log1pf(x); }
__device__ __forceinline__ double log1p(double x) { return ::log1p(x); }
__device__ __forceinline__ float sin(float x) { return ::sinf(x); }
__device__ __forceinline__ double sin(double x) { return ::sin(x); }
__device__ __forceinline__ float cos(float x) { return ::cosf(x); }
__device__ __forceinline__ double cos(double x) { return ::cos(x); }
__device__ __forceinline__ float erf(float x) { return ::erff(x); }
__device__ __forceinline__ double erf(double x) { return ::erf(x); }
__device__ __forceinline__ double tanh(double x) { return ::tanh(x); }

template <class T>
__device__ __forceinline__ T sigmoid(T x) {
    return 1 / (1 + exp(-x));
}

// The instruction of the GPU is good for 11 bits only.
__device__ __forceinline__ float tanh(float x) { return 2 * sigmoid(2 * x) - 1; }

template <class T>
__device__ __forceinline__ T rsqrt(T x) {
    return 1 / sqrt(x);
}

}   // namespace ops

// Negative indices count from the end. What is out of bounds becomes something that is none of [0, size) either.
__device__ __forceinline__ int index_of(int index, int size) {
    const unsigned from_begin = index, from_end = from_begin + size;
    return static_cast<int>(from_begin < from_end ? from_begin : from_end);
}

__device__ __forceinline__ int index_of(Int index, int size) {
    return index >= -static_cast<Int>(size) && index < size ? index_of(static_cast<int>(index), size) : -1;
}

__device__ __forceinline__ bool is_index(int index, int size) {
    return static_cast<unsigned>(index) < static_cast<unsigned>(size);
}

template <class Element>
__device__ __forceinline__ Element value_of(const Element& element) {
    return element;
}

__device__ __forceinline__ float value_of(const bfloat16& element) { return unpack<bfloat16>(element.bits).x; }
__device__ __forceinline__ float value_of(const float16& element) { return unpack<float16>(element.bits).x; }

// Where a look-up reads a contiguous tensor, in elements, or -1 where nothing is, and how the new score changes with
// what it reads.
struct TableGradient {
    int place;
    float slope;
};

// What a place is that of, beside batch entry and head.
enum class PlaceOf { kRow, kKey, kPair };

// An entry of a captured tensor, or 0 where there is none.
template <class Element>
__device__ __forceinline__ auto load_if(bool is_there, Int address, int offset) {
    using Value = decltype(value_of(Element{}));
    return is_there ? value_of(reinterpret_cast<const Element*>(address)[offset]) : Value(0);
}

}   // namespace ffa
