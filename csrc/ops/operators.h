// The table of operators with one input and one result: what each is asked, and its forms. Schemas,
// Meta, autograd and the kernels of every form follow from it. The fused normalizations are rows of
// collectives.h already: norm_operators.h.
//
// Options are positional with defaults, since keyword-only integers break AOTInductor. What writes
// an argument returns nothing, since third-party operators may not return an alias of one.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

#include <optional>
#include <string>
#include <string_view>

#include "../protocol/names.h"

namespace collx {

/// What a call is given. What its operator does not take stays as it is here.
struct Given {
  Collective collective;
  const at::Tensor& input;
  std::string_view reduce_op = {};
  int64_t root = -1;
  int64_t group_size = 0;
  std::string_view group_name = {};
  int64_t axis = 0;
  std::optional<c10::SymInt> total = {};
  c10::SymIntArrayRef output_splits = {};
  c10::SymIntArrayRef input_splits = {};
  std::string_view algorithm = {};
  int64_t max_blocks = 0;
  const struct Epilogue* epilogue = nullptr;  // behind a reduction

  const char* op() const { return name_of(collective).data(); }
};

/// Arguments: the type that kernels get, the words of the schema, and where the value goes.
namespace argument {

template <auto Given::*kMember, typename T>
struct To {
  using Type = T;
  static void set(Given& given, const Type& value) { given.*kMember = value; }
};

struct ReduceOp : To<&Given::reduce_op, std::string_view> {
  static constexpr const char* kSchema = "str reduce_op";
};
struct Root : To<&Given::root, int64_t> {
  static constexpr const char* kSchema = "int root";
};
struct GroupSize : To<&Given::group_size, int64_t> {
  static constexpr const char* kSchema = "int group_size";
};
struct GroupName : To<&Given::group_name, std::string_view> {
  static constexpr const char* kSchema = "str group_name";
};
struct Axis : To<&Given::axis, int64_t> {
  static constexpr const char* kSchema = "int axis=0";
};
struct Total : To<&Given::total, std::optional<c10::SymInt>> {
  static constexpr const char* kSchema = "SymInt? total=None";
};
struct OutputSplits : To<&Given::output_splits, c10::SymIntArrayRef> {
  static constexpr const char* kSchema = "SymInt[] output_splits";
};
struct InputSplits : To<&Given::input_splits, c10::SymIntArrayRef> {
  static constexpr const char* kSchema = "SymInt[] input_splits";
};
struct Algorithm : To<&Given::algorithm, std::string_view> {
  static constexpr const char* kSchema = "str algorithm=\"auto\"";
};
struct MaxBlocks : To<&Given::max_blocks, int64_t> {
  static constexpr const char* kSchema = "int max_blocks=0";
};

template <typename... A>
struct List {
  static std::string schema() {
    std::string text;
    ((text += (text.empty() ? "" : ", ") + std::string(A::kSchema)), ...);
    return text;
  }
};

}  // namespace argument

/// It has a form with a new result, one with out=, and one in place where the shape stays.
template <Collective C, typename... A>
struct Operator {
  static constexpr Collective kCollective = C;
  static constexpr const char* kName = row_of(C).name;
  static constexpr bool kInPlace = keeps_shape(C);
  using Arguments = argument::List<A...>;
  /// Of the functional form.
  using Signature = at::Tensor(const at::Tensor&, typename A::Type...);
};

namespace operators {

using argument::Algorithm;
using argument::Axis;
using argument::GroupName;
using argument::GroupSize;
using argument::InputSplits;
using argument::MaxBlocks;
using argument::OutputSplits;
using argument::ReduceOp;
using argument::Root;
using argument::Total;

struct Allreduce : Operator<Collective::allreduce, ReduceOp, GroupName, Algorithm, MaxBlocks> {};
struct Reducescatter : Operator<Collective::reducescatter, ReduceOp, GroupSize, GroupName, Axis,
                                Algorithm, MaxBlocks> {};
struct Allgather
    : Operator<Collective::allgather, GroupSize, GroupName, Axis, Total, Algorithm, MaxBlocks> {};
struct Broadcast : Operator<Collective::broadcast, Root, GroupName, Algorithm, MaxBlocks> {};
struct Reduce : Operator<Collective::reduce, ReduceOp, Root, GroupName, Algorithm, MaxBlocks> {};
struct Gather : Operator<Collective::gather, Root, GroupSize, GroupName, Algorithm, MaxBlocks> {};
struct Scatter : Operator<Collective::scatter, Root, GroupSize, GroupName, Algorithm, MaxBlocks> {};
struct Alltoall : Operator<Collective::alltoall, GroupSize, GroupName, Algorithm, MaxBlocks> {};
struct Alltoallv
    : Operator<Collective::alltoallv, OutputSplits, InputSplits, GroupName, Algorithm, MaxBlocks> {
};

/// Calls f with each of them.
template <typename F>
void for_each(F f) {
  f(Allreduce{});
  f(Reducescatter{});
  f(Allgather{});
  f(Broadcast{});
  f(Reduce{});
  f(Gather{});
  f(Scatter{});
  f(Alltoall{});
  f(Alltoallv{});
#if defined(COLLX_EXTRA_OPERATORS)
  COLLX_EXTRA_OPERATORS
#endif
}

}  // namespace operators

}  // namespace collx
