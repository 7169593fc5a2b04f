#include "norm.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "../cpu/calls.h"
#include "../protocol/names.h"
#include "checks.h"
#include "collectives.h"
#include "enqueue.h"
#include "epilogue_kernels.h"
#include "fallback.h"
#include "registry.h"
#if COLLX_CUDA
#include "../cuda/calls.h"
#endif

namespace collx {

namespace {

/// The tensors to which a call refers until it has completed. They are dense, with the layout that
/// the call describes.
struct NormOperands {
  at::Tensor input, residual, weight, bias, scale;
  Results results;
  std::optional<Epilogue> epilogue = {};
  std::vector<std::pair<at::Tensor, at::Tensor>> copies = {};  // {from, to}; they run last
};

at::Tensor dense(const at::Tensor& tensor) {
  return tensor.defined() ? *tensor.expect_contiguous() : tensor;
}

at::Tensor meta_result(const NormResultShape& shape, const at::Tensor& like) {
  const at::TensorOptions options = like.options().dtype(shape.dtype);
  if (shape.column_major) {
    return at::empty_strided_symint(shape.sizes, shape.strides(), options);
  }
  return at::empty_symint(shape.sizes, options);
}

at::Tensor new_result(const NormResultShape& shape, const at::Tensor& like) {
  if (shape.column_major) return meta_result(shape, like);
  return make_output(C10_AS_INTARRAYREF_SLOW(c10::SymIntArrayRef(shape.sizes)), like, shape.dtype);
}

/// Fills in the addresses and the descriptor of a call.
NormCall describe(const Operator& op, const NormCheck& check, const NormOperands& t) {
  NormCall call{};
  call.input = t.input.const_data_ptr();
  static_cast<CallCore&>(call) = check;
  call.cols = static_cast<uint64_t>(t.input.size(-1));
  call.rows = static_cast<uint64_t>(t.input.numel()) / call.cols;
  call.options = check.options;
  const auto address = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.const_data_ptr() : nullptr;
  };
  call.residual = address(t.residual);
  call.weight = address(t.weight);
  call.bias = address(t.bias);
  call.given_scale = static_cast<const float*>(address(t.scale));
  for (size_t i = 0; i < op.outputs.size(); ++i) {
    void* to = t.results[i].mutable_data_ptr();
    switch (op.outputs[i]) {
      case Output::quantized: call.quantized = to; break;
      case Output::scale: call.scale = to; break;
      case Output::residual: call.residual_out = to; break;
      case Output::out:
      case Output::normalized: call.normalized = to; break;
      case Output::value:
      case Output::output_splits: break;  // outputs of other families
    }
  }
  CallDescriptor& d = call.descriptor;
  describe_call(check, d);
  describe_tensor(t.input, d);
  // The leading dimensions may differ between ranks, so the descriptor has only rows and columns.
  d.dims = 2;
  std::fill(std::begin(d.sizes), std::end(d.sizes), 0);
  d.sizes[0] = static_cast<int64_t>(call.rows);
  d.sizes[1] = static_cast<int64_t>(call.cols);
  d.norm = call.options;
  d.keeps_norm = op.outputs.back() == Output::normalized;
  return call;
}

class NormCallRequest final : public CallRequest {
 public:
  /// `sizes` are those of the normalized tensor.
  NormCallRequest(const Communicator& communicator, const Operator& op, const NormCheck& check,
                  NormOperands&& operands, at::IntArrayRef sizes)
      : CallRequest(op.name.c_str(), check.algorithm),
        t_(std::move(operands)),
        call_(describe(op, check, t_)),
        results_(op.planned()) {
    is_empty_ = call_.rows == 0;
    has_rest_ = !t_.copies.empty() || (is_empty_ && call_.given_scale != nullptr);
    if (t_.epilogue) {
      kernel_epilogue_.use_for_rows(communicator, this->op(), *t_.epilogue, sizes, call_);
    }
  }

  Places locate(Communicator& communicator) const override {
    Places places;
    SymmetricMemory& memory = communicator.symmetric();
    if (!memory.is_empty()) places.input = memory.find(call_.input, t_.input.nbytes());
    if (asked() != Algorithm::automatic) {
      check_requirements(op(), request(communicator, places), communicator);
    }
    return places;
  }
  uint64_t input_bytes() const override { return t_.input.nbytes(); }

