// The stages after a reduction: add the residual, normalize the row, quantize.
// docs/internals/numerics.md has the formulas; the operations here follow their order. Which of the
// stages a call uses is uniform over the grid and known at run time. Kernels for common calls know
// it at compile time.
#pragma once

#include "../arguments/norm_arguments.cuh"
#include "../arguments/vectors.cuh"
#include "quantize.cuh"
#include "reduce.cuh"
#include "row_reduction.cuh"
#include "row_values.cuh"

namespace collx::cuda {

/// Processes a row from the sum over the ranks to its results, by all threads of a cluster.
///
/// `Simple`: an RMS norm of rows of whole aligned vectors, with a weight of the same dtype, in one
/// step and without group scales.
template <typename Results, bool Simple>
class NormStage {
  static constexpr DType D = Results::kDType;
  using E = Elements<D>;
  static constexpr int kCount = E::kCount;
  static constexpr bool kOneWeight = Simple || D == DType::float32;  // one vector, in the dtype
  struct Weights {
    Vector v[kOneWeight ? 1 : 2];
  };

 public:
  /// `epilogue`: for Results that map.
  template <typename... Epilogue>
  __device__ explicit NormStage(const NormArguments& norm, const Epilogue&... epilogue)
      : norm_(norm),
        asked_{norm},
        reduction_(norm),
        map_{epilogue...},
        place_(norm.cluster_rank() * blockDim.x + threadIdx.x) {
    norm.touch();
  }

  /// The index in its row of this thread's vector in a step.
  __device__ __forceinline__ uint32_t steps() const {
    return !Simple && Results::kForm.steps ? norm_.shape.steps : 1;
  }
  __device__ __forceinline__ uint32_t index(uint32_t step = 0) const {
    return Simple ? place_ : step * norm_.shape.step_vectors() + place_;
  }
  __device__ __forceinline__ bool has(uint32_t i) const { return i < norm_.vectors; }

  /// Starts the loads of the weights for this thread's columns, and of the scale if it is given.
  /// They do not change from row to row. Only the thread that stores the scale waits for its load
  /// here.
  __device__ __forceinline__ void prefetch(uint32_t step = 0) {
    const uint32_t i = index(step);
    if (!has(i)) return;
    weight_ = load(norm_.weight, i);
    if (layer()) bias_ = load(norm_.bias, i);
    if (asked_.given_scale()) {
      given_scale_ = *norm_.given_scale;
      if (blockIdx.x == 0 && threadIdx.x == 0) *static_cast<float*>(norm_.scale) = given_scale_;
    }
    if (steps() > 1) look_ahead(i);
  }

  /// Vector i of the residual for row `row` of the results.
  __device__ __forceinline__ Vector residual(uint64_t row, uint32_t i) const {
    if (!asked_.residual()) return {};
    return matrix_row<D, Simple>(norm_, norm_.residual, row).load(i);
  }

  /// Adds up the ranks' vectors and the residual. If a vector does not arrive, x stays unchanged.
  template <typename Source>
  __device__ __forceinline__ void sum(RowValues<D>& x, int world, const Source& source,
                                      const Vector& residual) const {
    if (add_up<D>(x, world, source)) accumulate(x, residual);
  }
  /// The same for a sum that is already computed.
  __device__ __forceinline__ void accumulate(RowValues<D>& x, const Vector& residual) const {
    const bool parity = asked_.options().rounding != Rounding::fp32;
    if (parity) round(x);
    if (!asked_.residual()) return;
#pragma unroll
    for (int e = 0; e < kCount; ++e) x[e] = x[e] + E::get(residual, e);
    if (parity) round(x);
  }

