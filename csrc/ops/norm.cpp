#include "norm.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "../cpu/norm.h"
#include "../protocol/names.h"
#include "../protocol/norm_plan.h"
#include "autograd_kernels.h"
#include "epilogue_kernels.h"
#include "norm_checks.h"
#include "registry.h"
#include "run.h"
#if COLLX_CUDA
#include "../cuda/norm.h"
#endif

namespace collx {

namespace {

using Tensors = c10::SmallVector<at::Tensor, 4>;

/// Tensors that the backends can work on: dense, of the layout that the call describes.
struct Operands {
  c10::MaybeOwned<at::Tensor> input, residual, weight, bias, scale;
  at::IntArrayRef sizes;  // of the normalized tensor
  Tensors results;
};

c10::MaybeOwned<at::Tensor> dense(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.expect_contiguous()
                          : c10::MaybeOwned<at::Tensor>::borrowed(tensor);
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

/// Addresses, and what the results have to do with each other.
NormCall describe(const NormOperator& op, const NormCheck& check, const Operands& t) {
  NormCall call{};
  call.input = t.input->const_data_ptr();
  call.collective = op.collective;
  call.dtype = check.dtype;
  call.cols = static_cast<uint64_t>(t.input->size(-1));
  call.rows = static_cast<uint64_t>(t.input->numel()) / call.cols;
  call.options = check.options;
  const auto address = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.const_data_ptr() : nullptr;
  };
  call.residual = address(*t.residual);
  call.weight = address(*t.weight);
  call.bias = address(*t.bias);
  call.given_scale = static_cast<const float*>(address(*t.scale));
  for (size_t i = 0; i < op.results.size(); ++i) {
    void* to = t.results[i].mutable_data_ptr();
    switch (op.results[i]) {
      case NormResult::quantized:
        call.quantized = to;
        break;
      case NormResult::scale:
        call.scale = to;
        break;
      case NormResult::residual:
        call.residual_out = to;
        break;
      case NormResult::out:
      case NormResult::normalized:
        call.normalized = to;
    }
  }
  CallDescriptor& d = call.descriptor;
  d.collective = op.collective;
  d.dtype = check.dtype;
  d.max_blocks = check.max_blocks;
  describe_tensor(*t.input, d);
  // Ranks may see the same rows in other leading dimensions.
  d.dims = 2;
  std::fill(std::begin(d.sizes), std::end(d.sizes), 0);
  d.sizes[0] = static_cast<int64_t>(call.rows);
  d.sizes[1] = static_cast<int64_t>(call.cols);
  d.norm = call.options;
  d.keeps_norm = op.results.back() == NormResult::normalized;
  return call;
}

class NormRun {
 public:
  NormCall call;

  /// `epilogue`: null without one.
  NormRun(const NormOperator& op, Communicator& communicator, const NormCheck& check,
          const Operands& operands, const Epilogue* epilogue)
      : call(describe(op, check, operands)),
        op_(op),
        communicator_(communicator),
        check_(check),
        operands_(operands) {
    if (epilogue != nullptr) {
      epilogue_.use_for_rows(communicator, op.name(), *epilogue, operands.sizes, call);
      if (getting_ready()) return;
    }
    if (is_empty()) return_given_scale();  // no backend will
  }

  const char* op() const { return op_.name(); }
  Algorithm asked() const { return check_.algorithm; }
  bool is_empty() const { return call.rows == 0; }
  static bool needs_no_peers() { return true; }
  void alone() {
    if (is_empty()) return;
    plan(Algorithm::fallback, {});
    const void* inputs[] = {call.input};
    normalize_locally(inputs, 1, call, input());
  }

  /// The kernels of the call alone: see GettingReady.
  void get_ready() {
    if (!communicator_.on_cuda()) return;
    in_kernels(communicator_, asked()) ? collx::run(*this, communicator_) : alone();
  }

