// Descriptions of calls and of their failures: the records that ranks exchange and that error
// messages are built from.
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
  Algorithm runs = Algorithm::automatic;       // the algorithm that executes the call
  uint8_t dims = 0;         // number of dimensions; `sizes` holds the first eight
  uint8_t scalar_type = 0;  // 1 + PyTorch's code, since copies support more dtypes than reductions
  uint8_t symmetric = 0;    // kInputSymmetric, kOutputSymmetric
  int8_t axis = -1;
  bool keeps_norm = false;  // the normalized tensor is a result in addition to the quantized one
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

/// FNV-1a over the descriptor, folded to 32 bits. The epoch in the same flag identifies the call.
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

/// The fingerprint of a call in which two ranks exchange their counts. Both compute the same value.
COLLX_HD constexpr uint32_t pair_fingerprint(uint32_t call, int rank, int peer, uint64_t sends,
                                             uint64_t expects) {
  const bool first = rank < peer;
  return fold(mix(mix(call, first ? sends : expects), first ? expects : sends));
}

enum class Failure : uint32_t {
  none,
  timeout,   // a peer did not arrive in time
  mismatch,  // a peer made a different call
  overlap,   // two kernels used the communicator concurrently
  splits,    // splits, read on the device, do not fit the tensors
  group,     // the process group raised an error in a fallback
  aborted,   // the program of a rank has aborted its calls
  count
};

/// The wait of a call in which a rank gave up.
enum class Phase : uint32_t {
  none,
  check,          // for the exchange of fingerprints (checked mode)
  start_barrier,  // until all ranks have entered, so that symmetric inputs may be read
  arrival,        // for the peers' pushed data
  stage_barrier,  // until staged data in the payload may be read
  gather,         // for the reduced parts from their owners
  end_barrier,    // until no peer uses this rank's tensors any more
  release,        // until a peer has read a slot, so that it may be written again
  counts,         // for the amount of data that each rank will send
  fallback,       // for the process group
  allocation,     // for symmetric memory, which all ranks allocate in the same order
  count
};

/// The failure of a rank. It is stored in that rank's own host-visible memory and, within a Note,
/// in every rank's region.
struct StatusRecord {
  Failure failure = Failure::none;
  Phase phase = Phase::none;
  int32_t rank = -1;  // the rank that gave up
  int32_t peer = -1;  // the rank that it waited for
  int32_t lane = -1;  // the lane in which it waited; -1 if there are no lanes
  int32_t padding = 0;
  uint64_t sequence = 0;  // calls that `rank` had completed on this communicator
  uint64_t expected = 0;  // epoch or word awaited
  uint64_t seen = 0;      // epoch or word found
  CallDescriptor own;     // the call of `rank`
  CallDescriptor other;   // the call of `peer` (mismatch only)
};

/// The note that a failed rank writes to each rank. A rank writes at most one note.
struct alignas(128) Note {
  StatusRecord record;
  uint32_t left;  // 1: the note is complete; stored with release after the record
  // 1 for each rank that a thread gave up waiting for; `record` describes one of them. On the CPU,
  // where a rank has one thread, all are 0.
  uint32_t missed[kMaxRanks];
};

/// A record, and whether it is complete. `ready` is written last, with release order.
struct alignas(64) Recorded {
  uint32_t ready;
  uint32_t padding[15];
  StatusRecord record;
};

/// Memory that the host can read while kernels run. Kernels and host threads use separate records,
/// because an atomic operation of a GPU on host memory is not atomic for the CPU, and so they could
/// not share a claim word. Each record has its own claim word, which only its writers use.
struct HostStatus {
  Recorded by_kernel;  // claimed by RegionHeader::claimed
  Recorded by_host;
  uint32_t claimed;  // set by the thread of this process that writes by_host
  /// By rank: how long calls have waited for it. Written by their thread; on CUDA, by the watchdog.
  uint64_t waited_ns[kMaxRanks];
};

#if !defined(__CUDACC_RTC__)
/// Returns true for exactly one host thread of the process. Only that thread may record.
inline bool claim(HostStatus& status) {
  return __atomic_exchange_n(&status.claimed, 1u, __ATOMIC_ACQ_REL) == 0;
}
/// Call only after claim() has returned true.
inline void record_claimed(HostStatus& status, const StatusRecord& record) {
  status.by_host.record = record;
  __atomic_store_n(&status.by_host.ready, 1u, __ATOMIC_RELEASE);
}
/// The failure of this rank; null if none is recorded. If both records are complete, the host's has
/// precedence.
inline const StatusRecord* recorded(const HostStatus& status) {
  const auto ready = [](const Recorded& place) {
    return __atomic_load_n(&place.ready, __ATOMIC_ACQUIRE) != 0;
  };
  if (ready(status.by_host)) return &status.by_host.record;
  return ready(status.by_kernel) ? &status.by_kernel.record : nullptr;
}
inline bool is_recorded(const HostStatus& status) { return recorded(status) != nullptr; }
/// Records a failure that concerns this process only, or that has been reported to the peers. An
/// earlier failure stays, even if a kernel recorded it.
inline void record_first(HostStatus& status, const StatusRecord& record) {
  if (!is_recorded(status) && claim(status)) record_claimed(status, record);
}
#endif

}  // namespace collx
