// Every rank reduces its part of the data and passes it on. Parts are pushed into their owner's
// slots and back, or pulled from the memory where their owners stored them.
// Traffic of a rank: push: 2·n·(W-1)/W written, n read; pull: n·(W-1)/W staged (symmetric:
// nothing), n read, n/W stored for the peers, n·(W-1)/W gathered. Two exchanges for each chunk.
#include "twoshot.h"

namespace collx::cpu {
namespace {

template <typename Places>
struct Steps {
  AllreduceSession& session;
  const CallKernels& kernels;
  Places places{session};

  struct Bytes {
    uint64_t at;  // offset in the tensor
    uint64_t count;
  };
  Bytes part(Chunk chunk, int r) const {
    const Part part = part_of(chunk, session, r);
    const uint64_t element = element_bytes(session);
    return {(chunk.start + part.start) * element, part.count * element};
  }

  void scatter(Use use, Chunk chunk) const {
    if (places.in_place()) return;
    for_each_peer(session, [&](int peer) {
      const Bytes bytes = part(chunk, peer);
      kernels.copy(places.outgoing(use, peer), session.input(bytes.at), bytes.count);
    });
  }

  void reduce(Use use, Chunk chunk) const {
    const Bytes own = part(chunk, session.rank());
    Operands operands;
    operands.sources[session.rank()] = session.input(own.at);
    for_each_peer(session, [&](int peer) {
      operands.sources[peer] =
          places.in_place() ? session.peer_input(peer, own.at) : places.incoming(use, peer);
    });
    places.for_each_result(use, [&](char* to) { operands.add_target(to); });
    operands.add_target(session.output(own.at));
    collx::cpu::reduce(kernels, session, operands, own.count / element_bytes(session));
  }

  // In place, this overwrites data that a peer has already read: its result has arrived.
  void gather(Use use, Chunk chunk) const {
    for_each_peer(session, [&](int peer) {
      const Bytes bytes = part(chunk, peer);
      kernels.copy(session.output(bytes.at), places.result(use, peer), bytes.count);
    });
  }
};

template <typename Places>
bool run(AllreduceSession& session, const CallKernels& kernels) {
  const Steps<Places> steps{session, kernels};
  const uint64_t part_elements = steps.places.slot_bytes() / element_bytes(session);
  return run_twoshot<const Steps<Places>&>(session, Places::kArea, session.call().numel,
                                           part_elements * static_cast<uint64_t>(session.world()),
                                           Places::kArrival, steps);
}

}  // namespace

bool allreduce_twoshot_push(AllreduceSession& session, const CallKernels& kernels) {
  return run<PushPlaces>(session, kernels);
}

bool allreduce_twoshot_pull(AllreduceSession& session, const CallKernels& kernels) {
  // The barrier only detects ranks whose offsets differ. The data order needs no barrier here, and
  // none at the end: a peer's last `reduced` states that it has read all of this rank's input.
  if (!session.staged() && !session.start_barrier()) return false;
  return run<PullPlaces>(session, kernels);
}

}  // namespace collx::cpu
