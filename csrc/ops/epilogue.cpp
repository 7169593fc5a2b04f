#include "epilogue.h"

#include <ATen/ExpandUtils.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/arange.h>

#include <functional>
#include <mutex>
#include <unordered_map>

#include "../cpu/simd/expression_kernels.h"
#include "../cpu/simd/float_environment.h"
#include "../protocol/names.h"
#include "checks.h"
#include "process_wide.h"

namespace collx {

namespace {

struct Hash : std::hash<std::string_view> {
  using is_transparent = void;
};
using Known =
    std::unordered_map<std::string, std::shared_ptr<const KnownExpression>, Hash, std::equal_to<>>;

struct Table {
  std::mutex mutex;
  Known known[static_cast<size_t>(DType::count)];

  Table* in_child() {
    mutex.unlock();
    return this;
  }
};

Table& table() { return process_wide<Table>(); }
[[maybe_unused]] const Table& table_at_load = table();

}  // namespace

std::shared_ptr<const KnownExpression> check_expression(const char* op, std::string_view text,
                                                        at::ScalarType dtype) {
  constexpr size_t kMost = 1024;  // the table is cleared when it reaches this size
  // A loop uses the same expression repeatedly; this finds it without a lookup in the table.
  thread_local std::shared_ptr<const KnownExpression> last;
  const DType value = check_dtype(op, dtype);
  if (last != nullptr && last->dtype == value && last->text == text) return last;
  const std::lock_guard guard(table().mutex);
  Known& of_dtype = table().known[static_cast<size_t>(value)];
  if (const auto found = of_dtype.find(text); found != of_dtype.end()) return last = found->second;
  Expression expression;
  const auto wrong = parse_expression(text, value, expression);
  TORCH_CHECK_VALUE(!wrong, "collx.", op, ": expression: got ", *wrong,
                    "; accepted for a value of ", dtype,
                    ": an expression that collx.epilogues.expression_of returns");
  if (of_dtype.size() >= kMost) of_dtype.clear();
  last = std::make_shared<const KnownExpression>(std::move(expression), text, value);
  of_dtype.emplace(text, last);
  return last;
}

std::pair<std::string, std::string> program_of(std::string_view text, at::ScalarType dtype,
                                               const ProgramOptions& options) {
  constexpr const char* kOp = "epilogue";
  const auto known = check_expression(kOp, text, dtype);
#if COLLX_CUDA
  std::string program = known->kernels.program(options);
#else
  std::string program = epilogue_program(known->expression, known->dtype, options);
#endif
  return {std::move(program), kernel_in_program(known->expression, options)};
}

namespace {
thread_local int ready_depth = 0;
}

GettingReady::GettingReady() { ++ready_depth; }
GettingReady::~GettingReady() { --ready_depth; }
bool getting_ready() { return ready_depth > 0; }

at::ScalarType scalar_type_of(ValueType type) {
  constexpr at::ScalarType kTypes[] = {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble,
                                       at::kInt,   at::kLong, at::kChar,     at::kByte,
                                       at::kShort, at::kBool};
  static_assert(std::size(kTypes) == static_cast<size_t>(ValueType::count));
  return kTypes[static_cast<size_t>(type)];
}

std::optional<Expression> with_numbers(const char* op, const Expression& expression,
                                       at::ArrayRef<double> numbers) {
  TORCH_CHECK_VALUE(expression.numbers <= static_cast<int>(numbers.size()) &&
                        numbers.size() <= static_cast<size_t>(kMostLeaves),
                    "collx.", op, ": numbers: got ", numbers.size(), "; accepted: from ",
                    expression.numbers, ", which the epilogue requires, to ", kMostLeaves);
  if (expression.numbers == 0) return std::nullopt;
  Expression bound = expression;
  for (Statement& s : bound.statements) {
    if (s.what != Do::number) continue;
    const auto bits = bits_of_number(numbers[s.number], s.type);
    TORCH_CHECK_VALUE(bits, "collx.", op, ": numbers[", s.number, "]: got ", numbers[s.number],
                      "; accepted: a number of ", scalar_type_of(s.type));
    s.what = Do::constant;
    s.number = *bits;
  }
  return bound;
}

void check_extras(const char* op, const Expression& expression, at::TensorList extras,
                  const at::Tensor& value, c10::SymIntArrayRef sizes) {
  TORCH_CHECK_VALUE(expression.extras <= static_cast<int>(extras.size()), "collx.", op,
                    ": extras: got ", extras.size(), " tensors; accepted: at least ",
                    expression.extras, ", which the epilogue requires");
  TORCH_CHECK_VALUE(extras.size() <= static_cast<size_t>(kMostLeaves), "collx.", op,
                    ": extras: got ", extras.size(), " tensors; accepted: up to ", kMostLeaves);
  TORCH_CHECK_VALUE(expression.indices <= static_cast<int>(sizes.size()), "collx.", op,
                    ": expression: uses coordinate ", expression.indices - 1, " of an output of ",
                    sizes.size(), " dimensions");
  for (size_t i = 0; i < extras.size(); ++i) {
    const at::Tensor& extra = extras[i];
    TORCH_CHECK_TYPE(extra.scalar_type() == value.scalar_type() && extra.layout() == at::kStrided,
                     "collx.", op, ": extras[", i, "]: got ", extra.layout(), ", ",
                     extra.scalar_type(), "; accepted: a strided tensor of ", value.scalar_type(),
                     ", as the input");
    TORCH_CHECK_VALUE(extra.device() == value.device(), "collx.", op, ": extras[", i,
                      "]: got a tensor on ", extra.device(), "; accepted: ", value.device());
    const auto has = extra.sym_sizes();
    bool fits = has.size() <= sizes.size();
    for (size_t d = 0; fits && d < has.size(); ++d) {
      const c10::SymInt& size = has[has.size() - 1 - d];
      fits = size == 1 || size == sizes[sizes.size() - 1 - d];
    }
    TORCH_CHECK_VALUE(fits, "collx.", op, ": extras[", i, "]: got shape ", has,
                      "; accepted: a shape that broadcasts to the output's, ", sizes);
  }
}

at::Tensor coordinate(at::IntArrayRef sizes, int64_t dim, Origin origin,
                      const c10::Device& device) {
  const int64_t from = dim == origin.axis ? origin.start : 0;
  std::vector<int64_t> shape(sizes.size(), 1);
  shape[static_cast<size_t>(dim)] = sizes[static_cast<size_t>(dim)];
  return at::arange(from, from + shape[static_cast<size_t>(dim)],
                    at::TensorOptions().dtype(at::kLong).device(device))
      .view(shape);
}

void apply(const Expression& expression, const at::Tensor& value, at::TensorList extras,
           Origin origin, const at::Tensor& out) {
  if (!value.is_cpu()) {
    out.copy_(evaluate(expression, value, extras, origin));
    return;
  }
  at::TensorIteratorConfig config;
  config.check_all_same_dtype(false).resize_outputs(false).add_output(out).add_const_input(value);
  for (int i = 0; i < expression.extras; ++i)
    config.add_const_input(extras[static_cast<size_t>(i)]);
  std::vector<at::Tensor> coordinates;
  for (int d = 0; d < expression.indices; ++d) {
    coordinates.push_back(coordinate(value.sizes(), d, origin, value.device()));
    config.add_const_input(coordinates.back());
  }
  at::TensorIterator iterator = config.build();
  const cpu::ExpressionKernel evaluate = cpu::expression_kernel();
  const auto lines = [&](char** data, const int64_t* strides, int64_t count, int64_t rows) {
    const cpu::FloatEnvironment environment;
    evaluate(expression, {data, strides, count, rows});
  };
  iterator.for_each(lines, at::internal::GRAIN_SIZE);
}

}  // namespace collx
