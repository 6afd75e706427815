// In place of ptx.cuh, for threads of a CPU that really run side by side: what bwd_items.cuh takes from there.
#pragma once

namespace ffa {

inline int load_acquire_system(const int* pointer) { return __atomic_load_n(pointer, __ATOMIC_ACQUIRE); }
inline void fence_proxy_async_global() {}

}  // namespace ffa
