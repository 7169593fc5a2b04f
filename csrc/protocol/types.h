// The names that every layer shares: devices, dtypes, reduce ops, algorithms.
//
// Plain C++20 for host, device and run-time compiled device code, so no standard header is included
// under NVRTC.
#pragma once

#if defined(__CUDACC_RTC__)
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#else
#include <cstddef>
#include <cstdint>
#endif

#if defined(__CUDACC__)
#define COLLX_HD __host__ __device__
#else
#define COLLX_HD
#endif

namespace collx {

/// Most ranks that one communicator can have: 16 processes on CPU, 8 GPUs on CUDA.
inline constexpr int kMaxRanks = 16;
inline constexpr int kMaxCpuRanks = 16;
inline constexpr int kMaxCudaRanks = 8;

enum class DeviceKind : uint8_t { cpu, cuda };

enum class DType : uint8_t {
  float32,
  float16,
  bfloat16,
  float64,
  int32,
  int64,
  int8,
  uint8,
  count
};

enum class ReduceOp : uint8_t { sum, avg, max, min, prod, count };

enum class Collective : uint8_t {
  none,
  allreduce,
  reducescatter,
  allgather,
  broadcast,
  reduce,
  gather,
  scatter,
  alltoall,
  alltoallv,
  barrier,
  // Reductions fused with a normalization of their rows: see norm.h.
  allreduce_rmsnorm,
  allreduce_residual_rmsnorm,
  allreduce_rmsnorm_fp8,
  allreduce_residual_rmsnorm_fp8,
  allreduce_rmsnorm_int8,
  allreduce_residual_rmsnorm_int8,
  allreduce_layernorm,
  allreduce_residual_layernorm,
  reducescatter_residual_rmsnorm,
  reducescatter_residual_rmsnorm_fp8,
  count
};

/// `automatic` stands for "the selection decides" and is never executed.
enum class Algorithm : uint8_t {
  automatic,
  oneshot_push,
  twoshot_push,
  pull_push,
  oneshot_pull,
  twoshot_pull,
  fallback,
  // All collectives but all-reduce: through the payload buffer, or between the tensors themselves.
  staged,
  direct,
  // Broadcast.
  onestage,
  twostage,
  pipelined,
  count
};

/// Dependent launch on CUDA: never; released after the last store; released right after the wait.
enum class PdlLevel : uint8_t { off, end, early };

COLLX_HD constexpr int dtype_size(DType dtype) {
  switch (dtype) {
    case DType::float64:
    case DType::int64:
      return 8;
    case DType::float32:
    case DType::int32:
      return 4;
    case DType::float16:
    case DType::bfloat16:
      return 2;
    default:
      return 1;
  }
}

/// Floats can give up one NaN pattern as the "not yet arrived" word of a slot; integers cannot.
COLLX_HD constexpr bool has_sentinel(DType dtype) {
  return dtype == DType::float32 || dtype == DType::float16 || dtype == DType::bfloat16 ||
         dtype == DType::float64;
}

template <typename T>
COLLX_HD constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

template <typename T>
COLLX_HD constexpr T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}

}  // namespace collx
