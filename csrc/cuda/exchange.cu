// Launchers of every collective but all-reduce: messages become routes, a call becomes a kernel.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "../protocol/names.h"
#include "../protocol/selection.h"
#include "collectives/kernel_table.cuh"
#include "exchange.h"
#include "kernels.h"
#include "launch.h"

namespace collx::cuda {
namespace {

bool is_direct(const ExchangeCall& call) { return call.plan.algorithm == Algorithm::direct; }

bool is_masked(const ExchangeCall& call) { return collx::is_masked(call.collective, call.dtype); }

Message message_of(const ExchangeCall& call, const void* tensor, const Span& span) {
  Message m{};
  m.data = static_cast<char*>(const_cast<void*>(tensor)) + span.offset;
  m.bytes = span.bytes();
  m.width = span.rows == 1 ? m.bytes : span.width;
  m.pitch = span.pitch;
  m.wire = wire_vectors(is_masked(call), ceil_div<uint64_t>(m.bytes, kVectorBytes));
  m.unit = std::min<uint32_t>(call.element_bytes, 8);
  const bool aligned_runs = span.width % kVectorBytes == 0 && span.pitch % kVectorBytes == 0;
  m.whole = whole_vectors(m.data) && (span.rows <= 1 || aligned_runs);
  return m;
}

/// This rank's messages between its own tensors and slots or peers' tensors.
Routes routes_of(const CudaView& view, const ExchangeCall& call) {
  Routes routes{};
  const bool copies_direct = is_direct(call) && !is_reduction(call.collective);
  const bool reduces_direct = is_direct(call) && is_reduction(call.collective);
  for (int d = 0; d < view.world; ++d) {
    const int rank = (view.rank + d) % view.world;
    routes.from[d] = reduces_direct
                         ? message_of(call, call.peer_input[rank], call.sent(rank, view.rank))
                         : message_of(call, call.input, call.sent(view.rank, rank));
    routes.to[d] = copies_direct
                       ? message_of(call, call.peer_output[rank], call.received(view.rank, rank))
                       : message_of(call, call.output, call.received(rank, view.rank));
  }
  routes.cleared = message_of(call, call.output, dense_span(call.cleared));
  // Gather and reduce have one message, or none.
  routes.same =
      call.collective == Collective::allgather || call.collective == Collective::broadcast;
  routes.has_root = call.root >= 0;
  routes.root = (call.root - view.rank + view.world) % view.world;
  // In place, what stays here is where it belongs.
  if (call.input == call.output && !is_reduction(call.collective)) routes.to[0].bytes = 0;
  return routes;
}

void use_channels(KernelCall& k, Routes& routes, const CudaView& view) {
  const ChannelArea& area = view.layout.channels;
  use_slots(k, area.slots, view, 0);
  for (int d = 1; d < view.world; ++d) {
    k.vectors = std::max({k.vectors, routes.from[d].wire, routes.to[d].wire});
  }
  char* own = view.region[view.rank];
  routes.uses_sent = reinterpret_cast<uint32_t*>(own + area.sent);
  routes.uses_received = reinterpret_cast<uint32_t*>(own + area.received);
  routes.uses_done = reinterpret_cast<uint32_t*>(own + area.done);
  routes.done_offset = area.done;
}

/// Vectors of the longest message, which all ranks agree on.
uint64_t longest(const ExchangeCall& call) {
  return ceil_div<uint64_t>(call.longest, kVectorBytes);
}

bool whole(const Message& m) {
  return m.bytes == 0 || (m.whole && m.width == m.bytes && m.bytes % kVectorBytes == 0);
}

bool all_whole(const Routes& routes, const CudaView& view) {
  for (int d = 0; d < view.world; ++d) {
    if (!whole(routes.from[d]) || !whole(routes.to[d])) return false;
  }
  return whole(routes.cleared);
}

/// Whether the call is one of those that session.cuh calls simple: here, of messages that are one
/// run each, and equally long unless they are empty.
bool is_simple(const KernelCall& k, const Routes& routes, const CudaView& view,
               const ExchangeCall& call) {
  const uint64_t threads = static_cast<uint64_t>(call.plan.blocks) * call.plan.threads;
  if (view.check || k.vectors == 0 || k.vectors > threads || k.vectors > k.capacity) return false;
  if (is_reduction(call.collective) && call.reduce_op != ReduceOp::sum) return false;
  return all_whole(routes, view);
}

struct Launch {
  const CudaView& view;
  const ExchangeCall& call;
  KernelCall kernel_call;
  Routes routes;
  PullArguments pull;
  Stream stream;

