// The first include of each source with kernels: compiles the functions that follow for the level
// of vector instructions COLLX_SIMD_LEVEL. Each source is one template at one level.
//
// The pragma follows all headers, so that their functions are compiled for any machine. The
// compiler's own macros do not follow the pragma, so a separate macro holds the vector size. There
// is no include guard: clang-tidy checks several sources as one.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <numbers>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "expression_kernels.h"
#include "norm_kernels.h"
#include "reduce_kernels.h"

/// What the sources of this level define.
namespace collx::cpu::COLLX_SIMD_LEVEL {
extern const Kernels kKernels;
extern const NormKernelTable kNormKernels;
void evaluate(const Expression& expression, const Line& line);
}  // namespace collx::cpu::COLLX_SIMD_LEVEL

#define COLLX_BYTES_AT_portable 16
#if defined(__x86_64__)
#include <immintrin.h>
#define COLLX_BYTES_AT_avx2 32
#define COLLX_BYTES_AT_avx512 64
#else
#define COLLX_BYTES_AT_avx2 16
#define COLLX_BYTES_AT_avx512 16
#endif
#define COLLX_JOINED(a, b) a##b
#define COLLX_BYTES_AT(level) COLLX_JOINED(COLLX_BYTES_AT_, level)
#define COLLX_VECTOR_BYTES COLLX_BYTES_AT(COLLX_SIMD_LEVEL)

#if COLLX_VECTOR_BYTES == 64
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c,prfchw")
#elif COLLX_VECTOR_BYTES == 32
#pragma GCC target("avx2,f16c,prfchw")
#endif
