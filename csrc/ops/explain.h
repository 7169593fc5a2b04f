// What a call would do, without making it.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/macros/Export.h>

#include <cstdint>
#include <string_view>

#include "../protocol/call.h"

namespace collx {

class Communicator;

struct Explanation {
  Plan plan;
  uint64_t chunks;           // uses of the payload buffer that the call takes
  uint64_t bytes;            // of the full tensor
  uint64_t workspace_bytes;  // of the payload buffer, if the call is not done in chunks
};

/// Additional options of a fused normalization, as far as they affect how it is executed.
struct NormWishes {
  std::string_view rounding = "fp32";
  std::string_view scale_mode = "row";
  int64_t quant_group_size = 128;
  bool keep_norm = false;

  bool operator==(const NormWishes&) const = default;
};

/// A call of `op` on `numel` elements, the last axis of `cols`. ValueError and TypeError as the
/// call itself raises them.
C10_EXPORT Explanation explain(const Communicator& communicator, std::string_view op,
                               uint64_t numel, uint64_t cols, at::ScalarType dtype,
                               bool input_symmetric, bool output_symmetric,
                               std::string_view algorithm, int64_t max_blocks,
                               const NormWishes& wishes);

/// Bytes of the payload buffer that a call occupies at a time. "auto": the most that a device's
/// selection may choose.
C10_EXPORT uint64_t workspace_bytes(std::string_view op, uint64_t numel, uint64_t cols,
                                    at::ScalarType dtype, int world_size,
                                    std::string_view algorithm, bool symmetric);

}  // namespace collx
