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

/// One rank's view of a communicator.
struct RankView {
  char* region[kMaxRanks];  // every rank's region, as mapped here
  HostStatus* status;       // this rank's own, readable by host and device
  uint64_t timeout_ns;      // limit of each wait
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
  char* multicast;  // one address for the regions of all ranks; null if there is none
  bool simulated;   // `multicast` is this rank's region; kernels find the others from it
};

struct CpuView : RankView {
  CpuLayout layout;
};

/// How a call is executed. It is the same on every rank: a pure function of agreed values.
struct Plan {
  Algorithm algorithm = Algorithm::automatic;  // what runs
  int32_t blocks = 1;                          // CUDA blocks; 1 on CPU
  int32_t threads = 1;                         // per block; 1 on CPU
  Algorithm named = Algorithm::automatic;      // as requested, or selected
  bool staged = false;        // peers pull inputs from the staging memory, not from the tensors
  bool into_outputs = false;  // multicast stores go into the outputs of all ranks
  int32_t width = 0;          // lanes that a block serves in turn; 0: one lane, ordinary kernels
  bool bulk = false;          // if width > 0: the kernel can use bulk copies
};

/// The fields that all calls share. `input` and `output` are dense.
struct Call {
  const void* input;
  void* output;
  Plan plan;
  /// Addresses at which this rank maps every rank's input (output), its own included. Null unless
  /// all of them are registered symmetric tensors.
  const void* peer_input[kMaxRanks];
  void* peer_output[kMaxRanks];
  /// The multicast address of all ranks' inputs (outputs); null if there is none.
  const void* multicast_input;
  void* multicast_output;
  CallDescriptor descriptor;
  /// On CUDA: the epilogue that is applied to each element before it is stored into the output. The
  /// output may then have a different dtype.
  const cuda::EpilogueCall* epilogue;
};

/// One all-reduce. `input` and `output` may be equal, but must not overlap otherwise.
struct AllreduceCall : Call, CallCore {
  uint64_t numel;
};

/// Any other collective: each rank sends a message to each rank. Messages may be empty.
struct ExchangeCall : Call, MessageMap {
  uint32_t element_bytes;  // addresses and lengths are multiples of this
  /// The longest message between any two ranks, which all ranks agree on. In alltoallv it is the
  /// longest message of this rank only.
  uint64_t longest;
  uint64_t cleared;  // leading bytes of `output` that are set to zero instead
  /// For an alltoallv whose splits lie in device memory only; otherwise its pointers are null.
  DeviceSplits splits;
};

/// How the rows of a normalization are distributed over blocks and slots: see norm_plan.h.
struct NormShape {
  uint32_t threads = 64;      // of a block; equals the vectors of its piece of a row
  uint32_t cluster = 1;       // blocks that share a row
  uint32_t steps = 1;         // steps until a row is complete
  uint32_t piece_tiles = 1;   // tiles of slots that a piece takes
  uint32_t rows_per_use = 1;  // rows per use of the slots or of the staging memory
  bool large_slots = false;   // a one-shot call uses the slots of two-shot

  COLLX_HD constexpr uint32_t step_vectors() const { return threads * cluster; }
};

/// Sums a row-major matrix [rows, cols] over the ranks and normalizes each row. Results are stored
/// through the pointers below that are not null; `output` is not used. All values except the
/// addresses are equal on all ranks.
struct NormCall : Call, CallCore {
  uint64_t rows;  // of the input
  uint64_t cols;
  NormOptions options;
  // Residual and results are [rows, cols]. If the collective scatters rows, they are this rank's
  // part of the rows (partition.h). Weight and bias are [cols].
  const void* residual;  // null if none; equal on all ranks unless rows are scattered
  const void* weight;
  const void* bias;          // only for layer norms
  const float* given_scale;  // only for ScaleMode::tensor, which stores it as the scale
  void* residual_out;        // the input of the normalization, in the dtype of the call
  void* normalized;          // in the dtype of the call
  void* quantized;           // one byte per element
  void* scale;               // as stored: [rows], [1], or one per group, depending on the options
  NormShape shape;           // on CUDA
  /// On CUDA, if shape.steps > 1: one row of float32 for each block; otherwise null.
  float* spill;
  // The epilogue of each normalized row on the CPU; CUDA uses `epilogue`. It counts elements in a
  // tensor in which the results start at row `first_row`.
  const cpu::RowEpilogue* row_epilogue;
  uint64_t first_row;

  bool scatters() const { return scatters_rows(collective); }
};

}  // namespace collx
