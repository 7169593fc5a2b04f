// Maps calls of Python functions to operators.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../ops/operator_table.h"

namespace collx {

/// The properties of a call's arguments on which the operator depends.
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

/// The variants of a function. Raises an error if there are none.
std::vector<Variant> variants_of(const std::string& function);

/// The parameter of the function from which an argument of the operator is converted.
const char* parameter_of(const Operator& op, size_t argument);

}  // namespace collx
