// Types that every layer shares: devices, dtypes, reduce ops, algorithms.
//
// This header is plain C++20 for host code, device code and device code compiled at run time. NVRTC
// has no standard headers, so none is included there.
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

/// The maximum number of ranks of a communicator: 16 processes on CPU, 8 GPUs on CUDA.
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

/// collectives.h has a row for each.
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
  // Reductions fused with a normalization of their rows: norm.h.
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

/// algorithms.h has a row for each. `automatic` means that the selection decides; it is never
/// executed.
enum class Algorithm : uint8_t {
  automatic,
  oneshot_push,
  twoshot_push,
  pull_push,
  oneshot_pull,
  twoshot_pull,
  // Through a multicast address, which refers to the same memory of all ranks.
  multimem_oneshot,
  multimem_twoshot,
  multimem_gather,
  fallback,
  // All collectives except all-reduce: through the payload, or directly between the tensors.
  staged,
  direct,
  multimem,
  // Broadcast.
  onestage,
  twostage,
  pipelined,
  // These execute some calls of the algorithms above and cannot be requested by name.
  channels,
  reduce_twostage,
  twoshot_push_sums,
  // In chunks through lanes: all-reduce, and the other collectives.
  twoshot_lanes,
  lanes,
  broadcast_lanes,  // not by name
  // Copies that the host issues, from tensors into symmetric outputs.
  copy_engine,
  count
};

/// A caller's request, with the same values on every rank. All layers from the operator to the
/// kernel launch share this struct.
struct CallCore {
  Collective collective = Collective::allreduce;
  DType dtype = DType::float32;  // of copies, which take any bits: uint8
  ReduceOp reduce_op = ReduceOp::sum;
  Algorithm algorithm = Algorithm::automatic;  // as requested
  int32_t root = -1;                           // -1 if there is none
  int32_t max_blocks = 0;                      // 0: no bound
};

/// Programmatic dependent launch on CUDA. off: none. end: a kernel releases its dependents after
/// its last store. early: it releases them right after its wait.
enum class PdlLevel : uint8_t { off, end, early };

/// Whether the row for each value of an enum is at the index of that value.
template <typename Row, size_t N, typename E>
constexpr bool stand_at_their_values(const Row (&rows)[N], E Row::*value) {
  for (size_t i = 0; i < N; ++i) {
    if (static_cast<size_t>(rows[i].*value) != i) return false;
  }
  return true;
}

struct DTypeRow {
  DType dtype;
  const char* name;
  int bytes;
  bool integer;
};

/// Elements<D> implements their arithmetic on CUDA, FormatOf<D> on the CPU.
inline constexpr DTypeRow kDTypes[] = {
    {DType::float32, "float32", 4, false},   {DType::float16, "float16", 2, false},
    {DType::bfloat16, "bfloat16", 2, false}, {DType::float64, "float64", 8, false},
    {DType::int32, "int32", 4, true},        {DType::int64, "int64", 8, true},
    {DType::int8, "int8", 1, true},          {DType::uint8, "uint8", 1, true},
};
static_assert(stand_at_their_values(kDTypes, &DTypeRow::dtype));
static_assert(sizeof(kDTypes) / sizeof(kDTypes[0]) == static_cast<size_t>(DType::count));

namespace detail {
template <typename T>
struct ByDType {
  T of[static_cast<int>(DType::count)];
};
template <typename T>
COLLX_HD constexpr ByDType<T> column(T DTypeRow::*member) {
  ByDType<T> values{};
  for (const DTypeRow& row : kDTypes) values.of[static_cast<int>(row.dtype)] = row.*member;
  return values;
}
}  // namespace detail

// Device code cannot read the table, so these copy the column that they need.
COLLX_HD constexpr int dtype_size(DType dtype) {
  constexpr auto bytes = detail::column(&DTypeRow::bytes);
  return bytes.of[static_cast<int>(dtype)];
}
COLLX_HD constexpr bool is_integer(DType dtype) {
  constexpr auto integer = detail::column(&DTypeRow::integer);
  return integer.of[static_cast<int>(dtype)];
}

/// Whether a bit pattern can be reserved to mark a word of a slot that has not arrived. Floats can
/// reserve one NaN pattern; integers cannot.
COLLX_HD constexpr bool has_sentinel(DType dtype) { return !is_integer(dtype); }

template <typename T>
COLLX_HD constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

template <typename T>
COLLX_HD constexpr T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}

}  // namespace collx
