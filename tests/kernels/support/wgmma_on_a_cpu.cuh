// `csrc/sm90/common/wgmma.cuh` for a CPU: what it has, `ptx_on_a_cpu.cuh` has.
#pragma once

#include "common/ptx.cuh"
