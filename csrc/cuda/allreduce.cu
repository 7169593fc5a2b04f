// Launchers of all-reduce, and the local reduction of the fallback.
#include <algorithm>

#include "../protocol/selection.h"
#include "allreduce.h"
#include "kernels.h"
#include "launch.h"
#include "stages/reduce.cuh"
#include "stages/vectors.cuh"

namespace collx::cuda {
namespace {

/// Slots of the algorithms that push; the others use barriers, whose flags carry fingerprints.
const SlotArea* slots_of(const CudaLayout& layout, const AllreduceCall& call) {
  switch (row_of(call.plan.algorithm).slots) {
    case SlotsFor::oneshot:
      return &layout.oneshot;
    case SlotsFor::twoshot:
      return &layout.twoshot;
    case SlotsFor::channels:
      return &layout.channels.slots;
    case SlotsFor::none:
      break;
  }
  return nullptr;
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

/// Whether the call is one of those that session.cuh calls simple. Ranks may differ in it: it
/// changes the code that runs, not what is exchanged.
bool is_simple(const KernelCall& k, const CudaView& view, const AllreduceCall& call) {
  const uint64_t bytes = call.numel * static_cast<uint64_t>(dtype_size(call.dtype));
  const uint64_t unit = row_of(call.plan.algorithm).share == Share::part
                            ? uint64_t{kVectorBytes} * static_cast<uint32_t>(view.world)
                            : uint64_t{kVectorBytes};
  const uint64_t threads = static_cast<uint64_t>(call.plan.blocks) * call.plan.threads;
  return call.reduce_op == ReduceOp::sum && !view.check && bytes > 0 && bytes % unit == 0 &&
         whole_vectors(call.input) && whole_vectors(call.output) && k.vectors <= threads &&
         k.vectors <= k.capacity;
}

/// Vectors that each rank sends to each in a stage, on the wire.
uint64_t sent_vectors(const AllreduceCall& call, int world) {
  const uint64_t bytes = call.numel * static_cast<uint64_t>(dtype_size(call.dtype));
  const uint64_t vectors = ceil_div<uint64_t>(bytes, kVectorBytes);
  const bool parts = row_of(call.plan.algorithm).share == Share::part;
  return wire_vectors(is_masked(Collective::allreduce, call.dtype),
                      parts ? largest_part(vectors, world) : vectors);
}

}  // namespace

void load_local_kernels() {
  for (const ReduceKernel kernel : kReduceKernels) {
    cudaFuncAttributes attributes;
    require(cudaFuncGetAttributes(&attributes, kernel), "loading the kernels");
  }
}

void allreduce(const CudaView& view, const AllreduceCall& call, Stream stream) {
  KernelCall kernel_call = arguments_of(view, call);
  kernel_call.numel = call.numel;
  kernel_call.reduce_op = call.reduce_op;
  PullArguments pull;
  bool simple = false;
  if (const SlotArea* area = slots_of(view.layout, call)) {
    use_slots(kernel_call, *area, view, sent_vectors(call, view.world));
    simple = is_simple(kernel_call, view, call);
  } else {
    pull = pull_arguments_of(view, call);
    kernel_call.fingerprint = fingerprint(call.descriptor);
  }
  if (view.check) kernel_call.fingerprint = fingerprint(call.descriptor);
  void* arguments[] = {&kernel_call, &pull};  // a kernel takes as many as it has
  const Kernel kernel =
      require_kernel(Collective::allreduce, call.plan.algorithm, call.dtype, view.world, simple);
  launch(kernel, call.plan, view.pdl, arguments, stream, "launching all-reduce");
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

}  // namespace collx::cuda
