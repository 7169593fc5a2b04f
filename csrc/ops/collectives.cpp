#include "collectives.h"

#include <limits>

#include "../cpu/exchange.h"
#include "../protocol/names.h"
#include "call.h"
#include "checks.h"
#include "exchange.h"
#include "fallback.h"
#include "registry.h"
#include "shapes.h"
#if COLLX_CUDA
#include "../cuda/exchange.h"
#endif

namespace collx {

namespace {

/// A call whose arguments have been checked, on its way to its output.
struct Prepared {
  Exchange exchange;
  std::shared_ptr<Communicator> communicator;
  at::Tensor input;  // as given
  Sizes sizes;       // of the output
  // Where the one tensor may be a part of the other: bytes between their beginnings.
  std::optional<int64_t> own_part;

  at::IntArrayRef output_sizes() const {
    return C10_AS_INTARRAYREF_SLOW(c10::SymIntArrayRef(sizes));
  }
};

Prepared prepare(Collective collective, const at::Tensor& input, std::string_view group_name,
                 std::string_view algorithm, int64_t max_blocks) {
  Prepared p;
  p.exchange.collective = collective;
  const char* op = p.exchange.op();
  check_copyable(op, "input", input);
  p.exchange.algorithm = check_algorithm(op, collective, algorithm);
  p.exchange.max_blocks = check_max_blocks(op, max_blocks);
  p.communicator = registry::require(op, group_name);
  check_device(op, "input", input, *p.communicator);
  p.communicator->require_usable(op);
  p.input = input;
  return p;
}

void use_reduction(Prepared& p, std::string_view reduce_op) {
  p.exchange.dtype = check_dtype(p.exchange.op(), "input", p.input);
  p.exchange.reduce_op = check_reduce_op(p.exchange.op(), reduce_op, p.exchange.dtype);
}

void use_root(Prepared& p, int64_t root) {
  check_root(p.exchange.op(), root, p.communicator->options().world_size);
  p.exchange.root = static_cast<int>(root);
}

/// Rows are divided: [W * n, ...] stands behind [n, ...].
void divide_rows(Prepared& p, at::IntArrayRef unsplit) {
  p.exchange.axis = 0;
  p.exchange.geometry = geometry_of(unsplit, 0, p.input.element_size());
}

int64_t own_offset(const Prepared& p) {
  const CommunicatorOptions& o = p.communicator->options();
  return static_cast<int64_t>(part_span(p.exchange.geometry, o.world_size, o.rank).offset);
}

at::Tensor into_new(const Prepared& p) {
  const OnDevice guard(p.input.device());
  at::Tensor output = make_output(p.output_sizes(), p.input);
  run(p.exchange, *p.communicator, *p.input.expect_contiguous(), output);
  return output;
}

/// Through a temporary where `out` has another order, or holes.
void into_dense(const Prepared& p, at::Tensor& out) {
  const OnDevice guard(p.input.device());
  const auto input = p.input.expect_contiguous();
  if (out.is_contiguous()) return run(p.exchange, *p.communicator, *input, out);
  const at::Tensor dense = make_output(p.output_sizes(), p.input);
  run(p.exchange, *p.communicator, *input, dense);
  out.copy_(dense);
}

/// `out` of an op that has no in-place form.
void into_apart(const Prepared& p, at::Tensor& out) {
  check_out(p.exchange.op(), p.input, p.sizes, out);
  check_disjoint(p.exchange.op(), p.input, out, p.own_part);
  into_dense(p, out);
}

/// `out` of the input's shape, which may be the input.
void into_like(const Prepared& p, at::Tensor& out) {
  check_out_like(p.exchange.op(), p.input, out);
  check_overlap(p.exchange.op(), p.input, out);
  into_dense(p, out);
}

void in_place(const Prepared& p) {
  check_writable(p.exchange.op(), "input", p.input);
  const OnDevice guard(p.input.device());
  if (p.input.is_contiguous()) return run(p.exchange, *p.communicator, p.input, p.input);
  const at::Tensor dense = p.input.contiguous();
  run(p.exchange, *p.communicator, dense, dense);
  p.input.copy_(dense);
}

Prepared prepare_reducescatter(const at::Tensor& input, std::string_view reduce_op,
                               int64_t group_size, std::string_view group_name, int64_t axis,
                               std::string_view algorithm, int64_t max_blocks) {
  Prepared p = prepare(Collective::reducescatter, input, group_name, algorithm, max_blocks);
  use_reduction(p, reduce_op);
  p.sizes = reducescatter_sizes(p.exchange.op(), input, group_size, axis, group_name);
  check_group(p.exchange.op(), group_size, *p.communicator);
  const int64_t along = check_axis(p.exchange.op(), input, axis);
  p.exchange.axis = static_cast<int>(along);
  p.exchange.geometry = geometry_of(input.sizes(), along, input.element_size());
  if (p.exchange.geometry.outer == 1) p.own_part = own_offset(p);
  return p;
}

Prepared prepare_allgather(const at::Tensor& input, int64_t group_size, std::string_view group_name,
                           int64_t axis, std::optional<int64_t> total, std::string_view algorithm,
                           int64_t max_blocks) {
  Prepared p = prepare(Collective::allgather, input, group_name, algorithm, max_blocks);
  const char* op = p.exchange.op();
  p.sizes = allgather_sizes(op, input, group_size, axis,
                            total ? std::optional<c10::SymInt>(*total) : std::nullopt);
  check_group(op, group_size, *p.communicator);
  const int64_t along = check_axis(op, input, axis);
  p.exchange.axis = static_cast<int>(along);
  p.exchange.geometry = geometry_of(p.output_sizes(), along, input.element_size());
  const CommunicatorOptions& o = p.communicator->options();
  const uint64_t own = partition(p.exchange.geometry.units, o.world_size, o.rank).count;
  TORCH_CHECK_VALUE(!total || own == static_cast<uint64_t>(input.size(along)), "collx.", op,
                    ": total: got ", *total, " with an input of ", input.size(along),
                    " along axis ", along, "; accepted on rank ", o.rank, " of ", o.world_size,
                    " with that total: ", own);
  if (p.exchange.geometry.outer == 1) p.own_part = own_offset(p);
  return p;
}

Prepared prepare_broadcast(const at::Tensor& input, int64_t root, std::string_view group_name,
                           std::string_view algorithm, int64_t max_blocks) {
  Prepared p = prepare(Collective::broadcast, input, group_name, algorithm, max_blocks);
  use_root(p, root);
  p.sizes = Sizes(input.sym_sizes().begin(), input.sym_sizes().end());
  p.exchange.geometry = undivided(input);
  return p;
}

Prepared prepare_reduce(const at::Tensor& input, std::string_view reduce_op, int64_t root,
                        std::string_view group_name, std::string_view algorithm,
                        int64_t max_blocks) {
  Prepared p = prepare(Collective::reduce, input, group_name, algorithm, max_blocks);
  use_reduction(p, reduce_op);
  use_root(p, root);
  p.sizes = Sizes(input.sym_sizes().begin(), input.sym_sizes().end());
  p.exchange.geometry = undivided(input);
  return p;
}

Prepared prepare_gather(const at::Tensor& input, int64_t root, int64_t group_size,
                        std::string_view group_name, std::string_view algorithm,
                        int64_t max_blocks) {
  Prepared p = prepare(Collective::gather, input, group_name, algorithm, max_blocks);
  use_root(p, root);
  p.sizes = gather_sizes(p.exchange.op(), input, group_size);
  check_group(p.exchange.op(), group_size, *p.communicator);
  divide_rows(p, p.output_sizes());
  return p;
}

Prepared prepare_scatter(const at::Tensor& input, int64_t root, int64_t group_size,
                         std::string_view group_name, std::string_view algorithm,
                         int64_t max_blocks) {
  Prepared p = prepare(Collective::scatter, input, group_name, algorithm, max_blocks);
  use_root(p, root);
  check_group(p.exchange.op(), group_size, *p.communicator);
  p.sizes = scatter_sizes(p.exchange.op(), input, group_size);
  divide_rows(p, input.sizes());
  return p;
}

Prepared prepare_alltoall(const at::Tensor& input, int64_t group_size, std::string_view group_name,
                          std::string_view algorithm, int64_t max_blocks) {
  Prepared p = prepare(Collective::alltoall, input, group_name, algorithm, max_blocks);
  check_group(p.exchange.op(), group_size, *p.communicator);
  p.sizes = alltoall_sizes(p.exchange.op(), input, group_size);
  divide_rows(p, input.sizes());
  return p;
}

uint64_t row_bytes_of(const at::Tensor& input) {
  return geometry_of(input.sizes(), 0, input.element_size()).inner;
}

Prepared prepare_alltoallv(const at::Tensor& input, at::IntArrayRef output_splits,
                           at::IntArrayRef input_splits, std::string_view group_name,
                           std::string_view algorithm, int64_t max_blocks) {
  Prepared p = prepare(Collective::alltoallv, input, group_name, algorithm, max_blocks);
  const char* op = p.exchange.op();
  p.sizes = alltoallv_sizes(op, input, c10::fromIntArrayRefSlow(output_splits),
                            c10::fromIntArrayRefSlow(input_splits));
  const CommunicatorOptions& o = p.communicator->options();
  TORCH_CHECK_VALUE(input_splits.size() == static_cast<size_t>(o.world_size), "collx.", op,
                    ": input_splits: got ", input_splits.size(),
                    " numbers; accepted: one for each rank of \"", o.name, "\", ", o.world_size);
  const auto rank = static_cast<size_t>(o.rank);
  TORCH_CHECK_VALUE(input_splits[rank] == output_splits[rank], "collx.", op,
                    ": output_splits: got ", output_splits[rank], " rows from rank ", rank,
                    " itself; accepted: what input_splits says for it, ", input_splits[rank]);
  p.exchange.axis = 0;
  p.exchange.geometry = {1, static_cast<uint64_t>(input.size(0)), row_bytes_of(input)};
  p.exchange.sent_rows = input_splits;
  p.exchange.received_rows = output_splits;
  return p;
}

Prepared prepare_device_splits(const at::Tensor& input, const at::Tensor& input_splits,
                               int64_t capacity, std::string_view group_name,
                               std::string_view algorithm, int64_t max_blocks) {
  Prepared p = prepare(Collective::alltoallv, input, group_name, algorithm, max_blocks);
  const char* op = p.exchange.op();
  p.sizes = device_splits_sizes(op, input, input_splits, capacity);
  TORCH_CHECK_VALUE(input_splits.size(0) == p.communicator->options().world_size, "collx.", op,
                    ": input_splits: got ", input_splits.size(0),
                    " numbers; accepted: one for each rank of \"", p.communicator->options().name,
                    "\", ", p.communicator->options().world_size);
  p.exchange.axis = 0;
  p.exchange.geometry = {1, static_cast<uint64_t>(input.size(0)), row_bytes_of(input)};
  return p;
}

/// `out` and `received` are contiguous.
void run_device_splits(Prepared& p, const at::Tensor& input_splits, const at::Tensor& out,
                       const at::Tensor& received) {
  const auto splits = input_splits.expect_contiguous();
  p.exchange.splits = {static_cast<const int64_t*>(splits->const_data_ptr()),
                       static_cast<int64_t*>(received.mutable_data_ptr()),
                       p.exchange.geometry.inner, static_cast<uint64_t>(p.input.size(0)),
                       static_cast<uint64_t>(out.size(0))};
  run(p.exchange, *p.communicator, *p.input.expect_contiguous(), out);
}

}  // namespace

at::Tensor reducescatter(const at::Tensor& input, std::string_view reduce_op, int64_t group_size,
                         std::string_view group_name, int64_t axis, std::string_view algorithm,
                         int64_t max_blocks) {
  return into_new(
      prepare_reducescatter(input, reduce_op, group_size, group_name, axis, algorithm, max_blocks));
}

void reducescatter_out(const at::Tensor& input, std::string_view reduce_op, int64_t group_size,
                       std::string_view group_name, int64_t axis, std::string_view algorithm,
                       int64_t max_blocks, at::Tensor& out) {
  into_apart(
      prepare_reducescatter(input, reduce_op, group_size, group_name, axis, algorithm, max_blocks),
      out);
}

at::Tensor allgather(const at::Tensor& input, int64_t group_size, std::string_view group_name,
                     int64_t axis, std::optional<int64_t> total, std::string_view algorithm,
                     int64_t max_blocks) {
  return into_new(
      prepare_allgather(input, group_size, group_name, axis, total, algorithm, max_blocks));
}

void allgather_out(const at::Tensor& input, int64_t group_size, std::string_view group_name,
                   int64_t axis, std::optional<int64_t> total, std::string_view algorithm,
                   int64_t max_blocks, at::Tensor& out) {
  into_apart(prepare_allgather(input, group_size, group_name, axis, total, algorithm, max_blocks),
             out);
}

at::Tensor broadcast(const at::Tensor& input, int64_t root, std::string_view group_name,
                     std::string_view algorithm, int64_t max_blocks) {
  return into_new(prepare_broadcast(input, root, group_name, algorithm, max_blocks));
}

void broadcast_out(const at::Tensor& input, int64_t root, std::string_view group_name,
                   std::string_view algorithm, int64_t max_blocks, at::Tensor& out) {
  into_like(prepare_broadcast(input, root, group_name, algorithm, max_blocks), out);
}

void broadcast_inplace(at::Tensor& input, int64_t root, std::string_view group_name,
                       std::string_view algorithm, int64_t max_blocks) {
  in_place(prepare_broadcast(input, root, group_name, algorithm, max_blocks));
}

at::Tensor reduce(const at::Tensor& input, std::string_view reduce_op, int64_t root,
                  std::string_view group_name, std::string_view algorithm, int64_t max_blocks) {
  return into_new(prepare_reduce(input, reduce_op, root, group_name, algorithm, max_blocks));
}

void reduce_out(const at::Tensor& input, std::string_view reduce_op, int64_t root,
                std::string_view group_name, std::string_view algorithm, int64_t max_blocks,
                at::Tensor& out) {
  into_like(prepare_reduce(input, reduce_op, root, group_name, algorithm, max_blocks), out);
}

void reduce_inplace(at::Tensor& input, std::string_view reduce_op, int64_t root,
                    std::string_view group_name, std::string_view algorithm, int64_t max_blocks) {
  in_place(prepare_reduce(input, reduce_op, root, group_name, algorithm, max_blocks));
}

at::Tensor gather(const at::Tensor& input, int64_t root, int64_t group_size,
                  std::string_view group_name, std::string_view algorithm, int64_t max_blocks) {
  return into_new(prepare_gather(input, root, group_size, group_name, algorithm, max_blocks));
}

void gather_out(const at::Tensor& input, int64_t root, int64_t group_size,
                std::string_view group_name, std::string_view algorithm, int64_t max_blocks,
                at::Tensor& out) {
  into_apart(prepare_gather(input, root, group_size, group_name, algorithm, max_blocks), out);
}

at::Tensor scatter(const at::Tensor& input, int64_t root, int64_t group_size,
                   std::string_view group_name, std::string_view algorithm, int64_t max_blocks) {
  return into_new(prepare_scatter(input, root, group_size, group_name, algorithm, max_blocks));
}

void scatter_out(const at::Tensor& input, int64_t root, int64_t group_size,
                 std::string_view group_name, std::string_view algorithm, int64_t max_blocks,
                 at::Tensor& out) {
  into_apart(prepare_scatter(input, root, group_size, group_name, algorithm, max_blocks), out);
}

at::Tensor alltoall(const at::Tensor& input, int64_t group_size, std::string_view group_name,
                    std::string_view algorithm, int64_t max_blocks) {
  return into_new(prepare_alltoall(input, group_size, group_name, algorithm, max_blocks));
}

void alltoall_out(const at::Tensor& input, int64_t group_size, std::string_view group_name,
                  std::string_view algorithm, int64_t max_blocks, at::Tensor& out) {
  into_like(prepare_alltoall(input, group_size, group_name, algorithm, max_blocks), out);
}

void alltoall_inplace(at::Tensor& input, int64_t group_size, std::string_view group_name,
                      std::string_view algorithm, int64_t max_blocks) {
  in_place(prepare_alltoall(input, group_size, group_name, algorithm, max_blocks));
}

at::Tensor alltoallv(const at::Tensor& input, at::IntArrayRef output_splits,
                     at::IntArrayRef input_splits, std::string_view group_name,
                     std::string_view algorithm, int64_t max_blocks) {
  return into_new(
      prepare_alltoallv(input, output_splits, input_splits, group_name, algorithm, max_blocks));
}

void alltoallv_out(const at::Tensor& input, at::IntArrayRef output_splits,
                   at::IntArrayRef input_splits, std::string_view group_name,
                   std::string_view algorithm, int64_t max_blocks, at::Tensor& out) {
  into_apart(
      prepare_alltoallv(input, output_splits, input_splits, group_name, algorithm, max_blocks),
      out);
}

std::tuple<at::Tensor, at::Tensor> alltoallv_device_splits(
    const at::Tensor& input, const at::Tensor& input_splits, int64_t capacity,
    std::string_view group_name, std::string_view algorithm, int64_t max_blocks) {
  Prepared p =
      prepare_device_splits(input, input_splits, capacity, group_name, algorithm, max_blocks);
  const OnDevice guard(input.device());
  at::Tensor out = make_output(p.output_sizes(), input);
  at::Tensor received = make_output(input_splits.sizes(), input_splits);
  run_device_splits(p, input_splits, out, received);
  return {std::move(out), std::move(received)};
}

void alltoallv_device_splits_out(const at::Tensor& input, const at::Tensor& input_splits,
                                 int64_t capacity, std::string_view group_name,
                                 std::string_view algorithm, int64_t max_blocks, at::Tensor& out,
                                 at::Tensor& output_splits) {
  Prepared p =
      prepare_device_splits(input, input_splits, capacity, group_name, algorithm, max_blocks);
  check_out(p.exchange.op(), input, p.sizes, out);
  check_disjoint(p.exchange.op(), input, out, std::nullopt);
  check_out(p.exchange.op(), input_splits, input_splits.sym_sizes(), output_splits,
            "output_splits");
  check_disjoint(p.exchange.op(), input_splits, output_splits, std::nullopt, "output_splits");
  const OnDevice guard(input.device());
  const at::Tensor dense = out.is_contiguous() ? out : make_output(p.output_sizes(), input);
  const at::Tensor received = output_splits.is_contiguous()
                                  ? output_splits
                                  : make_output(input_splits.sizes(), input_splits);
  run_device_splits(p, input_splits, dense, received);
  if (!dense.is_same(out)) out.copy_(dense);
  if (!received.is_same(output_splits)) output_splits.copy_(received);
}

void barrier(std::string_view group_name) {
  constexpr const char* kOp = "barrier";
  const auto communicator = registry::require(kOp, group_name);
  const auto held = communicator->lock();
  communicator->require_usable(kOp);
  if (communicator->options().world_size == 1) return;
  const OnDevice guard(communicator->options().device);
  CallDescriptor descriptor;
  descriptor.collective = Collective::barrier;
  descriptor.algorithm = communicator->has_regions() ? Algorithm::direct : Algorithm::fallback;
  if (!communicator->has_regions()) {
    enter_fallback(*communicator, kOp, descriptor);
    fallback_barrier(*communicator, kOp, descriptor);
  } else if (!communicator->on_cuda()) {
    if (!cpu::barrier(communicator->view(), descriptor)) communicator->require_usable(kOp);
  } else {
#if COLLX_CUDA
    cuda::barrier(communicator->view(), descriptor, communicator->streams().enter());
#endif
  }
  communicator->count_call();
}

}  // namespace collx
