// Conversions between enums and their names in the Python API. Host only.
#pragma once

#include <array>
#include <optional>
#include <string_view>
#include <vector>

#include "algorithms.h"
#include "collectives.h"
#include "types.h"

namespace collx {

inline constexpr std::array<std::string_view, static_cast<size_t>(ReduceOp::count)> kReduceOpNames =
    {"sum", "avg", "max", "min", "prod"};

inline constexpr std::array<std::string_view, 3> kRoundingNames = {"fp32", "parity",
                                                                   "parity_weight"};
inline constexpr std::array<std::string_view, 3> kScaleModeNames = {"row", "tensor", "group"};

namespace detail {
template <typename Row, size_t N>
constexpr std::array<std::string_view, N> names_of(const Row (&rows)[N]) {
  std::array<std::string_view, N> names;
  for (size_t i = 0; i < N; ++i) names[i] = rows[i].name;
  return names;
}
}  // namespace detail

inline constexpr auto kDTypeNames = detail::names_of(kDTypes);
inline constexpr auto kCollectiveNames = detail::names_of(kCollectives);
inline constexpr auto kAlgorithmNames = detail::names_of(kAlgorithms);

/// The names of the rows of a table for which `holds` is true.
template <typename Row, size_t N, typename F>
std::vector<std::string_view> names_where(const Row (&rows)[N], F holds) {
  std::vector<std::string_view> names;
  for (const Row& row : rows) {
    if (holds(row)) names.emplace_back(row.name);
  }
  return names;
}

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

/// "product" is an alias of "prod", as in torch.distributed.
constexpr std::optional<ReduceOp> parse_reduce_op(std::string_view name) {
  if (name == "product") return ReduceOp::prod;
  return find_name<ReduceOp>(kReduceOpNames, name);
}
constexpr std::optional<Algorithm> parse_algorithm(std::string_view name) {
  return find_name<Algorithm>(kAlgorithmNames, name);
}

}  // namespace collx
