#include "boot_id.h"

#include <fstream>
#include <stdexcept>

namespace collx::memory {

std::string boot_id() {
  constexpr const char* path = "/proc/sys/kernel/random/boot_id";
  std::ifstream file(path);
  std::string id;
  if (!std::getline(file, id) || id.size() != 36) {
    throw std::runtime_error(
        std::string("cannot determine whether ranks share a machine: no boot id in ") + path +
        " (is /proc mounted?)");
  }
  return id;
}

}  // namespace collx::memory
