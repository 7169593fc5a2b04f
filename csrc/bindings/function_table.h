// The Python functions of the operators: which operator a call of a function runs.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../ops/operator_table.h"

namespace collx {

/// What a call is given, as far as the operator depends on it.
enum class Feature : uint8_t {
  epilogue,
  device_splits,
  residual,
  fp8,
  int8,
  keep_norm,
  out,
  count,
};
inline constexpr const char* kFeatureNames[] = {"epilogue", "device_splits", "residual", "fp8",
                                                "int8",     "keep_norm",     "out"};
static_assert(std::size(kFeatureNames) == static_cast<size_t>(Feature::count));

using Features = unsigned;
constexpr Features bit(Feature feature) { return 1u << static_cast<unsigned>(feature); }
inline constexpr Features kAllFeatures = bit(Feature::count) - 1;

struct Variant {
  const Operator* op;
  std::string function;  // in Python
  Features features;
};

/// The variants of a function. An error if there is none.
std::vector<Variant> variants_of(const std::string& function);

/// The parameter of the function from which an argument of the operator is made.
const char* parameter_of(const Operator& op, size_t argument);

}  // namespace collx
