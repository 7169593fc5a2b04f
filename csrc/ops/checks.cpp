#include "checks.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <limits>
#include <optional>
#include <string>

#include "../protocol/names.h"
#include "call.h"
#include "communicator.h"
#include "torch_version.h"

namespace collx {

namespace {

constexpr std::optional<DType> dtype_of(at::ScalarType type) {
  switch (type) {
    case at::ScalarType::Float: return DType::float32;
    case at::ScalarType::Half: return DType::float16;
    case at::ScalarType::BFloat16: return DType::bfloat16;
    case at::ScalarType::Double: return DType::float64;
    case at::ScalarType::Int: return DType::int32;
    case at::ScalarType::Long: return DType::int64;
    case at::ScalarType::Char: return DType::int8;
    case at::ScalarType::Byte: return DType::uint8;
    default: return std::nullopt;
  }
}

uint64_t address(const at::Tensor& tensor) {
  return reinterpret_cast<uint64_t>(tensor.const_data_ptr());
}

/// The address after the last element.
uint64_t end_of(const at::Tensor& tensor) {
  return address(tensor) +
         at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size());
}

ReduceOp check_reduce_op(const char* op, std::string_view name, DType dtype) {
  const std::optional<ReduceOp> reduce_op = parse_reduce_op(name);
  TORCH_CHECK_VALUE(reduce_op.has_value(), "collx.", op, ": reduce_op: got \"", name,
                    "\"; accepted: ", c10::Join(", ", kReduceOpNames), ", product");
  TORCH_CHECK_TYPE(*reduce_op != ReduceOp::avg || !is_integer(dtype), "collx.", op,
                   ": reduce_op: got \"avg\" with dtype ", name_of(dtype),
                   "; avg accepts floating-point dtypes, integers accept sum, max, min, prod");
  return *reduce_op;
}

/// Raises TypeError unless the tensor is strided, with elements of whole bytes.
void check_copyable(const char* op, const at::Tensor& input) {
  TORCH_CHECK_TYPE(input.layout() == at::kStrided && !input.is_quantized(), "collx.", op,
                   ": input: got a tensor of layout ", input.layout(), " and dtype ",
                   dtype_name(input.scalar_type()), "; accepted: strided (dense) of any dtype");
}

}  // namespace

DType check_dtype(const char* op, at::ScalarType type) {
  const std::optional<DType> dtype = dtype_of(type);
  TORCH_CHECK_TYPE(dtype.has_value(), "collx.", op, ": dtype: got ", dtype_name(type),
                   "; accepted: ", c10::Join(", ", kDTypeNames));
  return *dtype;
}

DType check_dtype(const char* op, const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, "collx.", op, ": ", argument,
                   ": got a tensor of layout ", tensor.layout(), "; accepted: strided (dense)");
  const std::optional<DType> dtype = dtype_of(tensor.scalar_type());
  TORCH_CHECK_TYPE(dtype.has_value(), "collx.", op, ": ", argument, ": got dtype ",
                   dtype_name(tensor.scalar_type()), "; accepted: ", c10::Join(", ", kDTypeNames));
  return *dtype;
}

Algorithm check_algorithm(const char* op, Collective collective, std::string_view name) {
  const std::optional<Algorithm> algorithm = parse_algorithm(name);
  TORCH_CHECK_VALUE(
      algorithm && has_algorithm(collective, *algorithm), "collx.", op, ": algorithm: got \"", name,
      "\"; accepted: ", c10::Join(", ", names_where(kAlgorithms, [&](const AlgorithmRow& row) {
                                    return has_algorithm(collective, row.algorithm);
                                  })));
  return *algorithm;
}

int check_max_blocks(const char* op, int64_t max_blocks) {
  TORCH_CHECK_VALUE(max_blocks >= 0 && max_blocks <= std::numeric_limits<int32_t>::max(), "collx.",
                    op, ": max_blocks: got ", max_blocks, "; accepted: 0 (no bound) or more");
  return static_cast<int>(max_blocks);
}

CallCore check_core(const Arguments& a) {
  const char* const op = a.op();
  CallCore core{.collective = a.collective, .dtype = DType::uint8};
  if (is_reduction(a.collective)) {
    core.dtype = check_dtype(op, "input", a.input);
    core.reduce_op = check_reduce_op(op, a.reduce_op, core.dtype);
  } else {
    check_copyable(op, a.input);
  }
  core.algorithm = check_algorithm(op, a.collective, a.algorithm);
  core.max_blocks = check_max_blocks(op, a.max_blocks);
  return core;
}

