// C++ functions that call the operators of collx.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/SymIntArrayRef.h>

#include <string_view>

namespace collx::distributed::operators {

template <typename Signature>
auto find(const char* name, const char* overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).typed<Signature>();
}

inline constexpr std::string_view kAuto = "auto";

inline void allreduce_(at::Tensor& input, std::string_view reduce_op, std::string_view group) {
  using Signature =
      void(at::Tensor&, std::string_view, std::string_view, std::string_view, int64_t);
  static const auto op = find<Signature>("collx::allreduce_", "");
  op.call(input, reduce_op, group, kAuto, 0);
}

inline void reduce_(at::Tensor& input, std::string_view reduce_op, int64_t root,
                    std::string_view group) {
  using Signature =
      void(at::Tensor&, std::string_view, int64_t, std::string_view, std::string_view, int64_t);
  static const auto op = find<Signature>("collx::reduce_", "");
  op.call(input, reduce_op, root, group, kAuto, 0);
}

inline void broadcast_(at::Tensor& input, int64_t root, std::string_view group) {
  using Signature = void(at::Tensor&, int64_t, std::string_view, std::string_view, int64_t);
  static const auto op = find<Signature>("collx::broadcast_", "");
  op.call(input, root, group, kAuto, 0);
}

inline void allgather(const at::Tensor& input, int64_t world, std::string_view group,
                      at::Tensor& out) {
  using Signature = void(const at::Tensor&, int64_t, std::string_view, int64_t,
                         std::optional<c10::SymInt>, std::string_view, int64_t, at::Tensor&);
  static const auto op = find<Signature>("collx::allgather", "out");
  op.call(input, world, group, 0, std::nullopt, kAuto, 0, out);
}

inline void reducescatter(const at::Tensor& input, std::string_view reduce_op, int64_t world,
                          std::string_view group, at::Tensor& out) {
  using Signature = void(const at::Tensor&, std::string_view, int64_t, std::string_view, int64_t,
                         std::string_view, int64_t, at::Tensor&);
  static const auto op = find<Signature>("collx::reducescatter", "out");
  op.call(input, reduce_op, world, group, 0, kAuto, 0, out);
}

inline void alltoall(const at::Tensor& input, int64_t world, std::string_view group,
                     at::Tensor& out) {
  using Signature =
      void(const at::Tensor&, int64_t, std::string_view, std::string_view, int64_t, at::Tensor&);
  static const auto op = find<Signature>("collx::alltoall", "out");
  op.call(input, world, group, kAuto, 0, out);
}

inline void alltoallv(const at::Tensor& input, at::IntArrayRef output_splits,
                      at::IntArrayRef input_splits, std::string_view group, at::Tensor& out) {
  using Signature = void(const at::Tensor&, c10::SymIntArrayRef, c10::SymIntArrayRef,
                         std::string_view, std::string_view, int64_t, at::Tensor&);
  static const auto op = find<Signature>("collx::alltoallv", "out");
  op.call(input, c10::fromIntArrayRefSlow(output_splits), c10::fromIntArrayRefSlow(input_splits),
          group, kAuto, 0, out);
}

/// A collective with a root. For gather, only the values of `out` on root are defined. For scatter,
/// `input` is only read on root.
template <const char* Name>
void with_root(const at::Tensor& input, int64_t root, int64_t world, std::string_view group,
               at::Tensor& out) {
  using Signature = void(const at::Tensor&, int64_t, int64_t, std::string_view, std::string_view,
                         int64_t, at::Tensor&);
  static const auto op = find<Signature>(Name, "out");
  op.call(input, root, world, group, kAuto, 0, out);
}

inline constexpr char kGather[] = "collx::gather", kScatter[] = "collx::scatter";
inline constexpr auto gather = with_root<kGather>, scatter = with_root<kScatter>;

inline void barrier(std::string_view group) {
  static const auto op = find<void(std::string_view)>("collx::barrier", "");
  op.call(group);
}

}  // namespace collx::distributed::operators
