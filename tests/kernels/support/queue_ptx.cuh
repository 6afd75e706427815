// In place of common/ptx.cuh, for threads of a CPU: what backward/schedule/queue.cuh takes from there.
#pragma once

namespace ffa {

inline int opaque(int number) { return number; }
int num_clusters();   // not here

}   // namespace ffa
