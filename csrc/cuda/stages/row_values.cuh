// The values of a row that a thread holds, and what the results of a row are made of.
#pragma once

#include "../../protocol/norm.h"
#include "reduce.cuh"

namespace collx::cuda {

/// A thread's vector of a row.
template <DType D>
using RowValues = float[Elements<D>::kCount];

/// The sum of the ranks' vectors, in rank order. False, where one does not come.
template <DType D, typename Source>
__device__ __forceinline__ bool add_up(RowValues<D>& x, int world, const Source& source) {
  Vector v[Source::kRanks];
  if (!source.take(v)) return false;
  source.rearm();
  fold<D>(x, v, world, [](float a, float b) { return a + b; });
  return true;
}

/// What the results are made of: normalized rows as they are. MapRows makes something else of them.
template <DType D, CommonNorm C = CommonNorm::other>
struct Normalized {
  static constexpr DType kDType = D;
  static constexpr bool kMaps = false;
  static constexpr NormForm kForm = {true, true, true, C};  // else one kernel for all calls
  struct Ahead {};  // what is read for a vector besides, asked for while its sum is awaited
};

}  // namespace collx::cuda
