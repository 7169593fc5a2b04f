#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <numbers>
#include <type_traits>

#include "expression_kernels.h"

#define COLLX_SIMD_LEVEL avx512
// Below the includes: what they define is compiled for any machine.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c,prfchw")
#endif
#include "expression_template.h"

namespace collx::cpu {

ExpressionKernel avx512_expression_kernel() { return avx512::evaluate; }

}  // namespace collx::cpu
