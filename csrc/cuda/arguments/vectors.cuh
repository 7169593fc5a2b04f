// Tensors, and messages within them, in 16-byte vectors, for any length and any alignment of
// elements. The last vector may be partial. Bytes past the end read as zero and are never written
// (hazard 19).
#pragma once

#include "../ptx/memory.cuh"
#include "kernel_call.cuh"

namespace collx::cuda {

namespace detail {

// VECTORS AT ANY ADDRESS. An access of 16 bytes must be aligned. A vector at another address is
// shifted out of the two aligned vectors that contain it. Usually the next thread loads the second
// one as its first one, and passes it on. In the same way, a thread stores the aligned vector
// between the beginning of its own vector and the end of the next thread's vector. The bytes at
// both ends of a warp are stored in pieces.
//
// BOUNDS. No byte before the first or after the last byte of a tensor is accessed, and only bytes
// of the tensor's runs are written. Loads may include bytes of a gap, which nothing uses.

/// A tensor of one run: see Runs.
struct DenseRun {
  char* data;
  uint64_t bytes;
};
__device__ __forceinline__ Runs runs_of(const DenseRun& run) {
  return {run.data, run.bytes, 0, {}};
}
__device__ __forceinline__ const Runs& runs_of(const Runs& runs) { return runs; }

__device__ __forceinline__ uint32_t low_bits(const void* p) {
  return static_cast<uint32_t>(reinterpret_cast<uint64_t>(p));
}

/// Bytes from an address to the next aligned vector.
__device__ __forceinline__ uint32_t split_of(const void* p) { return -low_bits(p) % kVectorBytes; }

/// The aligned vector that contains a byte.
__device__ __forceinline__ const Vector* first_of(const char* p) {
  return reinterpret_cast<const Vector*>(p - low_bits(p) % kVectorBytes);
}

/// A byte of a tensor, and the number of bytes around it.
struct Location {
  __device__ __forceinline__ Location(const Runs& runs, uint64_t offset) {
    const uint64_t run = runs.gap == 0 ? 0 : runs.width.quotient(offset);
    at = runs.data + offset + run * runs.gap;
    before_all = offset;
    after_all = runs.bytes - offset;
    after = runs.gap == 0 ? after_all : (run + 1) * runs.width.value - offset;
  }

  /// Whether a vector here is in one run, and the aligned vectors that contain bytes of it lie
  /// between the first and the last byte of the tensor.
  __device__ __forceinline__ bool can_load() const {
    const uint32_t split = split_of(at);
    return after >= kVectorBytes && after_all >= kVectorBytes + split &&
           (split == 0 || before_all > kVectorBytes - 1 - split);
  }

  char* at;
  uint64_t before_all, after_all;  // of the tensor
  uint64_t after;                  // of the run; these two include the byte itself
};

/// The 16 bytes that begin `skip` < 16 bytes after the beginning of `low`, which `high` continues.
__device__ __forceinline__ Vector shifted(const Vector& low, const Vector& high, uint32_t skip) {
  uint32_t word[6], middle[5];
#pragma unroll
  for (int w = 0; w < 6; ++w) {
    const uint32_t far = w < 2 ? low.word[w + 2] : high.word[w - 2];
    word[w] = skip & 8 ? far : w < 4 ? low.word[w] : high.word[w - 4];
  }
#pragma unroll
  for (int w = 0; w < 5; ++w) middle[w] = skip & 4 ? word[w + 1] : word[w];
  Vector v;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    v.word[w] = __funnelshift_r(middle[w], middle[w + 1], 8 * (skip & 3));
  }
  return v;
}

/// The threads of a warp that execute the same access, and those of them with adjacent vectors.
class Neighbors {
 public:
  /// `at`: the address of this thread's vector. It orders the accesses of all these threads before
  /// it, because a thread then reads or writes bytes of the vector of another one.
  __device__ __forceinline__ explicit Neighbors(const char* at)
      : threads_(__activemask()), lane_(threadIdx.x % kWarpLanes) {
    __syncwarp(threads_);
    const auto address = reinterpret_cast<uint64_t>(at);
    const uint64_t next = __shfl_down_sync(threads_, address, 1);
    const bool here = threads_ >> lane_ >> 1 & 1;
    pairs_ = __ballot_sync(threads_, here && next == address + kVectorBytes);
  }

