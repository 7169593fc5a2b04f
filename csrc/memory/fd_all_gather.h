// An all-gather of file descriptors between the ranks of one machine, over Unix sockets.
//
// USAGE. Every rank makes an FdAllGather and publishes its endpoint through a channel that only the
// job reads (the store). With all endpoints at hand every rank calls all_gather().
//
// ADDRESSES are abstract and chosen by the kernel: unique, in no filesystem, gone with the socket.
//
// TRUST. A connection counts only if the process at its other end runs under this user (the kernel
// says so, SO_PEERCRED) and its message repeats both ends' nonces, which are random and known to
// only the job. All others are dropped, and the all-gather continues.
//
// BOUNDS. No socket ever blocks; every wait is a poll() that ends at the deadline. Sending waits
// for no rank: the message stays in the peer's backlog until it is accepted, so there is no order
// of calls in which ranks wait for each other. A rank sends all its messages before it reads or
// closes anything, so one that hangs up without its message having arrived has failed or been
// killed, and its peers need not wait for the deadline.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "deadline.h"
#include "unique_fd.h"

namespace collx::memory {

using Nonce = std::array<uint8_t, 16>;

/// Where a rank listens. Trivially copyable, since it travels through the store.
struct Endpoint {
  std::array<char, 16> address;  // in the abstract namespace, without the leading zero byte
  uint8_t address_size;
  Nonce nonce;
};

/// What every rank gives to every other.
inline constexpr int kFdsPerRank = 2;
using FdSet = std::array<UniqueFd, kFdsPerRank>;

class FdAllGather {
 public:
  /// Throws std::system_error.
  FdAllGather();

  const Endpoint& endpoint() const { return own_; }

  /// Returns the peers' descriptors by rank; the own entry stays empty. Throws std::runtime_error
  /// that names the ranks that did not come or have left.
  std::vector<FdSet> all_gather(int rank, std::span<const Endpoint> endpoints,
                                const std::array<int, kFdsPerRank>& fds, Deadline deadline) const;

 private:
  UniqueFd listener_;
  Endpoint own_{};
};

}  // namespace collx::memory
