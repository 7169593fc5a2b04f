// Launchers: from a call to a kernel on a stream, and what a communicator needs of the device.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "../protocol/names.h"
#include "../protocol/selection.h"
#include "allreduce.h"
#include "collectives/kernel_table.cuh"

namespace collx::cuda {
namespace {

void require(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    cudaGetLastError();  // not sticky unless the context is lost
    throw std::runtime_error(std::string("collx: ") + what + ": " + cudaGetErrorString(error));
  }
}

using Area = SlotArea RegionLayout::*;

struct AlgorithmRow {
  Algorithm algorithm;
  Kernel (*kernel)(DType dtype, int world, bool simple);
  // Slots of the algorithms that push; the others use barriers, whose flags carry fingerprints.
  Area slots = nullptr;
  Area pairs = nullptr;

  const SlotArea* area(const RegionLayout& layout, DType dtype) const {
    if (slots == nullptr) return nullptr;
    return &(layout.*(has_sentinel(dtype) ? slots : pairs));
  }
};

constexpr AlgorithmRow kAlgorithms[] = {
    {Algorithm::oneshot_push, allreduce_oneshot_push, &RegionLayout::oneshot,
     &RegionLayout::oneshot_pairs},
    {Algorithm::twoshot_push, allreduce_twoshot_push, &RegionLayout::twoshot,
     &RegionLayout::twoshot_pairs},
    {Algorithm::pull_push, allreduce_pull_push},
    {Algorithm::oneshot_pull, allreduce_oneshot_pull},
    {Algorithm::twoshot_pull, allreduce_twoshot_pull},
};

const AlgorithmRow& row_of(Algorithm algorithm) {
  for (const AlgorithmRow& row : kAlgorithms) {
    if (row.algorithm == algorithm) return row;
  }
  throw std::runtime_error("collx: no kernel for algorithm " + std::string(name_of(algorithm)));
}

struct GatheredCall {
  const void* input[kMaxRanks];
  void* output;
  uint64_t numel;
  ReduceOp reduce_op;
  int32_t world;
};

template <DType D>
__global__ void reduce_kernel(const __grid_constant__ GatheredCall call) {
  const VectorTensor<dtype_size(D)> output(call.output, call.numel);
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < output.vectors();
       i += stride) {
    Vector v[kMaxRanks];
#pragma unroll
    for (int rank = 0; rank < kMaxRanks; ++rank) {
      if (rank < call.world) {
        v[rank] = VectorTensor<dtype_size(D)>(call.input[rank], call.numel).load(i);
      }
    }
    output.store(i, reduce_vectors<D>(v, call.world, call.reduce_op));
  }
}

using ReduceKernel = void (*)(const GatheredCall);
constexpr ReduceKernel kReduceKernels[] = {
    reduce_kernel<DType::float32>, reduce_kernel<DType::float16>, reduce_kernel<DType::bfloat16>,
    reduce_kernel<DType::float64>, reduce_kernel<DType::int32>,   reduce_kernel<DType::int64>,
    reduce_kernel<DType::int8>,    reduce_kernel<DType::uint8>};
static_assert(std::size(kReduceKernels) == static_cast<size_t>(DType::count));