  void run_alone(const Launch& launch) override {
    if (is_empty()) return;
    plan(launch, {}, Algorithm::fallback);
    const void* inputs[] = {call_.input};
    normalize_locally(inputs, 1, call_, t_.input);
  }
  Call& plan(const Launch& launch, const Places& places) override {
    plan(launch, places, asked());
    const bool pulls = pulls_inputs(call_.plan.algorithm) || !launch.communicator.on_cuda();
    map_peers(launch.communicator, pulls ? places.input : std::nullopt, {}, call_);
    return call_;
  }

  void run_through_group(const Launch& launch) const override {
    return_given_scale();  // the rank may own no rows
    fallback_norm(launch.communicator, op(), call_, t_.input);
  }
  bool run(const CpuView& view) const override { return cpu::norm(view, call_); }
#if COLLX_CUDA
  void run(const CudaView& view, cuda::Stream stream) const override {
    cuda::norm(view, call_, stream);
  }
#endif
  void finish() const override {
    if (is_empty()) return_given_scale();  // no backend has run
    for (const auto& [from, to] : t_.copies) to.copy_(from);
  }

  /// Only prepares the kernels of the call: see GettingReady.
  void get_ready(Communicator& communicator) {
    if (!communicator.on_cuda()) return;
    has_rest_ = false;
    const OnDevice guard(communicator.options().device);
    const c10::Stream stream = current_stream(communicator.options().device);
    if (in_kernels(communicator, asked())) {
      enqueue(communicator, *this, stream);
    } else {
      run_alone({communicator, *this, stream});
    }
  }

 private:
  void return_given_scale() const {
    if (call_.given_scale != nullptr) t_.results[1].copy_(t_.scale.view({1}));
  }

  NormRequest request(const Communicator& communicator, const Places& places) const {
    NormRequest request = norm_request(request_of(communicator, call_), call_.options, results_,
                                       call_.rows, call_.cols);
    place_in(request, places.input, places.output);
    return request;
  }
  void plan(const Launch& launch, const Places& places, Algorithm algorithm) {
    NormRequest wanted = request(launch.communicator, places);
    wanted.algorithm = algorithm;
    const NormPlan plan = plan_call(launch.communicator, wanted);
    call_.plan = plan.plan;
    call_.shape = plan.shape;
    if (plan.spilled == 0) return;
    const UseStream use(launch.stream);
    spill_ = at::empty({static_cast<int64_t>(plan.spilled)}, t_.input.options().dtype(at::kFloat));
    call_.spill = static_cast<float*>(spill_.mutable_data_ptr());
  }

  const NormOperands t_;
  NormCall call_;
  const NormResults results_;
  at::Tensor spill_;
  KernelEpilogue kernel_epilogue_;
};

/// The memory range of a tensor, assuming that it is dense.
struct Occupied {
  explicit Occupied(const at::Tensor& of)
      : tensor(&of),
        begin(static_cast<const char*>(of.const_data_ptr())),
        end(begin + of.nbytes()) {}

  bool is(const at::Tensor& other) const { return tensor == &other; }
  bool is_apart_from(const Occupied& other) const {
    return end <= other.begin || other.end <= begin;
  }

