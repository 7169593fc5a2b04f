#include <type_traits>
#include <utility>

#include "reduce_kernels.h"

#define COLLX_SIMD_LEVEL portable
#define COLLX_VECTOR_BYTES 16
#include "reduce_template.h"

namespace collx::cpu {

const Kernels& portable_kernels() { return portable::kKernels; }

}  // namespace collx::cpu
