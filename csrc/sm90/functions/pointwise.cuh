// PyTorch's operators on numbers, for masks spelled in magi_compile/functions/operators.py. Integers wrap around.
#pragma once
#include "functions/tables.cuh"

namespace ffa {

__device__ __forceinline__ float inf_of_float() {
    const float most = 0x1.fffffep127f;
    return most * 2;
}

__device__ __forceinline__ float nan_of_float() { return inf_of_float() - inf_of_float(); }

template <class To, class From>
__device__ __forceinline__ To to(From x) {
    if constexpr (static_cast<To>(2) == static_cast<To>(1)) {   // bool
        return x != 0;
    } else {
        return static_cast<To>(x);
    }
}

namespace ops {

template <class T>
constexpr bool kIsFloat = static_cast<T>(0.5) != static_cast<T>(0) && static_cast<T>(2) != static_cast<T>(1);
template <class T>
constexpr bool kIsBool = static_cast<T>(2) == static_cast<T>(1);
template <class T>
constexpr bool kIsSigned = static_cast<T>(-1) < static_cast<T>(0);
template <class T>
constexpr int kNumBits = 8 * sizeof(T);

template <class T>
__device__ __forceinline__ T add(T x, T y) {
    if constexpr (kIsBool<T>) {
        return x | y;
    } else if constexpr (kIsFloat<T>) {
        return x + y;
    } else {
        return static_cast<T>(static_cast<Bits>(x) + static_cast<Bits>(y));
    }
}

template <class T>
__device__ __forceinline__ T sub(T x, T y) {
    if constexpr (kIsFloat<T>) {
        return x - y;
    } else {
        return static_cast<T>(static_cast<Bits>(x) - static_cast<Bits>(y));
    }
}

template <class T>
__device__ __forceinline__ T mul(T x, T y) {
    if constexpr (kIsBool<T>) {
        return x & y;
    } else if constexpr (kIsFloat<T>) {
        return x * y;
    } else {
        return static_cast<T>(static_cast<Bits>(x) * static_cast<Bits>(y));
    }
}

template <class T>
__device__ __forceinline__ T neg(T x) {
    if constexpr (kIsFloat<T>) {
        return -x;
    } else {
        return sub(T{0}, x);
    }
}

template <class T>
__device__ __forceinline__ T abs(T x) {
    if constexpr (kIsFloat<T>) {
        return x < 0 ? -x : x == 0 ? T{0} : x;
    } else {
        return x < 0 ? neg(x) : x;
    }
}

template <class T>
__device__ __forceinline__ T sign(T x) {
    return static_cast<T>((x > 0) - (x < 0));
}

// A number that is none stays one.
template <class T>
__device__ __forceinline__ T maximum(T x, T y) {
    return x != x || x > y ? x : y;
}

template <class T>
__device__ __forceinline__ T minimum(T x, T y) {
    return x != x || x < y ? x : y;
}

template <class T>
__device__ __forceinline__ T invert(T x) {
    if constexpr (kIsBool<T>) {
        return !x;
    } else {
        return static_cast<T>(~x);
    }
}

template <class T>
__device__ __forceinline__ T left_shift(T x, T places) {
    const bool is_beyond = places < 0 || places >= kNumBits<T>;
    return is_beyond ? T{0} : static_cast<T>(static_cast<Bits>(x) << places);
}

template <class T>
__device__ __forceinline__ T right_shift(T x, T places) {
    constexpr int kMost = kNumBits<T> - kIsSigned<T>;
    const bool is_beyond = places < 0 || places >= kMost;
    return static_cast<T>(static_cast<Int>(x) >> (is_beyond ? kMost : static_cast<int>(places)));
}

__device__ __forceinline__ float floor(float x) { return ::floorf(x); }
__device__ __forceinline__ double floor(double x) { return ::floor(x); }
__device__ __forceinline__ float ceil(float x) { return ::ceilf(x); }
__device__ __forceinline__ double ceil(double x) { return ::ceil(x); }
__device__ __forceinline__ float trunc(float x) { return ::truncf(x); }
__device__ __forceinline__ double trunc(double x) { return ::trunc(x); }
__device__ __forceinline__ float round(float x) { return ::rintf(x); }   // halves to even numbers
__device__ __forceinline__ double round(double x) { return ::rint(x); }
__device__ __forceinline__ float sqrt(float x) { return ::sqrtf(x); }
__device__ __forceinline__ double sqrt(double x) { return ::sqrt(x); }
__device__ __forceinline__ float rest(float x, float y) { return ::fmodf(x, y); }
__device__ __forceinline__ double rest(double x, double y) { return ::fmod(x, y); }

template <class T>
__device__ __forceinline__ bool is_inf(T x) {
    if constexpr (kIsFloat<T>) {
        return x == inf_of_float() || x == -inf_of_float();
    } else {
        return false;
    }
}

// The rest of a division to zero.
template <class T>
__device__ __forceinline__ T fmod(T x, T y) {
    if constexpr (kIsFloat<T>) {
        return rest(x, y);
    } else {
        return kIsSigned<T> && y == static_cast<T>(-1) ? T{0} : static_cast<T>(x % y);
    }
}

// The rest of a division down.
template <class T>
__device__ __forceinline__ T remainder(T x, T y) {
    const T rest = fmod(x, y);
    return rest != 0 && (rest < 0) != (y < 0) ? add(rest, y) : rest;
}

template <class T>
__device__ __forceinline__ T divide_to_zero(T x, T y) {
    if constexpr (kIsFloat<T>) {
        return trunc(x / y);
    } else {
        return kIsSigned<T> && y == static_cast<T>(-1) ? neg(x) : static_cast<T>(x / y);
    }
}

template <class T>
__device__ __forceinline__ T floor_divide(T x, T y) {
    if constexpr (kIsFloat<T>) {
        if (y == 0) {
            return x / y;
        }
        const T rest = fmod(x, y);
        T quotient = (x - rest) / y;
        if (rest != 0 && (y < 0) != (rest < 0)) {
            quotient -= 1;
        }
        if (quotient == 0) {
            const T zero = 0;
            return (x < 0) != (y < 0) ? -zero : zero;
        }
        const T down = floor(quotient);
        return quotient - down > static_cast<T>(0.5) ? down + 1 : down;
    } else {
        const bool is_uneven = fmod(x, y) != 0 && (x < 0) != (y < 0);
        return sub(divide_to_zero(x, y), static_cast<T>(is_uneven));
    }
}

}   // namespace ops

}   // namespace ffa
