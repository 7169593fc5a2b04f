// The all-reduce operators' kernels below autograd, and the path that they share.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

namespace collx {

at::Tensor allreduce(const at::Tensor& input, std::string_view reduce_op,
                     std::string_view group_name, std::string_view algorithm, int64_t max_blocks);
void allreduce_out(const at::Tensor& input, std::string_view reduce_op, std::string_view group_name,
                   std::string_view algorithm, int64_t max_blocks, at::Tensor& out);
void allreduce_inplace(at::Tensor& input, std::string_view reduce_op, std::string_view group_name,
                       std::string_view algorithm, int64_t max_blocks);

}  // namespace collx
