// In place of common/ptx.cuh, for threads of a CPU: what backward/schedule/queue.cuh takes from there.
#pragma once

namespace ffa {

inline int load_acquire_system(const int* pointer) { return __atomic_load_n(pointer, __ATOMIC_ACQUIRE); }
inline void store_release_system(int* pointer, int value) { __atomic_store_n(pointer, value, __ATOMIC_RELEASE); }
inline void fence_proxy_async_global() {}
inline int opaque(int number) { return number; }
int num_clusters();   // not here

}   // namespace ffa
