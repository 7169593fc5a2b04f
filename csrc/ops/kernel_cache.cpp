#include "kernel_cache.h"

#include <c10/util/Logging.h>
#include <c10/util/hash.h>
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <filesystem>
#include <mutex>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "../memory/unique_fd.h"

namespace collx::kernel_cache {

namespace {

namespace fs = std::filesystem;
using memory::UniqueFd;

// A file contains the hash of the code, followed by the code, so that damaged files are detected.
constexpr size_t kHashLength = 40;
constexpr std::string_view kTemporary = ".writing-";
constexpr time_t kAbandoned = 3600;  // seconds after which a temporary file is considered abandoned

bool is_ours_alone(const struct stat& s) {
  return s.st_uid == geteuid() && (s.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

void warn_once(const std::string& folder, const char* why) {
  // Never destroyed: kernels may be compiled at any point during exit.
  static auto* const mutex = new std::mutex;
  static auto* const warned = new std::set<std::string>;
  const std::lock_guard guard(*mutex);
  if (!warned->insert(folder).second) return;
  LOG(WARNING) << "collx: " << folder
               << ": compiled kernels are neither stored nor read there: " << why
               << "; accepted in COLLX_CACHE_DIR: a directory that only this user can write to";
}

/// Opens the folder if it is safe to load code from it.
UniqueFd open_folder(const std::string& folder) {
  UniqueFd opened(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat found {};
  if (opened && fstat(opened.get(), &found) == 0 && is_ours_alone(found)) return opened;
  if (opened) {
    warn_once(folder, "other users can write to it");
  } else if (lstat(folder.c_str(), &found) == 0) {
    warn_once(folder, "it is not a directory, or it is a symbolic link");
  }
  return {};
}

bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

/// Removes the least recently used files until the rest is within the limit, and temporary files of
/// processes that died. Other processes may do the same concurrently.
void evict(int folder, uint64_t most_bytes) {
  struct Kept {
    timespec used;
    uint64_t bytes;
    std::string name;
  };
  std::vector<Kept> files;
  uint64_t total = 0;
  DIR* const listing = fdopendir(dup(folder));
  if (listing == nullptr) return;
  rewinddir(listing);
  while (const dirent* entry = readdir(listing)) {
    const std::string_view name = entry->d_name;
    struct stat s {};
    if (fstatat(folder, entry->d_name, &s, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(s.st_mode)) {
      continue;
    }
    if (name.starts_with(kTemporary)) {
      if (s.st_mtim.tv_sec + kAbandoned < time(nullptr)) unlinkat(folder, entry->d_name, 0);
    } else if (name.ends_with(".cubin")) {
      total += static_cast<uint64_t>(s.st_size);
      files.push_back({s.st_mtim, static_cast<uint64_t>(s.st_size), entry->d_name});
    }
  }
  closedir(listing);
  std::sort(files.begin(), files.end(), [](const Kept& a, const Kept& b) {
    return std::pair(a.used.tv_sec, a.used.tv_nsec) < std::pair(b.used.tv_sec, b.used.tv_nsec);
  });
  for (const Kept& file : files) {
    if (total <= most_bytes) return;
    unlinkat(folder, file.name.c_str(), 0);
    total -= file.bytes;
  }
}

}  // namespace

std::string read(const std::string& folder, const std::string& name) {
  const UniqueFd opened = open_folder(folder);
  if (!opened) return {};
  const UniqueFd file(openat(opened.get(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
  struct stat found {};
  if (!file || fstat(file.get(), &found) != 0 || !S_ISREG(found.st_mode) || !is_ours_alone(found)) {
    return {};
  }
  std::string kept;
  char part[1 << 16];
  for (;;) {
    const ssize_t count = ::read(file.get(), part, sizeof(part));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    kept.append(part, static_cast<size_t>(count));
  }
  if (kept.size() <= kHashLength) return {};
  std::string code = kept.substr(kHashLength);
  if (c10::sha1(code).str() != kept.substr(0, kHashLength)) return {};
  futimens(file.get(), nullptr);  // marks it as recently used: see evict()
  return code;
}

void keep(const std::string& folder, const std::string& name, const std::string& code,
          uint64_t most_bytes) {
  std::error_code ignored;
  fs::create_directories(fs::path(folder).parent_path(), ignored);
  mkdir(folder.c_str(), 0700);
  const UniqueFd opened = open_folder(folder);
  if (!opened) return;
  std::string written = folder + "/" + std::string(kTemporary) + "XXXXXX";
  {
    const UniqueFd file(mkostemp(written.data(), O_CLOEXEC));
    if (!file) return;
    if (!write_all(file.get(), c10::sha1(code).str()) || !write_all(file.get(), code) ||
        fsync(file.get()) != 0) {
      unlink(written.c_str());
      return;
    }
  }
  if (renameat(AT_FDCWD, written.c_str(), opened.get(), name.c_str()) != 0) {
    unlink(written.c_str());
    return;
  }
  fsync(opened.get());
  evict(opened.get(), most_bytes);
}

}  // namespace collx::kernel_cache
