// What the ops layer hands to a backend: the communicator as one rank sees it, and one call.
#pragma once

#include "layout.h"
#include "status.h"
#include "types.h"

namespace collx {

/// A communicator from one rank, by value: this is what arrives at a kernel.
struct RankView {
  char* region[kMaxRanks];  // every rank's region, as mapped here
  RegionLayout layout;
  HostStatus* status;   // this rank's own, readable by host and device
  uint64_t timeout_ns;  // of every single wait
  int32_t rank;
  int32_t world;
  PdlLevel pdl;
  bool check;  // exchange fingerprints before each call

  COLLX_HD RegionHeader* header(int of) const {
    return reinterpret_cast<RegionHeader*>(region[of]);
  }
};

/// How a call is carried out. The same on every rank: a pure function of agreed values.
struct Plan {
  Algorithm algorithm = Algorithm::automatic;
  int32_t blocks = 1;   // CUDA blocks; 1 on CPU
  int32_t threads = 1;  // per block; 1 on CPU
};

/// One all-reduce. `input` and `output` are dense and may be equal, but overlap in no other way.
struct AllreduceCall {
  const void* input;
  void* output;
  uint64_t numel;
  DType dtype;
  ReduceOp reduce_op;
  Plan plan;
  /// Where every rank's input (output) is mapped here, own included; null unless all of them are
  /// registered symmetric tensors, which pull_push needs of both and the pull forms use of inputs.
  const void* peer_input[kMaxRanks];
  void* peer_output[kMaxRanks];
  CallDescriptor descriptor;
};

}  // namespace collx
