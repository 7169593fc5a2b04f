#include <algorithm>

#include "launch.h"

namespace collx::cuda {

void require(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    cudaGetLastError();  // not sticky unless the context is lost
    throw std::runtime_error(std::string("collx: ") + what + ": " + cudaGetErrorString(error));
  }
}

cudaFuncAttributes attributes_of(Kernel kernel) {
  cudaFuncAttributes attributes{};
  require(cudaFuncGetAttributes(&attributes, kernel), "querying a kernel's attributes");
  return attributes;
}

int held_together(Kernel kernel, int threads, uint32_t shared) {
  const int most = attributes_of(kernel).maxThreadsPerBlock;
  int blocks = 0;
  require(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, std::min(threads, most),
                                                        shared),
          "loading a kernel");
  return blocks;
}

namespace {

// The shared memory of a multiprocessor for all of its blocks: one of the sizes that an H100
// supports.
constexpr uint32_t kMultiprocessorBytes = 164 << 10;

}  // namespace

void prepare(Kernel kernel) {
  int device = 0, all = 0, most = 0;
  require(cudaGetDevice(&device), "querying the current device");
  require(cudaDeviceGetAttribute(&all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
          "querying the device's attributes");
  require(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          "querying the device's attributes");
  const auto own = static_cast<int>(attributes_of(kernel).sharedSizeBytes);
  require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most - own),
          "preparing a kernel");
  const int percent = std::min<int>(100, (kMultiprocessorBytes * 100 + all - 1) / all);
  require(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, percent),
          "preparing a kernel");
}

WideShape wide_shape(const Plan& plan, int world, uint32_t bytes, const bool (&uses)[3],
                     bool reduces) {
  WideShape shape{};
  shape.lanes = plan.width;
  while (1 << shape.shift < plan.width) ++shape.shift;
  shape.bytes = bytes;
  if (!plan.bulk || bytes == 0) return shape;
  constexpr int kMost = 16;
  const int count = uses[0] + uses[1] + uses[2];
  int left = static_cast<int>(kBulkBytes / bytes);
  if (reduces && uses[1]) {
    const int share = count == 1 ? left : count == 2 ? left * 2 / 3 : left / 2;
    const int taken = std::clamp(share / world, 2, kMost);
    shape.stages[1] = taken;
    left -= taken * world;
  }
  const int others = uses[0] + uses[2] + (uses[1] && !reduces);
  for (int role = 0, rest = others; role < 3; ++role) {
    if (!uses[role] || (role == 1 && reduces)) continue;
    shape.stages[role] = std::clamp((left + rest - 1) / rest, 2, kMost);
    left -= shape.stages[role];
    --rest;
  }
  return shape;
}

uint32_t shared_bytes(const WideShape& shape, int world, bool reduces) {
  const int units = shape.stages[0] + shape.stages[1] * (reduces ? world : 1) + shape.stages[2];
  return static_cast<uint32_t>(units) * shape.bytes;
}

KernelCall arguments_of(const CudaView& view, const Call& call) {
  KernelCall k;
  k.input = call.input;
  k.output = call.output;
  k.numel = 0;
  k.rank = view.rank;
  k.world = view.world;
  k.reduce_op = ReduceOp::sum;
  k.pdl = view.pdl;
  k.check = view.check;
  k.fingerprint = 0;
  for (int distance = 0; distance < view.world; ++distance) {
    k.peer[distance] = view.region[(view.rank + distance) % view.world];
  }
  k.timeout_ns = view.timeout_ns;
  k.status = view.status;
  k.descriptor = call.descriptor;
  return k;
}

PullArguments pull_arguments_of(const CudaView& view, const Call& call) {
  PullArguments p;
  for (int rank = 0; rank < kMaxCudaRanks; ++rank) {
    p.input[rank] = call.plan.staged ? nullptr : call.peer_input[rank];
  }
  std::copy_n(call.peer_output, kMaxCudaRanks, p.output);
  p.staging = view.layout.staging;
  p.staging_bytes = view.layout.staging_bytes;
  p.results = view.layout.results;
  p.result_bytes = view.layout.result_bytes;
  return p;
}

MulticastArguments multicast_arguments_of(const CudaView& view, const Call& call) {
  MulticastArguments m;
  m.region = view.multicast;
  m.input =
      call.plan.staged ? nullptr : static_cast<char*>(const_cast<void*>(call.multicast_input));
  m.output = call.plan.into_outputs ? static_cast<char*>(call.multicast_output) : nullptr;
  return m;
}

uint32_t fingerprint_of_lanes(CallDescriptor descriptor, bool direct) {
  descriptor.input_offset = 0;
  descriptor.symmetric &= direct ? kOutputSymmetric : 0;
  if (!direct) descriptor.output_offset = 0;
  return fingerprint(descriptor);
}

void use_slots(KernelCall& k, const SlotArea& area, const CudaView& view, uint64_t vectors) {
  k.entries = reinterpret_cast<TileEntry*>(view.region[view.rank] + area.entries);
  k.arriving = view.region[view.rank] + area.slots;
  k.vectors = vectors;
  k.capacity = area.tiles * kTileVectors;
  k.source_bytes = area.source_bytes;
  k.parity_bytes = area.source_bytes * static_cast<uint32_t>(view.world);
  for (int distance = 0; distance < view.world; ++distance) {
    k.outgoing[distance] = k.peer[distance] + area.slots +
                           uint64_t{area.source_bytes} * static_cast<uint32_t>(view.rank);
  }
}

void launch(Kernel kernel, const Plan& plan, PdlLevel pdl, void** arguments, Stream stream,
            std::string_view what, uint32_t cluster, cudaEvent_t begun, uint32_t shared) {
  cudaLaunchAttribute attributes[3];
  unsigned count = 0;
  if (pdl != PdlLevel::off) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {cluster, 1, 1};
  }
  if (begun != nullptr) {
    attributes[count].id = cudaLaunchAttributeLaunchCompletionEvent;
    attributes[count++].val.launchCompletionEvent = {begun, 0};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks));
  config.blockDim = dim3(static_cast<unsigned>(plan.threads));
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  const cudaError_t error = cudaLaunchKernelExC(&config, kernel, arguments);
  if (error != cudaSuccess) require(error, ("launching " + std::string(what)).c_str());
}

}  // namespace collx::cuda
