// What a call was, and how it failed: the records that ranks exchange and that errors are made of.
#pragma once

#include "collectives.h"
#include "norm.h"
#include "types.h"

namespace collx {

/// One call as a rank sees it. In checked mode ranks exchange it and compare the fingerprints.
struct CallDescriptor {
  Collective collective = Collective::none;
  DType dtype = DType::float32;
  ReduceOp reduce_op = ReduceOp::sum;
  Algorithm algorithm = Algorithm::automatic;  // as named or selected, never `automatic` in a call
  Algorithm runs = Algorithm::automatic;       // what carries it out
  uint8_t dims = 0;         // number of dimensions; the first eight sizes stand below
  uint8_t scalar_type = 0;  // 1 + PyTorch's code, since copies know more dtypes than reductions
  uint8_t symmetric = 0;    // bit 0: input, bit 1: output
  int8_t axis = -1;
  bool keeps_norm = false;  // the normalized tensor is a result besides the quantized one
  int16_t root = -1;
  int32_t max_blocks = 0;
  uint64_t numel = 0;
  uint64_t input_offset = 0;  // offsets in the symmetric allocations
  union {
    uint64_t output_offset = 0;
    uint64_t row_epilogue;  // as `epilogue`, of a fused normalization, whose results peers leave be
  };
  int64_t sizes[8] = {};
  union {
    NormOptions norm = {};  // of a fused normalization
    uint64_t epilogue;      // of any other reduction: a hash of its expression, 0 without one
  };
  // alltoallv: bytes for the rank that reads this, and bytes expected from it. Not part of the
  // fingerprint, see pair_fingerprint.
  uint64_t sends = 0;
  uint64_t expects = 0;
};
static_assert(sizeof(CallDescriptor) == 144);

/// A hash of the expression that is the call's epilogue; 0 without one.
constexpr uint64_t epilogue_of(const CallDescriptor& d) {
  return is_norm(d.collective) ? d.row_epilogue : d.epilogue;
}

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
  };
  uint64_t h = 0xcbf29ce484222325ull;
  for (const uint64_t word : words) h = mix(h, word);
  for (const int64_t size : d.sizes) h = mix(h, static_cast<uint64_t>(size));
  struct Words {
    uint64_t of[sizeof(NormOptions) / sizeof(uint64_t)];
  };
  // The epilogue is the first of them.
  for (const uint64_t word : __builtin_bit_cast(Words, d.norm).of) h = mix(h, word);
  return fold(h);
}

/// The same for a call in which two ranks exchange what only they know: both come to one value.
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
  splits,    // splits that do not fit the tensors, known to the device alone
  group,     // the process group raised in a fallback
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
  count
};

/// How a rank failed: in its own host-visible memory and, within a Note, in every rank's region.
struct StatusRecord {
  Failure failure = Failure::none;
  Phase phase = Phase::none;
  int32_t rank = -1;      // who gave up
  int32_t peer = -1;      // whom it waited for
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
  // 1 for each rank that a thread waited for in vain; `record` speaks of one of them. On CPU, where
  // a rank has one thread, zeros.
  uint32_t missed[kMaxRanks];
};

/// Memory that the host can read while kernels run. `ready` is written last, with release order.
struct alignas(64) HostStatus {
  uint32_t ready;
  uint32_t claimed;  // by the thread of this process that records
  uint32_t padding[14];
  StatusRecord record;
};

#if !defined(__CUDACC_RTC__)
/// True for one thread of the process, which may record then. No other does.
inline bool claim(HostStatus& status) {
  return __atomic_exchange_n(&status.claimed, 1u, __ATOMIC_ACQ_REL) == 0;
}
/// Only after claim().
inline void record_claimed(HostStatus& status, const StatusRecord& record) {
  status.record = record;
  __atomic_store_n(&status.ready, 1u, __ATOMIC_RELEASE);
}
inline bool is_recorded(const HostStatus& status) {
  return __atomic_load_n(&status.ready, __ATOMIC_ACQUIRE) != 0;
}
/// Records a failure that concerns this process alone, or that the peers have been told of. The
/// first one stays, a kernel's as well.
inline void record_first(HostStatus& status, const StatusRecord& record) {
  if (!is_recorded(status) && claim(status)) record_claimed(status, record);
}
#endif

}  // namespace collx
