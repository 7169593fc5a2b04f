// The forms of the operators in operators.h below autograd, and on Meta: what generated.h calls.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string_view>
#include <tuple>

#include "exchange.h"
#include "operators.h"
#include "shapes.h"

namespace collx {

/// A call whose arguments have been checked, on its way to its output.
struct Prepared {
  const at::Tensor& input;  // as given
  Exchange exchange;
  std::shared_ptr<Communicator> communicator;
  Sizes sizes;  // of the output, where it has not the input's
  // Where the one tensor may be a part of the other: bytes between their beginnings.
  std::optional<int64_t> own_part;

  at::IntArrayRef output_sizes() const;
};

/// With what is checked of every call; shapes are not.
Prepared prepare(const Given& given);

at::Tensor into_new(const Given& given);
/// `out` has the input's shape, and may be the input.
void into_like(const Given& given, at::Tensor& out);
void into_apart(const Given& given, at::Tensor& out);
void in_place(const Given& given);

// Without data: exact on any rank; only uneven parts ask the registry which rank this is.
Sizes check_meta(const Given& given);
at::Tensor new_meta(const Given& given);
void check_out_meta(const Given& given, const at::Tensor& out);

}  // namespace collx
