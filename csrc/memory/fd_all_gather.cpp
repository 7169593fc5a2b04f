#include "fd_all_gather.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <thread>

namespace collx::memory {
namespace {

using Clock = std::chrono::steady_clock;

// SEQPACKET provides connections, which have credentials, and messages, which arrive either
// complete or not at all.
constexpr int kSocketType = SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC;

struct Greeting {
  int32_t rank;
  Nonce sender;
  Nonce receiver;
};

[[noreturn]] void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

int remaining_ms(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 60'000));
}

bool same_user(int socket) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
         peer.uid == ::geteuid();
}

socklen_t to_sockaddr(const Endpoint& endpoint, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  const size_t size = std::min<size_t>(endpoint.address_size, endpoint.address.size());
  std::memcpy(address.sun_path + 1, endpoint.address.data(), size);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size);
}

UniqueFd connect_to(const Endpoint& endpoint, int peer, Deadline deadline) {
  sockaddr_un address{};
  const socklen_t size = to_sockaddr(endpoint, address);
  const std::string who = "rank " + std::to_string(peer);
  for (;;) {
    UniqueFd socket(::socket(AF_UNIX, kSocketType, 0));
    if (!socket) throw_errno("socket to " + who);
    if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), size) == 0) {
      if (same_user(socket.get())) return socket;
      throw std::runtime_error("the process at the address of " + who + " belongs to another user");
    }
    if (errno == ECONNREFUSED || errno == ENOENT) {
      throw std::runtime_error(who +
                               " no longer listens: it has ended or given up, or is in "
                               "another network namespace");
    }
    if (errno != EAGAIN && errno != EINTR) throw_errno("connect to " + who);
    // The backlog is full. poll() cannot wait for space in it.
    if (Clock::now() >= deadline) throw std::runtime_error("timed out connecting to " + who);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

using ControlBuffer = std::array<char, CMSG_SPACE(kFdsPerRank * sizeof(int))>;

void send_fds(int socket, Greeting greeting, const std::array<int, kFdsPerRank>& fds, int peer,
              Deadline deadline) {
  alignas(cmsghdr) ControlBuffer control{};
  iovec data{&greeting, sizeof(greeting)};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(fds));
  std::memcpy(CMSG_DATA(header), fds.data(), sizeof(fds));
  const std::string who = "rank " + std::to_string(peer);
  while (::sendmsg(socket, &message, MSG_NOSIGNAL) < 0) {
    if (errno != EAGAIN && errno != EINTR) throw_errno("sending descriptors to " + who);
    pollfd writable{socket, POLLOUT, 0};
    const int left = remaining_ms(deadline);
    if (left == 0) throw std::runtime_error("timed out sending descriptors to " + who);
    ::poll(&writable, 1, left);
  }
}

enum class Receipt { pending, refused, accepted };

struct Parcel {
  Greeting greeting;
  FdSet fds;
  bool complete;  // false: this process has too many open files for the descriptors
};

Receipt receive_parcel(int socket, Parcel& parcel) {
  alignas(cmsghdr) ControlBuffer control{};
  iovec data{&parcel.greeting, sizeof(parcel.greeting)};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  if (got < 0) {
    return errno == EAGAIN || errno == EINTR ? Receipt::pending : Receipt::refused;
  }
  // Takes ownership of all received descriptors before any other check, so that none leaks.
  size_t count = 0;
  for (cmsghdr* h = CMSG_FIRSTHDR(&message); h != nullptr; h = CMSG_NXTHDR(&message, h)) {
    if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS) continue;
    count = std::min<size_t>((h->cmsg_len - CMSG_LEN(0)) / sizeof(int), kFdsPerRank);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(h) + i * sizeof(int), sizeof(int));
      parcel.fds[i] = UniqueFd(fd);
    }
  }
  parcel.complete = count == kFdsPerRank && (message.msg_flags & MSG_CTRUNC) == 0;
  const bool whole = got == sizeof(Greeting) && (message.msg_flags & MSG_TRUNC) == 0;
  return whole ? Receipt::accepted : Receipt::refused;
}

bool authentic(const Greeting& greeting, int rank, std::span<const Endpoint> endpoints) {
  const int32_t from = greeting.rank;
  if (from < 0 || from == rank || static_cast<size_t>(from) >= endpoints.size()) return false;
  return greeting.sender == endpoints[static_cast<size_t>(from)].nonce &&
         greeting.receiver == endpoints[static_cast<size_t>(rank)].nonce;
}

/// The receiving half of one all-gather.
class Receiver {
 public:
  Receiver(int listener, int rank, std::span<const Endpoint> endpoints,
           std::vector<UniqueFd> outgoing)
      : listener_(listener),
        rank_(rank),
        endpoints_(endpoints),
        outgoing_(std::move(outgoing)),
        received_(endpoints.size()) {}

