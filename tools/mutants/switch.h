// Every rewritten source includes this file first. collx_mutant(n) returns whether mutant n is
// active.
//
// COLLX_MUTANTS is the name of a file that all processes map. It contains the number of the active
// mutant as int32, and one byte for each mutant, which is set when the mutant's place is executed.
#pragma once

#if defined(__CUDACC_RTC__)  // tests compile headers at run time, without the standard headers
constexpr bool collx_mutant(int) { return false; }
#else

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <type_traits>

namespace collx_mutants {

inline unsigned char* map_memory() {
  constexpr size_t kBytes = 1 << 20;
  const char* const name = std::getenv("COLLX_MUTANTS");
  const int file = name == nullptr ? -1 : open(name, O_RDWR | O_CLOEXEC);
  const int flags = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* const memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, flags, file, 0);
  if (file >= 0) close(file);
  if (memory == MAP_FAILED) std::abort();
  return static_cast<unsigned char*>(memory);
}

// The first use maps the memory, because the order of initializers of libraries is unspecified.
inline unsigned char* memory = nullptr;

inline bool reached(int number) {
  if (memory == nullptr) memory = map_memory();
  unsigned char& seen = memory[sizeof(int) + static_cast<size_t>(number)];
  if (seen == 0) seen = 1;
  int active;
  std::memcpy(&active, memory, sizeof(active));
  return active == number;
}

}  // namespace collx_mutants

constexpr bool collx_mutant(int number) {
  return !std::is_constant_evaluated() && collx_mutants::reached(number);
}

#endif