  Places find(SymmetricMemory& memory) const {
    return {memory.find(call.input, input().nbytes()), std::nullopt};
  }
  void check(const Places& places) const {
    if (needs_multicast(asked())) check_multicast(op(), request(places), communicator_);
  }
  Places touched(const Places& places) const {
    const bool pulls = pulls_inputs(call.plan.algorithm) || !communicator_.on_cuda();
    return {pulls ? places.input : std::nullopt, std::nullopt};
  }
  void plan(const Places& places) { plan(asked(), places); }

  void fall_back() const {
    return_given_scale();  // a rank may have no rows of its own
    fallback_norm(communicator_, op(), call, input());
  }
  bool run(const CpuView& view) const { return cpu::norm(view, call); }
#if COLLX_CUDA
  void run(const CudaView& view, cuda::Stream stream) const { cuda::norm(view, call, stream); }
#endif

 private:
  const at::Tensor& input() const { return *operands_.input; }

  void return_given_scale() const {
    if (call.given_scale != nullptr) operands_.results[1].copy_(operands_.scale->view({1}));
  }

  NormRequest request(const Places& places) const {
    NormRequest request = norm_request(communicator_, op_, check_, call.rows, call.cols);
    place_in(request, places.input, places.output);
    return request;
  }
  void plan(Algorithm algorithm, const Places& places) {
    NormRequest wanted = request(places);
    wanted.algorithm = algorithm;
    const NormPlan plan = plan_norm(wanted, communicator_.cuda_layout());
    call.plan = plan.plan;
    call.shape = plan.shape;
    if (plan.spilled == 0) return;
    spill_ = at::empty({static_cast<int64_t>(plan.spilled)}, input().options().dtype(at::kFloat));
    call.spill = static_cast<float*>(spill_.mutable_data_ptr());
  }

