// How a block that serves several lanes uses its shared memory.
#pragma once

#include "../../protocol/types.h"

namespace collx::cuda {

struct WideShape {
  int32_t lanes;      // of a block; a power of two
  int32_t shift;      // log2(lanes)
  uint32_t bytes;     // of a stage for copies; a stage for reductions has as many for each rank
  int32_t stages[3];  // the number of stages of each role
};

}  // namespace collx::cuda