  /// Whether the next thread has the vector after this one, or the previous thread the one before.
  __device__ __forceinline__ bool next() const { return pairs_ >> lane_ & 1; }
  __device__ __forceinline__ bool previous() const { return pairs_ << 1 >> lane_ & 1; }

  /// The vector of the next thread.
  __device__ __forceinline__ Vector of_next(const Vector& v) const {
    Vector of;
#pragma unroll
    for (int w = 0; w < 4; ++w) of.word[w] = __shfl_down_sync(threads_, v.word[w], 1);
    return of;
  }

  /// Orders the accesses of these threads before those that follow.
  __device__ __forceinline__ void sync() const { __syncwarp(threads_); }

 private:
  uint32_t threads_;
  uint32_t lane_;
  uint32_t pairs_;
};

// Volatile: these also load from peers, and bypass the L1 cache.
__device__ __forceinline__ uint64_t load_piece(const volatile char* from, uint32_t bytes) {
  if (bytes == 8) return *reinterpret_cast<const volatile uint64_t*>(from);
  if (bytes == 4) return *reinterpret_cast<const volatile uint32_t*>(from);
  if (bytes == 2) return *reinterpret_cast<const volatile uint16_t*>(from);
  return *reinterpret_cast<const volatile uint8_t*>(from);
}

__device__ __forceinline__ void store_piece(char* to, uint32_t bytes, uint64_t piece) {
  if (bytes == 8) {
    *reinterpret_cast<uint64_t*>(to) = piece;
  } else if (bytes == 4) {
    *reinterpret_cast<uint32_t*>(to) = static_cast<uint32_t>(piece);
  } else if (bytes == 2) {
    *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(piece);
  } else {
    *to = static_cast<char>(piece);
  }
}

/// Calls f(address, bytes, half of the vector, bit in that half) for the pieces of vector i:
/// aligned powers of two of at most 8 bytes, in one run and in one half.
template <typename F>
__device__ __forceinline__ void for_pieces(const Runs& runs, uint64_t i, F f) {
  const uint64_t offset = i * kVectorBytes, left = runs.bytes - offset;
  const uint32_t end = left < kVectorBytes ? static_cast<uint32_t>(left) : kVectorBytes;
#pragma unroll 1
  for (uint32_t at = 0; at < end;) {
    const Location place(runs, offset + at);
    const uint32_t from = at, to = place.after < end - at ? at + place.after : end;
#pragma unroll 1
    for (uint32_t bytes; at < to; at += bytes) {
      char* address = place.at + (at - from);
      const uint32_t most = min(to - at, 8 - at % 8);
      bytes = 1u << min(31 - __clz(most), __ffs(low_bits(address) | 8) - 1);
      f(address, bytes, at / 8, at % 8 * 8);
    }
  }
}

/// `peer`: loads from a peer's memory, bypassing the L1 cache.
__device__ __forceinline__ Vector load(const Vector* from, bool peer) {
  return peer ? ptx::ld_relaxed_sys(from) : ptx::ld_here(from);
}

/// The 16 bytes at an address, without the other threads.
__device__ __forceinline__ Vector load_alone(const char* at, bool peer) {
  const uint32_t split = split_of(at);
  const Vector first = load(first_of(at), peer);
  if (split == 0) return first;
  return shifted(first, load(reinterpret_cast<const Vector*>(at + split), peer),
                 -split % kVectorBytes);
}

/// A vector in two runs, or at an end of the tensor.
__device__ __forceinline__ Vector load_rest(const Runs& runs, uint64_t i, bool peer) {
  const Location place(runs, i * kVectorBytes);
  // The aligned vectors around both parts lie between the first and the last byte of the tensor.
  const bool inside = place.before_all >= kVectorBytes && place.after_all >= 3 * kVectorBytes;
  if (inside && runs.width.value >= kVectorBytes && place.after < kVectorBytes) {
    const auto here = static_cast<uint32_t>(place.after);
    const Vector end = load_alone(place.at, peer);
    const Vector begin = load_alone(place.at + place.after + runs.gap, peer);
    return shifted(shifted({}, end, here), begin, kVectorBytes - here);
  }
  uint64_t low = 0, high = 0;
  for_pieces(runs, i, [&](const char* from, uint32_t bytes, uint32_t half, uint32_t bit) {
    (half == 0 ? low : high) |= load_piece(from, bytes) << bit;
  });
  return vector_of(low, high);
}

/// Stores the first n < 16 bytes of v to an aligned address.
__device__ __forceinline__ void store_front(char* to, const Vector& v, uint32_t n) {
  if (n & 8) *reinterpret_cast<uint64_t*>(to) = half_of(v, 0);
  const uint64_t half = n & 8 ? half_of(v, 1) : half_of(v, 0);
  to += n & 8;
  if (n & 4) *reinterpret_cast<uint32_t*>(to) = static_cast<uint32_t>(half);
  const auto word = static_cast<uint32_t>(n & 4 ? half >> 32 : half);
  to += n & 4;
  if (n & 2) *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(word);
  if (n & 1) to[n & 2] = static_cast<char>(n & 2 ? word >> 16 : word);
}

/// Stores the last n < 16 bytes of v before an aligned address.
__device__ __forceinline__ void store_back(char* end, const Vector& v, uint32_t n) {
  if (n & 8) *reinterpret_cast<uint64_t*>(end - 8) = half_of(v, 1);
  const uint64_t half = n & 8 ? half_of(v, 0) : half_of(v, 1);
  end -= n & 8;
  if (n & 4) *reinterpret_cast<uint32_t*>(end - 4) = static_cast<uint32_t>(half >> 32);
  const auto word = static_cast<uint32_t>(n & 4 ? half : half >> 32);
  end -= n & 4;
  if (n & 2) *reinterpret_cast<uint16_t*>(end - 2) = static_cast<uint16_t>(word >> 16);
  if (n & 1) *(end - (n & 2) - 1) = static_cast<char>(n & 2 ? word >> 8 : word >> 24);
}

/// The 16 bytes at an address, of which `first` is the first aligned vector.
__device__ __forceinline__ Vector completed(const char* at, const Neighbors& neighbors,
                                            const Vector& first, bool peer) {
  const uint32_t split = split_of(at);
  Vector second;
  const bool loads = split > 0 && !neighbors.next();
  if (loads) second = load(reinterpret_cast<const Vector*>(at + split), peer);
  const Vector passed = neighbors.of_next(first);
  if (!loads) second = passed;
  return shifted(first, second, -split % kVectorBytes);
}

// These are calls instead of inlined code: each kernel would contain many copies of them, which
// take time to compile. `Given`: DenseRun or Runs. They are passed by value, because the address of
// a kernel argument makes all accesses to it slow.

template <typename Given>
__device__ __noinline__ Vector begin_rest(Given given, uint64_t i) {
  return load_rest(runs_of(given), i, false);
}
template <typename Given>
__device__ __noinline__ Vector end_load(Given given, uint64_t i, Vector begun) {
  const Location place(runs_of(given), i * kVectorBytes);
  return place.can_load() ? completed(place.at, Neighbors(place.at), begun, false) : begun;
}
template <typename Given>
__device__ __noinline__ Vector load(Given given, uint64_t i, bool peer) {
  const auto& runs = runs_of(given);
  const Location place(runs, i * kVectorBytes);
  if (!place.can_load()) return load_rest(runs, i, peer);
  const Neighbors neighbors(place.at);
  return completed(place.at, neighbors, load(first_of(place.at), peer), peer);
}
template <typename Given>
__device__ __noinline__ void store(Given given, uint64_t i, Vector v) {
  const auto& runs = runs_of(given);
  const Location place(runs, i * kVectorBytes);
  if (place.after < kVectorBytes) {
    const uint64_t low = half_of(v, 0), high = half_of(v, 1);
    return for_pieces(runs, i, [&](char* at, uint32_t bytes, uint32_t half, uint32_t bit) {
      store_piece(at, bytes, (half == 0 ? low : high) >> bit);
    });
  }
  const uint32_t split = split_of(place.at);
  char* const to = place.at + split;
  const Neighbors neighbors(place.at);
  const Vector second = shifted(v, neighbors.of_next(v), split);
  if (neighbors.next() || split == 0) {
    *reinterpret_cast<Vector*>(to) = second;
  } else {
    store_front(to, second, kVectorBytes - split);
  }
  if (!neighbors.previous() && split > 0) store_back(to, shifted({}, v, split), split);
  neighbors.sync();
}

}  // namespace detail