KernelCall arguments_of(const RankView& view, const AllreduceCall& call) {
  KernelCall k;
  k.input = call.input;
  k.output = call.output;
  k.numel = call.numel;
  k.rank = view.rank;
  k.world = view.world;
  k.reduce_op = call.reduce_op;
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

PullArguments pull_arguments_of(const RankView& view, const AllreduceCall& call) {
  PullArguments p;
  std::copy_n(view.region, kMaxCudaRanks, p.region);
  std::copy_n(call.peer_input, kMaxCudaRanks, p.input);
  std::copy_n(call.peer_output, kMaxCudaRanks, p.output);
  p.staging = view.layout.staging;
  p.staging_bytes = view.layout.staging_bytes;
  p.results = view.layout.results;
  p.result_bytes = view.layout.result_bytes;
  return p;
}

bool whole_vectors(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0;
}

/// Where the call's words go, for the algorithms that push.
void use_slots(KernelCall& k, const SlotArea& area, const RankView& view,
               const AllreduceCall& call) {
  const uint64_t bytes = call.numel * static_cast<uint64_t>(dtype_size(call.dtype));
  const uint64_t vectors = ceil_div<uint64_t>(bytes, kVectorBytes);
  const bool parts = call.plan.algorithm == Algorithm::twoshot_push;
  k.entries = reinterpret_cast<TileEntry*>(view.region[view.rank] + area.entries);
  k.arriving = view.region[view.rank] + area.slots;
  k.vectors = parts ? largest_part(vectors, view.world) : vectors;
  k.capacity = area.tiles * kTileVectors;
  k.source_bytes = area.source_bytes;
  k.parity_bytes = area.source_bytes * static_cast<uint32_t>(view.world);
  for (int distance = 0; distance < view.world; ++distance) {
    k.outgoing[distance] = k.peer[distance] + area.slots +
                           uint64_t{area.source_bytes} * static_cast<uint32_t>(view.rank);
  }
}

/// Whether the call is one of those that session.cuh calls simple. Ranks may differ in it: it
/// changes the code that runs, not what is exchanged.
bool is_simple(const KernelCall& k, const RankView& view, const AllreduceCall& call) {
  const uint64_t bytes = call.numel * static_cast<uint64_t>(dtype_size(call.dtype));
  const uint64_t unit = call.plan.algorithm == Algorithm::twoshot_push
                            ? uint64_t{kVectorBytes} * static_cast<uint32_t>(view.world)
                            : uint64_t{kVectorBytes};
  const uint64_t threads = static_cast<uint64_t>(call.plan.blocks) * call.plan.threads;
  return call.reduce_op == ReduceOp::sum && !view.check && bytes > 0 && bytes % unit == 0 &&
         whole_vectors(call.input) && whole_vectors(call.output) && k.vectors <= threads &&
         k.vectors <= k.capacity;
}

/// Fills one parity of every stage of an area.
void fill(char* region, const SlotArea& area, int world, int stages, int parity, int byte,
          Stream stream) {
  const uint64_t bytes = static_cast<uint64_t>(world) * area.tiles * area.tile_bytes;
  for (int stage = 0; stage < stages; ++stage) {
    require(cudaMemsetAsync(region + area.slot(world, stage, parity, 0), byte, bytes, stream),
            "arming the slots");
  }
}

}  // namespace

void initialise(char* region, const RegionLayout& layout, int world, Stream stream) {
  require(cudaMemsetAsync(region, 0, layout.total_bytes, stream), "clearing the region");
  const auto arm = [&](const SlotArea& area, int stages, bool pairs) {
    fill(region, area, world, stages, 0, 0xFF, stream);
    // Pairs of odd epochs start from zero, an even one: see PairSlots.
    if (!pairs) fill(region, area, world, stages, 1, 0xFF, stream);
  };
  arm(layout.oneshot, 1, false);
  arm(layout.twoshot, 2, false);
  arm(layout.oneshot_pairs, 1, true);
  arm(layout.twoshot_pairs, 2, true);
}

int load_kernels() {
  // Asking for a kernel's attributes loads it: later, loading could synchronise with the device
  // while another kernel spins there.
  int resident = kMaxBlocks;
  for (const AlgorithmRow& row : kAlgorithms) {
    for (int dtype = 0; dtype < static_cast<int>(DType::count); ++dtype) {
      for (int world : {2, 3, 4, 8}) {
        for (bool simple : {false, true}) {
          const Kernel kernel = row.kernel(static_cast<DType>(dtype), world, simple);
          int blocks = 0;
          require(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kFullBlock, 0),
                  "loading the kernels");
          resident = std::min(resident, blocks);
        }
      }
    }
  }
  for (const ReduceKernel kernel : kReduceKernels) {
    cudaFuncAttributes attributes;
    require(cudaFuncGetAttributes(&attributes, kernel), "loading the kernels");
  }
  int device = 0, multiprocessors = 0;
  require(cudaGetDevice(&device), "asking for the device");
  require(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
          "asking for the multiprocessors");
  return resident * multiprocessors;
}

