// Division by a number that many divisions share. GPUs have no instruction for it: for sm_90, a
// division of 64 bits compiles to 99 instructions, and quotient() below to 17.
#pragma once

#include "types.h"

namespace collx {

/// The upper 64 bits of a product.
COLLX_HD inline uint64_t multiply_high(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
#endif
}

/// A divisor of at least 1.
///
/// 2^64 / value - 1 <= inverse < 2^64 / value. So n * inverse / 2^64 is smaller than n / value by
/// at most n / 2^64 < 1, and the first quotient below is either right or too small by one.
struct IntegerDivisor {
  uint64_t value;
  uint64_t inverse;

  IntegerDivisor() = default;  // trivial, for shared memory
  constexpr explicit IntegerDivisor(uint64_t value) : value(value), inverse(~uint64_t{0} / value) {}

  COLLX_HD uint64_t quotient(uint64_t n) const {
    const uint64_t q = multiply_high(n, inverse);
    return n - q * value >= value ? q + 1 : q;
  }
};

}  // namespace collx
