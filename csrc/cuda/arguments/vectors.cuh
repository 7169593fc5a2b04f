// Tensors, and messages within them, in 16-byte vectors, for any length and any alignment of
// elements. The last vector may be partial. Bytes past the end read as zero and are never written
// (hazard 19).
#pragma once

#include "../ptx/memory.cuh"
#include "kernel_call.cuh"

namespace collx::cuda {

namespace detail {

/// Calls f(address, half of the vector, bit in that half) for each element of vector i. It is a
/// loop instead of unrolled code: this path is rare, and each kernel has many copies of it, which
/// must not take registers from the common path.
template <typename Tensor, typename F>
__device__ __forceinline__ void for_elements(const Tensor& tensor, uint64_t i, F f) {
  const uint64_t offset = i * kVectorBytes;
#pragma unroll 1
  for (uint32_t at = 0; at < kVectorBytes && offset + at < tensor.bytes(); at += tensor.unit()) {
    f(tensor.place(offset + at), at / 8, at % 8 * 8);
  }
}

// Volatile: these also load from peers, and bypass the L1 cache.
__device__ __forceinline__ uint64_t load_element(const volatile char* from, uint32_t unit) {
  if (unit == 8) return *reinterpret_cast<const volatile uint64_t*>(from);
  if (unit == 4) return *reinterpret_cast<const volatile uint32_t*>(from);
  if (unit == 2) return *reinterpret_cast<const volatile uint16_t*>(from);
  return *reinterpret_cast<const volatile uint8_t*>(from);
}

__device__ __forceinline__ void store_element(char* to, uint32_t unit, uint64_t element) {
  if (unit == 8) {
    *reinterpret_cast<uint64_t*>(to) = element;
  } else if (unit == 4) {
    *reinterpret_cast<uint32_t*>(to) = static_cast<uint32_t>(element);
  } else if (unit == 2) {
    *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(element);
  } else {
    *to = static_cast<char>(element);
  }
}

template <typename Tensor>
__device__ __forceinline__ Vector load_elements(const Tensor& tensor, uint64_t i) {
  uint64_t low = 0, high = 0;
  for_elements(tensor, i, [&](const char* from, uint32_t half, uint32_t bit) {
    (half == 0 ? low : high) |= load_element(from, tensor.unit()) << bit;
  });
  return vector_of(low, high);
}

template <typename Tensor>
__device__ __forceinline__ void store_elements(const Tensor& tensor, uint64_t i, Vector v) {
  const uint64_t low = half_of(v, 0), high = half_of(v, 1);
  for_elements(tensor, i, [&](char* to, uint32_t half, uint32_t bit) {
    store_element(to, tensor.unit(), (half == 0 ? low : high) >> bit);
  });
}

}  // namespace detail

/// Reads and writes any tensor by vectors. A `Tensor` has these members: has(i), whether vector i
/// begins before the end; whole(i), whether it is aligned and complete; place(offset), the address
/// of a byte; bytes(), its size; unit(), the size of an element.
template <typename Tensor>
class VectorAccess {
 public:
  __device__ __forceinline__ uint64_t vectors() const {
    return ceil_div<uint64_t>(self().bytes(), kVectorBytes);
  }

  /// The load is issued where it is written: see ld_here.
  __device__ __forceinline__ Vector load(uint64_t i) const {
    if (!self().has(i)) return {};
    if (__builtin_expect(self().whole(i), 1)) return ptx::ld_here(vector(i));
    return detail::load_elements(self(), i);
  }
  /// Loads from a peer's tensor, bypassing the L1 cache.
  __device__ __forceinline__ Vector load_peer(uint64_t i) const {
    if (!self().has(i)) return {};
    if (__builtin_expect(self().whole(i), 1)) return ptx::ld_relaxed_sys(vector(i));
    return detail::load_elements(self(), i);
  }
  /// A store requires no additional loads.
  struct Ahead {};
  static constexpr int kAhead = 0;
  __device__ __forceinline__ Ahead ahead(uint64_t /*i*/) const { return {}; }
  __device__ __forceinline__ void store(uint64_t i, Vector v, Ahead = {}) const {
    if (!self().has(i)) return;
    if (__builtin_expect(self().whole(i), 1)) {
      *vector(i) = v;
    } else {
      detail::store_elements(self(), i, v);
    }
  }