  const NormOperator& op_;
  Communicator& communicator_;
  const NormCheck& check_;
  const Operands& operands_;
  at::Tensor spill_;
  KernelEpilogue epilogue_;
};

/// Where a tensor lies, if it is dense.
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

/// Results share no memory with what is read, but for a residual that is updated in place, and none
/// with each other.
void check_apart(const NormOperator& op, const NormArguments& a) {
  c10::SmallVector<Occupied, 9> others;
  for (const at::Tensor* read : {&a.input, &a.residual, &a.weight, &a.bias}) {
    if (read->defined()) others.emplace_back(*read);
  }
  if (a.scale) others.emplace_back(*a.scale);
  for (size_t i = 0; i < a.results.size(); ++i) {
    const Occupied result(a.results[i]);
    const char* argument = name_of(op.results[i]);
    check_writable(op.name(), argument, a.results[i]);
    for (const Occupied& other : others) {
      if (other.is_apart_from(result)) continue;
      const bool updated = op.results[i] == NormResult::residual && other.is(a.residual) &&
                           other.begin == result.begin &&
                           a.residual.strides() == a.results[i].strides();
      if (!updated) check_disjoint(op.name(), *other.tensor, a.results[i], std::nullopt, argument);
    }
    others.push_back(result);
  }
}

/// Where the rows of the results begin in the tensor that is normalized.
Origin origin_of(const NormOperator& op, const NormArguments& a, const Communicator& communicator) {
  if (!scatters_rows(op.collective)) return {};
  const CommunicatorOptions& o = communicator.options();
  const auto rows = static_cast<uint64_t>(a.input.size(0));
  return {0, static_cast<int64_t>(partition(rows, o.world_size, o.rank).start)};
}

/// Extras of an epilogue that share nothing with the results. Where that cannot be told, a copy.
std::vector<at::Tensor> extras_apart(const NormOperator& op, const NormArguments& a) {
  std::vector<at::Tensor> extras = a.extras;
  for (at::Tensor& extra : extras) {
    for (size_t i = 0; i < a.results.size(); ++i) {
      const at::MemOverlapStatus overlap = at::get_overlap_status(extra, a.results[i]);
      if (overlap == at::MemOverlapStatus::TooHard) extra = extra.clone();
      TORCH_CHECK_VALUE(
          overlap == at::MemOverlapStatus::No || overlap == at::MemOverlapStatus::TooHard, "collx.",
          op.name(), ": extras: one overlaps ", name_of(op.results[i]),
          "; accepted: tensors that share nothing with the results");
    }
  }
  return extras;
}

bool lies_as(const at::Tensor& tensor, const NormResultShape& shape) {
  return shape.column_major ? tensor.sym_strides().equals(shape.strides()) : tensor.is_contiguous();
}

Tensors call(const NormOperator& op, const NormArguments& a) {
  const NormCheck check = check_norm(op, a);
  const auto communicator = registry::require(op.name(), a.group_name);
  check_device(op.name(), "input", a.input, *communicator);
  communicator->require_usable(op.name());
  for (size_t i = 0; i < a.results.size(); ++i) {
    check_norm_out(op, a, check.results[i], a.results[i]);
  }
  check_apart(op, a);
  const OnDevice guard(a.input.device());
  Operands operands{a.input.expect_contiguous(),
                    dense(a.residual),
                    dense(a.weight),
                    dense(a.bias),
                    a.scale ? dense(*a.scale) : c10::MaybeOwned<at::Tensor>(),
                    (a.residual.defined() ? a.residual : a.input).sizes(),
                    {}};
  for (size_t i = 0; i < check.results.size(); ++i) {
    const bool given = op.out && lies_as(a.results[i], check.results[i]);
    operands.results.push_back(given ? a.results[i] : new_result(check.results[i], a.input));
  }
  std::vector<at::Tensor> extras;
  std::optional<Epilogue> epilogue;
  if (check.epilogue != nullptr) {
    extras = extras_apart(op, a);
    epilogue.emplace(Epilogue{*check.epilogue, extras,
                              with_numbers(op.name(), check.epilogue->expression, a.numbers),
                              origin_of(op, a, *communicator)});
  }
  NormRun norm(op, *communicator, check, operands, epilogue ? &*epilogue : nullptr);
  if (epilogue && getting_ready()) {
    norm.get_ready();
    return operands.results;
  }
  run(norm, *communicator);
  for (size_t i = 0; i < a.results.size(); ++i) {
    if (!operands.results[i].is_same(a.results[i])) a.results[i].copy_(operands.results[i]);
  }
  return operands.results;
}

Tensors call_meta(const NormOperator& op, const NormArguments& a) {
  const NormCheck check = check_norm(op, a);
  Tensors results;
  for (size_t i = 0; i < check.results.size(); ++i) {
    if (op.out) {
      check_norm_out(op, a, check.results[i], a.results[i]);
    } else {
      results.push_back(meta_result(check.results[i], a.input));
    }
  }
  return results;
}

class Kernel final : public c10::OperatorKernel {
 public:
  using Function = Tensors (*)(const NormOperator&, const NormArguments&);
  Kernel(NormOperator op, Function function) : op_(std::move(op)), function_(function) {}

  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    Tensors results = function_(op_, NormArguments(op_, *stack));
    torch::jit::drop(*stack, op_.arguments.size() + (op_.out ? op_.results.size() : 0));
    if (op_.out) return;
    for (at::Tensor& result : results) stack->emplace_back(std::move(result));
  }

 private:
  NormOperator op_;
  Function function_;
};

/// The kernel below autograd, which is the first one in inference mode: results that are given get
/// a new version each.
class VersionsKernel final : public c10::OperatorKernel {
 public:
  explicit VersionsKernel(NormOperator op) : op_(std::move(op)) {}

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    write(op_, handle, keys, stack);
  }

  static void write(const NormOperator& op, const c10::OperatorHandle& handle,
                    c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    Tensors written;
    if (op.out) {
      for (const c10::IValue& value : torch::jit::last(*stack, op.results.size())) {
        autograd::check_versioned(op.name(), name_of(op.results[written.size()]), value.toTensor());
        written.push_back(value.toTensor());
      }
    }
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      handle.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
    }
    for (const at::Tensor& result : written) torch::autograd::increment_version(result);
  }

 private:
  NormOperator op_;
};