  const at::Tensor* tensor;
  const char* begin;
  const char* end;
};

/// Checks that results share no memory with each other or with tensors that are read, except for a
/// residual that is updated in place.
void check_apart(const Operator& op, const Arguments& a) {
  c10::SmallVector<Occupied, 9> others;
  for (const at::Tensor* read : {&a.input, &a.residual, &a.weight, &a.bias}) {
    if (read->defined()) others.emplace_back(*read);
  }
  if (a.scale) others.emplace_back(*a.scale);
  for (size_t i = 0; i < a.results.size(); ++i) {
    const Occupied result(a.results[i]);
    const char* argument = name_of(op.outputs[i]);
    check_writable(op.name.c_str(), argument, a.results[i]);
    for (const Occupied& other : others) {
      if (other.is_apart_from(result)) continue;
      const bool updated = op.outputs[i] == Output::residual && other.is(a.residual) &&
                           other.begin == result.begin &&
                           a.residual.strides() == a.results[i].strides();
      if (updated) continue;
      const char* const name = other.is(a.input) ? "the input" : "another tensor of the call";
      check_disjoint(op.name.c_str(), *other.tensor, a.results[i], std::nullopt, argument, name);
    }
    others.push_back(result);
  }
}

/// The extras of an epilogue, which must share no memory with the results. An extra is copied if
/// its overlap is unknown.
std::vector<at::Tensor> extras_apart(const Operator& op, const Arguments& a) {
  std::vector<at::Tensor> extras = a.extras;
  for (at::Tensor& extra : extras) {
    for (size_t i = 0; i < a.results.size(); ++i) {
      const at::MemOverlapStatus overlap = overlap_of(extra, a.results[i]);
      if (overlap == at::MemOverlapStatus::TooHard) extra = extra.clone();
      TORCH_CHECK_VALUE(
          overlap == at::MemOverlapStatus::No || overlap == at::MemOverlapStatus::TooHard, "collx.",
          op.name.c_str(), ": extras: one overlaps ", name_of(op.outputs[i]),
          "; accepted: tensors that share no memory with the results");
    }
  }
  return extras;
}

/// Checks a tensor that was passed for a result.
void check_given(const Arguments& a, const NormResultShape& shape, const at::Tensor& out) {
  check_out(a.op(), a.input, shape.sizes, out, name_of(shape.result), shape.dtype, "");
}

bool lies_as(const at::Tensor& tensor, const NormResultShape& shape) {
  return shape.column_major ? tensor.sym_strides().equals(shape.strides()) : tensor.is_contiguous();
}

}  // namespace

Results norm(const Operator& op, const Arguments& a) {
  // First, since the check of the residual needs the rank.
  const auto communicator = registry::require(op.name.c_str(), a.group_name, a.input.device());
  const NormCheck check = check_norm(op, a);
  check_device(op.name.c_str(), "input", a.input, *communicator);
  communicator->require_usable(op.name.c_str());
  for (size_t i = 0; i < a.results.size(); ++i) {
    check_given(a, check.results[i], a.results[i]);
  }
  check_apart(op, a);
  NormOperands operands{*a.input.expect_contiguous(),
                        dense(a.residual),
                        dense(a.weight),
                        dense(a.bias),
                        a.scale ? dense(*a.scale) : at::Tensor(),
                        {}};
  for (size_t i = 0; i < check.results.size(); ++i) {
    const bool given = op.takes_outputs() && lies_as(a.results[i], check.results[i]);
    operands.results.push_back(given ? a.results[i] : new_result(check.results[i], a.input));
    if (op.takes_outputs() && !given) {
      operands.copies.emplace_back(operands.results[i], a.results[i]);
    }
  }
  if (check.epilogue != nullptr) {
    operands.epilogue = Epilogue{
        check.epilogue, extras_apart(op, a),
        with_numbers(op.name.c_str(), check.epilogue->expression, a.numbers), origin_of(a)};
  }
  const at::IntArrayRef sizes = (a.residual.defined() ? a.residual : a.input).sizes();
  Results results;
  if (!op.takes_outputs()) results = operands.results;
  if (operands.epilogue && getting_ready()) {
    NormCallRequest(*communicator, op, check, std::move(operands), sizes).get_ready(*communicator);
  } else {
    make_call<NormCallRequest>(*communicator, op, check, std::move(operands), sizes);
  }
  return results;
}

Results norm_meta(const Operator& op, const Arguments& a) {
  const NormCheck check = check_norm(op, a);
  Results results;
  for (size_t i = 0; i < check.results.size(); ++i) {
    if (op.takes_outputs()) {
      check_given(a, check.results[i], a.results[i]);
    } else {
      results.push_back(meta_result(check.results[i], a.input));
    }
  }
  return results;
}

NormRequest norm_request(const Request& request, const NormOptions& options, NormResults results,
                         uint64_t rows, uint64_t cols) {
  NormRequest norm;
  static_cast<Request&>(norm) = request;
  norm.rows = rows;
  norm.cols = cols;
  norm.bytes = rows * cols * static_cast<uint64_t>(dtype_size(norm.dtype));
  norm.options = options;
  norm.exact_sums = options.rounding == Rounding::fp32 && norm.dtype != DType::float32;
  norm.results = results;
  return norm;
}

}  // namespace collx
