// An all-gather of file descriptors between the ranks of one machine, over Unix sockets.
//
// USAGE. Every rank creates an FdAllGather and publishes its endpoint through a channel that only
// the job reads (the store). After it has all endpoints, every rank calls all_gather().
//
// ADDRESSES are abstract socket addresses that the kernel chooses. They are unique, are not in a
// filesystem, and disappear with the socket.
//
// TRUST. A connection is accepted only if the kernel reports that the peer process runs as the same
// user (SO_PEERCRED), and if its message contains the nonces of both ends, which are random and
// known only to the job. Other connections are dropped, and the all-gather continues.
//
// BOUNDS. No socket blocks; every wait is a poll() that ends at the deadline. Sending does not wait
// for another rank: the message stays in the peer's backlog until it is accepted. So ranks cannot
// deadlock, regardless of the order of their calls. A rank sends all its messages before it reads
// or closes anything. So a peer that hangs up before its message has arrived has failed or been
// killed, and the other ranks need not wait for the deadline.
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

/// The address at which a rank listens. Trivially copyable, since it is sent through the store.
struct Endpoint {
  std::array<char, 16> address;  // in the abstract namespace, without the leading zero byte
  uint8_t address_size;
  Nonce nonce;
};

/// The descriptors that every rank sends to every other rank.
inline constexpr int kFdsPerRank = 2;
using FdSet = std::array<UniqueFd, kFdsPerRank>;

class FdAllGather {
 public:
  /// Throws std::system_error.
  FdAllGather();

  const Endpoint& endpoint() const { return own_; }

  /// Returns the peers' descriptors by rank; this rank's entry stays empty. Throws
  /// std::runtime_error, which names the ranks that did not arrive or have left.
  std::vector<FdSet> all_gather(int rank, std::span<const Endpoint> endpoints,
                                const std::array<int, kFdsPerRank>& fds, Deadline deadline) const;

 private:
  UniqueFd listener_;
  Endpoint own_{};
};

}  // namespace collx::memory
