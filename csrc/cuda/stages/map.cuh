// A reduction with an epilogue: every rank applies the epilogue to the elements that it receives,
// before it stores them to its output. The ranks exchange the reduced, rounded values, not the
// results of the epilogue. The extra tensors may therefore differ between ranks.
//
// protocol/epilogue_program.h generates an epilogue as a struct `F`:
//   Arguments                            the members of EpilogueArguments that it uses
//   kDType, kResult, kExtras, kCoordinates, kEpilogueForm
//   apply(value, extras, coordinates, arguments)   for one element
//   kRounded                             whether apply() rounds to kResult; else it returns float32
#pragma once

#include "combine.cuh"
#include "values.cuh"

namespace collx::cuda {

namespace detail {

/// The coordinates of an element. next() advances to the next element.
template <typename F>
class Coordinates {
  static constexpr int kCount = F::kCoordinates;

 public:
  __device__ __forceinline__ Coordinates(const typename F::Arguments& epilogue, uint64_t first)
      : epilogue_(epilogue) {
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      const Coordinate& of = epilogue.coordinate[c];
      const uint64_t run = first / of.below;
      rest_[c] = first - run * of.below;
      at_[c] = run % of.size;
    }
  }
  __device__ __forceinline__ int64_t operator[](int c) const {
    return epilogue_.coordinate[c].start + static_cast<int64_t>(at_[c]);
  }
  __device__ __forceinline__ void next() {
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      const Coordinate& of = epilogue_.coordinate[c];
      if (++rest_[c] < of.below) continue;
      rest_[c] = 0;
      if (++at_[c] == of.size) at_[c] = 0;
    }
  }

 private:
  const typename F::Arguments& epilogue_;
  uint64_t rest_[kCount], at_[kCount];
};
template <typename F>
requires(F::kCoordinates == 0) class Coordinates<F> {
 public:
  __device__ __forceinline__ Coordinates(const typename F::Arguments&, uint64_t) {}
  __device__ __forceinline__ void next() {}
};

/// Loads the elements of an extra that correspond to the output vector whose first element is
/// `first`, for any layout. This is not inlined: a kernel calls it at each place where it takes a
/// vector, and each copy would be compiled.
template <int Size>
__device__ __noinline__ Vector load_any_extra(const ExtraTensor& extra, uint64_t first,
                                              uint64_t numel) {
  constexpr int kCount = kVectorBytes / Size;
  const auto* data = static_cast<const char*>(extra.data);
  if (extra.lies == Lies::vectors && first + kCount <= numel) {
    return ptx::ld_here(reinterpret_cast<const Vector*>(data + offset_of(extra, first) * Size));
  }
  uint64_t half[2] = {0, 0}, element = 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll 1
    for (int e = 0; e < kCount / 2; ++e) {
      const uint64_t i = first + h * (kCount / 2) + e;
      if (i >= numel) break;
      if (extra.lies != Lies::same || i == first) {
        element = load_piece(data + offset_of(extra, i) * Size, Size);
      }
      half[h] |= element << (8 * Size * e);
    }
  }
  return vector_of(half[0], half[1]);
}

/// The same, with a fast path for whole vectors whose offset is computed by reciprocals.
template <int Size>
__device__ __forceinline__ Vector load_extra(const ExtraTensor& extra, uint64_t first,
                                             uint64_t numel) {
  const bool quick = extra.lies == Lies::vectors && has_reciprocals(extra);
  if (__builtin_expect(quick && first + kVectorBytes / Size <= numel, 1)) {
    const auto* data = static_cast<const char*>(extra.data);
    return ptx::ld_here(
        reinterpret_cast<const Vector*>(data + offset_by_reciprocals(extra, first) * Size));
  }
  return load_any_extra<Size>(extra, first, numel);
}

/// The same for a form that is known at compile time. If the whole vector shares one element of the
/// extra, this loads only that element.
template <int Size, ExtraForm kForm>
__device__ __forceinline__ Vector load_known_extra(const ExtraTensor& extra, uint64_t first,
                                                   uint64_t numel) {
  if (first >= numel) return {};
  const char* from =
      static_cast<const char*>(extra.data) + offset_by_reciprocals<kForm>(extra, first) * Size;
  if constexpr (kForm.lies == Lies::vectors) {
    return ptx::ld_here(reinterpret_cast<const Vector*>(from));
  } else {
    const uint64_t element = load_piece(from, Size);
    return vector_of(element, 0);
  }
}

