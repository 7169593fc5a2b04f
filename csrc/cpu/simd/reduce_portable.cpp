#include <type_traits>
#include <utility>

#include "reduce_kernels.h"

#define COLLX_SIMD_LEVEL portable
#include "reduce_template.h"

namespace collx::cpu {

const ReduceKernelTable& portable_kernels() { return portable::kTable; }

}  // namespace collx::cpu
