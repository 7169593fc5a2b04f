#include "checks.h"

#include <ATen/MemoryOverlap.h>
#include <c10/util/Exception.h>

#include <limits>
#include <optional>
#include <string>

#include "../protocol/names.h"
#include "../protocol/selection.h"
#include "communicator.h"

namespace collx {

namespace {

template <size_t N>
std::string joined(const std::array<std::string_view, N>& names) {
  std::string text;
  for (std::string_view name : names) text.append(text.empty() ? "" : ", ").append(name);
  return text;
}

constexpr std::optional<DType> dtype_of(at::ScalarType type) {
  switch (type) {
    case at::ScalarType::Float:
      return DType::float32;
    case at::ScalarType::Half:
      return DType::float16;
    case at::ScalarType::BFloat16:
      return DType::bfloat16;
    case at::ScalarType::Double:
      return DType::float64;
    case at::ScalarType::Int:
      return DType::int32;
    case at::ScalarType::Long:
      return DType::int64;
    case at::ScalarType::Char:
      return DType::int8;
    case at::ScalarType::Byte:
      return DType::uint8;
    default:
      return std::nullopt;
  }
}

std::string dtype_name(at::ScalarType type) { return c10::getDtypeNames(type).first; }

constexpr bool is_integer(DType dtype) { return !has_sentinel(dtype); }

uint64_t address(const at::Tensor& tensor) {
  return reinterpret_cast<uint64_t>(tensor.const_data_ptr());
}

}  // namespace

DType check_dtype(const char* op, at::ScalarType type) {
  const std::optional<DType> dtype = dtype_of(type);
  TORCH_CHECK_TYPE(dtype.has_value(), "collx.", op, ": dtype: got ", dtype_name(type),
                   "; accepted: ", joined(kDTypeNames));
  return *dtype;
}

DType check_dtype(const char* op, const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, "collx.", op, ": ", argument,
                   ": got a tensor of layout ", tensor.layout(), "; accepted: strided (dense)");
  const std::optional<DType> dtype = dtype_of(tensor.scalar_type());
  TORCH_CHECK_TYPE(dtype.has_value(), "collx.", op, ": ", argument, ": got dtype ",
                   dtype_name(tensor.scalar_type()), "; accepted: ", joined(kDTypeNames));
  return *dtype;
}

ReduceOp check_reduce_op(const char* op, std::string_view name, DType dtype) {
  const std::optional<ReduceOp> reduce_op = parse_reduce_op(name);
  TORCH_CHECK_VALUE(reduce_op.has_value(), "collx.", op, ": reduce_op: got \"", name,
                    "\"; accepted: ", joined(kReduceOpNames), ", product");
  TORCH_CHECK_TYPE(*reduce_op != ReduceOp::avg || !is_integer(dtype), "collx.", op,
                   ": reduce_op: got \"avg\" with dtype ", name_of(dtype),
                   "; avg accepts floating-point dtypes, integers accept sum, max, min, prod");
  return *reduce_op;
}

Algorithm check_algorithm(const char* op, std::string_view name) {
  const std::optional<Algorithm> algorithm = parse_algorithm(name);
  TORCH_CHECK_VALUE(algorithm.has_value(), "collx.", op, ": algorithm: got \"", name,
                    "\"; accepted: ", joined(kAlgorithmNames));
  return *algorithm;
}

int check_max_blocks(const char* op, int64_t max_blocks) {
  TORCH_CHECK_VALUE(max_blocks >= 0 && max_blocks <= std::numeric_limits<int32_t>::max(), "collx.",
                    op, ": max_blocks: got ", max_blocks, "; accepted: 0 (no bound) and more");
  return static_cast<int>(max_blocks);
}

ReductionOptions check_reduction(const char* op, const at::Tensor& input,
                                 std::string_view reduce_op, std::string_view algorithm,
                                 int64_t max_blocks) {
  const DType dtype = check_dtype(op, "input", input);
  return {dtype, check_reduce_op(op, reduce_op, dtype), check_algorithm(op, algorithm),
          check_max_blocks(op, max_blocks)};
}

void check_device(const char* op, const char* argument, const at::Tensor& tensor,
                  const Communicator& communicator) {
  TORCH_CHECK_VALUE(tensor.device() == communicator.options().device, "collx.", op, ": ", argument,
                    ": got a tensor on ", tensor.device(), "; communicator \"",
                    communicator.options().name, "\" accepts tensors on ",
                    communicator.options().device);
}

void check_out_like(const char* op, const at::Tensor& input, const at::Tensor& out) {
  TORCH_CHECK_TYPE(out.layout() == at::kStrided, "collx.", op, ": out: got a tensor of layout ",
                   out.layout(), "; accepted: strided (dense)");
  TORCH_CHECK_TYPE(out.scalar_type() == input.scalar_type(), "collx.", op, ": out: got dtype ",
                   dtype_name(out.scalar_type()), "; accepted: the input's, ",
                   dtype_name(input.scalar_type()));
  TORCH_CHECK_VALUE(out.device() == input.device(), "collx.", op, ": out: got a tensor on ",
                    out.device(), "; accepted: the input's device, ", input.device());
  TORCH_CHECK_VALUE(out.sym_sizes().equals(input.sym_sizes()), "collx.", op, ": out: got shape ",
                    out.sym_sizes(), "; accepted: the input's, ", input.sym_sizes());
}

void check_writable(const char* op, const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(
      tensor.is_contiguous() || at::has_internal_overlap(tensor) != at::MemOverlap::Yes, "collx.",
      op, ": ", argument, ": got strides ", tensor.strides(),
      ", with which several elements share a location; accepted: one location per element");
}

void check_overlap(const char* op, const at::Tensor& input, const at::Tensor& out) {
  check_writable(op, "out", out);
  // Tensors with holes go through a temporary, which is right however they interleave.
  if (!input.is_non_overlapping_and_dense() || !out.is_non_overlapping_and_dense()) return;
  const uint64_t from = address(input), to = address(out), bytes = input.nbytes();
  const uint64_t distance = from < to ? to - from : from - to;
  const bool same = distance == 0 && ((input.is_contiguous() && out.is_contiguous()) ||
                                      input.strides() == out.strides());
  TORCH_CHECK_VALUE(same || distance >= bytes, "collx.", op,
                    ": out: overlaps the input partly, or in another order (", distance, " of ",
                    bytes,
                    " bytes apart); accepted: the input itself, or a tensor that shares "
                    "nothing with it");
}

void check_symmetric(const char* op, Algorithm algorithm, bool input_symmetric,
                     bool output_symmetric) {
  TORCH_CHECK_VALUE(!needs_symmetric(algorithm) || (input_symmetric && output_symmetric), "collx.",
                    op, ": algorithm: got \"", name_of(algorithm), "\", which needs a symmetric ",
                    input_symmetric ? "" : "input",
                    input_symmetric || output_symmetric ? "" : " and ",
                    output_symmetric ? "" : "output (give it as out=, or work in place)",
                    "; accepted: contiguous tensors from collx.empty or known by collx.register");
}

void check_peer_access(const char* op, Algorithm algorithm, const Communicator& communicator) {
  TORCH_CHECK_NOT_IMPLEMENTED(communicator.has_regions() || algorithm == Algorithm::automatic ||
                                  algorithm == Algorithm::fallback,
                              "collx.", op, ": algorithm: got \"", name_of(algorithm),
                              "\", but the ranks of \"", communicator.options().name,
                              "\" have no access to each other's memory; accepted: auto, fallback");
}

}  // namespace collx
