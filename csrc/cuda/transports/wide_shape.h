// How a block that serves several lanes uses its shared memory.
#pragma once

#include "../../protocol/types.h"

namespace collx::cuda {

struct WideShape {
  int32_t lanes;      // of a block
  int32_t shift;      // their number is a power of two: this one
  uint32_t bytes;     // of a stage of copies; one of reductions has as many of each rank
  int32_t stages[3];  // of each role
};

}  // namespace collx::cuda
