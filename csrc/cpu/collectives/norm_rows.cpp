#include "norm_rows.h"

#include <algorithm>
#include <numeric>

namespace collx::cpu {
namespace {

/// The address of byte `at`; null if `tensor` is null.
char* byte_of(void* tensor, uint64_t at) {
  return tensor == nullptr ? nullptr : static_cast<char*>(tensor) + at;
}
const char* byte_of(const void* tensor, uint64_t at) {
  return tensor == nullptr ? nullptr : static_cast<const char*>(tensor) + at;
}

}  // namespace

RowScales scales_of(const NormCall& call, uint64_t rows, uint64_t row) {
  const NormOptions& o = call.options;
  const bool none = o.quantization == Quantization::none || o.scale_mode == ScaleMode::tensor;
  if (none || call.scale == nullptr) return {nullptr, 0, 0, 0};
  char* const scales = static_cast<char*>(call.scale);
  const uint64_t bytes = scale_bytes(o.scale_type);
  if (o.scale_mode == ScaleMode::row) return {scales + row * bytes, 1, bytes, bytes};
  const uint64_t groups = ceil_div(call.cols, static_cast<uint64_t>(o.quant_group_size));
  if (o.column_major) return {scales + row * bytes, groups, bytes, rows * bytes};
  return {scales + row * groups * bytes, groups, bytes, bytes};
}

NormRows::NormRows(const NormCall& call, uint64_t rows)
    : call_(call),
      kernels_(norm_kernels(call.dtype)),
      rows_(rows),
      element_(static_cast<uint64_t>(dtype_size(call.dtype))),
      sums_(rows == 0 ? 0 : norm_room(call.cols)),
      tree_(rows == 0 ? 0 : norm_tree_room(call.cols)),
      gain_(rows == 0 ? 0 : norm_room(call.cols)),
      bias_(rows == 0 || call.bias == nullptr ? 0 : norm_room(call.cols)) {
  const RowEpilogue* const epilogue = call.row_epilogue;
  if (epilogue == nullptr) return;
  if (call.normalized == nullptr) mapped_.resize(call.cols * element_);
  const Expression& e = epilogue->expression;
  coordinates_.resize(static_cast<size_t>(e.indices));
  // Within a row, an extra advances by the stride of its innermost dimension. The coordinate of the
  // columns advances by one, and other coordinates are constant.
  const auto step = static_cast<int64_t>(element_);
  strides_ = {step, step};
  for (int x = 0; x < e.extras; ++x) {
    strides_.push_back(epilogue->arguments.extra[x].stride[0] * step);
  }
  for (int c = 0; c < e.indices; ++c) {
    const bool columns = is_column(epilogue->arguments.coordinate[c]);
    strides_.push_back(columns ? static_cast<int64_t>(sizeof(int64_t)) : 0);
    if (!columns) continue;
    columns_.resize(call.cols);
    std::iota(columns_.begin(), columns_.end(), epilogue->arguments.coordinate[c].start);
  }
  operands_.resize(strides_.size());
}

bool NormRows::is_column(const Coordinate& c) const { return c.below == 1 && call_.cols > 1; }

void NormRows::place_operands(uint64_t row, NormRow& task) {
  const RowEpilogue& epilogue = *call_.row_epilogue;
  const Expression& e = epilogue.expression;
  const uint64_t first = (call_.first_row + row) * call_.cols;
  char** to = operands_.data();
  to[0] = to[1] = task.normalized == nullptr ? mapped_.data() : static_cast<char*>(task.normalized);
  to += 2;
  for (int x = 0; x < e.extras; ++x) {
    const ExtraTensor& extra = epilogue.arguments.extra[x];
    const int64_t offset = offset_of(extra, first) * static_cast<int64_t>(element_);
    // The kernel only reads this operand.
    *to++ = const_cast<char*>(static_cast<const char*>(extra.data)) + offset;
  }
  for (int c = 0; c < e.indices; ++c) {
    const Coordinate& of = epilogue.arguments.coordinate[c];
    int64_t& here = coordinates_[static_cast<size_t>(c)];
    here = of.start + static_cast<int64_t>(first / of.below % of.size);
    *to++ = reinterpret_cast<char*>(is_column(of) ? columns_.data() : &here);
  }
  task.epilogue = &e;
  task.evaluate = expression_kernel();
  task.line = {operands_.data(), strides_.data(), static_cast<int64_t>(call_.cols)};
}

void NormRows::widen(const void* weights, float* to, float offset) const {
  const NormOptions& o = call_.options;
  const NormKernels& of_weights = o.weight_float32 ? norm_kernels(DType::float32) : kernels_;
  of_weights.sum({&weights, 1, nullptr, to, nullptr, call_.cols});
  kernels_.prepare(to, call_.cols, offset, o.rounding == Rounding::parity_weight);
}

void NormRows::prepare() {
  // Adding -0 changes nothing. The weight of a layer norm has no offset.
  const bool layer = call_.options.norm == Norm::layer;
  widen(call_.weight, gain_.at(0), layer ? -0.0f : call_.options.weight_offset);
  if (call_.bias != nullptr) widen(call_.bias, bias_.at(0), -0.0f);
  prepared_ = true;
}

void NormRows::sum(const void* const* sources, int world, uint64_t at, uint64_t count) {
  const bool rounded = call_.options.rounding != Rounding::fp32;
  (rounded ? kernels_.sum_rounded : kernels_.sum)(
      {sources, world, byte_of(call_.residual, at * element_), sums_.at(at % call_.cols),
       byte_of(call_.residual_out, at * element_), count});
}

void NormRows::finish(uint64_t row) {
  const uint64_t first = row * call_.cols;
  const RowScales scales = scales_of(call_, rows_, row);
  NormRow task{};
  task.values = sums_.at(0);
  task.tree = tree_.at(0);
  task.gain = gain_.at(0);
  task.bias = bias_.at(0);
  task.cols = call_.cols;
  task.options = &call_.options;
  task.given_scale = call_.given_scale == nullptr ? 0 : *call_.given_scale;
  task.normalized = byte_of(call_.normalized, first * element_);
  task.quantized = byte_of(call_.quantized, first);
  task.scales = scales.first;
  task.scale_stride = scales.stride;
  if (call_.row_epilogue != nullptr) place_operands(row, task);
  kernels_.finish(task);
}

void NormRows::take(const void* const* sources, int world, uint64_t at, uint64_t count) {
  if (count == 0) return;
  if (!prepared_) prepare();
  const void* from[kMaxRanks];
  std::copy_n(sources, world, from);
  while (count > 0) {
    const uint64_t left = call_.cols - at % call_.cols;
    const uint64_t piece = std::min(count, left);
    sum(from, world, at, piece);
    if (piece == left) finish(at / call_.cols);
    for (int r = 0; r < world; ++r) from[r] = static_cast<const char*>(from[r]) + piece * element_;
    at += piece;
    count -= piece;
  }
}

}  // namespace collx::cpu