void allreduce(const RankView& view, const AllreduceCall& call, Stream stream) {
  const AlgorithmRow& row = row_of(call.plan.algorithm);
  KernelCall kernel_call = arguments_of(view, call);
  PullArguments pull;
  bool simple = false;
  if (const SlotArea* area = row.area(view.layout, call.dtype)) {
    use_slots(kernel_call, *area, view, call);
    simple = is_simple(kernel_call, view, call);
  } else {
    pull = pull_arguments_of(view, call);
    kernel_call.fingerprint = fingerprint(call.descriptor);
  }
  if (view.check) kernel_call.fingerprint = fingerprint(call.descriptor);

  cudaLaunchAttribute dependent;
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(call.plan.blocks));
  config.blockDim = dim3(static_cast<unsigned>(call.plan.threads));
  config.stream = stream;
  config.attrs = &dependent;
  config.numAttrs = view.pdl == PdlLevel::off ? 0 : 1;
  void* arguments[] = {&kernel_call, &pull};  // a kernel takes as many as it has
  require(cudaLaunchKernelExC(&config, row.kernel(call.dtype, view.world, simple), arguments),
          "launching all-reduce");
}

void reduce(const void* const* inputs, int world, void* output, uint64_t numel, DType dtype,
            ReduceOp op, Stream stream) {
  GatheredCall call;
  std::copy_n(inputs, world, call.input);
  call.world = world;
  call.output = output;
  call.numel = numel;
  call.reduce_op = op;
  const uint64_t vectors = ceil_div<uint64_t>(numel * dtype_size(dtype), kVectorBytes);
  if (vectors == 0) return;
  const auto blocks =
      static_cast<unsigned>(std::min<uint64_t>(ceil_div<uint64_t>(vectors, 256), 1024));
  void* arguments[] = {&call};
  require(
      cudaLaunchKernel(reinterpret_cast<const void*>(kReduceKernels[static_cast<size_t>(dtype)]),
                       dim3(blocks), dim3(256), arguments, 0, stream),
      "launching the local reduction");
}

HostStatus* allocate_status() {
  void* status = nullptr;
  require(cudaHostAlloc(&status, sizeof(HostStatus), cudaHostAllocMapped | cudaHostAllocPortable),
          "allocating the status record");
  return new (status) HostStatus{};
}

void free_status(HostStatus* status) { cudaFreeHost(status); }

namespace {

/// A stream of its own for copies between host and region, which so wait for no kernel.
class CopyStream {
 public:
  CopyStream() {
    require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
  }
  ~CopyStream() { cudaStreamDestroy(stream_); }
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;

  template <typename T>
  void read(T& to, const T& from) {
    require(cudaMemcpyAsync(&to, &from, sizeof(T), cudaMemcpyDeviceToHost, stream_),
            "reading the region");
    require(cudaStreamSynchronize(stream_), "reading the region");
  }
  template <typename T>
  void write(T& to, const T& from) {
    require(cudaMemcpyAsync(&to, &from, sizeof(T), cudaMemcpyHostToDevice, stream_),
            "telling the peers");
    require(cudaStreamSynchronize(stream_), "telling the peers");
  }

 private:
  cudaStream_t stream_ = nullptr;
};

void record_here(HostStatus& status, const StatusRecord& record) {
  // A kernel that has found the same failure meanwhile keeps the word.
  if (__atomic_load_n(&status.ready, __ATOMIC_ACQUIRE) != 0) return;
  status.record = record;
  __atomic_store_n(&status.ready, 1u, __ATOMIC_RELEASE);
}

}  // namespace

void report(const RankView& view, const StatusRecord& record) {
  record_here(*view.status, record);
  if (view.region[0] == nullptr) return;  // fallback only: nothing that peers could look at
  CopyStream stream;
  for (int peer = 0; peer < view.world; ++peer) {
    RegionHeader* header = view.header(peer);
    stream.write(header->inbox[view.rank], record);
    stream.write(header->poison, static_cast<uint32_t>(view.rank) + 1);
  }
}

void adopt_reported(const RankView& view) {
  CopyStream stream;
  uint32_t poison = 0;
  stream.read(poison, view.header(view.rank)->poison);
  if (poison == 0) return;
  StatusRecord record;
  stream.read(record, view.header(view.rank)->inbox[poison - 1]);
  record_here(*view.status, record);
}

}  // namespace collx::cuda
