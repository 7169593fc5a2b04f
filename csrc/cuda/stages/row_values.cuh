// The values of a row that a thread holds, and how its results are derived from them.
#pragma once

#include "../../protocol/norm.h"
#include "reduce.cuh"

namespace collx::cuda {

/// A thread's vector of a row.
template <DType D>
using RowValues = float[Elements<D>::kCount];

/// Adds up the ranks' vectors in rank order. Returns false if one does not arrive.
template <DType D, typename Source>
__device__ __forceinline__ bool add_up(RowValues<D>& x, int world, const Source& source) {
  Vector v[Source::kRanks];
  if (!source.take(v)) return false;
  source.rearm();
  fold<D>(x, v, world, [](float a, float b) { return a + b; });
  return true;
}

/// The results are the normalized rows themselves. MapRows applies an epilogue to them.
template <DType D, CommonNorm C = CommonNorm::other>
struct Normalized {
  static constexpr DType kDType = D;
  static constexpr bool kMaps = false;
  static constexpr NormForm kForm = {true, true, true, C};  // C == other: one kernel for all calls
  struct Ahead {};  // additional loads for a vector, started while its sum is awaited
};

}  // namespace collx::cuda
