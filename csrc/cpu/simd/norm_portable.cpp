#include <type_traits>
#include <utility>

#include "norm_kernels.h"

#define COLLX_SIMD_LEVEL portable
#define COLLX_VECTOR_BYTES 16
#include "norm_template.h"

namespace collx::cpu {

const NormKernelTable& portable_norm_kernels() { return portable::kNormKernels; }

}  // namespace collx::cpu
