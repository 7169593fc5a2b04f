#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <numbers>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "expression_kernels.h"

#define COLLX_SIMD_LEVEL avx512
// This pragma follows the includes, so that their functions are compiled for any machine. The
// compiler's own macros do not follow the pragma, so a separate macro holds the vector size.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c,prfchw")
#define COLLX_VECTOR_BYTES 64
#else
#define COLLX_VECTOR_BYTES 16
#endif
#include "expression_template.h"

namespace collx::cpu {

ExpressionKernel avx512_expression_kernel() { return avx512::evaluate; }

}  // namespace collx::cpu
