// Names of the enums in the words of the Python surface, both ways. Host only.
#pragma once

#include <array>
#include <optional>
#include <string_view>

#include "types.h"

namespace collx {

inline constexpr std::array<std::string_view, static_cast<size_t>(DType::count)> kDTypeNames = {
    "float32", "float16", "bfloat16", "float64", "int32", "int64", "int8", "uint8"};
inline constexpr std::array<std::string_view, static_cast<size_t>(ReduceOp::count)> kReduceOpNames =
    {"sum", "avg", "max", "min", "prod"};
inline constexpr std::array<std::string_view, static_cast<size_t>(Collective::count)>
    kCollectiveNames = {"none",
                        "allreduce",
                        "reducescatter",
                        "allgather",
                        "broadcast",
                        "reduce",
                        "gather",
                        "scatter",
                        "alltoall",
                        "alltoallv",
                        "barrier",
                        "allreduce_rmsnorm",
                        "allreduce_residual_rmsnorm",
                        "allreduce_rmsnorm_fp8",
                        "allreduce_residual_rmsnorm_fp8",
                        "allreduce_rmsnorm_int8",
                        "allreduce_residual_rmsnorm_int8",
                        "allreduce_layernorm",
                        "allreduce_residual_layernorm",
                        "reducescatter_residual_rmsnorm",
                        "reducescatter_residual_rmsnorm_fp8"};
inline constexpr std::array<std::string_view, static_cast<size_t>(Algorithm::count)>
    kAlgorithmNames = {"auto",         "oneshot_push", "twoshot_push", "pull_push",
                       "oneshot_pull", "twoshot_pull", "fallback",     "staged",
                       "direct",       "onestage",     "twostage",     "pipelined"};

template <typename E, size_t N>
constexpr std::optional<E> find_name(const std::array<std::string_view, N>& names,
                                     std::string_view name) {
  for (size_t i = 0; i < N; ++i) {
    if (names[i] == name) return static_cast<E>(i);
  }
  return std::nullopt;
}

constexpr std::string_view name_of(DType v) { return kDTypeNames[static_cast<size_t>(v)]; }
constexpr std::string_view name_of(ReduceOp v) { return kReduceOpNames[static_cast<size_t>(v)]; }
constexpr std::string_view name_of(Collective v) {
  return kCollectiveNames[static_cast<size_t>(v)];
}
constexpr std::string_view name_of(Algorithm v) { return kAlgorithmNames[static_cast<size_t>(v)]; }

/// "product" is the same as "prod", as in torch.distributed.
constexpr std::optional<ReduceOp> parse_reduce_op(std::string_view name) {
  if (name == "product") return ReduceOp::prod;
  return find_name<ReduceOp>(kReduceOpNames, name);
}
constexpr std::optional<Algorithm> parse_algorithm(std::string_view name) {
  return find_name<Algorithm>(kAlgorithmNames, name);
}

}  // namespace collx
