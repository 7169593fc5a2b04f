// The operators that fuse a reduction with a normalization, as data: their schemas follow from one
// description each, and one boxed kernel a dispatch key serves all of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "../protocol/norm_plan.h"

namespace collx {

/// Their rows are in norm_operators.cpp.
enum class NormArgument : uint8_t {
  input,
  residual,
  weight,
  bias,
  eps,
  group_name,
  weight_offset,
  scale_ub,
  fp8_dtype,
  scale_mode,
  scale,
  quant_group_size,
  ue8m0,
  scale_dtype,
  scale_layout,
  rounding,
  algorithm,
  max_blocks,
  expression,
  extras,
  numbers,
};

enum class NormResult : uint8_t { quantized, scale, out, residual, normalized };

/// What the results are called as arguments of the forms with out=.
constexpr const char* name_of(NormResult result) {
  constexpr const char* kNames[] = {"q_out", "scale_out", "out", "residual_out", "norm_out"};
  return kNames[static_cast<size_t>(result)];
}

struct NormOperator {
  Collective collective;
  std::string overload;  // "", "keep_norm", "out", "keep_norm_out"
  bool out;              // takes its results
  std::vector<NormArgument> arguments;
  std::vector<NormResult> results;

  const char* name() const;
  /// "fp8" or "int8" in its name, or neither.
  bool is_fp8() const;
  bool is_int8() const;
  std::string schema() const;
  /// Not by their addresses: a rank that gets no rows has none.
  NormResults planned() const;
};

/// The functional form of a collective. ValueError unless it can keep the normalized tensor.
NormOperator norm_operator(Collective collective, bool keeps_norm = false);
/// All of them.
std::vector<NormOperator> norm_operators();

/// The arguments of a call. The views are into the stack.
struct NormArguments {
  at::Tensor input, residual, weight, bias;  // undefined where the operator has none
  std::optional<at::Tensor> scale;
  double eps = 0, weight_offset = 0;
  std::optional<double> scale_ub;
  std::string_view group_name, fp8_dtype, rounding, algorithm;
  std::string_view expression;  // of the epilogue; empty: none
  std::vector<at::Tensor> extras;
  std::vector<double> numbers;
  std::string_view scale_mode = "row", scale_dtype = "float32", scale_layout = "row";
  int64_t quant_group_size = 0, max_blocks = 0;
  bool ue8m0 = false;
  c10::SmallVector<at::Tensor, 4> results;  // given as out=

  NormArguments() = default;
  NormArguments(const NormOperator& op, const torch::jit::Stack& stack);
};

}  // namespace collx