  void run(bool simple = false, void* third = nullptr) {
    run_kernel(require_kernel(call.collective, call.plan.algorithm, call.dtype, view.world, simple),
               third);
  }
  void run_kernel(Kernel kernel, void* third) {
    void* arguments[] = {&kernel_call, &routes, third};  // a kernel takes as many as it has
    launch(kernel, call.plan, view.pdl, arguments, stream, "launching a collective");
  }
};

void use_twoshot_slots(Launch& l, uint64_t vectors) {
  use_slots(l.kernel_call, l.view.layout.twoshot, l.view, wire_vectors(is_masked(l.call), vectors));
}

void staged(Launch& l) {
  // One stage of all-reduce's two-shot slots: a use carries a word between all pairs, too.
  use_twoshot_slots(l, longest(l.call));
  l.run(is_simple(l.kernel_call, l.routes, l.view, l.call));
}

void with_device_splits(Launch& l) {
  const ExchangeCall& call = l.call;
  const DeviceSplits& splits = call.splits;
  l.routes.from[0] = message_of(call, call.input, dense_span(splits.rows * splits.row_bytes));
  l.routes.to[0] = message_of(call, call.output, dense_span(splits.capacity * splits.row_bytes));
  use_channels(l.kernel_call, l.routes, l.view);
  DeviceSplits given = splits;
  l.run_kernel(alltoallv_device_splits({l.call.dtype, l.view.world, false}), &given);
}

void channels(Launch& l) {
  if (l.call.splits.sent != nullptr) return with_device_splits(l);
  use_channels(l.kernel_call, l.routes, l.view);
  l.run(is_simple(l.kernel_call, l.routes, l.view, l.call));
}

void direct(Launch& l) {
  l.kernel_call.vectors = longest(l.call);
  l.kernel_call.fingerprint = fingerprint(l.call.descriptor);
  l.run(all_whole(l.routes, l.view));
}

void twostage(Launch& l) {
  l.kernel_call.vectors = longest(l.call);
  l.kernel_call.fingerprint = fingerprint(l.call.descriptor);
  // Every rank passes on a part of the whole tensor, whether or not it is the root.
  l.routes.from[0] = message_of(l.call, l.call.input, dense_span(l.call.longest));
  l.routes.to[0] = message_of(l.call, l.call.output, dense_span(l.call.longest));
  l.run(false, &l.pull);
}

/// Slices of 1/(W-1), one for each rank that is not the root: those behind it in turn.
struct Slices {
  const Launch& l;
  uint64_t vectors() const {
    return ceil_div<uint64_t>(longest(l.call), static_cast<uint64_t>(l.view.world) - 1);
  }
  Span of(int rank) const {
    const int world = l.view.world;
    const Part part =
        partition(longest(l.call), world - 1, (rank - l.call.root - 1 + world) % world);
    const uint64_t from = std::min(part.start * kVectorBytes, l.call.longest);
    const uint64_t to = std::min((part.start + part.count) * kVectorBytes, l.call.longest);
    return {from, 1, to - from, to - from};
  }
};

void pipelined(Launch& l) {
  const Slices slices{l};
  const int root = l.call.root;
  for (int d = 1; d < l.view.world; ++d) {
    const int rank = (l.view.rank + d) % l.view.world;
    const bool is_root = l.view.rank == root;
    // From the root its slice, from another rank that rank's own. Nothing comes back to the root.
    l.routes.from[d] = is_root ? message_of(l.call, l.call.input, slices.of(rank)) : Message{};
    l.routes.to[d] =
        is_root ? Message{}
                : message_of(l.call, l.call.output, slices.of(rank == root ? l.view.rank : rank));
  }
  use_twoshot_slots(l, slices.vectors());
  l.run(is_simple(l.kernel_call, l.routes, l.view, l.call));
}

void reduce_in_two_stages(Launch& l) {
  const Slices slices{l};
  const int root = l.call.root;
  for (int d = 0; d < l.view.world; ++d) {
    const int rank = (l.view.rank + d) % l.view.world;
    if (rank == root) continue;
    l.routes.from[d] = message_of(l.call, l.call.input, slices.of(rank));
    if (l.view.rank == root) {
      l.routes.to[d] = message_of(l.call, l.call.output, slices.of(rank));
    }
  }
  if (l.view.rank != root) {  // what stays here, unless it is where it belongs
    const uint64_t bytes = l.call.input == l.call.output ? 0 : l.call.longest;
    l.routes.kept = message_of(l.call, l.call.input, dense_span(bytes));
    l.routes.to[0] = message_of(l.call, l.call.output, dense_span(bytes));
  }
  use_twoshot_slots(l, slices.vectors());
  l.run();
}

struct LauncherRow {
  Algorithm algorithm;
  void (*launch)(Launch&);
};

constexpr LauncherRow kLaunchers[] = {
    {Algorithm::staged, staged},       {Algorithm::channels, channels},
    {Algorithm::direct, direct},       {Algorithm::reduce_twostage, reduce_in_two_stages},
    {Algorithm::pipelined, pipelined}, {Algorithm::twostage, twostage},
};

}  // namespace

void exchange(const CudaView& view, const ExchangeCall& call, Stream stream) {
  Launch l{
      view,  call, arguments_of(view, call), routes_of(view, call), pull_arguments_of(view, call),
      stream};
  l.kernel_call.reduce_op = call.reduce_op;
  if (view.check) l.kernel_call.fingerprint = fingerprint(call.descriptor);
  for (const LauncherRow& row : kLaunchers) {
    if (row.algorithm == call.plan.algorithm) return row.launch(l);
  }
  throw std::runtime_error("collx: nothing launches algorithm " +
                           std::string(name_of(call.plan.algorithm)));
}

void barrier(const CudaView& view, const CallDescriptor& descriptor, Stream stream) {
  Call call{};
  call.descriptor = descriptor;
  KernelCall kernel_call = arguments_of(view, call);
  kernel_call.fingerprint = fingerprint(descriptor);
  void* arguments[] = {&kernel_call};
  launch(rank_barrier({}), Plan{Algorithm::direct, 1, 64}, view.pdl, arguments, stream,
         "launching a barrier");
}

}  // namespace collx::cuda
