// Normalized rows with an epilogue behind them: what it makes of a row, rounded to the dtype, takes
// the row's place before it is stored or quantized. `F` as in map.cuh; its result is of the dtype,
// and it has
//   kForm    what the kernel has to be able to do
#pragma once

#include "map.cuh"
#include "norm.cuh"

namespace collx::cuda {

/// As Normalized.
template <typename F>
class MapRows {
  using Value = Elements<F::kDType>;
  static constexpr int kCount = Value::kCount;

 public:
  static constexpr DType kDType = F::kDType;
  static constexpr bool kMaps = true;
  static constexpr NormForm kForm = F::kForm;
  struct Ahead {
    Vector extra[F::kExtras > 0 ? F::kExtras : 1];
  };

  __device__ __forceinline__ explicit MapRows(const EpilogueArguments& epilogue)
      : epilogue_(epilogue) {}

  __device__ __forceinline__ Ahead ahead(uint64_t first, uint64_t numel) const {
    Ahead ahead;
#pragma unroll
    for (int x = 0; x < F::kExtras; ++x) {
      ahead.extra[x] = detail::load_extra<dtype_size(kDType)>(epilogue_.extra[x], first, numel);
    }
    return ahead;
  }

  __device__ __forceinline__ void apply(float (&y)[kCount], uint64_t first,
                                        const Ahead& ahead) const {
    detail::Coordinates<F::kCoordinates> at(epilogue_, first);
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      float extras[F::kExtras > 0 ? F::kExtras : 1];
#pragma unroll
      for (int x = 0; x < F::kExtras; ++x) extras[x] = Value::get(ahead.extra[x], e);
      y[e] = F::apply(y[e], extras, at);
      at.next();
    }
  }

 private:
  const EpilogueArguments& epilogue_;
};

}  // namespace collx::cuda
