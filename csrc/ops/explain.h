// Explains how a call would be executed, without executing it.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/macros/Export.h>

#include <cstdint>
#include <string_view>

#include "../protocol/call.h"

namespace collx {

class Communicator;
struct TuningEntry;

struct Explanation {
  Plan plan;
  uint64_t chunks;           // uses of the payload buffer that the call takes
  uint64_t bytes;            // of the full tensor
  uint64_t workspace_bytes;  // of the payload buffer, if the call runs in a single use
  const TuningEntry* entry;  // the entry that chose the plan; null: the call or the built-in table
};

/// The options of a fused normalization that affect how it is executed.
struct NormWishes {
  std::string_view rounding = "fp32";
  std::string_view scale_mode = "row";
  int64_t quant_group_size = 128;
  bool keep_norm = false;

  bool operator==(const NormWishes&) const = default;
};

/// Explains a call of `op` on `numel` elements whose last axis has size `cols`. Raises the same
/// ValueError and TypeError as the call itself.
C10_EXPORT Explanation explain(const Communicator& communicator, std::string_view op,
                               uint64_t numel, uint64_t cols, at::ScalarType dtype,
                               bool input_symmetric, bool output_symmetric,
                               std::string_view algorithm, int64_t max_blocks,
                               const NormWishes& wishes);

/// Bytes of the payload buffer that a call occupies at a time. For "auto", the maximum over the
/// selections of all devices.
C10_EXPORT uint64_t workspace_bytes(std::string_view op, uint64_t numel, uint64_t cols,
                                    at::ScalarType dtype, int world_size,
                                    std::string_view algorithm, bool symmetric);

}  // namespace collx
