#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>

namespace collx::memory {
namespace {

#ifdef MFD_NOEXEC_SEAL
constexpr unsigned kNoExecSeal = MFD_NOEXEC_SEAL;
#else
constexpr unsigned kNoExecSeal = 0x0008;  // the headers may be older than the kernel
#endif
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void throw_errno(const char* call, size_t bytes) {
  throw std::system_error(
      errno, std::generic_category(),
      std::string(call) + " of a shared segment of " + std::to_string(bytes) + " bytes");
}

// At least one page, so that an empty tensor also has a unique address.
size_t whole_pages(size_t bytes) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  if (bytes > static_cast<size_t>(std::numeric_limits<off_t>::max()) - page) {
    errno = EFBIG;
    throw_errno("ftruncate", bytes);
  }
  return bytes == 0 ? page : (bytes + page - 1) / page * page;
}

/// The memory is not executable, as vm.memfd_noexec=2 requires. Kernels before 6.3 lack the flag.
UniqueFd create_memfd(const char* label) {
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  UniqueFd fd(::memfd_create(label, kFlags | kNoExecSeal));
  if (!fd && errno == EINVAL) fd = UniqueFd(::memfd_create(label, kFlags));
  return fd;
}

std::byte* map_shared(int fd, size_t bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) throw_errno("mmap", bytes);
  return static_cast<std::byte*>(data);
}

}  // namespace

Segment Segment::create(size_t bytes, const char* label) {
  const size_t size = whole_pages(bytes);
  UniqueFd fd = create_memfd(label);
  if (!fd) throw_errno("memfd_create", size);
  if (::ftruncate(fd.get(), static_cast<off_t>(size)) != 0) throw_errno("ftruncate", size);
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) throw_errno("sealing", size);
  std::byte* data = map_shared(fd.get(), size);
  return Segment(std::move(fd), data, size);
}

Segment Segment::map(UniqueFd fd, size_t bytes) {
  const size_t size = whole_pages(bytes);
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) throw_errno("fstat", size);
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (static_cast<size_t>(status.st_size) != size || seals < 0 || (seals & kSeals) != kSeals) {
    throw std::runtime_error("a peer sent a descriptor that is not a sealed segment of " +
                             std::to_string(size) + " bytes");
  }
  return Segment(UniqueFd(), map_shared(fd.get(), size), size);
}

Segment::Segment(Segment&& other) noexcept
    : fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      mapped_bytes_(other.mapped_bytes_) {}

Segment::~Segment() {
  if (data_ != nullptr) ::munmap(data_, mapped_bytes_);
}

}  // namespace collx::memory
