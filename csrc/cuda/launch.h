// From a call to a kernel on a stream: the code that all launchers share.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>
#include <string_view>

#include "../protocol/names.h"
#include "arguments/kernel_call.cuh"
#include "collectives/kernel_table.h"
#include "device.h"
#include "epilogue.h"
#include "transports/wide_shape.h"

namespace collx::cuda {

/// Throws std::runtime_error that names the failed operation `what`.
void require(cudaError_t error, const char* what);

cudaFuncAttributes attributes_of(Kernel kernel);

/// The number of blocks of a kernel that one multiprocessor holds, with `threads` threads or the
/// kernel's maximum if that is smaller, and `shared` bytes of dynamic shared memory. The query
/// loads the kernel: loading it later could synchronize with the device while another kernel spins
/// on it.
int held_together(Kernel kernel, int threads, uint32_t shared = 0);

/// The shared memory of a block that copies in bulk.
inline constexpr uint32_t kBulkBytes = 144 << 10;

KernelCall arguments_of(const CudaView& view, const Call& call);
PullArguments pull_arguments_of(const CudaView& view, const Call& call);
MulticastArguments multicast_arguments_of(const CudaView& view, const Call& call);

/// Fingerprint of the properties that all ranks must share in a call through lanes. `direct`: peers
/// store into outputs. Otherwise the locations of the tensors may differ between ranks.
uint32_t fingerprint_of_lanes(CallDescriptor descriptor, bool direct);

/// Sets the slots of the call: `vectors` to each rank in each stage.
void use_slots(KernelCall& k, const SlotArea& area, const CudaView& view, uint64_t vectors);

inline bool whole_vectors(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0;
}

/// `cluster`: the number of consecutive blocks of the grid that form a cluster. `what`: for the
/// error message. `begun`: an event that is recorded when all blocks have begun, or null. `shared`:
/// bytes of dynamic shared memory of a block.
void launch(Kernel kernel, const Plan& plan, PdlLevel pdl, void** arguments, Stream stream,
            std::string_view what, uint32_t cluster = 1, cudaEvent_t begun = nullptr,
            uint32_t shared = 0);

/// Prepares a kernel: allows the shared memory that bulk copies need, and sets the same shared
/// memory carveout for all kernels. A multiprocessor changes the division of its memory between
/// shared memory and cache only when no block is resident. If a block with a smaller carveout
/// waited for a peer, it would keep out the blocks of another communicator's kernel.
void prepare(Kernel kernel);

/// Divides shared memory among the roles of a block with several lanes: see WideShape. `bytes`: the
/// size of a chunk. `uses`: the roles that have chunks. `reduces`: the second role adds the chunks
/// of all ranks.
WideShape wide_shape(const Plan& plan, int world, uint32_t bytes, const bool (&uses)[3],
                     bool reduces);
/// The total size in bytes.
uint32_t shared_bytes(const WideShape& shape, int world, bool reduces);

inline Collective collective_of(const AllreduceCall&) { return Collective::allreduce; }
inline Collective collective_of(const ExchangeCall& call) { return call.collective; }
inline Collective collective_of(const NormCall& call) { return call.collective; }
inline uint32_t cluster_of(const Call&) { return 1; }
inline uint32_t cluster_of(const NormCall& call) { return call.shape.cluster; }
inline CommonNorm common_of(const Call&) { return CommonNorm::other; }
inline CommonNorm common_of(const NormCall& call) {
  const NormOptions& o = call.options;
  if (call.residual == nullptr || call.residual_out == nullptr) return CommonNorm::other;
  if (call.quantized == nullptr) return common_values(o.rounding);
  if (call.normalized != nullptr || o.rounding != Rounding::fp32 ||
      o.quantization != Quantization::e4m3fn || o.scale_mode == ScaleMode::group) {
    return CommonNorm::other;
  }
  return o.scale_mode == ScaleMode::row ? CommonNorm::e4m3fn_row : CommonNorm::e4m3fn_tensor;
}
inline NormForm form_of(const Call&) { return {}; }
inline NormForm form_of(const NormCall& call) {
  return {call.options.norm == Norm::layer, call.options.scale_mode == ScaleMode::group,
          call.shape.steps > 1};
}

/// The kernel of a call with an epilogue; null if the call only prepares the kernel.
Kernel find_with_epilogue(const EpilogueCall& epilogue, ProgramOptions options, const Plan& plan);

/// A call that is being launched.
template <typename CallOf>
struct Launch {
  const CudaView& view;
  const CallOf& call;
  Stream stream;
  const KernelFamily& kernels;
  uint32_t shared = 0;  // bytes of dynamic shared memory of a block

