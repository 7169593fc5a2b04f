// Operator schemas, and their kernels below autograd.
//
// Options are positional with defaults, since keyword-only integers break AOTInductor. What writes
// an argument returns nothing, since third-party operators may not return an alias of one.
#include <torch/library.h>

#include <string>

#include "allreduce.h"
#include "collectives.h"
#include "norm.h"

namespace collx {

namespace {

constexpr const char* kOptions = "str group_name, str algorithm=\"auto\", int max_blocks=0";

/// An operator and its form with out=.
void define(torch::Library& library, const std::string& name, const std::string& overload,
            const std::string& arguments, const std::string& result = "Tensor",
            const std::string& outputs = "Tensor(a!) out") {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides};
  const std::vector<at::Tag> out_tags = {tags[0], tags[1], at::Tag::out_variant};
  const std::string dot = overload.empty() ? "" : "." + overload;
  const std::string out = overload.empty() ? ".out" : dot + "_out";
  library.def((name + dot + "(" + arguments + ") -> " + result).c_str(), tags);
  library.def((name + out + "(" + arguments + ", *, " + outputs + ") -> ()").c_str(), out_tags);
}

void define_inplace(torch::Library& library, const std::string& name,
                    const std::string& arguments) {
  library.def((name + "_(Tensor(a!) input, " + arguments + ") -> ()").c_str(),
              {at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides});
}

void add_kernels(torch::Library& library, c10::DispatchKey key) {
  const auto add = [&](const char* name, auto function) {
    library.impl(name, torch::dispatch(key, function));
  };
  add("allreduce", TORCH_FN(allreduce));
  add("allreduce.out", TORCH_FN(allreduce_out));
  add("allreduce_", TORCH_FN(allreduce_inplace));
  add("reducescatter", TORCH_FN(reducescatter));
  add("reducescatter.out", TORCH_FN(reducescatter_out));
  add("allgather", TORCH_FN(allgather));
  add("allgather.out", TORCH_FN(allgather_out));
  add("broadcast", TORCH_FN(broadcast));
  add("broadcast.out", TORCH_FN(broadcast_out));
  add("broadcast_", TORCH_FN(broadcast_inplace));
  add("reduce", TORCH_FN(reduce));
  add("reduce.out", TORCH_FN(reduce_out));
  add("reduce_", TORCH_FN(reduce_inplace));
  add("gather", TORCH_FN(gather));
  add("gather.out", TORCH_FN(gather_out));
  add("scatter", TORCH_FN(scatter));
  add("scatter.out", TORCH_FN(scatter_out));
  add("alltoall", TORCH_FN(alltoall));
  add("alltoall.out", TORCH_FN(alltoall_out));
  add("alltoall_", TORCH_FN(alltoall_inplace));
  add("alltoallv", TORCH_FN(alltoallv));
  add("alltoallv.out", TORCH_FN(alltoallv_out));
  add("alltoallv.device_splits", TORCH_FN(alltoallv_device_splits));
  add("alltoallv.device_splits_out", TORCH_FN(alltoallv_device_splits_out));
}

}  // namespace

TORCH_LIBRARY(collx, library) {
  const std::string input = "Tensor input, ", reduce_op = "str reduce_op, ", root = "int root, ",
                    size = "int group_size, ", group = "str group_name, ",
                    options = "str algorithm=\"auto\", int max_blocks=0";
  define(library, "allreduce", "", input + reduce_op + kOptions);
  define_inplace(library, "allreduce", reduce_op + kOptions);
  define(library, "reducescatter", "", input + reduce_op + size + group + "int axis=0, " + options);
  define(library, "allgather", "",
         input + size + group + "int axis=0, SymInt? total=None, " + options);
  define(library, "broadcast", "", input + root + kOptions);
  define_inplace(library, "broadcast", root + kOptions);
  define(library, "reduce", "", input + reduce_op + root + kOptions);
  define_inplace(library, "reduce", reduce_op + root + kOptions);
  define(library, "gather", "", input + root + size + kOptions);
  define(library, "scatter", "", input + root + size + kOptions);
  define(library, "alltoall", "", input + size + kOptions);
  define_inplace(library, "alltoall", size + kOptions);
  define(library, "alltoallv", "",
         input + "SymInt[] output_splits, SymInt[] input_splits, " + kOptions);
  define(library, "alltoallv", "device_splits",
         input + "Tensor input_splits, SymInt capacity, " + kOptions, "(Tensor, Tensor)",
         "Tensor(a!) out, Tensor(b!) output_splits");
  define_norms(library);
  library.def("barrier(str group_name) -> ()", {at::Tag::pt2_compliant_tag});
  // The layouts that are refused get the same kernels, whose checks say what is accepted; without
  // one, the dispatcher's own message would name neither argument nor cure.
  for (const c10::DispatchKey key :
       {c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::SparseCPU,
        c10::DispatchKey::SparseCUDA, c10::DispatchKey::SparseCsrCPU,
        c10::DispatchKey::SparseCsrCUDA, c10::DispatchKey::QuantizedCPU,
        c10::DispatchKey::QuantizedCUDA, c10::DispatchKey::MkldnnCPU}) {
    add_kernels(library, key);
    add_norm_kernels(library, key);
  }
  // No tensor says on which device: the communicator does.
  library.impl("barrier",
               torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(barrier)));
}

}  // namespace collx
