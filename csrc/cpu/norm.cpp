#include "norm.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "../protocol/names.h"
#include "collectives/norm.h"
#include "simd/float_environment.h"

namespace collx::cpu {
namespace {

bool keep(NormSession& session, CopyKernel, NormRows& rows) {
  const void* const input = session.input(0);
  rows.take(&input, 1, 0, session.numel());
  return true;
}

NormSteps algorithm_of(const NormCall& call) {
  const Algorithm algorithm = call.plan.algorithm;
  if (call.scatters() && algorithm == Algorithm::staged) return norm_staged;
  if (!call.scatters()) {
    switch (algorithm) {
      case Algorithm::oneshot_push:
        return norm_oneshot_push;
      case Algorithm::twoshot_push:
        return norm_twoshot_push;
      case Algorithm::oneshot_pull:
        return norm_oneshot_pull;
      case Algorithm::twoshot_pull:
        return norm_twoshot_pull;
      default:
        break;
    }
  }
  throw std::invalid_argument("algorithm " + std::string(name_of(algorithm)) + " of " +
                              std::string(name_of(call.collective)) + " has no CPU kernel");
}

/// A scale that was given is returned as it is, whatever the number of rows.
void return_given_scale(const NormCall& call) {
  const NormOptions& o = call.options;
  if (o.quantization == Quantization::none || o.scale_mode != ScaleMode::tensor) return;
  if (call.scale != nullptr) std::memcpy(call.scale, call.given_scale, sizeof(float));
}

uint64_t own_rows(const RankView& view, const NormCall& call) {
  return call.scatters() ? partition(call.rows, view.world, view.rank).count : call.rows;
}

}  // namespace

bool norm(const RankView& view, const NormCall& call) {
  const NormSteps algorithm = view.world == 1 ? keep : algorithm_of(call);
  NormRows rows(call, own_rows(view, call));
  NormSession session(view, call);
  if (!session.enter()) return false;
  if (view.check && !session.meet(Phase::check)) return false;
  const FloatEnvironment environment;
  // Equal shapes: without rows on one rank is without rows on all, and nothing is exchanged.
  if (call.rows != 0 && !algorithm(session, copy_kernel(), rows)) return false;
  return_given_scale(call);
  session.complete();
  return true;
}

void normalize(const void* const* inputs, int world, const NormCall& call) {
  NormRows rows(call, call.rows);
  const FloatEnvironment environment;
  rows.take(inputs, world, 0, call.rows * call.cols);
  return_given_scale(call);
}

}  // namespace collx::cpu