void check_root(const char* op, int64_t root, int world_size) {
  TORCH_CHECK_VALUE(root >= 0 && root < world_size, "collx.", op, ": root: got ", root,
                    "; accepted: a rank of the communicator, 0 to ", world_size - 1);
}

void check_group(const char* op, int64_t group_size, const Communicator& communicator) {
  TORCH_CHECK_VALUE(group_size == communicator.options().world_size, "collx.", op,
                    ": group_size: got ", group_size, "; accepted: the world size of \"",
                    communicator.options().name, "\", ", communicator.options().world_size);
}

void check_device(const char* op, const char* argument, const at::Tensor& tensor,
                  const Communicator& communicator) {
  TORCH_CHECK_VALUE(tensor.device() == communicator.options().device, "collx.", op, ": ", argument,
                    ": got a tensor on ", tensor.device(), "; communicator \"",
                    communicator.options().name, "\" accepts tensors on ",
                    communicator.options().device);
}

void check_out(const char* op, const at::Tensor& input, c10::SymIntArrayRef sizes,
               const at::Tensor& out, const char* argument, std::optional<at::ScalarType> other,
               const char* whose) {
  TORCH_CHECK_TYPE(out.layout() == at::kStrided, "collx.", op, ": ", argument,
                   ": got a tensor of layout ", out.layout(), "; accepted: strided (dense)");
  const at::ScalarType dtype = other.value_or(input.scalar_type());
  TORCH_CHECK_TYPE(out.scalar_type() == dtype, "collx.", op, ": ", argument, ": got dtype ",
                   dtype_name(out.scalar_type()), "; accepted: ", other ? whose : "the input's, ",
                   dtype_name(dtype));
  TORCH_CHECK_VALUE(out.device() == input.device(), "collx.", op, ": ", argument,
                    ": got a tensor on ", out.device(), "; accepted: the input's device, ",
                    input.device());
  TORCH_CHECK_VALUE(out.sym_sizes().equals(sizes), "collx.", op, ": ", argument, ": got shape ",
                    out.sym_sizes(), "; accepted: ", sizes);
}

void check_writable(const char* op, const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(
      tensor.is_contiguous() || at::has_internal_overlap(tensor) != at::MemOverlap::Yes, "collx.",
      op, ": ", argument, ": got strides ", tensor.strides(),
      ", with which several elements share a location; accepted: one location per element");
}

void check_overlap(const char* op, const at::Tensor& input, const at::Tensor& out) {
  check_writable(op, "out", out);
  // Tensors with gaps use a temporary, which is correct for any interleaving.
  if (!input.is_non_overlapping_and_dense() || !out.is_non_overlapping_and_dense()) return;
  const uint64_t from = address(input), to = address(out), bytes = input.nbytes();
  const uint64_t distance = from < to ? to - from : from - to;
  const bool same = distance == 0 && ((input.is_contiguous() && out.is_contiguous()) ||
                                      input.strides() == out.strides());
  TORCH_CHECK_VALUE(same || distance >= bytes, "collx.", op,
                    ": out: overlaps the input partly, or in another order (", distance, " of ",
                    bytes,
                    " bytes apart); accepted: the input itself, or a tensor that shares "
                    "no memory with it");
}

at::MemOverlapStatus overlap_of(const at::Tensor& a, const at::Tensor& b) {
  const at::MemOverlapStatus status = at::get_overlap_status(a, b);
  const bool unknown = status == at::MemOverlapStatus::TooHard;
  const bool disjoint = unknown && (end_of(a) <= address(b) || end_of(b) <= address(a));
  return disjoint ? at::MemOverlapStatus::No : status;
}

void check_disjoint(const char* op, const at::Tensor& input, const at::Tensor& out,
                    std::optional<int64_t> offset, const char* argument, const char* other) {
  check_writable(op, argument, out);
  // Tensors with gaps use a temporary, which is correct for any interleaving.
  if (!input.is_non_overlapping_and_dense() || !out.is_non_overlapping_and_dense()) return;
  const auto from = static_cast<int64_t>(address(input)), to = static_cast<int64_t>(address(out));
  const bool apart = from + static_cast<int64_t>(input.nbytes()) <= to ||
                     to + static_cast<int64_t>(out.nbytes()) <= from;
  const bool own_part = offset && input.is_contiguous() && out.is_contiguous() &&
                        (input.nbytes() < out.nbytes() ? from - to : to - from) == *offset;
  TORCH_CHECK_VALUE(apart || own_part, "collx.", op, ": ", argument, ": overlaps ", other, " (",
                    to - from, " bytes apart); accepted: a tensor that shares no memory with it",
                    offset ? ", or exactly this rank's part of the larger tensor" : "");
}

