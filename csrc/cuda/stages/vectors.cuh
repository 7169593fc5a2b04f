// A dense tensor in 16-byte vectors: any length, any alignment of its elements. The last vector
// may be partial; what lies behind the end reads as zero and is never written (hazard 19).
#pragma once

#include "../ptx/memory.cuh"

namespace collx::cuda {

namespace detail {
template <int Size>
struct Unsigned;
template <>
struct Unsigned<1> {
  using type = uint8_t;
};
template <>
struct Unsigned<2> {
  using type = uint16_t;
};
template <>
struct Unsigned<4> {
  using type = uint32_t;
};
template <>
struct Unsigned<8> {
  using type = uint64_t;
};

// Element by element, the first `present` of a vector. Loops instead of straight code, and no
// call: this is rare, and must not cost the common path registers.
template <int Size>
__device__ __forceinline__ Vector load_elements(const char* data, int present) {
  const auto* from = reinterpret_cast<const volatile typename Unsigned<Size>::type*>(data);
  Vector v{};
  if constexpr (Size == 8) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint64_t element = e < present ? from[e] : 0;
      v.word[2 * e] = static_cast<uint32_t>(element);
      v.word[2 * e + 1] = static_cast<uint32_t>(element >> 32);
    }
  } else {
    constexpr int per_word = 4 / Size;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
#pragma unroll 1
      for (int e = 0; e < per_word && w * per_word + e < present; ++e) {
        v.word[w] |= static_cast<uint32_t>(from[w * per_word + e]) << (e * Size * 8);
      }
    }
  }
  return v;
}

template <int Size>
__device__ __forceinline__ void store_elements(char* data, int present, Vector v) {
  using Element = typename Unsigned<Size>::type;
  auto* to = reinterpret_cast<Element*>(data);
  if constexpr (Size == 8) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (e < present) to[e] = v.word[2 * e] | static_cast<uint64_t>(v.word[2 * e + 1]) << 32;
    }
  } else {
    constexpr int per_word = 4 / Size;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
#pragma unroll 1
      for (int e = 0; e < per_word && w * per_word + e < present; ++e) {
        to[w * per_word + e] = static_cast<Element>(v.word[w] >> (e * Size * 8));
      }
    }
  }
}

}  // namespace detail

/// `Size`: bytes of an element. `Whole`: known to be aligned and of whole vectors. Works on this
/// rank's tensors and on those of peers, whose bytes are loaded past the first-level cache
/// (relaxed, system scope).
template <int Size, bool Whole = false>
class VectorTensor {
 public:
  __device__ VectorTensor(const void* data, uint64_t numel)
      : data_(static_cast<char*>(const_cast<void*>(data))),
        bytes_(numel * Size),
        aligned_((reinterpret_cast<uint64_t>(data) & (kVectorBytes - 1)) == 0) {}

  __device__ uint64_t vectors() const { return ceil_div<uint64_t>(bytes_, kVectorBytes); }

  __device__ __forceinline__ Vector load(uint64_t i) const {
    if (__builtin_expect(whole(i), 1)) return ptx::ld_here(vector(i));
    return detail::load_elements<Size>(data_ + i * kVectorBytes, present(i));
  }
  __device__ __forceinline__ Vector load_peer(uint64_t i) const {
    if (__builtin_expect(whole(i), 1)) return ptx::ld_relaxed_sys(vector(i));
    return detail::load_elements<Size>(data_ + i * kVectorBytes, present(i));
  }
  __device__ __forceinline__ void store(uint64_t i, Vector v) const {
    if (__builtin_expect(whole(i), 1)) {
      *vector(i) = v;
    } else {
      detail::store_elements<Size>(data_ + i * kVectorBytes, present(i), v);
    }
  }

 private:
  __device__ __forceinline__ bool whole(uint64_t i) const {
    return Whole || (aligned_ && (i + 1) * kVectorBytes <= bytes_);
  }
  __device__ __forceinline__ Vector* vector(uint64_t i) const {
    return reinterpret_cast<Vector*>(data_) + i;
  }
  __device__ __forceinline__ int present(uint64_t i) const {
    const uint64_t left = bytes_ - i * kVectorBytes;
    return left < kVectorBytes ? static_cast<int>(left / Size) : kVectorBytes / Size;
  }

  char* data_;
  uint64_t bytes_;
  bool aligned_;
};

}  // namespace collx::cuda
