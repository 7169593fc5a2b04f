// A reduction with an epilogue, from the arguments of its operators to the reduction.
#pragma once

#include <memory>
#include <tuple>

#include "collectives.h"
#include "epilogue.h"

namespace collx {

/// What an operator reduces, and what it does with the result.
struct Mapped {
  Given given;
  std::string_view text;
  at::TensorList extras;
  at::ArrayRef<double> numbers;
  std::shared_ptr<const KnownExpression> known = {};
  Sizes sizes = {};

  const char* op() const { return given.op(); }
  /// Without data: exact on any rank.
  Epilogue check();
};

/// Where this rank's part begins along the axis that is scattered.
Origin origin_of(const Given& given);

at::Tensor mapped_new(Mapped mapped);
/// `value`: where the reduced elements go, too, if they are wanted.
void mapped_into(Mapped mapped, at::Tensor& out, const at::Tensor* value = nullptr);
/// And the reduced value, of which a derivative is made.
std::tuple<at::Tensor, at::Tensor> mapped_with_value(Mapped mapped);
void mapped_into_with_value(Mapped mapped, at::Tensor& out, const at::Tensor& value);

// Without data.
at::Tensor mapped_meta(Mapped mapped);
std::tuple<at::Tensor, at::Tensor> mapped_with_value_meta(Mapped mapped);
void check_result_meta(Mapped mapped, const at::Tensor& out);
void check_value(Mapped& mapped, const at::Tensor& value);

}  // namespace collx