/// The elements of all extras for one vector of the output.
template <typename F>
class Extras {
  using Value = Elements<F::kDType>;
  using Acc = typename Value::Acc;
  static constexpr int kBytes = dtype_size(F::kDType), kRoom = F::kExtras > 0 ? F::kExtras : 1;
  static constexpr EpilogueForm kForm = F::kEpilogueForm;

 public:
  Extras() = default;
  /// Starts the loads. `first`, `numel`: elements of the output.
  __device__ __forceinline__ Extras(const typename F::Arguments& epilogue, uint64_t first,
                                    uint64_t numel) {
    for_each([&]<int X>() {
      if constexpr (kForm.whole) {
        vector_[X] = load_known_extra<kBytes, kForm.extra[X]>(epilogue.extra[X], first, numel);
      } else {
        vector_[X] = load_extra<kBytes>(epilogue.extra[X], first, numel);
      }
    });
  }

  /// The extras of element e of the vector.
  __device__ __forceinline__ void get(int e, Acc (&elements)[kRoom]) const {
    for_each([&]<int X>() {
      constexpr bool kSame = kForm.whole && kForm.extra[X].lies == Lies::same;
      elements[X] = Value::get(vector_[X], kSame ? 0 : e);
    });
  }

 private:
  template <int X = 0, typename Do>
  static __device__ __forceinline__ void for_each(Do each) {
    if constexpr (X < F::kExtras) {
      each.template operator()<X>();
      for_each<X + 1>(each);
    }
  }

  Vector vector_[kRoom];
};

/// Applies F to the elements of a vector in order: calls make(e, the result for `value(e)`).
template <typename F, typename Value, typename Make>
__device__ __forceinline__ void map(const typename F::Arguments& epilogue, uint64_t first,
                                    const Extras<F>& extras, Value value, Make make) {
  Coordinates<F> at(epilogue, first);
#pragma unroll
  for (int e = 0; e < Elements<F::kDType>::kCount; ++e) {
    typename Elements<F::kDType>::Acc elements[F::kExtras > 0 ? F::kExtras : 1];
    extras.get(e, elements);
    make(e, F::apply(value(e), elements, at, epilogue));
    at.next();
  }
}

/// Results in the layout in which they are stored. `Rounded`: the results are already values of T.
/// Otherwise they are float32, and this rounds them in pairs.
template <ValueType T, int Count, bool Rounded>
struct Packed {
  static constexpr int kBytes = kValueTypes[static_cast<int>(T)].bytes, kTotal = Count * kBytes;
  static constexpr int kWords = kTotal < 4 ? 1 : kTotal / 4;
  uint32_t word[kWords] = {};

  __device__ __forceinline__ explicit Packed(const values::Kept<T> (&y)[Count]) {
    if constexpr (is_narrow(T) && Count > 1) {
#pragma unroll
      for (int e = 0; e < Count; e += 2) {
        if constexpr (T == ValueType::float16) {
          word[e / 2] = ptx::cvt_rn_f16x2(y[e], y[e + 1]);
        } else if constexpr (Rounded) {
          word[e / 2] = __byte_perm(__float_as_uint(y[e]), __float_as_uint(y[e + 1]), 0x7632);
        } else {
          word[e / 2] = ptx::cvt_rn_bf16x2(y[e], y[e + 1]);
        }
      }
    } else {
#pragma unroll
      for (int e = 0; e < Count; ++e) {
        const uint64_t bits = bits_of(y[e]);
        const int bit = 8 * kBytes * e;
        word[bit / 32] |= static_cast<uint32_t>(bits << (bit % 32));
        if constexpr (kBytes == 8) word[bit / 32 + 1] = static_cast<uint32_t>(bits >> 32);
      }
    }
  }

  __device__ __forceinline__ uint64_t operator[](int e) const {
    if constexpr (kBytes == 8) return word[2 * e] | static_cast<uint64_t>(word[2 * e + 1]) << 32;
    return word[e * kBytes / 4] >> (8 * kBytes * e % 32);
  }

