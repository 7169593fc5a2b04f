// What a call was, and how it failed: the records that ranks exchange and that errors are made of.
#pragma once

#include "collectives.h"
#include "norm.h"
#include "types.h"

namespace collx {

inline constexpr uint8_t kInputSymmetric = 1, kOutputSymmetric = 2;

/// One call as a rank sees it. In checked mode ranks exchange it and compare the fingerprints.
struct CallDescriptor {
  Collective collective = Collective::none;
  DType dtype = DType::float32;
  ReduceOp reduce_op = ReduceOp::sum;
  Algorithm algorithm = Algorithm::automatic;  // as named or selected, never `automatic` in a call
  Algorithm runs = Algorithm::automatic;       // what carries it out
  uint8_t dims = 0;         // number of dimensions; the first eight sizes stand below
  uint8_t scalar_type = 0;  // 1 + PyTorch's code, since copies support more dtypes than reductions
  uint8_t symmetric = 0;    // kInputSymmetric, kOutputSymmetric
  int8_t axis = -1;
  bool keeps_norm = false;  // the normalized tensor is a result besides the quantized one
  int16_t root = -1;
  int32_t max_blocks = 0;
  uint64_t numel = 0;
  uint64_t input_offset = 0;  // offsets in the symmetric allocations
  uint64_t output_offset = 0;
  uint64_t epilogue = 0;  // a hash of the expression of a reduction's epilogue; 0 without one
  int64_t sizes[8] = {};
  NormOptions norm = {};  // of a fused normalization
  // alltoallv: bytes for the rank that reads this, and bytes expected from it. Not part of the
  // fingerprint, see pair_fingerprint.
  uint64_t sends = 0;
  uint64_t expects = 0;
};
static_assert(sizeof(CallDescriptor) == 152);

/// FNV-1a over the descriptor, folded to 32 bits. Which call it was stands beside it, in the epoch
/// of the flag that carries it.
COLLX_HD constexpr uint32_t fold(uint64_t hash) {
  return static_cast<uint32_t>(hash ^ (hash >> 32));
}
COLLX_HD constexpr uint64_t mix(uint64_t hash, uint64_t value) {
  for (int i = 0; i < 8; ++i) {
    hash = (hash ^ ((value >> (8 * i)) & 0xff)) * 0x100000001b3ull;
  }
  return hash;
}
constexpr uint32_t fingerprint(const CallDescriptor& d) {
  const uint64_t words[] = {
      static_cast<uint64_t>(d.collective) | static_cast<uint64_t>(d.dtype) << 8 |
          static_cast<uint64_t>(d.reduce_op) << 16 | static_cast<uint64_t>(d.algorithm) << 24 |
          static_cast<uint64_t>(d.runs) << 32 | static_cast<uint64_t>(d.dims) << 40 |
          static_cast<uint64_t>(d.scalar_type) << 48 | static_cast<uint64_t>(d.symmetric) << 56,
      static_cast<uint64_t>(static_cast<uint8_t>(d.axis)) |
          static_cast<uint64_t>(d.keeps_norm) << 8 |
          static_cast<uint64_t>(static_cast<uint16_t>(d.root)) << 16 |
          static_cast<uint64_t>(static_cast<uint32_t>(d.max_blocks)) << 32,
      d.numel,
      d.input_offset,
      d.output_offset,
      d.epilogue,
  };
  uint64_t h = 0xcbf29ce484222325ull;
  for (const uint64_t word : words) h = mix(h, word);
  for (const int64_t size : d.sizes) h = mix(h, static_cast<uint64_t>(size));
  struct Words {
    uint64_t of[sizeof(NormOptions) / sizeof(uint64_t)];
  };
  for (const uint64_t word : __builtin_bit_cast(Words, d.norm).of) h = mix(h, word);
  return fold(h);
}

/// The same for a call in which two ranks exchange their counts: both compute the same value.
COLLX_HD constexpr uint32_t pair_fingerprint(uint32_t call, int rank, int peer, uint64_t sends,
                                             uint64_t expects) {
  const bool first = rank < peer;
  return fold(mix(mix(call, first ? sends : expects), first ? expects : sends));
}

enum class Failure : uint32_t {
  none,
  timeout,   // a peer did not come in time
  mismatch,  // a peer made another call
  overlap,   // two kernels used the communicator at once, in no order
  splits,    // splits that do not fit the tensors, read on the device
  group,     // the process group raised in a fallback
  aborted,   // the program of a rank has given up its calls
  count
};

/// Where in a call a rank was when it gave up waiting.
enum class Phase : uint32_t {
  none,
  check,          // exchange of fingerprints (checked mode)
  start_barrier,  // all ranks have entered: symmetric inputs may be read
  arrival,        // the peers' pushed data
  stage_barrier,  // data staged in the payload may be read
  gather,         // the reduced parts from their owners
  end_barrier,    // no peer uses this rank's tensors any more
  release,        // a slot that a peer has still to read may be written again
  counts,         // how much each rank is about to send
  fallback,       // the process group
  allocation,     // of symmetric memory, which all ranks allocate in the same order
  count
};

/// How a rank failed: in its own host-visible memory and, within a Note, in every rank's region.
struct StatusRecord {
  Failure failure = Failure::none;
  Phase phase = Phase::none;
  int32_t rank = -1;  // who gave up
  int32_t peer = -1;  // the rank that it waited for
  int32_t lane = -1;  // in which it waited; -1 where there are no lanes
  int32_t padding = 0;
  uint64_t sequence = 0;  // calls completed by `rank` on this communicator before
  uint64_t expected = 0;  // epoch or word awaited
  uint64_t seen = 0;      // epoch or word found
  CallDescriptor own;     // the call of `rank`
  CallDescriptor other;   // the call of `peer` (mismatch only)
};

/// What a rank that has failed leaves at each rank. It leaves one note at most.
struct alignas(128) Note {
  StatusRecord record;
  uint32_t left;  // 1, stored with release when the record stands
  // 1 for each rank that a thread gave up waiting for; `record` describes one of them. On CPU,
  // where a rank has one thread, zeros.
  uint32_t missed[kMaxRanks];
};

/// A record and whether it is complete. `ready` is written last, with release order.
struct alignas(64) Recorded {
  uint32_t ready;
  uint32_t padding[15];
  StatusRecord record;
};

/// Memory that the host can read while kernels run. Kernels and host threads record in places of
/// their own: an atomic operation of a GPU on host memory is not atomic for the CPU, so no word
/// could be claimed by both. Each place has one claim word, which only its writers use.
struct HostStatus {
  Recorded by_kernel;  // claimed by RegionHeader::claimed
  Recorded by_host;
  uint32_t claimed;  // by the thread of this process that writes by_host
};

#if !defined(__CUDACC_RTC__)
/// True for one host thread of the process, which may then record. No other may.
inline bool claim(HostStatus& status) {
  return __atomic_exchange_n(&status.claimed, 1u, __ATOMIC_ACQ_REL) == 0;
}
/// Only after claim().
inline void record_claimed(HostStatus& status, const StatusRecord& record) {
  status.by_host.record = record;
  __atomic_store_n(&status.by_host.ready, 1u, __ATOMIC_RELEASE);
}
/// The failure of this rank; null where none is recorded. Of two that were recorded at the same
/// moment it is the host's from then on.
inline const StatusRecord* recorded(const HostStatus& status) {
  const auto ready = [](const Recorded& place) {
    return __atomic_load_n(&place.ready, __ATOMIC_ACQUIRE) != 0;
  };
  if (ready(status.by_host)) return &status.by_host.record;
  return ready(status.by_kernel) ? &status.by_kernel.record : nullptr;
}
inline bool is_recorded(const HostStatus& status) { return recorded(status) != nullptr; }
/// Records a failure that concerns this process only, or that has been reported to the peers. The
/// first one stays, also if a kernel has recorded it.
inline void record_first(HostStatus& status, const StatusRecord& record) {
  if (!is_recorded(status) && claim(status)) record_claimed(status, record);
}
#endif

}  // namespace collx
