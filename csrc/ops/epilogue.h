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

/// A parsed expression for a value of one dtype, and the kernels that were compiled for it.
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

/// Parses the text, and caches the result for later calls. Raises ValueError unless the text is an
/// expression for a value of that dtype.
std::shared_ptr<const KnownExpression> check_expression(const char* op, std::string_view text,
                                                        at::ScalarType dtype);

/// The program that is compiled for an expression, and the name of the kernel in it. Tests use it
/// to compile without a GPU.
C10_EXPORT std::pair<std::string, std::string> program_of(std::string_view text,
                                                          at::ScalarType dtype,
                                                          const ProgramOptions& options);

at::ScalarType scalar_type_of(ValueType type);

/// The expression with the numbers of a call as constants. Returns nullopt if it takes no numbers.
/// Raises ValueError if there are too few or too many numbers, or if one does not fit its type.
std::optional<Expression> with_numbers(const char* op, const Expression& expression,
                                       at::ArrayRef<double> numbers);

/// Checks that there is a tensor for each that the expression takes, with the value's dtype and
/// device, that broadcasts to `sizes`. Meta kernels use this check as well.
void check_extras(const char* op, const Expression& expression, at::TensorList extras,
                  const at::Tensor& value, c10::SymIntArrayRef sizes);

/// The position of the value's first element in the tensor to which coordinates refer.
struct Origin {
  int64_t axis = 0;
  int64_t start = 0;
};

/// The epilogue of a call, which may outlive the operator.
struct Epilogue {
  std::shared_ptr<const KnownExpression> known;
  std::vector<at::Tensor> extras;
  std::optional<Expression> bound = {};  // with the numbers of the call as constants
  Origin origin = {};
  bool apart = true;      // the extras share no memory with the output
  at::Tensor value = {};  // also receives the reduced elements; may be undefined

  /// The expression with the numbers of the call as constants, since only kernels take numbers.
  const Expression& expression() const { return bound ? *bound : known->expression; }
  at::ScalarType result() const { return scalar_type_of(known->expression.result()); }
};

/// Applies the expression. `out` may be `value`. For use below autograd.
void apply(const Expression& expression, const at::Tensor& value, at::TensorList extras,
           Origin origin, const at::Tensor& out);

/// evaluate() applies the expression with PyTorch's own operators, on any device. gradients()
/// returns the gradients of value and extras, which are undefined if not differentiable.
at::Tensor evaluate(const Expression& expression, const at::Tensor& value, at::TensorList extras,
                    Origin origin);
std::vector<at::Tensor> gradients(const Expression& expression, const at::Tensor& value,
                                  at::TensorList extras, Origin origin, const at::Tensor& gradient);

/// Coordinate `dim` of each element of a tensor with these sizes. The result has size 1 in all
/// other dimensions.
at::Tensor coordinate(at::IntArrayRef sizes, int64_t dim, Origin origin, const c10::Device& device);

/// During its lifetime, calls with an epilogue on this thread only prepare their kernels, and
/// launch nothing. Other calls are not affected.
class C10_EXPORT GettingReady {
 public:
  GettingReady();
  ~GettingReady();
  GettingReady(const GettingReady&) = delete;
  GettingReady& operator=(const GettingReady&) = delete;
};
bool getting_ready();

}  // namespace collx