 private:
  static __device__ __forceinline__ uint64_t bits_of(values::Kept<T> y) {
    if constexpr (T == ValueType::float32) {
      return __float_as_uint(y);
    } else if constexpr (T == ValueType::bfloat16) {
      return __float_as_uint(y) >> 16;
    } else if constexpr (T == ValueType::float16) {
      return ptx::cvt_rn_f16x2(y, 0.0f);
    } else if constexpr (T == ValueType::float64) {
      return static_cast<uint64_t>(__double_as_longlong(y));
    } else {
      return static_cast<uint64_t>(y) & (~0ull >> (64 - 8 * kBytes));
    }
  }
};

}  // namespace detail

/// An output that takes reduced vectors and stores the results of the epilogue. Element i of the
/// output corresponds to element i of the reduced tensor, whatever their element sizes are.
template <typename F, bool Whole>
class MappedTensor {
  using Value = Elements<F::kDType>;
  using Arguments = typename F::Arguments;
  static constexpr EpilogueForm kForm = F::kEpilogueForm;
  static constexpr int kCount = Value::kCount;

 public:
  /// The extras, loaded while the thread waits for the reduced vector.
  using Ahead = detail::Extras<F>;
  static constexpr int kAhead = F::kExtras;

  __device__ __forceinline__ MappedTensor(void* data, uint64_t numel, const Arguments& epilogue)
      : data_(static_cast<char*>(data)), numel_(numel), epilogue_(epilogue) {}

  __device__ __forceinline__ Ahead ahead(uint64_t i) const {
    return Ahead(epilogue_, i * kCount, numel_);
  }

  __device__ __forceinline__ void store(uint64_t i, const Vector& v, const Ahead& ahead) const {
    const uint64_t first = i * kCount;
    if (first >= numel_) return;
    if constexpr (kForm.keeps) {
      DenseTensor<dtype_size(F::kDType), kForm.whole>(epilogue_.value, numel_).store(i, v);
    }
    values::Kept<F::kResult> y[kCount];
    detail::map<F>(
        epilogue_, first, ahead, [&](int e) { return Value::get(v, e); },
        [&](int e, auto made) { y[e] = made; });
    keep(first, Results(y));
  }

 private:
  using Results = detail::Packed<F::kResult, kCount, F::kRounded>;
  static constexpr int kBytes = Results::kBytes;

  __device__ __forceinline__ void keep(uint64_t first, const Results& y) const {
    constexpr int kTotal = Results::kTotal, kAligned = kTotal < 16 ? kTotal : 16;
    char* to = data_ + first * kBytes;
    const bool aligned = reinterpret_cast<uint64_t>(data_) % kAligned == 0;
    if (!Whole && (!aligned || first + kCount > numel_)) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        if (first + e < numel_) detail::store_piece(to + e * kBytes, kBytes, y[e]);
      }
      return;
    }
    const auto& word = y.word;
    if constexpr (kTotal == 2) {
      *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(word[0]);
    } else if constexpr (kTotal == 4) {
      *reinterpret_cast<uint32_t*>(to) = word[0];
    } else if constexpr (kTotal == 8) {
      *reinterpret_cast<uint2*>(to) = make_uint2(word[0], word[1]);
    } else {
#pragma unroll
      for (int q = 0; q < kTotal / 16; ++q) {
        reinterpret_cast<Vector*>(to)[q] = {
            {word[4 * q], word[4 * q + 1], word[4 * q + 2], word[4 * q + 3]}};
      }
    }
  }

  char* data_;
  uint64_t numel_;
  const Arguments& epilogue_;
};

/// Like Reduce, with outputs that apply an epilogue.
template <typename F>
struct Map : Reduce<F::kDType> {
  template <bool Whole>
  static __device__ __forceinline__ auto output(void* data, uint64_t numel,
                                                const typename F::Arguments& epilogue) {
    constexpr bool kWhole = Whole || F::kEpilogueForm.whole;
    return MappedTensor<F, kWhole>(data, numel, epilogue);
  }
  template <bool Whole>
  static __device__ __forceinline__ auto output(const Message& to,
                                                const typename F::Arguments& epilogue) {
    return output<Whole>(to.data, to.bytes / Reduce<F::kDType>::kElementBytes, epilogue);
  }
};

}  // namespace collx::cuda
