// Meta kernels: shapes, dtypes and strides without data. Exact on any rank; only uneven parts ask
// the registry which rank this is.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>

#include "checks.h"
#include "shapes.h"

namespace collx {

namespace {

using c10::SymInt;
using c10::SymIntArrayRef;
using std::string_view;

/// A group's size is not known here, so a root is checked against the largest.
void check_options(Collective collective, const char* op, const at::Tensor& input,
                   string_view algorithm, int64_t max_blocks) {
  check_copyable(op, "input", input);
  check_algorithm(op, collective, algorithm);
  check_max_blocks(op, max_blocks);
}

at::Tensor new_tensor(const at::Tensor& input, SymIntArrayRef sizes) {
  return at::empty_symint(sizes, input.options());
}

// allreduce

at::Tensor allreduce_meta(const at::Tensor& input, string_view reduce_op, string_view,
                          string_view algorithm, int64_t max_blocks) {
  check_reduction("allreduce", input, reduce_op, algorithm, max_blocks);
  return new_tensor(input, input.sym_sizes());
}

void allreduce_out_meta(const at::Tensor& input, string_view reduce_op, string_view,
                        string_view algorithm, int64_t max_blocks, at::Tensor& out) {
  check_reduction("allreduce", input, reduce_op, algorithm, max_blocks);
  check_out_like("allreduce", input, out);
}

void allreduce_inplace_meta(at::Tensor& input, string_view reduce_op, string_view,
                            string_view algorithm, int64_t max_blocks) {
  check_reduction("allreduce", input, reduce_op, algorithm, max_blocks);
}

// reducescatter

Sizes sizes_of_reducescatter(const at::Tensor& input, string_view reduce_op, int64_t group_size,
                             string_view group_name, int64_t axis, string_view algorithm,
                             int64_t max_blocks) {
  check_reduction("reducescatter", input, reduce_op, algorithm, max_blocks);
  return reducescatter_sizes("reducescatter", input, group_size, axis, group_name);
}

at::Tensor reducescatter_meta(const at::Tensor& input, string_view reduce_op, int64_t group_size,
                              string_view group_name, int64_t axis, string_view algorithm,
                              int64_t max_blocks) {
  return new_tensor(input, sizes_of_reducescatter(input, reduce_op, group_size, group_name, axis,
                                                  algorithm, max_blocks));
}

void reducescatter_out_meta(const at::Tensor& input, string_view reduce_op, int64_t group_size,
                            string_view group_name, int64_t axis, string_view algorithm,
                            int64_t max_blocks, at::Tensor& out) {
  check_out(
      "reducescatter", input,
      sizes_of_reducescatter(input, reduce_op, group_size, group_name, axis, algorithm, max_blocks),
      out);
}

// allgather

Sizes sizes_of_allgather(const at::Tensor& input, int64_t group_size, int64_t axis,
                         const std::optional<SymInt>& total, string_view algorithm,
                         int64_t max_blocks) {
  check_options(Collective::allgather, "allgather", input, algorithm, max_blocks);
  return allgather_sizes("allgather", input, group_size, axis, total);
}

at::Tensor allgather_meta(const at::Tensor& input, int64_t group_size, string_view, int64_t axis,
                          std::optional<SymInt> total, string_view algorithm, int64_t max_blocks) {
  return new_tensor(input,
                    sizes_of_allgather(input, group_size, axis, total, algorithm, max_blocks));
}

void allgather_out_meta(const at::Tensor& input, int64_t group_size, string_view, int64_t axis,
                        std::optional<SymInt> total, string_view algorithm, int64_t max_blocks,
                        at::Tensor& out) {
  check_out("allgather", input,
            sizes_of_allgather(input, group_size, axis, total, algorithm, max_blocks), out);
}

// broadcast

void check_broadcast(const at::Tensor& input, int64_t root, string_view algorithm,
                     int64_t max_blocks) {
  check_options(Collective::broadcast, "broadcast", input, algorithm, max_blocks);
  check_root("broadcast", root, kMaxRanks);
}

at::Tensor broadcast_meta(const at::Tensor& input, int64_t root, string_view, string_view algorithm,
                          int64_t max_blocks) {
  check_broadcast(input, root, algorithm, max_blocks);
  return new_tensor(input, input.sym_sizes());
}

void broadcast_out_meta(const at::Tensor& input, int64_t root, string_view, string_view algorithm,
                        int64_t max_blocks, at::Tensor& out) {
  check_broadcast(input, root, algorithm, max_blocks);
  check_out_like("broadcast", input, out);
}

void broadcast_inplace_meta(at::Tensor& input, int64_t root, string_view, string_view algorithm,
                            int64_t max_blocks) {
  check_broadcast(input, root, algorithm, max_blocks);
}

// reduce

void check_reduce(const at::Tensor& input, string_view reduce_op, int64_t root,
                  string_view algorithm, int64_t max_blocks) {
  check_reduction("reduce", input, reduce_op, algorithm, max_blocks);
  check_root("reduce", root, kMaxRanks);
}

at::Tensor reduce_meta(const at::Tensor& input, string_view reduce_op, int64_t root, string_view,
                       string_view algorithm, int64_t max_blocks) {
  check_reduce(input, reduce_op, root, algorithm, max_blocks);
  return new_tensor(input, input.sym_sizes());
}

void reduce_out_meta(const at::Tensor& input, string_view reduce_op, int64_t root, string_view,
                     string_view algorithm, int64_t max_blocks, at::Tensor& out) {
  check_reduce(input, reduce_op, root, algorithm, max_blocks);
  check_out_like("reduce", input, out);
}

void reduce_inplace_meta(at::Tensor& input, string_view reduce_op, int64_t root, string_view,
                         string_view algorithm, int64_t max_blocks) {
  check_reduce(input, reduce_op, root, algorithm, max_blocks);
}

// gather, scatter

Sizes sizes_of_gather(const at::Tensor& input, int64_t root, int64_t group_size,
                      string_view algorithm, int64_t max_blocks) {
  check_options(Collective::gather, "gather", input, algorithm, max_blocks);
  Sizes sizes = gather_sizes("gather", input, group_size);
  check_root("gather", root, static_cast<int>(group_size));
  return sizes;
}

at::Tensor gather_meta(const at::Tensor& input, int64_t root, int64_t group_size, string_view,
                       string_view algorithm, int64_t max_blocks) {
  return new_tensor(input, sizes_of_gather(input, root, group_size, algorithm, max_blocks));
}

void gather_out_meta(const at::Tensor& input, int64_t root, int64_t group_size, string_view,
                     string_view algorithm, int64_t max_blocks, at::Tensor& out) {
  check_out("gather", input, sizes_of_gather(input, root, group_size, algorithm, max_blocks), out);
}

Sizes sizes_of_scatter(const at::Tensor& input, int64_t root, int64_t group_size,
                       string_view algorithm, int64_t max_blocks) {
  check_options(Collective::scatter, "scatter", input, algorithm, max_blocks);
  Sizes sizes = scatter_sizes("scatter", input, group_size);
  check_root("scatter", root, static_cast<int>(group_size));
  return sizes;
}

at::Tensor scatter_meta(const at::Tensor& input, int64_t root, int64_t group_size, string_view,
                        string_view algorithm, int64_t max_blocks) {
  return new_tensor(input, sizes_of_scatter(input, root, group_size, algorithm, max_blocks));
}

void scatter_out_meta(const at::Tensor& input, int64_t root, int64_t group_size, string_view,
                      string_view algorithm, int64_t max_blocks, at::Tensor& out) {
  check_out("scatter", input, sizes_of_scatter(input, root, group_size, algorithm, max_blocks),
            out);
}

// alltoall

Sizes sizes_of_alltoall(const at::Tensor& input, int64_t group_size, string_view algorithm,
                        int64_t max_blocks) {
  check_options(Collective::alltoall, "alltoall", input, algorithm, max_blocks);
  return alltoall_sizes("alltoall", input, group_size);
}

at::Tensor alltoall_meta(const at::Tensor& input, int64_t group_size, string_view,
                         string_view algorithm, int64_t max_blocks) {
  return new_tensor(input, sizes_of_alltoall(input, group_size, algorithm, max_blocks));
}

void alltoall_out_meta(const at::Tensor& input, int64_t group_size, string_view,
                       string_view algorithm, int64_t max_blocks, at::Tensor& out) {
  check_out("alltoall", input, sizes_of_alltoall(input, group_size, algorithm, max_blocks), out);
}

void alltoall_inplace_meta(at::Tensor& input, int64_t group_size, string_view,
                           string_view algorithm, int64_t max_blocks) {
  sizes_of_alltoall(input, group_size, algorithm, max_blocks);
}

// alltoallv

Sizes sizes_of_alltoallv(const at::Tensor& input, SymIntArrayRef output_splits,
                         SymIntArrayRef input_splits, string_view algorithm, int64_t max_blocks) {
  check_options(Collective::alltoallv, "alltoallv", input, algorithm, max_blocks);
  return alltoallv_sizes("alltoallv", input, output_splits, input_splits);
}

at::Tensor alltoallv_meta(const at::Tensor& input, SymIntArrayRef output_splits,
                          SymIntArrayRef input_splits, string_view, string_view algorithm,
                          int64_t max_blocks) {
  return new_tensor(input,
                    sizes_of_alltoallv(input, output_splits, input_splits, algorithm, max_blocks));
}

void alltoallv_out_meta(const at::Tensor& input, SymIntArrayRef output_splits,
                        SymIntArrayRef input_splits, string_view, string_view algorithm,
                        int64_t max_blocks, at::Tensor& out) {
  check_out("alltoallv", input,
            sizes_of_alltoallv(input, output_splits, input_splits, algorithm, max_blocks), out);
}

Sizes sizes_of_device_splits(const at::Tensor& input, const at::Tensor& input_splits,
                             const SymInt& capacity, string_view algorithm, int64_t max_blocks) {
  check_options(Collective::alltoallv, "alltoallv", input, algorithm, max_blocks);
  return device_splits_sizes("alltoallv", input, input_splits, capacity);
}

std::tuple<at::Tensor, at::Tensor> device_splits_meta(const at::Tensor& input,
                                                      const at::Tensor& input_splits,
                                                      SymInt capacity, string_view,
                                                      string_view algorithm, int64_t max_blocks) {
  at::Tensor out = new_tensor(
      input, sizes_of_device_splits(input, input_splits, capacity, algorithm, max_blocks));
  return {std::move(out), new_tensor(input_splits, input_splits.sym_sizes())};
}

void device_splits_out_meta(const at::Tensor& input, const at::Tensor& input_splits,
                            SymInt capacity, string_view, string_view algorithm, int64_t max_blocks,
                            at::Tensor& out, at::Tensor& output_splits) {
  check_out("alltoallv", input,
            sizes_of_device_splits(input, input_splits, capacity, algorithm, max_blocks), out);
  check_out("alltoallv", input_splits, input_splits.sym_sizes(), output_splits, "output_splits");
}

// While tracing no rank waits.
void barrier_meta(string_view) {}

}  // namespace

TORCH_LIBRARY_IMPL(collx, Meta, library) {
  library.impl("allreduce", TORCH_FN(allreduce_meta));
  library.impl("allreduce.out", TORCH_FN(allreduce_out_meta));
  library.impl("allreduce_", TORCH_FN(allreduce_inplace_meta));
  library.impl("reducescatter", TORCH_FN(reducescatter_meta));
  library.impl("reducescatter.out", TORCH_FN(reducescatter_out_meta));
  library.impl("allgather", TORCH_FN(allgather_meta));
  library.impl("allgather.out", TORCH_FN(allgather_out_meta));
  library.impl("broadcast", TORCH_FN(broadcast_meta));
  library.impl("broadcast.out", TORCH_FN(broadcast_out_meta));
  library.impl("broadcast_", TORCH_FN(broadcast_inplace_meta));
  library.impl("reduce", TORCH_FN(reduce_meta));
  library.impl("reduce.out", TORCH_FN(reduce_out_meta));
  library.impl("reduce_", TORCH_FN(reduce_inplace_meta));
  library.impl("gather", TORCH_FN(gather_meta));
  library.impl("gather.out", TORCH_FN(gather_out_meta));
  library.impl("scatter", TORCH_FN(scatter_meta));
  library.impl("scatter.out", TORCH_FN(scatter_out_meta));
  library.impl("alltoall", TORCH_FN(alltoall_meta));
  library.impl("alltoall.out", TORCH_FN(alltoall_out_meta));
  library.impl("alltoall_", TORCH_FN(alltoall_inplace_meta));
  library.impl("alltoallv", TORCH_FN(alltoallv_meta));
  library.impl("alltoallv.out", TORCH_FN(alltoallv_out_meta));
  library.impl("alltoallv.device_splits", TORCH_FN(device_splits_meta));
  library.impl("alltoallv.device_splits_out", TORCH_FN(device_splits_out_meta));
  library.impl("barrier", TORCH_FN(barrier_meta));
}

}  // namespace collx
