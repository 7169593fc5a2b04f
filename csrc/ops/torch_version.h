// Where the supported versions of PyTorch differ. Nothing else in the tree asks which one it is.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/version.h>

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

/// Whether c10d::Backend has hooks for completion. C10D_BACKEND_HAS_HOOKS is older, and says that
/// it has those for an abort.
#define COLLX_COMPLETION_HOOKS (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15)

namespace at {
class Tensor;
}

namespace collx {

/// PyTorch has it as a string, or as a view of one.
inline std::string dtype_name(at::ScalarType type) {
  return std::string(c10::getDtypeNames(type).first);
}

/// All ranks' `input`, one after the other. The newer name if the group has it: there the
/// older one is deprecated. Group: c10d::ProcessGroup, whose header takes seconds to compile.
template <typename Group, typename Options>
auto all_gather(Group& group, at::Tensor& output, at::Tensor& input, const Options& options) {
  if constexpr (requires { group.all_gather_single(output, input, options); }) {
    return group.all_gather_single(output, input, options);
  } else {
    return group._allgather_base(output, input, options);
  }
}

/// The identifier of a c10d::Work in hooks.
template <typename Work>
uint64_t completion_key(const Work& work) {
  if constexpr (requires { work.getCompletionKey(); }) {
    return work.getCompletionKey();
  } else {
    return 0;  // there is no hook
  }
}

/// A node of the autograd graph. Newer versions count the references in it.
template <typename N, typename... Arguments>
auto make_node(Arguments&&... arguments) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, N>) {
    return c10::make_intrusive<N>(std::forward<Arguments>(arguments)...);
  } else {
    return std::shared_ptr<N>(new N(std::forward<Arguments>(arguments)...),
                              [](N* node) { deleteNode(node); });
  }
}

/// torch.autograd.graph's hooks on new nodes, where PyTorch has them.
template <typename Pointer>
void fire_creation_hooks(const Pointer& node) {
  if constexpr (requires { fire_node_creation_hooks(node); }) fire_node_creation_hooks(node);
}

}  // namespace collx
