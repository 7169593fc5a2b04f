#include "../cpu/calls.h"
#include "../protocol/names.h"
#include "collectives.h"
#include "enqueue.h"
#include "fallback.h"
#include "registry.h"
#if COLLX_CUDA
#include "../cuda/calls.h"
#endif

namespace collx {

namespace {

class BarrierCallRequest final : public CallRequest {
 public:
  explicit BarrierCallRequest(const Communicator&)
      : CallRequest(name_of(Collective::barrier).data(), Algorithm::automatic) {}

  Call& plan(const Launch& launch, const Places&) override {
    call_.plan = select(request_of(launch.communicator, {.collective = Collective::barrier}));
    call_.descriptor.collective = Collective::barrier;
    return call_;
  }
  void run_through_group(const Launch& launch) const override {
    fallback_barrier(launch.communicator, op(), call_.descriptor);
  }
  bool run(const CpuView& view) const override { return cpu::barrier(view, call_.descriptor); }
#if COLLX_CUDA
  void run(const CudaView& view, cuda::Stream stream) const override {
    cuda::barrier(view, call_.descriptor, stream);
  }
#endif

 private:
  Call call_{};
};

}  // namespace

Results barrier(const Operator& op, const Arguments& a) {
  const c10::Device device(at::hasCUDA() ? c10::kCUDA : c10::kCPU);
  const auto communicator = registry::require(op.name.c_str(), a.group_name, device);
  communicator->require_usable(op.name.c_str());
  make_call<BarrierCallRequest>(*communicator);
  return {};
}

}  // namespace collx