namespace {

/// Checks that the tensors that peers access are symmetric.
void check_symmetric(const char* op, const Request& r) {
  const Touched peers = touched(r.collective);
  const bool input = !peers.input || r.input_symmetric;
  const bool output = !peers.output || r.output_symmetric;
  TORCH_CHECK_VALUE(
      input && output, "collx.", op, ": algorithm: got \"", name_of(r.algorithm),
      "\", which needs a symmetric ", input ? "" : "input", input || output ? "" : " and ",
      output                                  ? ""
      : r.collective == Collective::allreduce ? "output (pass it as out=, or use the in-place form)"
                                              : "output (pass it as out=)",
      "; accepted: contiguous tensors from collx.empty or collx.register");
  TORCH_CHECK_VALUE(!r.in_place || !overwrites_in_place(r.collective), "collx.", op,
                    ": algorithm: got \"", name_of(r.algorithm),
                    "\" in place, in which peers would overwrite data that is not sent yet; "
                    "accepted: auto, staged, lanes, fallback");
}

/// Alerts about a sum whose order the NVLink switch determines. Integer sums are equal in any
/// order.
void alert_order_of_switch(const char* op, const Request& request) {
  at::Context& context = at::globalContext();
  if (!context.deterministicAlgorithms() || is_integer(request.dtype)) return;
  const std::string algorithm(name_of(request.algorithm));
  context.alertNotDeterministic("collx." + std::string(op) + " with algorithm \"" + algorithm +
                                '"');
}

[[noreturn, gnu::cold]] void refuse_multicast(const char* op, const Request& request,
                                              const Communicator& communicator) {
  Request automatic = request;
  automatic.algorithm = Algorithm::automatic;
  const std::string_view instead = name_of(plan_call(communicator, automatic).named);
  TORCH_CHECK_NOT_IMPLEMENTED(
      request.capabilities.multicast, "collx.", op, ": algorithm: got \"",
      name_of(request.algorithm), "\", which needs NVLink multicast, and \"",
      communicator.options().name, "\" has none: ", communicator.multicast_unavailable_reason(),
      "; \"auto\" selects ", instead, " for this call");
  TORCH_CHECK_NOT_IMPLEMENTED(!request.exact_sums, "collx.", op, ": algorithm: got \"",
                              name_of(request.algorithm), "\" with rounding fp32 and dtype ",
                              name_of(request.dtype),
                              ", whose sum NVLink multicast rounds; accepted: rounding "
                              "parity or parity_weight, or float32; \"auto\" selects ",
                              instead, " for this call");
  TORCH_CHECK_NOT_IMPLEMENTED(false, "collx.", op, ": algorithm: got \"",
                              name_of(request.algorithm), "\" with reduce_op ",
                              name_of(request.reduce_op), " and dtype ", name_of(request.dtype),
                              "; NVLink multicast accepts sum of float32, float16, bfloat16, int32 "
                              "and int64, and avg of float32; \"auto\" selects ",
                              instead, " for this call");
}

void check_multicast(const char* op, const Request& request, const Communicator& communicator) {
  const bool adds = adds_by_multicast(request.collective, request.algorithm);
  if (adds ? can_be_switched(request) : request.capabilities.multicast) {
    return adds ? alert_order_of_switch(op, request) : void();
  }
  refuse_multicast(op, request, communicator);
}

}  // namespace

void check_requirements(const char* op, const Request& request, const Communicator& communicator) {
  if (request.algorithm == Algorithm::automatic) return;
  if (needs_multicast(request.algorithm)) check_multicast(op, request, communicator);
  // With splits on the device, only the bound of a message is known.
  const bool has_data = request.bytes > 0 || request.message > 0;
  if (needs_symmetric(request.algorithm) && has_data) check_symmetric(op, request);
  TORCH_CHECK_NOT_IMPLEMENTED(
      communicator.has_regions() || request.world == 1 || row_of(request.algorithm).by == By::group,
      "collx.", op, ": algorithm: got \"", name_of(request.algorithm), "\", but the ranks of \"",
      communicator.options().name,
      "\" have no access to each other's memory; accepted: auto, fallback");
}

}  // namespace collx
