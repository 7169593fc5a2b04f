// The operators' kernels below autograd, all-reduce apart. Arguments as in schema.cpp; the forms
// with `out` write it, those that end in _inplace their input.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace collx {

at::Tensor reducescatter(const at::Tensor& input, std::string_view reduce_op, int64_t group_size,
                         std::string_view group_name, int64_t axis, std::string_view algorithm,
                         int64_t max_blocks);
void reducescatter_out(const at::Tensor& input, std::string_view reduce_op, int64_t group_size,
                       std::string_view group_name, int64_t axis, std::string_view algorithm,
                       int64_t max_blocks, at::Tensor& out);

at::Tensor allgather(const at::Tensor& input, int64_t group_size, std::string_view group_name,
                     int64_t axis, std::optional<int64_t> total, std::string_view algorithm,
                     int64_t max_blocks);
void allgather_out(const at::Tensor& input, int64_t group_size, std::string_view group_name,
                   int64_t axis, std::optional<int64_t> total, std::string_view algorithm,
                   int64_t max_blocks, at::Tensor& out);

at::Tensor broadcast(const at::Tensor& input, int64_t root, std::string_view group_name,
                     std::string_view algorithm, int64_t max_blocks);
void broadcast_out(const at::Tensor& input, int64_t root, std::string_view group_name,
                   std::string_view algorithm, int64_t max_blocks, at::Tensor& out);
void broadcast_inplace(at::Tensor& input, int64_t root, std::string_view group_name,
                       std::string_view algorithm, int64_t max_blocks);

at::Tensor reduce(const at::Tensor& input, std::string_view reduce_op, int64_t root,
                  std::string_view group_name, std::string_view algorithm, int64_t max_blocks);
void reduce_out(const at::Tensor& input, std::string_view reduce_op, int64_t root,
                std::string_view group_name, std::string_view algorithm, int64_t max_blocks,
                at::Tensor& out);
void reduce_inplace(at::Tensor& input, std::string_view reduce_op, int64_t root,
                    std::string_view group_name, std::string_view algorithm, int64_t max_blocks);

at::Tensor gather(const at::Tensor& input, int64_t root, int64_t group_size,
                  std::string_view group_name, std::string_view algorithm, int64_t max_blocks);
void gather_out(const at::Tensor& input, int64_t root, int64_t group_size,
                std::string_view group_name, std::string_view algorithm, int64_t max_blocks,
                at::Tensor& out);

at::Tensor scatter(const at::Tensor& input, int64_t root, int64_t group_size,
                   std::string_view group_name, std::string_view algorithm, int64_t max_blocks);
void scatter_out(const at::Tensor& input, int64_t root, int64_t group_size,
                 std::string_view group_name, std::string_view algorithm, int64_t max_blocks,
                 at::Tensor& out);

at::Tensor alltoall(const at::Tensor& input, int64_t group_size, std::string_view group_name,
                    std::string_view algorithm, int64_t max_blocks);
void alltoall_out(const at::Tensor& input, int64_t group_size, std::string_view group_name,
                  std::string_view algorithm, int64_t max_blocks, at::Tensor& out);
void alltoall_inplace(at::Tensor& input, int64_t group_size, std::string_view group_name,
                      std::string_view algorithm, int64_t max_blocks);

at::Tensor alltoallv(const at::Tensor& input, at::IntArrayRef output_splits,
                     at::IntArrayRef input_splits, std::string_view group_name,
                     std::string_view algorithm, int64_t max_blocks);
void alltoallv_out(const at::Tensor& input, at::IntArrayRef output_splits,
                   at::IntArrayRef input_splits, std::string_view group_name,
                   std::string_view algorithm, int64_t max_blocks, at::Tensor& out);

std::tuple<at::Tensor, at::Tensor> alltoallv_device_splits(
    const at::Tensor& input, const at::Tensor& input_splits, int64_t capacity,
    std::string_view group_name, std::string_view algorithm, int64_t max_blocks);
void alltoallv_device_splits_out(const at::Tensor& input, const at::Tensor& input_splits,
                                 int64_t capacity, std::string_view group_name,
                                 std::string_view algorithm, int64_t max_blocks, at::Tensor& out,
                                 at::Tensor& output_splits);

void barrier(std::string_view group_name);

}  // namespace collx
