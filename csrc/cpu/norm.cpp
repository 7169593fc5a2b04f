#include <cstring>

#include "calls.h"
#include "collectives/bodies.h"
#include "collectives/norm_steps.h"
#include "simd/float_environment.h"

namespace collx::cpu {
namespace {

bool keep(NormSession& session, CopyKernel, NormRows& rows) {
  const void* const input = session.input();
  rows.take(&input, 1, 0, session.call().rows * session.call().cols);
  return true;
}

constexpr Body<NormSteps> kBodies[] = {
    {Algorithm::oneshot_push, kNorms, norm_oneshot_push},
    {Algorithm::twoshot_push, kNorms, norm_twoshot_push},
    {Algorithm::oneshot_pull, kNorms, norm_oneshot_pull},
    {Algorithm::twoshot_pull, kNorms, norm_twoshot_pull},
    {Algorithm::staged, kScatteringNorms, norm_staged},
};
static_assert(are_complete(kBodies, kNorms | kScatteringNorms));

/// A given scale is returned unchanged, for any number of rows.
void return_given_scale(const NormCall& call) {
  const NormOptions& o = call.options;
  if (o.quantization == Quantization::none || o.scale_mode != ScaleMode::tensor) return;
  if (call.scale != nullptr) std::memcpy(call.scale, call.given_scale, sizeof(float));
}

uint64_t own_rows(const CpuView& view, const NormCall& call) {
  return call.scatters() ? partition(call.rows, view.world, view.rank).count : call.rows;
}

}  // namespace

bool norm(const CpuView& view, const NormCall& call) {
  const NormSteps algorithm =
      view.world == 1 ? keep : require_body(kBodies, call.collective, call.plan.algorithm);
  NormRows rows(call, own_rows(view, call));
  NormSession session(view, call);
  if (!session.enter()) return false;
  if (view.check && !session.meet(Phase::check)) return false;
  const FloatEnvironment environment;
  // The shapes are equal: if one rank has no rows, no rank has rows, and the ranks exchange
  // nothing.
  if (call.rows != 0 && !algorithm(session, copy_kernel(), rows)) return false;
  return_given_scale(call);
  return session.complete();
}

void normalize(const void* const* inputs, int world, const NormCall& call) {
  NormRows rows(call, call.rows);
  const FloatEnvironment environment;
  rows.take(inputs, world, 0, call.rows * call.cols);
  return_given_scale(call);
}

}  // namespace collx::cpu
