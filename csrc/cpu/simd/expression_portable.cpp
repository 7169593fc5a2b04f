#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <numbers>
#include <type_traits>

#include "expression_kernels.h"

#define COLLX_SIMD_LEVEL portable
#include "expression_template.h"

namespace collx::cpu {

ExpressionKernel portable_expression_kernel() { return portable::evaluate; }

}  // namespace collx::cpu
