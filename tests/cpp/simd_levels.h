// The levels of vector instructions.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "cpu/simd/reduce_kernels.h"

namespace collx::cpu {

/// Runs `body` at each level that this machine supports, and then restores the level.
template <typename Body>
void at_every_level(Body body) {
  const SimdLevel before = simd_level();
  for (const SimdLevel level : {SimdLevel::portable, SimdLevel::avx2, SimdLevel::avx512}) {
    if (!set_simd_level(level)) continue;
    SCOPED_TRACE("level " + std::to_string(int(level)));
    body();
  }
  set_simd_level(before);
}

}  // namespace collx::cpu
