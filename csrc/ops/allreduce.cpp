#include "allreduce.h"

#include "../cpu/allreduce.h"
#include "epilogue_kernels.h"
#include "run.h"
#if COLLX_CUDA
#include "../cuda/allreduce.h"
#endif

namespace collx {

namespace {

constexpr const char* kAllreduceOp = "allreduce";

class Allreduce {
 public:
  AllreduceCall call{};

  Allreduce(Communicator& communicator, const ReductionOptions& options, const at::Tensor& input,
            const at::Tensor& output)
      : communicator_(communicator), options_(options), input_(input), output_(output) {
    call.input = input.const_data_ptr();
    call.output = output.mutable_data_ptr();
    call.numel = static_cast<uint64_t>(input.numel());
    call.dtype = options.dtype;
    call.reduce_op = options.reduce_op;
    epilogue_.use(communicator, options.algorithm, kAllreduceOp, options.epilogue, output, call);
  }

  static const char* op() { return kAllreduceOp; }
  Algorithm asked() const { return options_.algorithm; }
  bool is_empty() const { return call.numel == 0; }
  static bool needs_no_peers() { return true; }
  void alone() const {
    if (!in_place()) output_.copy_(input_);
  }

  Places find(SymmetricMemory& memory) const {
    const auto from = memory.find(call.input, bytes());
    return {from, in_place() ? from : memory.find(call.output, output_.nbytes())};
  }
  void check(const Places& places) const {
    if (needs_multicast(asked())) check_multicast(kAllreduceOp, request(places), communicator_);
    if (is_empty()) return;
    check_symmetric(kAllreduceOp, asked(), places.input.has_value(), places.output.has_value());
  }
  static const Places& touched(const Places& places) { return places; }

  void plan(const Places& places) {
    call.plan = communicator_.tuned(select(request(places)));
    CallDescriptor& d = call.descriptor;
    d.collective = Collective::allreduce;
    d.dtype = options_.dtype;
    d.reduce_op = options_.reduce_op;
    d.max_blocks = options_.max_blocks;
    if (options_.epilogue != nullptr) d.epilogue = options_.epilogue->known.hash;
    describe_tensor(input_, d);
  }

  void fall_back() const { fallback_allreduce(communicator_, kAllreduceOp, call, input_, output_); }
  bool run(const CpuView& view) const { return cpu::allreduce(view, call); }
#if COLLX_CUDA
  void run(const CudaView& view, cuda::Stream stream) const { cuda::allreduce(view, call, stream); }
#endif

 private:
  Request request(const Places& places) const {
    Request request = request_of(communicator_, Collective::allreduce, options_.max_blocks);
    request.dtype = options_.dtype;
    request.reduce_op = options_.reduce_op;
    request.bytes = bytes();
    place_in(request, places.input, places.output);
    request.in_place = in_place();
    request.epilogue = call.epilogue != nullptr;
    request.algorithm = asked();
    return request;
  }
  bool in_place() const { return call.input == call.output; }
  uint64_t bytes() const { return call.numel * static_cast<uint64_t>(dtype_size(call.dtype)); }

  Communicator& communicator_;
  const ReductionOptions& options_;
  const at::Tensor& input_;
  const at::Tensor& output_;
  KernelEpilogue epilogue_;
};

}  // namespace

void run_allreduce(Communicator& communicator, const ReductionOptions& options,
                   const at::Tensor& input, const at::Tensor& output) {
  Allreduce allreduce(communicator, options, input, output);
  run(allreduce, communicator);
}

}  // namespace collx
