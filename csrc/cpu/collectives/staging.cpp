#include "staging.h"

namespace collx::cpu {

void Staging::fill(Use use, int receiver, uint64_t at) const {
  const Span& message = messages_.sent[receiver];
  copy(kernels_.copy, {slot(use, session_.rank(), receiver)}, 0, rows_of(session_.input(), message),
       at, chunk_of(message, at));
}

bool Staging::send(Use use, uint64_t at) const {
  for (int step = 1; step < session_.world(); ++step) {
    const int peer = session_.neighbor(step);
    if (chunk_of(messages_.sent[peer], at) == 0) continue;
    if (!session_.claim(use)) return false;
    fill(use, peer, at);
    if (slots_.stride == 0) break;  // the other receivers read the same memory
  }
  return true;
}

void Staging::keep(uint64_t at, uint64_t bytes) const {
  const Span& sent = messages_.sent[session_.rank()];
  if (session_.reduces() || at >= sent.bytes()) return;
  copy(kernels_.copy, rows_of(session_.output(), messages_.received[session_.rank()]), at,
       rows_of(session_.input(), sent), at, std::min(bytes, sent.bytes() - at));
}

void Staging::reduce(Use use, uint64_t at) const {
  const int rank = session_.rank();
  const Span& result = messages_.received[rank];
  const Source own = rows_of(session_.input(), messages_.sent[rank]);
  Operands operands;
  for_each_peer(session_, [&](int peer) { operands.sources[peer] = slot(use, peer, rank); });
  if (own.dense()) {
    operands.sources[rank] = own.at(at);
  } else {
    fill(use, rank, at);
    operands.sources[rank] = slot(use, rank, rank);
  }
  operands.add_target(rows_of(session_.output(), result).at(at));
  collx::cpu::reduce(kernels_, session_, operands,
                     chunk_of(result, at) / session_.call().element_bytes);
}

bool Staging::receive(Use use, uint64_t at) const {
  const int rank = session_.rank();
  int awaited = 0;
  for (int step = 1; step < session_.world(); ++step) {
    const int peer = session_.neighbor(step);
    const Span& message = messages_.received[peer];
    const uint64_t bytes = chunk_of(message, at);
    if (bytes == 0) continue;
    if (!session_.await_from(peer, use, Word::arrived, Phase::stage_barrier)) return false;
    ++awaited;
    if (session_.reduces()) continue;
    copy(kernels_.copy, rows_of(session_.output(), message), at, {slot(use, peer, rank)}, 0, bytes);
  }
  if (awaited == session_.world() - 1) session_.settle(use);
  if (awaited > 0 && session_.reduces()) reduce(use, at);
  return true;
}

}  // namespace collx::cpu
