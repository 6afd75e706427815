// Captured tensors of a mask as its source looks them up.
#pragma once

namespace ffa {

using Int = long long;
using Bits = unsigned long long;

// An entry of a captured tensor; negative indices count from the end.
__device__ __forceinline__ Int wrapped(Int index, Int size) { return index < 0 ? index + size : index; }
__device__ __forceinline__ bool is_inside(Int index, Int size) { return index >= 0 && index < size; }
__device__ __forceinline__ Int clamped(Int index, Int size) { return index < 0 ? 0 : index < size ? index : size - 1; }

template <class Element>
__device__ __forceinline__ Element load(Int address, Int offset) {
    return reinterpret_cast<const Element*>(address)[offset];
}

}   // namespace ffa
