// Broadcast in two stages: the root sends a part to each relay, and all ranks gather from the
// relays.
// twostage: every rank is a relay, including the root. pipelined: the root sends all parts and has
// none in the second stage. Large tensors are sent chunk by chunk, so that relays forward one chunk
// while the next one arrives.
//
// Parts travel through the payload: the relay copies its part from the root's staging memory into
// its results. If outputs are symmetric, parts travel through the relays' outputs, where the root
// stores them.
// Traffic with R relays: the root writes n; a relay reads its n/R from the root, and the parts of
// the other relays.
#include "messages.h"
#include "twoshot.h"

namespace collx::cpu {
namespace {

enum class Relays : uint8_t { all, all_but_root };

class Relay {
 public:
  Relay(ExchangeSession& session, const CallKernels& kernels, Relays relays)
      : session_(session), kernels_(kernels), relays_(relays) {}

  bool run_staged();
  bool run_symmetric(uint64_t chunk_lines);

  // The steps of the two-shot pipeline, in units of lines.
  void scatter(Use use, Chunk chunk) const {
    if (!session_.is_root()) return;
    const Bytes all = bytes_of(chunk, {0, chunk.count});
    kernels_.copy(session_.staging(root(), use), session_.input() + all.at, all.count);
  }
  void reduce(Use use, Chunk chunk) const;
  void gather(Use use, Chunk chunk) const;

 private:
  struct Bytes {
    uint64_t at;  // offset in the tensor
    uint64_t count;
  };

  int root() const { return session_.call().root; }
  int count() const { return session_.world() - (relays_ == Relays::all ? 0 : 1); }
  bool is_relay(int rank) const { return relays_ == Relays::all || rank != root(); }
  uint64_t lines() const { return ceil_div(session_.call().longest, kCpuLineBytes); }

  Bytes bytes_of(Chunk chunk, Part part) const {
    const uint64_t at = (chunk.start + part.start) * kCpuLineBytes;
    const uint64_t left = session_.call().longest - std::min(at, session_.call().longest);
    return {at, std::min(part.count * kCpuLineBytes, left)};
  }
  Bytes part_of(Chunk chunk, int relay) const {
    const int index = relays_ == Relays::all || relay < root() ? relay : relay - 1;
    return bytes_of(chunk, partition(chunk.count, count(), index));
  }
  /// Copies the root's input to its output.
  void keep(Bytes bytes) const {
    copy(kernels_.copy, {session_.output()}, bytes.at, {session_.input()}, bytes.at, bytes.count);
  }
  void hand_out(Chunk chunk) const;
  void keep_the_others(Chunk chunk) const;
  void gather_from_outputs(Chunk chunk) const;

  ExchangeSession& session_;
  const CallKernels& kernels_;
  Relays relays_;
};

void Relay::reduce(Use use, Chunk chunk) const {
  const int rank = session_.rank();
  const Bytes part = is_relay(rank) ? part_of(chunk, rank) : Bytes{0, 0};
  char* const results = session_.results(rank, use);
  if (session_.is_root()) {
    kernels_.copy(results, session_.input() + part.at, part.count);
    return;
  }
  const uint64_t staged = part.at - chunk.start * kCpuLineBytes;
  kernels_.copy(results, session_.staging(root(), use) + staged, part.count);
  kernels_.copy(session_.output() + part.at, results, part.count);
}

void Relay::gather(Use use, Chunk chunk) const {
  if (session_.is_root()) return keep(bytes_of(chunk, {0, chunk.count}));
  for_each_peer(session_, [&](int peer) {
    if (!is_relay(peer)) return;
    const Bytes part = part_of(chunk, peer);
    kernels_.copy(session_.output() + part.at, session_.results(peer, use), part.count);
  });
}

bool Relay::run_staged() {
  const uint64_t part_lines = session_.layout().result_bytes / kCpuLineBytes;
  return run_twoshot(session_, Area::pull, lines(), part_lines * static_cast<uint64_t>(count()),
                     Phase::stage_barrier, *this);
}

void Relay::hand_out(Chunk chunk) const {
  for_each_peer(session_, [&](int peer) {
    const Bytes part = part_of(chunk, peer);
    kernels_.copy(session_.peer_output(peer) + part.at, session_.input() + part.at, part.count);
  });
  if (is_relay(root())) keep(part_of(chunk, root()));
}

/// Copies all parts except the root's own, which peers may already be reading.
void Relay::keep_the_others(Chunk chunk) const {
  for_each_peer(session_, [&](int peer) {
    if (is_relay(peer)) keep(part_of(chunk, peer));
  });
}

void Relay::gather_from_outputs(Chunk chunk) const {
  for_each_peer(session_, [&](int peer) {
    if (!is_relay(peer)) return;
    const Bytes part = part_of(chunk, peer);
    kernels_.copy(session_.output() + part.at, session_.peer_output(peer) + part.at, part.count);
  });
}

bool Relay::run_symmetric(uint64_t chunk_lines) {
  if (!session_.start_barrier()) return false;
  for (uint64_t start = 0; start < lines(); start += chunk_lines) {
    const Chunk chunk{start, std::min(chunk_lines, lines() - start)};
    const Use use = session_.next_use(Area::pull);
    if (session_.is_root()) {
      if (!session_.alive()) return false;
      hand_out(chunk);
      session_.publish_all(use);
      keep_the_others(chunk);
      continue;
    }
    session_.publish_all(use);
    // The root has filled the relays' outputs, so its word covers all of them.
    if (!session_.await_from(root(), use, Word::arrived, Phase::stage_barrier)) return false;
    gather_from_outputs(chunk);
  }
  return session_.end_barrier();
}

/// The lines of a part that the root stores into a relay's output at a time.
constexpr uint64_t kStrideLines = (64 << 10) / kCpuLineBytes;

bool relay(ExchangeSession& session, const CallKernels& kernels, Relays relays) {
  Relay relay(session, kernels, relays);
  return session.outputs_symmetric()
             ? relay.run_symmetric(kStrideLines * static_cast<uint64_t>(session.world()))
             : relay.run_staged();
}

}  // namespace

bool broadcast_twostage(ExchangeSession& session, const CallKernels& kernels) {
  return relay(session, kernels, Relays::all);
}

bool broadcast_pipelined(ExchangeSession& session, const CallKernels& kernels) {
  return relay(session, kernels, Relays::all_but_root);
}

}  // namespace collx::cpu
