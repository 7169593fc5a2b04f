// A message inside of a tensor, in 16-byte vectors of its bytes: runs of any length and alignment.
// What lies behind its end reads as zero and is never written (hazard 19).
#pragma once

#include "../ptx/memory.cuh"
#include "../transports/kernel_call.cuh"

namespace collx::cuda {

namespace detail {

__device__ __forceinline__ char* place(const Message& m, uint64_t offset) {
  return m.width == m.bytes ? m.data + offset
                            : m.data + offset / m.width * m.pitch + offset % m.width;
}

// Element by element. Loops instead of straight code, and no call: this is rare, and must not cost
// the common path registers.
__device__ __forceinline__ Vector load_units(const Message& m, uint64_t offset) {
  uint64_t half[2] = {0, 0};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll 1
    for (uint32_t at = 0; at < 8 && offset + 8 * h + at < m.bytes; at += m.unit) {
      const volatile char* from = place(m, offset + 8 * h + at);
      uint64_t element;
      if (m.unit == 8) {
        element = *reinterpret_cast<const volatile uint64_t*>(from);
      } else if (m.unit == 4) {
        element = *reinterpret_cast<const volatile uint32_t*>(from);
      } else if (m.unit == 2) {
        element = *reinterpret_cast<const volatile uint16_t*>(from);
      } else {
        element = *reinterpret_cast<const volatile uint8_t*>(from);
      }
      half[h] |= element << 8 * at;
    }
  }
  return {{static_cast<uint32_t>(half[0]), static_cast<uint32_t>(half[0] >> 32),
           static_cast<uint32_t>(half[1]), static_cast<uint32_t>(half[1] >> 32)}};
}

__device__ __forceinline__ void store_units(const Message& m, uint64_t offset, Vector v) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint64_t half = v.word[2 * h] | static_cast<uint64_t>(v.word[2 * h + 1]) << 32;
#pragma unroll 1
    for (uint32_t at = 0; at < 8 && offset + 8 * h + at < m.bytes; at += m.unit) {
      char* to = place(m, offset + 8 * h + at);
      const uint64_t element = half >> 8 * at;
      if (m.unit == 8) {
        *reinterpret_cast<uint64_t*>(to) = element;
      } else if (m.unit == 4) {
        *reinterpret_cast<uint32_t*>(to) = static_cast<uint32_t>(element);
      } else if (m.unit == 2) {
        *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(element);
      } else {
        *to = static_cast<char>(element);
      }
    }
  }
}

}  // namespace detail

/// `Simple`: one run of whole aligned vectors. The loads are where they are written: see ld_here.
template <bool Simple = false>
__device__ __forceinline__ Vector load(const Message& m, uint64_t i) {
  const uint64_t offset = i * kVectorBytes;
  if (offset >= m.bytes) return {};
  if constexpr (Simple) return ptx::ld_here(reinterpret_cast<const Vector*>(m.data + offset));
  if (__builtin_expect(m.whole && offset + kVectorBytes <= m.bytes, 1)) {
    return ptx::ld_here(reinterpret_cast<const Vector*>(detail::place(m, offset)));
  }
  return detail::load_units(m, offset);
}

/// From a peer's tensor, past the first-level cache.
__device__ __forceinline__ Vector load_peer(const Message& m, uint64_t i) {
  const uint64_t offset = i * kVectorBytes;
  if (offset >= m.bytes) return {};
  if (__builtin_expect(m.whole && offset + kVectorBytes <= m.bytes, 1)) {
    return ptx::ld_relaxed_sys(reinterpret_cast<const Vector*>(detail::place(m, offset)));
  }
  return detail::load_units(m, offset);
}

template <bool Simple = false>
__device__ __forceinline__ void store(const Message& m, uint64_t i, Vector v) {
  const uint64_t offset = i * kVectorBytes;
  if (offset >= m.bytes) return;
  if constexpr (Simple) {
    *reinterpret_cast<Vector*>(m.data + offset) = v;
  } else if (__builtin_expect(m.whole && offset + kVectorBytes <= m.bytes, 1)) {
    *reinterpret_cast<Vector*>(detail::place(m, offset)) = v;
  } else {
    detail::store_units(m, offset, v);
  }
}

__device__ __forceinline__ uint64_t vectors_of(const Message& m) {
  return ceil_div<uint64_t>(m.bytes, kVectorBytes);
}

/// Copies a message within this rank, by all threads of the grid.
template <bool Simple = false>
__device__ __forceinline__ void copy_own(const Message& from, const Message& to) {
  const uint64_t stride = gridDim.x * blockDim.x;
  for (uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < vectors_of(from); i += stride) {
    store<Simple>(to, i, load<Simple>(from, i));
  }
}

template <bool Simple = false>
__device__ __forceinline__ void clear(const Message& m) {
  const uint64_t stride = gridDim.x * blockDim.x;
  for (uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < vectors_of(m); i += stride) {
    store<Simple>(m, i, Vector{});
  }
}

}  // namespace collx::cuda
