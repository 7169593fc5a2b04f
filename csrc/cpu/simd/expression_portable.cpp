#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <numbers>
#include <type_traits>
#include <vector>

#include "expression_kernels.h"

#define COLLX_SIMD_LEVEL portable
#define COLLX_VECTOR_BYTES 16
#include "expression_template.h"

namespace collx::cpu {

ExpressionKernel portable_expression_kernel() { return portable::evaluate; }

}  // namespace collx::cpu