/// They have no backward: whoever asks for a gradient hears of it at once.
class AutogradKernel final : public c10::OperatorKernel {
 public:
  explicit AutogradKernel(NormOperator op) : op_(std::move(op)) {}

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    const size_t count = op_.arguments.size() + (op_.out ? op_.results.size() : 0);
    for (const c10::IValue& value : torch::jit::last(*stack, count)) {
      if (value.isTensor() && value.toTensor().defined()) refuse_gradient(value.toTensor());
      if (!value.isTensorList()) continue;
      for (const c10::IValue& extra : value.toListRef()) refuse_gradient(extra.toTensor());
    }
    VersionsKernel::write(op_, handle, keys, stack);
  }

 private:
  void refuse_gradient(const at::Tensor& tensor) const {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !autograd::wants_gradient(tensor) && !torch::autograd::isFwGradDefined(tensor), "collx.",
        op_.name(),
        ": has no automatic differentiation: got an argument that requires grad or has a "
        "tangent; accepted: detached arguments, torch.no_grad(), or the unfused sequence "
        "(collx.nn.unfused_rmsnorm)");
  }

  NormOperator op_;
};

std::string full_name(const NormOperator& op) {
  return op.overload.empty() ? op.name() : std::string(op.name()) + "." + op.overload;
}

void add_kernels(torch::Library& library, Kernel::Function function) {
  for (const NormOperator& op : norm_operators()) {
    library.impl(full_name(op).c_str(),
                 torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(op, function)));
  }
}

}  // namespace

NormRequest norm_request(const Communicator& communicator, const NormOperator& op,
                         const NormCheck& check, uint64_t rows, uint64_t cols) {
  NormRequest request;
  static_cast<Request&>(request) = request_of(communicator, op.collective, check.max_blocks);
  request.dtype = check.dtype;
  request.rows = rows;
  request.cols = cols;
  request.bytes = rows * cols * static_cast<uint64_t>(dtype_size(check.dtype));
  request.algorithm = check.algorithm;
  request.options = check.options;
  request.exact_sums = check.options.rounding == Rounding::fp32 && check.dtype != DType::float32;
  request.results = op.planned();
  request.tuned_blocks = communicator.tuned_blocks();
  request.tuned_threads = communicator.tuned_threads();
  return request;
}

void define_norms(torch::Library& library) {
  for (const NormOperator& op : norm_operators()) {
    const at::Tag pt2 = at::Tag::pt2_compliant_tag, strides = at::Tag::needs_contiguous_strides;
    const std::vector<at::Tag> tags =
        op.out ? std::vector{pt2, strides, at::Tag::out_variant} : std::vector{pt2, strides};
    library.def(op.schema().c_str(), tags);
  }
}

void add_norm_kernels(torch::Library& library, c10::DispatchKey key) {
  for (const NormOperator& op : norm_operators()) {
    library.impl(full_name(op).c_str(),
                 torch::dispatch(key, torch::CppFunction::makeFromBoxedFunctor(
                                          std::make_unique<Kernel>(op, call))));
  }
}

TORCH_LIBRARY_IMPL(collx, Meta, library) { add_kernels(library, call_meta); }

TORCH_LIBRARY_IMPL(collx, Autograd, library) {
  for (const NormOperator& op : norm_operators()) {
    library.impl(full_name(op).c_str(),
                 torch::CppFunction::makeFromBoxedFunctor(std::make_unique<AutogradKernel>(op)));
  }
}

TORCH_LIBRARY_IMPL(collx, ADInplaceOrView, library) {
  for (const NormOperator& op : norm_operators()) {
    if (!op.out) continue;
    library.impl(full_name(op).c_str(),
                 torch::CppFunction::makeFromBoxedFunctor(std::make_unique<VersionsKernel>(op)));
  }
}

}  // namespace collx
