// Hides the differences between supported versions of PyTorch. No other file checks the version.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/version.h>

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

/// Whether c10d::Backend has completion hooks. The older C10D_BACKEND_HAS_HOOKS only means that it
/// has abort hooks.
#define COLLX_COMPLETION_HOOKS (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15)

namespace at {
class Tensor;
}

namespace collx {

/// Depending on its version, PyTorch returns a string or a string view.
inline std::string dtype_name(at::ScalarType type) {
  return std::string(c10::getDtypeNames(type).first);
}

/// Gathers `input` of all ranks into `output`. Uses the newer name if the group has it, since the
/// older one is then deprecated. Group is c10d::ProcessGroup, a template parameter because its
/// header takes seconds to compile.
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
    return 0;  // there are no hooks
  }
}

/// Creates a node of the autograd graph. Newer versions use intrusive reference counts.
template <typename N, typename... Arguments>
auto make_node(Arguments&&... arguments) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, N>) {
    return c10::make_intrusive<N>(std::forward<Arguments>(arguments)...);
  } else {
    return std::shared_ptr<N>(new N(std::forward<Arguments>(arguments)...),
                              [](N* node) { deleteNode(node); });
  }
}

/// Runs the hooks of torch.autograd.graph for new nodes, if PyTorch has them.
template <typename Pointer>
void fire_creation_hooks(const Pointer& node) {
  if constexpr (requires { fire_node_creation_hooks(node); }) fire_node_creation_hooks(node);
}

}  // namespace collx