  /// Launches the kernel's instance for the call, with the arguments that its template declares.
  template <typename... Arguments>
  void run(bool simple, Arguments&... arguments) const {
    if (call.epilogue != nullptr) return run_with_epilogue(simple, arguments...);
    const Instance instance{call.dtype, view.world, simple, view.simulated, common_of(call)};
    const Kernel kernel = kernels.find != nullptr ? kernels.find(instance) : nullptr;
    if (kernel == nullptr) {
      throw std::runtime_error("collx: " + std::string(name_of(call.plan.algorithm)) + " of " +
                               std::string(name_of(call.dtype)) + " has no kernel");
    }
    void* given[] = {&arguments...};
    launch(kernel, call.plan, view.pdl, given, stream, name_of(collective_of(call)),
           cluster_of(call), nullptr, shared);
  }

 private:
  template <typename... Arguments>
  void run_with_epilogue(bool simple, Arguments&... arguments) const {
    const KernelTemplate& of = kernels.with_epilogue;
    if (of.name.empty()) {
      throw std::runtime_error("collx: " + std::string(name_of(call.plan.algorithm)) +
                               " does not support epilogues");
    }
    const ProgramOptions options{of, of.worlds ? unrolled(view.world) : 0, of.simple && simple,
                                 of.multicast && view.simulated, form_of(call)};
    const Kernel kernel = find_with_epilogue(*call.epilogue, options, call.plan);
    if (kernel == nullptr) return;
    void* given[] = {&arguments..., const_cast<EpilogueArguments*>(&call.epilogue->arguments)};
    launch(kernel, call.plan, view.pdl, given, stream, name_of(collective_of(call)),
           cluster_of(call));
  }
};

/// The implementation of an algorithm for some collectives. A row whose launcher uses no kernel of
/// its own has `kernels` without `find`.
template <typename CallOf>
struct LauncherRow {
  Algorithm algorithm;
  Collectives serves;
  KernelFamily kernels;
  void (*launch)(const Launch<CallOf>&);
};

template <typename CallOf, size_t N>
constexpr const LauncherRow<CallOf>* find_launcher(const LauncherRow<CallOf> (&rows)[N],
                                                   Collective c, Algorithm a) {
  for (const LauncherRow<CallOf>& row : rows) {
    if (row.algorithm == a && (row.serves & only(c)) != 0) return &row;
  }
  return nullptr;
}

template <typename CallOf, size_t N>
void launch_by(const LauncherRow<CallOf> (&rows)[N], const CudaView& view, const CallOf& call,
               Stream stream) {
  const Collective c = collective_of(call);
  const LauncherRow<CallOf>* row = find_launcher(rows, c, call.plan.algorithm);
  if (row == nullptr) {
    throw std::runtime_error("collx: " + std::string(name_of(call.plan.algorithm)) + " of " +
                             std::string(name_of(c)) + " has no launcher");
  }
  row->launch({view, call, stream, row->kernels});
}

/// Whether every row with kernels of these collectives takes an epilogue. `except`: an algorithm
/// that selection replaces for calls with an epilogue.
template <typename CallOf, size_t N>
constexpr bool take_epilogues(const LauncherRow<CallOf> (&rows)[N], Collectives of,
                              Algorithm except) {
  for (const LauncherRow<CallOf>& row : rows) {
    if ((row.serves & of) == 0 || row.algorithm == except || row.kernels.find == nullptr) continue;
    if (row.kernels.with_epilogue.name.empty()) return false;
  }
  return true;
}

}  // namespace collx::cuda
