// Every rank sums and normalizes its part of the rows and passes the results on: it pushes them
// into the peers' slots, or stores them for the peers to pull.
// Traffic of a rank, with n bytes of input and m of results: n·(W-1)/W written (pull from symmetric
// inputs: none), n read, m·(W-1)/W written (pull: m/W), m·(W-1)/W gathered; two exchanges for each
// chunk.
#include "norm_results.h"
#include "norm_steps.h"
#include "twoshot.h"

namespace collx::cpu {
namespace {

/// How rows are divided among the uses of an area. Usually whole rows fit a slot. Then a use is a
/// batch of rows, and each rank owns a part of the batch. Batches of longer rows have one row for
/// each rank. Their values take several uses, and their results follow in further uses. The last
/// values and the first results share one use.
struct Batches {
  uint64_t rows;     // in all batches
  uint64_t largest;  // rows in a batch
  uint64_t slot;     // bytes for a rank's part in one use
  uint64_t pieces_in, pieces_out;

  Batches(const NormSession& session, uint64_t slot_bytes, uint64_t row_in, uint64_t row_out)
      : rows(session.call().rows), slot(slot_bytes) {
    const uint64_t longest = std::max<uint64_t>({row_in, row_out, 1});
    largest = std::max<uint64_t>(slot / longest, 1) * static_cast<uint64_t>(session.world());
    pieces_in = std::max<uint64_t>(ceil_div(row_in, slot), 1);
    pieces_out = std::max<uint64_t>(ceil_div(row_out, slot), 1);
  }

  uint64_t uses_of_batch() const { return pieces_in + pieces_out - 1; }
  uint64_t uses() const { return ceil_div(rows, largest) * uses_of_batch(); }
  Chunk batch(uint64_t use) const {
    const uint64_t start = use / uses_of_batch() * largest;
    return {start, std::min(largest, rows - start)};
  }
  /// The piece that a use carries, or kNone.
  static constexpr uint64_t kNone = ~0ull;
  uint64_t piece_in(uint64_t use) const {
    const uint64_t piece = use % uses_of_batch();
    return piece < pieces_in ? piece : kNone;
  }
  uint64_t piece_out(uint64_t use) const {
    const uint64_t piece = use % uses_of_batch();
    return piece + 1 < pieces_in ? kNone : piece + 1 - pieces_in;
  }
};

template <typename Places>
class Steps {
 public:
  Steps(NormSession& session, CopyKernel copy, NormRows& rows)
      : session_(session),
        copy_(copy),
        rows_(rows),
        places_{session},
        results_(session.call(), copy),
        row_in_(session.call().cols * element_bytes(session)),
        batches_(session, places_.slot_bytes(), places_.in_place() ? 0 : row_in_,
                 results_.row_bytes()) {}

  uint64_t uses() const { return batches_.uses(); }

  void scatter(Use use, Chunk at) const {
    if (places_.in_place()) return;
    for_each_peer(session_, [&](int peer) {
      const Bytes piece = values_of(at.start, peer);
      if (piece.count == 0) return;
      copy_(places_.outgoing(use, peer), session_.input(piece.start), piece.count);
    });
  }

  void reduce(Use use, Chunk at) const {
    const int rank = session_.rank();
    const Bytes values = values_of(at.start, rank);
    if (values.count > 0) {
      const uint64_t element = element_bytes(session_);
      Operands operands;
      operands.sources[rank] = session_.input(values.start);
      for_each_peer(session_, [&](int peer) {
        operands.sources[peer] = places_.in_place() ? session_.peer_input(peer, values.start)
                                                    : places_.incoming(use, peer);
      });
      rows_.take(operands.sources, session_.world(), values.start / element,
                 values.count / element);
    }
    const Bytes results = results_of(at.start, rank);
    if (results.count == 0) return;
    places_.for_each_result(use, [&](char* to) {
      results_.pack(to, part_of_use(at.start, rank).start, results.start, results.count);
    });
  }

  void gather(Use use, Chunk at) const {
    for_each_peer(session_, [&](int peer) {
      const Bytes results = results_of(at.start, peer);
      if (results.count == 0) return;
      results_.unpack(places_.result(use, peer), part_of_use(at.start, peer).start, results.start,
                      results.count);
    });
  }

 private:
  struct Bytes {
    uint64_t start;
    uint64_t count;
  };

  /// The rows of a rank in the batch of a use.
  Part part_of_use(uint64_t use, int r) const {
    const Chunk batch = batches_.batch(use);
    const Part part = part_of(batch, session_, r);
    return {batch.start + part.start, part.count};
  }

  Bytes piece_of(uint64_t piece, uint64_t pieces, uint64_t total) const {
    if (piece == Batches::kNone) return {0, 0};
    if (pieces == 1) return {0, total};
    const uint64_t start = std::min(piece * batches_.slot, total);
    return {start, std::min(batches_.slot, total - start)};
  }

  /// The bytes of the input that a use transfers for a rank's rows.
  Bytes values_of(uint64_t use, int r) const {
    const Part part = part_of_use(use, r);
    const Bytes piece = piece_of(batches_.piece_in(use), batches_.pieces_in, part.count * row_in_);
    return {part.start * row_in_ + piece.start, piece.count};
  }

  /// The bytes that a use transfers of the message with the results of a rank's rows.
  Bytes results_of(uint64_t use, int r) const {
    const Part part = part_of_use(use, r);
    return piece_of(batches_.piece_out(use), batches_.pieces_out,
                    part.count * results_.row_bytes());
  }

  NormSession& session_;
  CopyKernel copy_;
  NormRows& rows_;
  Places places_;
  NormResults results_;
  uint64_t row_in_;
  Batches batches_;
};

template <typename Places>
bool run(NormSession& session, CopyKernel copy, NormRows& rows) {
  const Steps<Places> steps(session, copy, rows);
  // The unit of the pipeline is a use.
  return run_twoshot<const Steps<Places>&>(session, Places::kArea, steps.uses(), 1,
                                           Places::kArrival, steps);
}

}  // namespace

bool norm_twoshot_push(NormSession& session, CopyKernel copy, NormRows& rows) {
  return run<PushPlaces>(session, copy, rows);
}

bool norm_twoshot_pull(NormSession& session, CopyKernel copy, NormRows& rows) {
  // No barrier is needed at the end: a peer's last `reduced` states that it has read all of this
  // rank's input. The barrier at the start detects ranks whose offsets differ.
  if (!session.staged() && !session.start_barrier()) return false;
  return run<PullPlaces>(session, copy, rows);
}

}  // namespace collx::cpu
