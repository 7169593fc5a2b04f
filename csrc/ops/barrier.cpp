#include "barrier.h"

#include "../cpu/exchange.h"
#include "../protocol/names.h"
#include "registry.h"
#include "run.h"
#if COLLX_CUDA
#include "../cuda/exchange.h"
#endif

namespace collx {

namespace {

class Barrier {
 public:
  Call call{};

  explicit Barrier(Communicator& communicator) : communicator_(communicator) {}

  static const char* op() { return name_of(Collective::barrier).data(); }
  static Algorithm asked() { return Algorithm::automatic; }
  static bool is_empty() { return false; }
  static bool needs_no_peers() { return true; }
  static void alone() {}

  static Places find(SymmetricMemory&) { return {}; }
  static void check(const Places&) {}
  static Places touched(const Places&) { return {}; }
  void plan(const Places&) {
    call.descriptor.collective = Collective::barrier;
    call.plan.named = communicator_.has_regions() ? Algorithm::direct : Algorithm::fallback;
    call.plan.algorithm = call.plan.named;
  }

  void fall_back() const { fallback_barrier(communicator_, op(), call.descriptor); }
  bool run(const CpuView& view) const { return cpu::barrier(view, call.descriptor); }
#if COLLX_CUDA
  void run(const CudaView& view, cuda::Stream stream) const {
    cuda::barrier(view, call.descriptor, stream);
  }
#endif

 private:
  Communicator& communicator_;
};

}  // namespace

Results barrier(const Operator& /*op*/, const Arguments& a) {
  const auto communicator = registry::require(Barrier::op(), a.group_name);
  communicator->require_usable(Barrier::op());
  const OnDevice guard(communicator->options().device);
  Barrier barrier(*communicator);
  run(barrier, *communicator);
  return {};
}

}  // namespace collx