  std::vector<FdSet> run(Deadline deadline) {
    for (std::string missing; !(missing = missing_ranks()).empty();) {
      const int left = remaining_ms(deadline);
      if (left == 0) throw std::runtime_error("timed out waiting for descriptors from " + missing);
      const std::vector<size_t> hung_up = await_events(left);
      accept_all();
      read_all();
      for (const size_t peer : hung_up) {
        outgoing_[peer] = UniqueFd();
        if (received_[peer][0]) continue;
        throw std::runtime_error("rank " + std::to_string(peer) + " has ended or given up");
      }
    }
    return std::move(received_);
  }

 private:
  std::string missing_ranks() const {
    std::string names;
    for (size_t peer = 0; peer < received_.size(); ++peer) {
      if (static_cast<int>(peer) == rank_ || received_[peer][0]) continue;
      names += (names.empty() ? "rank " : ", rank ") + std::to_string(peer);
    }
    return names;
  }

  /// Returns the peers that have closed the connection on which this rank sent.
  std::vector<size_t> await_events(int timeout_ms) {
    // poll() ignores negative descriptors, and always reports a hang-up.
    polled_.clear();
    for (const UniqueFd& socket : outgoing_) polled_.push_back({socket.get(), 0, 0});
    polled_.push_back({listener_, POLLIN, 0});
    for (const UniqueFd& socket : pending_) polled_.push_back({socket.get(), POLLIN, 0});
    if (::poll(polled_.data(), polled_.size(), timeout_ms) < 0) {
      if (errno != EINTR) throw_errno("poll");
      return {};
    }
    std::vector<size_t> hung_up;
    for (size_t peer = 0; peer < outgoing_.size(); ++peer) {
      if (outgoing_[peer] && polled_[peer].revents != 0) hung_up.push_back(peer);
    }
    return hung_up;
  }

  void accept_all() {
    // Other processes may connect and send nothing. If there are too many, the oldest is dropped.
    const size_t most_pending = endpoints_.size() + 64;
    for (;;) {
      UniqueFd socket(::accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!socket) {
        if (errno == EMFILE || errno == ENFILE) throw_errno("accept");
        return;
      }
      if (!same_user(socket.get())) continue;
      if (pending_.size() == most_pending) pending_.erase(pending_.begin());
      pending_.push_back(std::move(socket));
    }
  }

  void read_all() {
    std::erase_if(pending_, [this](const UniqueFd& socket) {
      Parcel parcel{};
      const Receipt receipt = receive_parcel(socket.get(), parcel);
      if (receipt == Receipt::accepted && authentic(parcel.greeting, rank_, endpoints_)) {
        keep(std::move(parcel));
      }
      return receipt != Receipt::pending;
    });
  }

  void keep(Parcel parcel) {
    const auto from = static_cast<size_t>(parcel.greeting.rank);
    if (!parcel.complete) {
      throw std::runtime_error("no room for the descriptors of rank " + std::to_string(from) +
                               ": too many open files");
    }
    if (!received_[from][0]) received_[from] = std::move(parcel.fds);
  }

  int listener_;
  int rank_;
  std::span<const Endpoint> endpoints_;
  std::vector<UniqueFd> outgoing_;  // by rank; this rank's entry stays empty
  std::vector<UniqueFd> pending_;   // accepted connections without a message so far
  std::vector<FdSet> received_;
  std::vector<pollfd> polled_;
};

}  // namespace

FdAllGather::FdAllGather() : listener_(::socket(AF_UNIX, kSocketType, 0)) {
  if (!listener_) throw_errno("socket");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // An address of only the family makes the kernel choose a free abstract address.
  if (::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(sa_family_t)) != 0) {
    throw_errno("bind");
  }
  if (::listen(listener_.get(), SOMAXCONN) != 0) throw_errno("listen");
  socklen_t size = sizeof(address);
  if (::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    throw_errno("getsockname");
  }
  const size_t length = size - offsetof(sockaddr_un, sun_path) - 1;
  if (length > own_.address.size())
    throw std::runtime_error("the abstract socket address is too long");
  std::memcpy(own_.address.data(), address.sun_path + 1, length);
  own_.address_size = static_cast<uint8_t>(length);
  if (::getrandom(own_.nonce.data(), own_.nonce.size(), 0) !=
      static_cast<ssize_t>(own_.nonce.size())) {
    throw_errno("getrandom");
  }
}

std::vector<FdSet> FdAllGather::all_gather(int rank, std::span<const Endpoint> endpoints,
                                           const std::array<int, kFdsPerRank>& fds,
                                           Deadline deadline) const {
  std::vector<UniqueFd> outgoing(endpoints.size());
  for (size_t peer = 0; peer < endpoints.size(); ++peer) {
    const int to = static_cast<int>(peer);
    if (to == rank) continue;
    outgoing[peer] = connect_to(endpoints[peer], to, deadline);
    send_fds(outgoing[peer].get(), {rank, own_.nonce, endpoints[peer].nonce}, fds, to, deadline);
  }
  return Receiver(listener_.get(), rank, endpoints, std::move(outgoing)).run(deadline);
}

}  // namespace collx::memory
