// An exchange through the payload: each rank stages its messages chunk by chunk, and the receivers
// copy or reduce from the staging memory. A rank waits only for the ranks that send to it.
// session.h explains why two slots still suffice.
#pragma once

#include "messages.h"
#include "steps.h"

namespace collx::cpu {

class Staging {
 public:
  Staging(ExchangeSession& session, const CallKernels& kernels, Messages messages,
          const CpuSlots& slots)
      : session_(session), kernels_(kernels), messages_(messages), slots_(slots) {}

  /// Stages the chunk of each message that starts at byte `at`.
  bool send(Use use, uint64_t at) const;
  /// Copies the same chunk of this rank's message to itself, unless it is an operand of a
  /// reduction.
  void keep(uint64_t at, uint64_t bytes) const;
  /// Waits for the other ranks' chunks, and copies or reduces them.
  bool receive(Use use, uint64_t at) const;

 private:
  uint64_t chunk_of(const Span& message, uint64_t at) const {
    const uint64_t bytes = message.bytes();
    return at < bytes ? std::min(slots_.chunk, bytes - at) : 0;
  }
  char* slot(Use use, int sender, int receiver) const {
    return session_.staging(sender, use) + slots_.offset(sender, receiver);
  }
  void fill(Use use, int receiver, uint64_t at) const;
  void reduce(Use use, uint64_t at) const;

  ExchangeSession& session_;
  const CallKernels& kernels_;
  Messages messages_;
  CpuSlots slots_;
};

}  // namespace collx::cpu
