// Epilogues: elementwise expressions after a reduction.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/macros/Export.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../protocol/epilogue_program.h"
#if COLLX_CUDA
#include "../cuda/epilogue.h"
#endif

namespace collx {

/// A parsed expression for a dtype of the value, and the kernels that were compiled for it.
struct KnownExpression {
  KnownExpression(Expression of, std::string_view said, DType dtype)
      : expression(std::move(of)),
        text(said),
        hash(hash_of_text(said)),
        dtype(dtype)
#if COLLX_CUDA
        ,
        kernels(expression, dtype)
#endif
  {
  }

  const Expression expression;
  const std::string text;
  const uint64_t hash;  // of the text
  const DType dtype;    // of the value
#if COLLX_CUDA
  mutable cuda::EpilogueKernels kernels;
#endif
};

/// ValueError unless the text is an expression of a value of that dtype. Kept for the calls to
/// come.
std::shared_ptr<const KnownExpression> check_expression(const char* op, std::string_view text,
                                                        at::ScalarType dtype);

/// The program that is compiled for an expression, and the kernel's name in it: for tests, which
/// compile without a GPU.
C10_EXPORT std::pair<std::string, std::string> program_of(std::string_view text,
                                                          at::ScalarType dtype,
                                                          const ProgramOptions& options);

at::ScalarType scalar_type_of(ValueType type);

/// The expression with the numbers of a call as constants. None if it takes no numbers.
/// ValueError unless they are as many as it takes, and have its types.
std::optional<Expression> with_numbers(const char* op, const Expression& expression,
                                       at::ArrayRef<double> numbers);

/// One tensor for each that the expression takes, of the value's dtype and device, which broadcast
/// to `sizes`. What Meta can check as well.
void check_extras(const char* op, const Expression& expression, at::TensorList extras,
                  const at::Tensor& value, c10::SymIntArrayRef sizes);

/// Where the value's first element stands in the tensor whose coordinates are meant.
struct Origin {
  int64_t axis = 0;
  int64_t start = 0;
};

/// The epilogue of a call, which may outlive the operator.
struct Epilogue {
  std::shared_ptr<const KnownExpression> known;
  std::vector<at::Tensor> extras;
  std::optional<Expression> bound = {};  // to the numbers of the call
  Origin origin = {};
  bool apart = true;      // the extras share nothing with the output
  at::Tensor value = {};  // where the reduced elements are wanted, too; undefined: nowhere

  /// The computation without the numbers of the call, which only kernels receive.
  const Expression& expression() const { return bound ? *bound : known->expression; }
  at::ScalarType result() const { return scalar_type_of(known->expression.result()); }
};

/// `out` may be `value`. Below autograd.
void apply(const Expression& expression, const at::Tensor& value, at::TensorList extras,
           Origin origin, const at::Tensor& out);

/// The same by PyTorch's own operators, on any device; and the gradients of value and extras, of
/// those that are differentiable, else undefined.
at::Tensor evaluate(const Expression& expression, const at::Tensor& value, at::TensorList extras,
                    Origin origin);
std::vector<at::Tensor> gradients(const Expression& expression, const at::Tensor& value,
                                  at::TensorList extras, Origin origin, const at::Tensor& gradient);

/// Coordinate `dim` of each element of a tensor of those sizes, of one element in other dimensions.
at::Tensor coordinate(at::IntArrayRef sizes, int64_t dim, Origin origin, const c10::Device& device);

/// While one exists, calls of this thread with an epilogue prepare what they need, and launch
/// nothing: other calls are not changed.
class C10_EXPORT GettingReady {
 public:
  GettingReady();
  ~GettingReady();
  GettingReady(const GettingReady&) = delete;
  GettingReady& operator=(const GettingReady&) = delete;
};
bool getting_ready();

}  // namespace collx
