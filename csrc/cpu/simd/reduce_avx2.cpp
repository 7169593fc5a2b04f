#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "reduce_kernels.h"

#define COLLX_SIMD_LEVEL avx2
// This pragma follows the includes, so that their functions are compiled for any machine. The
// compiler's own macros do not follow the pragma, so a separate macro holds the vector size.
#if defined(__x86_64__)
#pragma GCC target("avx2,f16c,prfchw")
#define COLLX_VECTOR_BYTES 32
#else
#define COLLX_VECTOR_BYTES 16
#endif
#include "reduce_template.h"

namespace collx::cpu {

const Kernels& avx2_kernels() { return avx2::kKernels; }

}  // namespace collx::cpu
