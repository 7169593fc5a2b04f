// Broadcast in a pipeline: the root sends each other rank a slice of its own, 1/(W-1) of the
// tensor; that rank forwards every word, as it arrives, to the ranks that are not the root.
//
// Costs the tensor once on the root's link, and two flights. In all-reduce's two-shot slots: the
// second stage carries fillers to the root, so that every two ranks exchange words in both
// directions in every use. The fillers use a direction of the links that is idle.
#include "../stages/messages.cuh"
#include "kernel_table.cuh"

namespace collx::cuda {
namespace {

enum Stage { kScatter, kForward };

template <int W, bool Simple>
class Pipeline {
  using S = MaskedSlots;
  static constexpr int kRanks = World<W>::kRanks;

 public:
  __device__ Pipeline(Session<Simple>& session, const Routes& routes)
      : session_(session),
        call_(session.call),
        routes_(routes),
        world_(World<W>::size(call_)),
        root_((call_.rank + routes.root) % world_) {}

  __device__ void run() {
    run_slots<Order::behind>(
        session_, [this] { copy_own<Simple>(routes_.from[0], routes_.to[0]); },
        [this](const Place& at) { root_ == call_.rank ? scatter(at) : forward(at); },
        [this](const Place& at) { gather(at); });
  }

 private:
  /// The root: a vector of each slice to the rank that forwards it.
  __device__ __forceinline__ void scatter(const Place& at) {
    Vector v[kRanks];
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d < world_) v[d] = load<Simple>(routes_.from[d], data_index<S>(at.vector));
    }
    const uint32_t offset = slot_offset(call_, kScatter, at.epoch, at.i);
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d >= world_) continue;
      v[d] = S::sendable(v[d]);
      if (session_.alive()) S::push(call_.outgoing[d] + offset, v[d]);
    }
  }

  /// Another rank: a vector of its slice, on to the others and to its output. The masks travel
  /// along.
  __device__ __forceinline__ void forward(const Place& at) {
    char* slot = call_.arriving + slot_offset(call_, kScatter, at.epoch, at.i) +
                 static_cast<uint32_t>(root_) * call_.source_bytes;
    Vector wire{};
    const bool arrived = session_.patience.wait(
        Phase::arrival, [&] { return S::poll(slot, wire) != ~0u; },
        [&] {
          return Blame{root_, at.epoch, 0};
        });
    const uint32_t offset = slot_offset(call_, kForward, at.epoch, at.i);
#pragma unroll
    for (int d = 1; d < kRanks; ++d) {
      if (d >= world_ || !arrived) continue;
      S::push(call_.outgoing[d] + offset, d == routes_.root ? Vector{} : wire);
    }
    const Vector data = S::received(wire);
    if (!arrived) return;
    store<Simple>(routes_.to[routes_.root], data_index<S>(at.vector), data);
    S::rearm(slot);
  }

  /// A vector of every slice that others forward; to the root, fillers.
  __device__ __forceinline__ void gather(const Place& at) {
    const Arrivals<kRanks> arrivals(call_, slot_offset(call_, kForward, at.epoch, at.i));
    const auto forwards = [this](int source) {
      return source < world_ && source != call_.rank && source != root_;
    };
    Vector v[kRanks];
    const bool arrived =
        await_vectors<S>(session_, Phase::gather, at.epoch, Vector{}, arrivals, v, forwards);
#pragma unroll
    for (int source = 0; source < kRanks; ++source) {
      if (!forwards(source)) continue;
      v[source] = S::received(v[source]);
      if (!arrived) continue;
      // Nothing is kept of the fillers: the root expects no message.
      const int d = source > call_.rank ? source - call_.rank : source - call_.rank + world_;
      store<Simple>(routes_.to[d], data_index<S>(at.vector), v[source]);
      S::rearm(arrivals.slot(source));
    }
  }

  Session<Simple>& session_;
  const KernelCall& call_;
  const Routes& routes_;
  const int world_, root_;
};

template <int W, bool Simple>
__global__ void __launch_bounds__(kFullBlock, kBlocksHeld)
    pipelined(const __grid_constant__ KernelCall call, const __grid_constant__ Routes routes) {
  Session<Simple> session(call);
  Pipeline<W, Simple>(session, routes).run();
}

}  // namespace

Kernel broadcast_pipelined(const Instance& i) {
  return for_world_and_simple(
      i, [&]<int W, bool Simple>() { return as_kernel(pipelined<W, Simple>); });
}

}  // namespace collx::cuda
