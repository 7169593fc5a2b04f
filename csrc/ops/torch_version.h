// Where the supported versions of PyTorch differ. Nothing else in the tree asks which one it is.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace at {
class Tensor;
}

namespace collx {

/// PyTorch has it as a string, or as a view of one.
inline std::string dtype_name(at::ScalarType type) {
  return std::string(c10::getDtypeNames(type).first);
}

/// All ranks' `input`, one after the other. The newer name where the group knows it: there the
/// older one is deprecated. Group: c10d::ProcessGroup, whose header takes seconds to compile.
template <typename Group, typename Options>
auto all_gather(Group& group, at::Tensor& output, at::Tensor& input, const Options& options) {
  if constexpr (requires { group.all_gather_single(output, input, options); }) {
    return group.all_gather_single(output, input, options);
  } else {
    return group._allgather_base(output, input, options);
  }
}

}  // namespace collx
