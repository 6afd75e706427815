// In place of ptx.cuh, for threads of a CPU: what fwd_scheduler.cuh takes from there.
#pragma once

namespace ffa {

inline int opaque(int value) { return value; }

}  // namespace ffa
