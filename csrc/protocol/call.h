// What the ops layer passes to a backend: one rank's view of the communicator, and one call.
#pragma once

#include "cpu_layout.h"
#include "cuda_layout.h"
#include "norm.h"
#include "status.h"
#include "types.h"

namespace collx {

namespace cuda {
struct EpilogueCall;
}
namespace cpu {
struct RowEpilogue;
}

/// A communicator from one rank.
struct RankView {
  char* region[kMaxRanks];  // every rank's region, as mapped here
  HostStatus* status;       // this rank's own, readable by host and device
  uint64_t timeout_ns;      // of every single wait
  int32_t rank;
  int32_t world;
  PdlLevel pdl;
  bool check;  // exchange fingerprints before each call

  COLLX_HD RegionHeader* header(int of) const {
    return reinterpret_cast<RegionHeader*>(region[of]);
  }
};

struct CudaView : RankView {
  CudaLayout layout;
  char* multicast;  // the regions of all ranks at one address; null: there is none
  bool simulated;   // it is this rank's own, from which kernels find the others'
};

struct CpuView : RankView {
  CpuLayout layout;
};

/// How a call is carried out. The same on every rank: a pure function of agreed values.
struct Plan {
  Algorithm algorithm = Algorithm::automatic;  // what runs
  int32_t blocks = 1;                          // CUDA blocks; 1 on CPU
  int32_t threads = 1;                         // per block; 1 on CPU
  Algorithm named = Algorithm::automatic;      // as requested, or selected
  bool staged = false;        // peers pull inputs from the staging memory, not from where they lie
  bool into_outputs = false;  // what is stored by multicast goes into the outputs of all ranks
};

/// What all calls have in common. `input` and `output` are dense.
struct Call {
  const void* input;
  void* output;
  Plan plan;
  /// Where every rank's input (output) is mapped here, own included; null unless all of them are
  /// registered symmetric tensors.
  const void* peer_input[kMaxRanks];
  void* peer_output[kMaxRanks];
  /// Likewise, where that of all ranks is at once; null where there is no such address.
  const void* multicast_input;
  void* multicast_output;
  CallDescriptor descriptor;
  /// On CUDA: what is done with each element of a result on its way into the output, whose dtype
  /// may be another then.
  const cuda::EpilogueCall* epilogue;
};

/// One all-reduce. `input` and `output` may be equal, but overlap in no other way.
struct AllreduceCall : Call, CallCore {
  uint64_t numel;
};

/// Any other collective: a message from each rank to each, some of them empty.
struct ExchangeCall : Call, MessageMap {
  uint32_t element_bytes;  // addresses and lengths are multiples of this
  /// The longest message between any two ranks. An agreed value, but in alltoallv, where it is the
  /// longest of this rank.
  uint64_t longest;
  uint64_t cleared;  // bytes of `output`, from its first, that are set to zero instead
  /// alltoallv whose splits are only on the device, in memory of the device; otherwise null.
  DeviceSplits splits;
};

/// How the rows of a normalization lie on blocks and slots: norm_plan.h.
struct NormShape {
  uint32_t threads = 64;      // of a block: the vectors of a row that it takes, its piece
  uint32_t cluster = 1;       // blocks that share a row
  uint32_t steps = 1;         // until a row is complete
  uint32_t piece_tiles = 1;   // tiles of slots that a piece takes
  uint32_t rows_per_use = 1;  // of the slots, or of the staging memory
  bool large_slots = false;   // one-shot: those of two-shot

  COLLX_HD constexpr uint32_t step_vectors() const { return threads * cluster; }
};

/// A sum over the ranks of a matrix [rows, cols], row-major, of which each row is normalized. The
/// results are those below that are not null; `output` is not used. Ranks differ in no value but
/// the addresses.
struct NormCall : Call, CallCore {
  uint64_t rows;  // of the input
  uint64_t cols;
  NormOptions options;
  // Residual and results are [rows, cols], or this rank's part of the rows by partition.h where the
  // collective scatters them. Weight and bias are [cols].
  const void* residual;  // null: none; equal on all ranks but where rows are scattered
  const void* weight;
  const void* bias;          // only for layer norms
  const float* given_scale;  // only for ScaleMode::tensor, which stores it as the scale
  void* residual_out;        // the dtype: what was normalized
  void* normalized;          // the dtype
  void* quantized;           // one byte an element
  void* scale;               // as stored: [rows], [1], or by group as the options say
  NormShape shape;           // on CUDA
  /// On CUDA, where shape.steps > 1: a row of float32 for each block; otherwise null.
  float* spill;
  // What goes over each normalized row: on CUDA `epilogue`, on the CPU this one. Its elements are
  // counted from a tensor in which the results begin with row `first_row`.
  const cpu::RowEpilogue* row_epilogue;
  uint64_t first_row;

  bool scatters() const { return scatters_rows(collective); }
};

}  // namespace collx
