// Alltoallv. A rank has only its own splits, but all ranks count uses. In the first use each rank
// publishes how much it sends to each rank.
//
// staged: through the payload. The first use also carries the first chunk, so messages that fit one
// chunk need only one exchange. Traffic of a rank: as in gather_scatter_staged, and a row of counts
// from each peer.
// direct: into the peers' symmetric outputs, between two barriers after the first use. A rank
// computes the place of its messages in each output from all counts.
#include "../failure.h"
#include "staging.h"

namespace collx::cpu {
namespace {

/// By rank, in bytes; in rows if the splits are in memory.
struct Splits {
  uint64_t unit;  // bytes of the counted unit
  uint64_t sent[kMaxRanks];
  uint64_t received[kMaxRanks];
  uint64_t longest;  // between any two ranks
};

bool in_memory(const ExchangeCall& call) { return call.splits.sent != nullptr; }

bool refuse(const Session& session, Phase phase, uint64_t most, uint64_t seen) {
  StatusRecord record = session.record(Failure::splits, phase, session.rank());
  record.expected = most;
  record.seen = seen;
  report(session.view(), record);
  return false;
}

/// Whether the sum of all counts is at most `most`. The sum itself may wrap around.
bool fit(const uint64_t* counts, int world, uint64_t most) {
  for (int r = 0; r < world; ++r) {
    if (counts[r] > most) return false;
    most -= counts[r];
  }
  return true;
}

uint64_t sum(const uint64_t* counts, int world) {
  uint64_t total = 0;
  for (int r = 0; r < world; ++r) total += counts[r];
  return total;
}

/// Returns false if the rank's own splits do not fit its input. A negative split is a very large
/// count.
bool read_own(const ExchangeSession& session, Splits& splits) {
  const ExchangeCall& call = session.call();
  const int world = session.world();
  splits.unit = in_memory(call) ? call.splits.row_bytes : 1;
  for (int r = 0; r < world; ++r) {
    splits.sent[r] = in_memory(call) ? static_cast<uint64_t>(call.splits.sent[r]) : call.sends[r];
  }
  if (!in_memory(call) || fit(splits.sent, world, call.splits.rows)) return true;
  return refuse(session, Phase::counts, call.splits.rows, sum(splits.sent, world));
}

void tell(const ExchangeSession& session, Use use, const Splits& splits) {
  const Counts counts = session.counts(session.rank(), use);
  for (int r = 0; r < session.world(); ++r) {
    counts.sends[r] = splits.sent[r];
    if (!in_memory(session.call())) counts.expects[r] = session.call().expects[r];
  }
}

/// Reports two ranks whose splits differ, on the receiver.
bool refuse_pair(const Session& session, Use use, int peer, uint64_t expected) {
  const Counts counts = session.counts(peer, use);
  StatusRecord record = session.record(Failure::mismatch, Phase::counts, peer);
  record.expected = expected;
  record.seen = counts.sends[session.rank()];
  record.other = session.descriptor(peer);
  record.other.sends = counts.sends[session.rank()];
  record.other.expects = counts.expects[session.rank()];
  report(session.view(), record);
  return false;
}

/// Reads the counts of the other ranks: the counts for this rank, and the maximum. Returns false if
/// the messages do not fit.
bool read_others(const ExchangeSession& session, Use use, Splits& splits) {
  const ExchangeCall& call = session.call();
  const int rank = session.rank(), world = session.world();
  splits.longest = 0;
  for (int from = 0; from < world; ++from) {
    const Counts counts = session.counts(from, use);
    for (int to = 0; to < world; ++to) {
      if (to != from) splits.longest = std::max(splits.longest, counts.sends[to]);
    }
    splits.received[from] = counts.sends[rank];
    if (in_memory(call)) continue;
    const uint64_t expected = call.expects[from];
    if (splits.received[from] != expected) return refuse_pair(session, use, from, expected);
  }
  if (!in_memory(call)) return true;
  if (!fit(splits.received, world, call.splits.capacity)) {
    return refuse(session, Phase::arrival, call.splits.capacity, sum(splits.received, world));
  }
  for (int r = 0; r < world; ++r)
    call.splits.received[r] = static_cast<int64_t>(splits.received[r]);
  return true;
}

/// Lays out messages in rank order. Returns their total size in bytes.
uint64_t lay_out(const uint64_t* counts, int world, uint64_t unit, Span* messages) {
  uint64_t start = 0;
  for (int r = 0; r < world; ++r) {
    messages[r] = dense_span(counts[r] * unit);
    messages[r].offset = start;
    start += counts[r] * unit;
  }
  return start;
}

/// Publishes the first use, and waits for the counts of the other ranks.
bool exchange_counts(ExchangeSession& session, Use use, Splits& splits) {
  session.publish_all(use);
  if (!session.await(use, Word::arrived, Phase::counts)) return false;
  session.settle(use);
  return read_others(session, use, splits);
}

/// The bytes after the received rows are set to zero if the splits are in memory.
void clear_rest(const ExchangeSession& session, const Splits& splits, uint64_t total) {
  const ExchangeCall& call = session.call();
  if (!in_memory(call)) return;
  const uint64_t rest = call.splits.capacity * splits.unit - total;
  if (rest > 0) std::memset(session.output() + total, 0, rest);  // without rows, there is no output
}

}  // namespace

bool alltoallv_staged(ExchangeSession& session, const CallKernels& kernels) {
  Splits splits{};
  if (!read_own(session, splits)) return false;
  Span sent[kMaxRanks], received[kMaxRanks];
  lay_out(splits.sent, session.world(), splits.unit, sent);
  const CpuSlots slots =
      cpu_slots(session.layout(), Collective::alltoallv, kAnyMessage, session.world());
  const Staging staging(session, kernels, {sent, received}, slots);

  const Use first = session.next_use(Area::pull);
  if (!session.claim(first)) return false;
  tell(session, first, splits);
  if (!staging.send(first, 0)) return false;
  if (!exchange_counts(session, first, splits)) return false;
  const uint64_t total = lay_out(splits.received, session.world(), splits.unit, received);
  if (!staging.receive(first, 0)) return false;

  uint64_t at = slots.chunk;
  for (; at < splits.longest * splits.unit; at += slots.chunk) {
    const Use use = session.next_use(Area::pull);
    if (!staging.send(use, at)) return false;
    session.publish_all(use);
    if (!staging.receive(use, at)) return false;
  }
  staging.keep(0, kAnyMessage);
  clear_rest(session, splits, total);
  return true;
}

bool alltoallv_direct(ExchangeSession& session, const CallKernels& kernels) {
  const int own = session.rank(), world = session.world();
  Splits splits{};
  if (!read_own(session, splits)) return false;
  Span sent[kMaxRanks], received[kMaxRanks];
  lay_out(splits.sent, world, splits.unit, sent);
  const Use first = session.next_use(Area::pull);
  if (!session.claim(first)) return false;
  tell(session, first, splits);
  if (!exchange_counts(session, first, splits)) return false;
  for (int to = 0; to < world; ++to) {
    received[to] = sent[to];
    received[to].offset = 0;
    for (int from = 0; from < own; ++from) {
      received[to].offset += session.counts(from, first).sends[to] * splits.unit;
    }
  }
  // Afterwards, the messages of every rank fit its output. In checked mode, the ranks have already
  // exchanged the descriptors, which state the places of the outputs.
  const bool met = session.view().check ? session.barrier(Phase::start_barrier)
                                        : session.meet(Phase::start_barrier);
  if (!met) return false;
  if (!store_messages(session, kernels, {sent, received}, splits.longest * splits.unit)) {
    return false;
  }
  copy(kernels.copy, rows_of(session.output(), received[own]), 0,
       rows_of(session.input(), sent[own]), 0, sent[own].bytes());
  clear_rest(session, splits, sum(splits.received, world) * splits.unit);
  return session.end_barrier();
}

}  // namespace collx::cpu