 private:
  __device__ __forceinline__ const Tensor& self() const {
    return static_cast<const Tensor&>(*this);
  }
  __device__ __forceinline__ Vector* vector(uint64_t i) const {
    return reinterpret_cast<Vector*>(self().place(i * kVectorBytes));
  }
};

/// A dense tensor with elements of `Size` bytes. Vectors past its last one are never accessed.
/// `Whole`: the tensor is known to be aligned and to consist of whole vectors.
template <int Size, bool Whole = false>
class DenseTensor : public VectorAccess<DenseTensor<Size, Whole>> {
 public:
  __device__ DenseTensor(const void* data, uint64_t numel)
      : data_(static_cast<char*>(const_cast<void*>(data))),
        bytes_(numel * Size),
        aligned_((reinterpret_cast<uint64_t>(data) & (kVectorBytes - 1)) == 0) {}

  __device__ __forceinline__ bool has(uint64_t /*i*/) const { return true; }
  __device__ __forceinline__ bool whole(uint64_t i) const {
    return Whole || (aligned_ && (i + 1) * kVectorBytes <= bytes_);
  }
  __device__ __forceinline__ char* place(uint64_t offset) const { return data_ + offset; }
  __device__ __forceinline__ uint64_t bytes() const { return bytes_; }
  static __device__ __forceinline__ constexpr uint32_t unit() { return Size; }

 private:
  char* data_;
  uint64_t bytes_;
  bool aligned_;
};

/// Accesses a message as a tensor. `Simple`: the message is one run of whole vectors.
template <bool Simple = false>
class Run : public VectorAccess<Run<Simple>> {
 public:
  __device__ __forceinline__ explicit Run(const Message& m) : m_(m) {}

  __device__ __forceinline__ bool has(uint64_t i) const { return i * kVectorBytes < m_.bytes; }
  __device__ __forceinline__ bool whole(uint64_t i) const {
    return Simple || (m_.whole && (i + 1) * kVectorBytes <= m_.bytes);
  }
  __device__ __forceinline__ char* place(uint64_t offset) const {
    if (Simple || m_.gap == 0) return m_.data + offset;
    return m_.data + offset + m_.width.quotient(offset) * m_.gap;
  }
  __device__ __forceinline__ uint64_t bytes() const { return m_.bytes; }
  __device__ __forceinline__ uint32_t unit() const { return m_.unit; }

 private:
  const Message& m_;
};

template <bool Simple = false>
__device__ __forceinline__ Vector load(const Message& m, uint64_t i) {
  return Run<Simple>(m).load(i);
}
template <bool Simple = false>
__device__ __forceinline__ void store(const Message& m, uint64_t i, Vector v) {
  Run<Simple>(m).store(i, v);
}

/// Copies a slice of a message within this rank, by all threads of the grid. It does nothing if the
/// message has no destination: in an in-place call the data is already there.
template <bool Simple = false>
__device__ __forceinline__ void copy_own(const Message& from, const Message& to, Slice slice = {}) {
  if (to.bytes == 0) return;
  for_own(
      Run<Simple>(from).vectors(), [&](uint64_t i) { store<Simple>(to, i, load<Simple>(from, i)); },
      slice);
}

template <bool Simple = false>
__device__ __forceinline__ void clear(const Message& m, Slice slice = {}) {
  for_own(
      Run<Simple>(m).vectors(), [&](uint64_t i) { store<Simple>(m, i, Vector{}); }, slice);
}

}  // namespace collx::cuda