  /// `fetch(step, x)` loads this thread's vector of each step. It is called even if the thread has
  /// no vector. A row of several steps is spilled to memory until all of its steps have arrived.
  template <typename Fetch, typename Sink>
  __device__ __forceinline__ void row(Fetch fetch, const Sink& sink) {
    RowValues<D> x;
    row_ = sink.index();
    if (steps() == 1) look_ahead(index());
    if constexpr (Simple) {
      const bool mine = has(index());
      fetch(0, x);
      float leaf = 0, largest = 0;
      if (mine) {
        leaf = squares(x);
        if (asked_.keeps_residual()) sink.residual(index(), E::pack(x));
        if (!parity_weight()) multiply(x, largest);
      }
      complete(reduction_(leaf, magnitude(largest)));
      if (Results::kMaps && mine) map(x, index());
      if (needs_second_look()) {
        largest_ = reduction_(0, mine ? largest_of(x, index()) : 0).largest;
      }
      if (mine) emit(x, index(), sink);
    } else {
      run_passes(x, fetch, sink);
    }
  }

  /// Processes the first n of N rows together. Their values fit the dtype. `sink(k)` takes the
  /// values of row k.
  template <int N, typename SinkOf>
  __device__ __forceinline__ void rows(const Vector (&values)[N], int n, SinkOf sink_of) {
    static_assert(Simple);
    float leaf[N] = {};
    uint32_t largest[N] = {};
    const uint32_t i = index();
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (k >= n || !has(i)) continue;
      RowValues<D> x;
      unpack<D>(values[k], x);
      leaf[k] = squares(x);
      if (asked_.keeps_residual()) sink_of(k).residual(i, values[k]);
      float most = 0;
      if (!parity_weight()) multiply(x, most);
      largest[k] = magnitude(most);
    }
    RowTotal total[N];
    reduction_.reduce(leaf, largest, total);
    float none = 0;
    Vector mapped[Results::kMaps ? N : 1];
    if (Results::kMaps || needs_second_look()) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        if (k >= n || !has(i)) continue;
        RowValues<D> x;
        unpack<D>(values[k], x);
        complete(total[k]);
        if constexpr (Results::kMaps) {
          if (!parity_weight()) multiply(x, none);
          row_ = sink_of(k).index();
          look_ahead(i);
          map(x, i);
          mapped[k] = E::pack(x);
        }
        largest[k] = largest_of(x, i);
      }
    }
    if (needs_second_look()) {
      RowTotal looked[N];
      reduction_.reduce(leaf, largest, looked);
#pragma unroll
      for (int k = 0; k < N; ++k) total[k].largest = looked[k].largest;
    }
    if (!has(i)) return;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (k >= n) continue;
      RowValues<D> x;
      unpack<D>(Results::kMaps ? mapped[k] : values[k], x);
      complete(total[k]);
      if (!from_products()) largest_ = total[k].largest;
      if (!Results::kMaps && !parity_weight()) multiply(x, none);
      emit(x, i, sink_of(k));
    }
  }

 private:
  enum Pass { kFetch, kSquares, kMap, kLook, kEmit, kDone };

  template <typename Fetch, typename Sink>
  __device__ __forceinline__ void run_passes(RowValues<D>& x, Fetch fetch, const Sink& sink) {
    const uint32_t steps = this->steps();
#pragma unroll 1
    for (int pass = kFetch; pass < kDone; ++pass) {
      if ((pass == kSquares && !layer()) || (pass == kMap && !Results::kMaps) ||
          (pass == kLook && !needs_second_look())) {
        continue;
      }
      StepSums sums;
      uint32_t most = 0;
#pragma unroll 1
      for (uint32_t step = 0; step < steps; ++step) {
        const uint32_t i = index(step);
        if (steps > 1) prefetch(step);
        if (pass == kFetch) {
          fetch(step, x);
        } else if (steps > 1 && has(i)) {
          unspill(i, x);
        }
        if (Results::kMaps && pass == kMap) {
          if (has(i)) map(x, i);
          if (has(i) && steps > 1) spill(i, x);
          continue;
        }
        if (pass == kEmit) {
          if (groups()) measure_group(step, x);
          if (has(i)) emit(x, i, sink);
          continue;
        }
        float leaf = 0, largest = 0;
        if (has(i) && pass == kFetch) {
          if (asked_.keeps_residual()) sink.residual(i, E::pack(x));
          if (layer()) {
            leaf = tree(x);
          } else {
            leaf = squares(x);
            if (!parity_weight()) multiply(x, largest);
          }
          if (steps > 1) spill(i, x);
        } else if (has(i) && pass == kSquares) {
          leaf = centered_squares(x, i);
        } else if (has(i)) {
          largest = float_of(largest_of(x, i));
        }
        const RowTotal t = reduction_(leaf, max(most, magnitude(largest)));
        sums.add(t.sum);
        most = t.largest;
      }
      if (pass == kFetch && layer()) {
        mean_ = (sums.total() + 0.0f) / static_cast<float>(norm_.cols);
      } else if (pass == kLook) {
        largest_ = most;
      } else if (pass < kMap) {
        complete({sums.total(), most});
      }
    }
  }

  __device__ __forceinline__ bool layer() const {
    return !Simple && Results::kForm.layer && norm_.options.norm == Norm::layer;
  }
  __device__ __forceinline__ bool parity_weight() const {
    return asked_.options().rounding == Rounding::parity_weight;
  }
  __device__ __forceinline__ bool groups() const {
    return !Simple && Results::kForm.groups && asked_.quantizes() &&
           asked_.options().scale_mode == ScaleMode::group;
  }
  /// Whether each row has a scale.
  __device__ __forceinline__ bool needs_scale() const {
    return asked_.quantizes() && asked_.options().scale_mode == ScaleMode::row;
  }
  /// Whether the largest result follows from the largest product with the weight.
  __device__ __forceinline__ bool from_products() const {
    return !Results::kMaps && !parity_weight();
  }
  __device__ __forceinline__ bool needs_second_look() const {
    return !from_products() && needs_scale();
  }

  /// Rounds to the dtype and back. A conversion handles two values at once.
  static __device__ __forceinline__ void round(RowValues<D>& x) { unpack<D>(E::pack(x), x); }

  __device__ __forceinline__ Weights load(const void* data, uint32_t i) const {
    Weights w{};
    if (kOneWeight || !norm_.options.weight_float32) {
      w.v[0] = DenseTensor<dtype_size(D), Simple>(data, norm_.cols).load(i);
    } else if constexpr (!kOneWeight) {
      const DenseTensor<4> tensor(data, norm_.cols);
      w.v[0] = tensor.load(2 * i);
      if (2 * i + 1 < tensor.vectors()) w.v[1] = tensor.load(2 * i + 1);
    }
    return w;
  }
  __device__ __forceinline__ void unpack_weights(const Weights& w, RowValues<D>& to) const {
    if (kOneWeight || !norm_.options.weight_float32) {
      unpack<D>(w.v[0], to);
    } else if constexpr (!kOneWeight) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) to[e] = __uint_as_float(w.v[e / 4].word[e % 4]);
    }
  }
  __device__ __forceinline__ void gains(RowValues<D>& to) const {
    unpack_weights(weight_, to);
#pragma unroll
    for (int e = 0; e < kCount; ++e) to[e] = to[e] + norm_.options.weight_offset;
    if (parity_weight()) round(to);
  }

  /// The subtree of the squares of this thread's vector.
  static __device__ __forceinline__ float squares(const RowValues<D>& x) {
    RowValues<D> t;
#pragma unroll
    for (int e = 0; e < kCount; ++e) t[e] = x[e] * x[e];
    return tree(t);
  }
  /// Multiplies by the weight, which in most modes comes before everything else. Updates the
  /// largest product.
  __device__ __forceinline__ void multiply(RowValues<D>& x, float& largest) const {
    RowValues<D> gain;
    gains(gain);
#pragma unroll
    for (int e = 0; e < kCount; ++e) x[e] = x[e] * gain[e];
    if (!needs_scale()) return;
#pragma unroll
    for (int e = 0; e < kCount; ++e) largest = larger_magnitude(largest, x[e]);
  }
  __device__ __forceinline__ float centered_squares(const RowValues<D>& x, uint32_t i) const {
    RowValues<D> t;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      const float d = uint64_t{i} * kCount + e < norm_.cols ? x[e] - mean_ : 0;
      t[e] = d * d;
    }
    return tree(t);
  }

  /// Completes the statistics from the sum of squares and the largest product with the weight.
  __device__ __forceinline__ void complete(const RowTotal& t) {
    inverse_ = 1.0f / sqrtf(t.sum / static_cast<float>(norm_.cols) + norm_.options.eps);
    largest_ = largest_result(t.largest);
  }
  /// The largest result, from the largest product with the weight.
  __device__ __forceinline__ uint32_t largest_result(uint32_t product) const {
    const float largest = float_of(product) * inverse_;
    const bool parity = asked_.options().rounding != Rounding::fp32;
    return magnitude(parity ? rounded<D>(largest) : largest);
  }

  /// The index of vector i's first element among the elements of all results.
  __device__ __forceinline__ uint64_t first_of(uint32_t i) const {
    return (norm_.first_row + row_) * norm_.cols + uint64_t{i} * kCount;
  }
  __device__ __forceinline__ void look_ahead(uint32_t i) {
    if constexpr (Results::kMaps) {
      ahead_ = map_.ahead(first_of(i), (norm_.first_row + norm_.result_rows) * norm_.cols);
    }
  }
  /// Replaces the input of normalized() by the results of vector i.
  __device__ __forceinline__ void map(RowValues<D>& x, uint32_t i) const {
    if constexpr (Results::kMaps) {
      RowValues<D> y;
      normalized(x, y);
      round(y);
      map_.apply(y, first_of(i), ahead_);
#pragma unroll
      for (int e = 0; e < kCount; ++e) x[e] = y[e];
    }
  }
  /// If the stage maps, map() must have been applied to x.
  __device__ __forceinline__ void results(const RowValues<D>& x, RowValues<D>& y) const {
    if constexpr (Results::kMaps) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) y[e] = x[e];
    } else {
      normalized(x, y);
    }
  }

  /// The normalized values. x is already multiplied by the weight, except in the modes that apply
  /// the weight last.
  __device__ __forceinline__ void normalized(const RowValues<D>& x, RowValues<D>& y) const {
    if (layer()) return layer_results(x, y);
#pragma unroll
    for (int e = 0; e < kCount; ++e) y[e] = x[e] * inverse_;
    if (asked_.options().rounding == Rounding::fp32) return;
    round(y);
    if (!parity_weight()) return;
    RowValues<D> gain;
    gains(gain);
#pragma unroll
    for (int e = 0; e < kCount; ++e) y[e] = y[e] * gain[e];
    round(y);
  }
  __device__ __forceinline__ void layer_results(const RowValues<D>& x, RowValues<D>& y) const {
    RowValues<D> gain, bias;
    unpack_weights(weight_, gain);
    unpack_weights(bias_, bias);
#pragma unroll
    for (int e = 0; e < kCount; ++e) y[e] = (x[e] - mean_) * inverse_;
    if (parity_weight()) {
      round(y);
      round(gain);
      round(bias);
    }
#pragma unroll
    for (int e = 0; e < kCount; ++e) y[e] = y[e] * gain[e];
    if (parity_weight()) round(y);
#pragma unroll
    for (int e = 0; e < kCount; ++e) y[e] = y[e] + bias[e];
  }
  __device__ __forceinline__ uint32_t largest_of(const RowValues<D>& x, uint32_t i) const {
    RowValues<D> y;
    results(x, y);
    uint32_t largest = 0;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      if (Simple || uint64_t{i} * kCount + e < norm_.cols) largest = max(largest, magnitude(y[e]));
    }
    return largest;
  }

  template <typename Sink>
  __device__ __forceinline__ void emit(const RowValues<D>& x, uint32_t i, const Sink& sink) const {
    RowValues<D> y;
    results(x, y);
    if (asked_.keeps_values()) sink.normalized(i, E::pack(y));
    if (!asked_.quantizes()) return;
    const NormOptions o = asked_.options();
    if (o.scale_mode == ScaleMode::tensor) {
      const Divisor scale(given_scale_);
#pragma unroll
      for (int e = 0; e < kCount; ++e) y[e] = scale.divide(y[e]);
    } else {
      const Scale scale = scale_of(largest_, o);
      if (leads_group<D, Simple>(norm_, i)) sink.scale(i, scale.scale);
#pragma unroll
      for (int e = 0; e < kCount; ++e) y[e] = y[e] * scale.inverse;
    }
    sink.quantized(i, quantized_bytes(y, o.quantization));
  }

  /// The largest result in the group of this thread's vector.
  __device__ __forceinline__ void measure_group(uint32_t step, RowValues<D>& x) {
    const uint32_t lanes = static_cast<uint32_t>(norm_.options.quant_group_size) / kCount;
    if (lanes > kWarpLanes) {
      measure_wide_group(step, lanes, x);
    } else {
      largest_ = largest_in_group(x, index(step));
      for (uint32_t distance = 1; distance < lanes; distance *= 2) {
        largest_ = max(largest_, __shfl_xor_sync(~0u, largest_, distance));
      }
    }
    if (from_products()) largest_ = largest_result(largest_);
  }
  /// For one vector: the largest result, or the largest product if the result follows from it.
  __device__ __forceinline__ uint32_t largest_in_group(const RowValues<D>& x, uint32_t i) const {
    if (!has(i)) return 0;
    if (!from_products()) return largest_of(x, i);
    float largest = 0;
#pragma unroll
    for (int e = 0; e < kCount; ++e) largest = larger_magnitude(largest, x[e]);
    return magnitude(largest);
  }
  /// For a group of several warps or several steps.
  __device__ __forceinline__ void measure_wide_group(uint32_t step, uint32_t lanes,
                                                     RowValues<D>& x) {
    const uint32_t width = norm_.shape.step_vectors();
    const uint32_t count = steps() > 1 && lanes > width ? lanes / width : 1;
    __shared__ uint32_t largest[kFullBlock / kWarpLanes];
    __syncthreads();  // the values of the previous step have been read
    if (threadIdx.x < kFullBlock / kWarpLanes) largest[threadIdx.x] = 0;
    __syncthreads();
    const uint32_t first = step - step % count;
#pragma unroll 1
    for (uint32_t s = first; s < first + count; ++s) {
      if (count > 1) fetch_spilled(s, x);
      atomicMax(&largest[threadIdx.x / lanes], largest_in_group(x, index(s)));
    }
    if (count > 1) fetch_spilled(step, x);
    __syncthreads();
    largest_ = largest[threadIdx.x / lanes];
  }

  // The spill memory of a long row. Each thread reads only what it has written itself.
  __device__ __forceinline__ float4* spilled(uint32_t i) const {
    const uint64_t row = uint64_t{norm_.shape.steps} * norm_.shape.step_vectors();
    return reinterpret_cast<float4*>(norm_.spill) + (blockIdx.x * row + i) * (kCount / 4);
  }
  __device__ __forceinline__ void fetch_spilled(uint32_t step, RowValues<D>& x) {
    prefetch(step);
    if (has(index(step))) unspill(index(step), x);
  }
  __device__ __forceinline__ void spill(uint32_t i, const RowValues<D>& x) const {
#pragma unroll
    for (int e = 0; e < kCount; e += 4) {
      spilled(i)[e / 4] = make_float4(x[e], x[e + 1], x[e + 2], x[e + 3]);
    }
  }
  __device__ __forceinline__ void unspill(uint32_t i, RowValues<D>& x) const {
#pragma unroll
    for (int e = 0; e < kCount; e += 4) {
      const float4 v = spilled(i)[e / 4];
      x[e] = v.x;
      x[e + 1] = v.y;
      x[e + 2] = v.z;
      x[e + 3] = v.w;
    }
  }

  const NormArguments& norm_;
  const Asked<Results::kForm.common> asked_;
  RowReduction reduction_;
  const Results map_;
  const uint32_t place_;  // of this thread's vector within a step
  uint64_t row_ = 0;      // the current row of the results
  typename Results::Ahead ahead_;
  Weights weight_;
  Weights bias_;
  float given_scale_ = 0;
  float mean_ = 0;
  float inverse_ = 0;     // 1 / root of the mean square
  uint32_t largest_ = 0;  // magnitude over the results of a row or a group
};

}  // namespace collx::cuda
