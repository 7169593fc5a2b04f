// Normalized rows with an epilogue: the result of the epilogue, rounded to the dtype, replaces the
// row before it is stored or quantized. `F` is as in map.cuh. Its result has the dtype, and F also
// has
//   kForm    the features that the kernel must support
#pragma once

#include "map.cuh"
#include "norm.cuh"

namespace collx::cuda {

/// Like Normalized.
template <typename F>
class MapRows {
  static constexpr int kCount = Elements<F::kDType>::kCount;

 public:
  static constexpr DType kDType = F::kDType;
  static constexpr bool kMaps = true;
  static constexpr NormForm kForm = F::kForm;
  using Ahead = detail::Extras<F>;

  __device__ __forceinline__ explicit MapRows(const typename F::Arguments& epilogue)
      : epilogue_(epilogue) {}

  __device__ __forceinline__ Ahead ahead(uint64_t first, uint64_t numel) const {
    return Ahead(epilogue_, first, numel);
  }

  __device__ __forceinline__ void apply(float (&y)[kCount], uint64_t first,
                                        const Ahead& ahead) const {
    detail::map<F>(
        epilogue_, first, ahead, [&](int e) { return y[e]; },
        [&](int e, float made) { y[e] = made; });
  }

 private:
  const typename F::Arguments& epilogue_;
};

}  // namespace collx::cuda