/// Reads and writes any tensor by vectors. A `Tensor` has these members: has(i), whether vector i
/// begins before the end; whole(i), whether it is aligned and complete; runs(); address(offset), of
/// a byte.
template <typename Tensor>
class VectorAccess {
 public:
  __device__ __forceinline__ uint64_t vectors() const {
    return ceil_div<uint64_t>(self().runs().bytes, kVectorBytes);
  }

  /// The load is issued where it is written: see ld_here.
  __device__ __forceinline__ Vector load(uint64_t i) const { return load_from<false>(i); }
  /// Loads from a peer's tensor, bypassing the L1 cache.
  __device__ __forceinline__ Vector load_peer(uint64_t i) const { return load_from<true>(i); }

  /// A load in two parts. If a thread begins several loads before it ends the first one, all of
  /// them are in flight at once. A call would wait for them, so the common cases make none.
  __device__ __forceinline__ Vector begin_load(uint64_t i) const {
    if (!self().has(i)) return {};
    if (__builtin_expect(self().whole(i), 1)) return ptx::ld_here(vector(i));
    const auto given = self().runs();
    const detail::Location place(detail::runs_of(given), i * kVectorBytes);
    if (place.can_load()) return ptx::ld_here(detail::first_of(place.at));
    return detail::begin_rest(given, i);
  }
  /// `begun`: the result of begin_load().
  __device__ __forceinline__ Vector end_load(uint64_t i, const Vector& begun) const {
    if (!self().has(i) || __builtin_expect(self().whole(i), 1)) return begun;
    return detail::end_load(self().runs(), i, begun);
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
      detail::store(self().runs(), i, v);
    }
  }

 private:
  __device__ __forceinline__ const Tensor& self() const {
    return static_cast<const Tensor&>(*this);
  }
  __device__ __forceinline__ Vector* vector(uint64_t i) const {
    return reinterpret_cast<Vector*>(self().address(i * kVectorBytes));
  }
  template <bool Peer>
  __device__ __forceinline__ Vector load_from(uint64_t i) const {
    if (!self().has(i)) return {};
    if (__builtin_expect(self().whole(i), 1)) return detail::load(vector(i), Peer);
    return detail::load(self().runs(), i, Peer);
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
  __device__ __forceinline__ char* address(uint64_t offset) const { return data_ + offset; }
  __device__ __forceinline__ detail::DenseRun runs() const { return {data_, bytes_}; }

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
  __device__ __forceinline__ char* address(uint64_t offset) const {
    return Simple ? m_.data + offset : m_.address(offset);
  }
  __device__ __forceinline__ Runs runs() const { return m_; }

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
