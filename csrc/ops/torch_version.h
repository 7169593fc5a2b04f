// Where the supported versions of PyTorch differ. Nothing else in the tree asks which one it is.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace collx {

/// PyTorch has it as a string, or as a view of one.
inline std::string dtype_name(at::ScalarType type) {
  return std::string(c10::getDtypeNames(type).first);
}

/// All ranks' `input`, one after the other. The newer name where the group knows it: there the
/// older one is deprecated.
template <typename Group = c10d::ProcessGroup>
c10::intrusive_ptr<c10d::Work> all_gather(Group& group, at::Tensor& output, at::Tensor& input,
                                          const c10d::AllgatherOptions& options) {
  if constexpr (requires { group.all_gather_single(output, input, options); }) {
    return group.all_gather_single(output, input, options);
  } else {
    return group._allgather_base(output, input, options);
  }
}

}  // namespace collx
