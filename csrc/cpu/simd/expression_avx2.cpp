#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <numbers>
#include <type_traits>

#include "expression_kernels.h"

#define COLLX_SIMD_LEVEL avx2
// Below the includes: what they define is compiled for any machine.
#if defined(__x86_64__)
#pragma GCC target("avx2,f16c,prfchw")
#endif
#include "expression_template.h"

namespace collx::cpu {

ExpressionKernel avx2_expression_kernel() { return avx2::evaluate; }

}  // namespace collx::cpu
