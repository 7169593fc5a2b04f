// Launchers of every collective except all-reduce. They convert messages to routes and launch a
// kernel for the call.
#include <algorithm>

#include "../protocol/uses.h"
#include "calls.h"
#include "collectives/device_rows.cuh"
#include "launch.h"
#include "transports/lanes.cuh"

namespace collx::cuda {
namespace {

/// Whether a rank reads the values that it reduces from the peers' tensors, or stores its messages
/// into the peers' tensors.
bool reads_peers(const ExchangeCall& call) {
  const Algorithm a = call.plan.algorithm;
  return is_reduction(call.collective) &&
         (a == Algorithm::direct || (a == Algorithm::multimem && !call.plan.staged));
}
bool writes_peers(const ExchangeCall& call) {
  if (row_of(call.collective).counted) return false;  // only the receiver knows the destination
  return !is_reduction(call.collective) &&
         (needs_symmetric(call.plan.algorithm) || call.plan.into_outputs);
}

bool is_masked(const ExchangeCall& call) { return collx::is_masked(call.collective, call.dtype); }

Message message_of(const ExchangeCall& call, const void* tensor, const Span& span) {
  Message m{};
  m.data = static_cast<char*>(const_cast<void*>(tensor)) + span.offset;
  m.bytes = span.bytes();
  if (span.rows > 1 && span.pitch != span.width) {
    m.gap = span.pitch - span.width;
    m.width = IntegerDivisor(span.width);
  }
  m.wire = wire_vectors(is_masked(call), ceil_div<uint64_t>(m.bytes, kVectorBytes));
  const bool aligned_runs = m.width.value % kVectorBytes == 0 && m.gap % kVectorBytes == 0;
  m.whole = whole_vectors(m.data) && (m.gap == 0 || aligned_runs);
  return m;
}

bool stays_in_place(const Message& from, const Message& to) {
  return from.data == to.data && from.gap == to.gap && from.width.value == to.width.value;
}

/// This rank's messages between its own tensors and slots or peers' tensors.
Routes routes_of(const CudaView& view, const ExchangeCall& call) {
  Routes routes{};
  const bool reads = reads_peers(call), writes = writes_peers(call);
  // Gather and reduce have at most one message.
  routes.same =
      call.collective == Collective::allgather || call.collective == Collective::broadcast;
  for (int d = 0; d < view.world; ++d) {
    const int rank = (view.rank + d) % view.world;
    routes.from[d] = routes.same && d > 0 ? routes.from[0]
                     : reads ? message_of(call, call.peer_input[rank], call.sent(rank, view.rank))
                             : message_of(call, call.input, call.sent(view.rank, rank));
    routes.to[d] = writes ? message_of(call, call.peer_output[rank], call.received(view.rank, rank))
                          : message_of(call, call.output, call.received(rank, view.rank));
  }
  routes.cleared = message_of(call, call.output, dense_span(call.cleared));
  routes.has_root = call.root >= 0;
  routes.root = (call.root - view.rank + view.world) % view.world;
  // In place, the part that stays on this rank is already at its destination. But a rank that
  // reduces stores its result there. If messages are stored into all outputs at once, this rank's
  // own message gives their location on the other ranks.
  const bool stores =
      is_reduction(call.collective) ? !routes.has_root || routes.root == 0 : call.plan.into_outputs;
  if (stays_in_place(routes.from[0], routes.to[0]) && !stores) routes.to[0].bytes = 0;
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

/// The number of vectors of the longest message: see ExchangeCall.
uint64_t longest_vectors(const ExchangeCall& call) {
  return ceil_div<uint64_t>(call.longest, kVectorBytes);
}

/// Whether all runs of a message begin and end at multiples of 16 bytes. A single run may end
/// elsewhere.
bool aligned(const Message& m) { return m.bytes == 0 || m.whole; }

bool whole(const Message& m) {
  return m.bytes == 0 || (m.whole && m.gap == 0 && m.bytes % kVectorBytes == 0);
}

/// Whether all messages to and from ranks, including this one, are so.
bool all(bool (&are)(const Message&), const Routes& routes, const CudaView& view) {
  for (int d = 0; d < view.world; ++d) {
    if (!are(routes.from[d]) || !are(routes.to[d])) return false;
  }
  return true;
}

bool all_whole(const Routes& routes, const CudaView& view) {
  return all(whole, routes, view) && whole(routes.cleared);
}

/// Whether an unchecked call takes one use of the tiles, and at most one vector for each thread.
bool is_straight(const KernelCall& k, const CudaView& view, const ExchangeCall& call) {
  const uint64_t threads = static_cast<uint64_t>(call.plan.blocks) * call.plan.threads;
  return !view.check && k.vectors > 0 && k.vectors <= threads && k.vectors <= k.capacity;
}

/// Whether the call is simple: see session.cuh. Here each message is one run, and all messages that
/// are not empty have equal length.
bool is_simple(const KernelCall& k, const Routes& routes, const CudaView& view,
               const ExchangeCall& call) {
  if (!is_straight(k, view, call)) return false;
  if (is_reduction(call.collective) && call.reduce_op != ReduceOp::sum) return false;
  return all_whole(routes, view);
}

using ExchangeLaunch = Launch<ExchangeCall>;

KernelCall kernel_call_of(const ExchangeLaunch& l) {
  KernelCall k = arguments_of(l.view, l.call);
  k.reduce_op = l.call.reduce_op;
  if (l.view.check) k.fingerprint = fingerprint(l.call.descriptor);
  return k;
}

/// Uses barriers, whose flags carry fingerprints.
KernelCall barrier_call_of(const ExchangeLaunch& l) {
  KernelCall k = kernel_call_of(l);
  k.vectors = longest_vectors(l.call);
  k.fingerprint = fingerprint(l.call.descriptor);
  return k;
}

/// `vectors`: the data vectors to each rank in each stage.
KernelCall twoshot_call_of(const ExchangeLaunch& l, uint64_t vectors) {
  KernelCall k = kernel_call_of(l);
  use_slots(k, l.view.layout.twoshot, l.view, wire_vectors(is_masked(l.call), vectors));
  return k;
}

/// Uses one stage of all-reduce's two-shot slots: here too, a use carries a word between all pairs.
void staged(const ExchangeLaunch& l) {
  KernelCall k = twoshot_call_of(l, longest_vectors(l.call));
  Routes routes = routes_of(l.view, l.call);
  l.run(is_simple(k, routes, l.view, l.call), k, routes);
}

/// This many threads of a block saturate the link. With more of them, calls in both directions are
/// slower (docs/internals/engineering-log.md).
constexpr int32_t kScatters = 64;

/// The messages of a call. With splits in device memory, the first ones are the whole tensors.
Routes counted_routes_of(const ExchangeLaunch& l) {
  const DeviceSplits& splits = l.call.splits;
  Routes routes = routes_of(l.view, l.call);
  if (splits.sent != nullptr) {
    const uint64_t sent = splits.rows * splits.row_bytes;
    routes.from[0] = message_of(l.call, l.call.input, dense_span(sent));
    const uint64_t received = splits.capacity * splits.row_bytes;
    routes.to[0] = message_of(l.call, l.call.output, dense_span(received));
  }
  return routes;
}

/// Messages into symmetric outputs of which only the receiver knows the place.
void direct_counted(const ExchangeLaunch& l) {
  KernelCall k = barrier_call_of(l);
  Routes routes = counted_routes_of(l);
  PullArguments pull = pull_arguments_of(l.view, l.call);
  DeviceSplits splits = l.call.splits;
  // If all rows are whole vectors, so are the messages of all ranks. This rank's output may be
  // empty; those of the peers begin at the same place.
  const bool whole_rows = l.call.geometry.inner % kVectorBytes == 0;
  const bool aligned =
      whole_vectors(l.call.input) && whole_vectors(l.call.peer_output[l.view.rank]);
  l.run(whole_rows && aligned, k, routes, pull, splits);
}

/// The same for every algorithm that uses the region, since the lengths of the messages are not
/// known here.
void with_device_splits(const ExchangeLaunch& l) {
  DeviceSplits splits = l.call.splits;
  KernelCall k = kernel_call_of(l);
  Routes routes = counted_routes_of(l);
  use_channels(k, routes, l.view);
  const uint64_t longest = wire_vectors(true, longest_vectors(l.call));
  k.vectors = longest;
  l.run(is_straight(k, l.view, l.call), k, routes, splits);
  if (l.view.world != 2 || !is_long(longest, k.capacity)) return;
  k.check = false;  // the ranks have already compared the call, and one of them may end here
  LaneArguments lanes{};
  lanes.area = l.view.layout.lanes;
  lanes.fingerprint[1] = fingerprint_of_lanes(l.call.descriptor, false);
  lanes.scatters = kScatters;
  lanes.takes = 128;
  void* arguments[] = {&k, &routes, &splits, &lanes};
  launch(alltoallv_long({}), Plan{Algorithm::lanes, splits.lanes, kLaneBlock}, l.view.pdl,
         arguments, l.stream, "the long messages of an alltoallv");
}

/// Launches a call with few blocks, each of which serves several lanes.
void wide_lanes(const ExchangeLaunch& l, KernelCall& k, LaneArguments& lanes, Routes& routes,
                bool sends, bool takes) {
  const bool reduces = is_reduction(l.call.collective);
  const bool whole = l.call.plan.bulk && all_whole(routes, l.view);
  // Values that are also sent are stored together with the send. A reduction already includes the
  // root's own values.
  const bool keeps = !reduces && lanes.received[0].count > 0 && !(routes.same && sends);
  const bool uses[3] = {sends, takes, keeps};
  uint32_t vectors = lanes.received[0].vectors;
  for (int d = 1; d < l.view.world; ++d) {
    vectors = std::max({vectors, lanes.sent[d].vectors, lanes.received[d].vectors});
  }
  lanes.wide = wide_shape(l.call.plan, l.view.world, vectors * kVectorBytes, uses, reduces);
  ExchangeLaunch wide{l.view, l.call, l.stream,
                      reduces ? kernels::exchange_wide : kernels::exchange_wide_copy};
  if (whole) wide.shared = shared_bytes(lanes.wide, l.view.world, reduces);
  wide.run(whole, k, lanes, routes);
}

/// Launches a call by chunks, with one lane or several lanes for each block.
void lanes(const ExchangeLaunch& l) {
  KernelCall k = kernel_call_of(l);
  Routes routes = routes_of(l.view, l.call);
  LaneArguments lanes{};
  lanes.area = l.view.layout.lanes;
  const uint32_t mark = fingerprint_of_lanes(l.call.descriptor, false);
  lanes.in_place = overwrites_in_place(l.call.collective) && l.call.input == l.call.output;
  const bool reduces = is_reduction(l.call.collective);
  const int32_t width = l.call.plan.width;
  const uint32_t slot = lanes.area.slot_bytes;
  const uint32_t most = width > 0 ? largest_wide_chunk(l.call.collective, l.view.world, slot)
                                  : largest_chunk(l.call.collective, l.call.plan.algorithm, slot);
  const auto chunks_of = [&](const Message& m) {
    return LaneChunks(ceil_div<uint64_t>(m.bytes, kVectorBytes),
                      l.call.plan.blocks * std::max(width, 1), most / kVectorBytes);
  };
  lanes.sent[0] = chunks_of(routes.cleared);
  lanes.received[0] = chunks_of(routes.to[0]);
  bool sends = false, takes = false;
  for (int d = 1; d < l.view.world; ++d) {
    const int peer = (l.view.rank + d) % l.view.world;
    lanes.sent[d] = chunks_of(routes.from[d]);
    lanes.received[d] = chunks_of(routes.to[d]);
    sends |= lanes.sent[d].count > 0;
    takes |= lanes.received[d].count > 0;
    lanes.fingerprint[d] =
        row_of(l.call.collective).counted
            ? pair_fingerprint(mark, l.view.rank, peer, routes.from[d].bytes, routes.to[d].bytes)
            : mark;
  }
  if (width > 0) return wide_lanes(l, k, lanes, routes, sends, takes);
  lanes.scatters = sends ? kScatters : 0;
  lanes.takes = !takes ? 0 : sends && !reduces ? 128 : 192;
  // Other loads and stores take longer than the link: see docs/internals/engineering-log.md.
  if (sends && takes && !all(aligned, routes, l.view)) {
    lanes.scatters = lanes.takes = reduces ? 128 : 96;
  }
  const bool sums = !reduces || l.call.reduce_op == ReduceOp::sum;
  l.run(sums && all_whole(routes, l.view), k, lanes, routes);
}

void channels(const ExchangeLaunch& l) {
  KernelCall k = kernel_call_of(l);
  Routes routes = routes_of(l.view, l.call);
  use_channels(k, routes, l.view);
  l.run(is_simple(k, routes, l.view, l.call), k, routes);
}

void direct(const ExchangeLaunch& l) {
  KernelCall k = barrier_call_of(l);
  Routes routes = routes_of(l.view, l.call);
  l.run(all_whole(routes, l.view), k, routes);
}

/// By multicast.
void multimem(const ExchangeLaunch& l) {
  KernelCall k = barrier_call_of(l);
  Routes routes = routes_of(l.view, l.call);
  PullArguments pull = pull_arguments_of(l.view, l.call);
  MulticastArguments multicast = multicast_arguments_of(l.view, l.call);
  l.run(false, k, routes, pull, multicast);
}

/// Every rank passes on a part of the whole tensor, including ranks that are not the root.
void twostage(const ExchangeLaunch& l) {
  KernelCall k = barrier_call_of(l);
  Routes routes = routes_of(l.view, l.call);
  routes.from[0] = message_of(l.call, l.call.input, dense_span(l.call.longest));
  routes.to[0] = message_of(l.call, l.call.output, dense_span(l.call.longest));
  PullArguments pull = pull_arguments_of(l.view, l.call);
  l.run(false, k, routes, pull);
}

/// Slices of 1/(W-1) of the tensor, one for each rank except the root, in ring order after it.
uint64_t slice_vectors(const ExchangeLaunch& l) {
  return ceil_div<uint64_t>(longest_vectors(l.call), static_cast<uint64_t>(l.view.world) - 1);
}
Span slice_of(const ExchangeLaunch& l, int rank) {
  const int world = l.view.world;
  const Part part =
      partition(longest_vectors(l.call), world - 1, (rank - l.call.root - 1 + world) % world);
  const uint64_t from = std::min(part.start * kVectorBytes, l.call.longest);
  const uint64_t to = std::min((part.start + part.count) * kVectorBytes, l.call.longest);
  return {from, 1, to - from, to - from};
}

/// The messages of a broadcast in which every rank except the root passes on its slice.
Routes slices_of_broadcast(const ExchangeLaunch& l) {
  const ExchangeCall& call = l.call;
  Routes routes = routes_of(l.view, call);
  const bool is_root = l.view.rank == call.root;
  for (int d = 1; d < l.view.world; ++d) {
    const int rank = (l.view.rank + d) % l.view.world;
    // The root sends this rank's slice. Another rank sends its own slice. The root receives
    // nothing.
    const int slice = rank == call.root ? l.view.rank : rank;
    routes.from[d] = is_root ? message_of(call, call.input, slice_of(l, rank)) : Message{};
    routes.to[d] = is_root ? Message{} : message_of(call, call.output, slice_of(l, slice));
  }
  return routes;
}

void pipelined(const ExchangeLaunch& l) {
  Routes routes = slices_of_broadcast(l);
  KernelCall k = twoshot_call_of(l, slice_vectors(l));
  l.run(is_simple(k, routes, l.view, l.call), k, routes);
}

/// The same by chunks.
void broadcast_lanes(const ExchangeLaunch& l) {
  KernelCall k = kernel_call_of(l);
  Routes routes = slices_of_broadcast(l);
  LaneArguments lanes{};
  lanes.area = l.view.layout.lanes;
  const uint32_t most =
      largest_chunk(l.call.collective, l.call.plan.algorithm, lanes.area.slot_bytes);
  const auto chunks_of = [&](uint64_t vectors) {
    return LaneChunks(vectors, l.call.plan.blocks, most / kVectorBytes);
  };
  const LaneChunks slice = chunks_of(slice_vectors(l)), none = chunks_of(0);
  const uint32_t mark = fingerprint_of_lanes(l.call.descriptor, false);
  const bool is_root = l.view.rank == l.call.root;
  lanes.received[0] = chunks_of(ceil_div<uint64_t>(routes.to[0].bytes, kVectorBytes));
  for (int d = 1; d < l.view.world; ++d) {
    const bool from_root = d == routes.root;
    lanes.sent[d] = is_root ? slice : none;
    lanes.received[d] = from_root ? slice : none;
    lanes.passed[d] = lanes.gathered[d] = is_root || from_root ? none : slice;
    lanes.fingerprint[d] = mark;
  }
  l.run(all_whole(routes, l.view), k, lanes, routes);
}

void reduce_in_two_stages(const ExchangeLaunch& l) {
  const ExchangeCall& call = l.call;
  Routes routes = routes_of(l.view, call);
  const bool is_root = l.view.rank == call.root;
  for (int d = 0; d < l.view.world; ++d) {
    const int rank = (l.view.rank + d) % l.view.world;
    if (rank == call.root) continue;
    routes.from[d] = message_of(call, call.input, slice_of(l, rank));
    if (is_root) routes.to[d] = message_of(call, call.output, slice_of(l, rank));
  }
  if (!is_root) {  // the part that stays here, unless it is already at its destination
    const uint64_t bytes = call.input == call.output ? 0 : call.longest;
    routes.kept = message_of(call, call.input, dense_span(bytes));
    routes.to[0] = message_of(call, call.output, dense_span(bytes));
  }
  KernelCall k = twoshot_call_of(l, slice_vectors(l));
  l.run(false, k, routes);
}

constexpr Collectives kCopies = kPairs & ~kReductions;
constexpr Collectives kCopiesToo = kCopies | kBroadcast;

constexpr LauncherRow<ExchangeCall> kLaunchers[] = {
    {Algorithm::staged, kReductions, kernels::gather_scatter_staged, staged},
    {Algorithm::staged, kCopies, kernels::gather_scatter_staged_copy, staged},
    {Algorithm::channels, kReduce, kernels::gather_scatter_channels, channels},
    {Algorithm::channels, kCopiesToo, kernels::gather_scatter_channels_copy, channels},
    {Algorithm::lanes, kReductions, kernels::exchange_lanes, lanes},
    {Algorithm::lanes, kCopiesToo, kernels::exchange_lanes_copy, lanes},
    {Algorithm::direct, kReductions, kernels::reducescatter_direct, direct},
    {Algorithm::direct, kCounted, kernels::alltoallv_direct, direct_counted},
    {Algorithm::direct, kCopiesToo & ~kCounted, kernels::gather_scatter_direct, direct},
    {Algorithm::multimem, kReductions, kernels::reducescatter_multimem, multimem},
    {Algorithm::multimem, kCopiesToo, kernels::allgather_multimem, multimem},
    {Algorithm::reduce_twostage, kReduce, kernels::reduce_twostage, reduce_in_two_stages},
    {Algorithm::pipelined, kBroadcast, kernels::broadcast_pipelined, pipelined},
    {Algorithm::broadcast_lanes, kBroadcast, kernels::broadcast_lanes, broadcast_lanes},
    {Algorithm::twostage, kBroadcast, kernels::broadcast_twostage, twostage},
};
static_assert(is_complete(DeviceKind::cuda, kExchanges, [](Collective c, Algorithm a) {
  return find_launcher(kLaunchers, c, a) != nullptr;
}));

static_assert(take_epilogues(kLaunchers, only(Collective::reducescatter), Algorithm::automatic));

/// Copies a message. If one side is strided and the other one is a single run, the run is copied
/// with the width of the strided side. CUDA limits the distance of the rows of a copy, so longer
/// rows, of which few fit into memory, are copied one by one.
void copy(const Message& from, const Message& to, Stream stream) {
  if (from.gap == 0 && to.gap == 0) {
    return require(cudaMemcpyAsync(to.data, from.data, to.bytes, cudaMemcpyDefault, stream),
                   "copying a message");
  }
  constexpr uint64_t kMostPitch = INT32_MAX;  // cudaDevAttrMaxPitch of all devices
  const uint64_t width = (from.gap != 0 ? from : to).width.value, rows = to.bytes / width;
  const uint64_t pitch_to = width + to.gap, pitch_from = width + from.gap;
  if (std::max(pitch_to, pitch_from) <= kMostPitch) {
    return require(cudaMemcpy2DAsync(to.data, pitch_to, from.data, pitch_from, width, rows,
                                     cudaMemcpyDefault, stream),
                   "copying a message");
  }
  for (uint64_t row = 0; row < rows; ++row) {
    require(cudaMemcpyAsync(static_cast<char*>(to.data) + row * pitch_to,
                            static_cast<const char*>(from.data) + row * pitch_from, width,
                            cudaMemcpyDefault, stream),
            "copying a message");
  }
}

void launch_barrier(Kernel kernel, const CudaView& view, const CallDescriptor& descriptor,
                    Stream stream, cudaEvent_t begun) {
  Call call{};
  call.descriptor = descriptor;
  KernelCall kernel_call = arguments_of(view, call);
  kernel_call.fingerprint = fingerprint(descriptor);
  void* arguments[] = {&kernel_call};
  launch(kernel, Plan{Algorithm::direct, 1, 64}, view.pdl, arguments, stream, "a barrier", 1,
         begun);
}

}  // namespace

void exchange(const CudaView& view, const ExchangeCall& call, Stream stream) {
  if (call.splits.sent != nullptr && call.plan.algorithm != Algorithm::direct) {
    return with_device_splits({view, call, stream, kernels::alltoallv_device_splits});
  }
  launch_by(kLaunchers, view, call, stream);
}

void copy(const CudaView& view, const ExchangeCall& call, CopyStreams& streams, Stream stream) {
  const Routes routes = routes_of(view, call);
  const bool stays = routes.to[0].bytes > 0 || routes.cleared.bytes > 0;
  if (stays) {
    const Stream second = streams.fork(stream);
    if (routes.to[0].bytes > 0) copy(routes.from[0], routes.to[0], second);
    if (routes.cleared.bytes > 0) {
      require(cudaMemsetAsync(routes.cleared.data, 0, routes.cleared.bytes, second),
              "clearing an output");
    }
  }
  // Copies are serialized, and at any time each rank copies to a different rank: simultaneous
  // copies to several GPUs lose a third of the link's bandwidth (docs/guide/performance.md).
  for (int d = 1; d < view.world; ++d) {
    if (routes.to[d].bytes > 0) copy(routes.from[d], routes.to[d], stream);
  }
  if (stays) streams.join(stream);
}

void enter(const CudaView& view, const CallDescriptor& descriptor, CopyStreams& streams,
           Stream stream) {
  launch_barrier(rank_entry({}), view, descriptor, stream, streams.entered());
}

void barrier(const CudaView& view, const CallDescriptor& descriptor, Stream stream) {
  launch_barrier(rank_barrier({}), view, descriptor, stream, nullptr);
}

}  // namespace collx::cuda
