// From a call to a kernel on a stream: what all launchers share.
#pragma once

#include <cuda_runtime_api.h>

#include "device.h"
#include "transports/kernel_call.cuh"

namespace collx::cuda {

/// std::runtime_error that says what failed.
void require(cudaError_t error, const char* what);

KernelCall arguments_of(const CudaView& view, const Call& call);
PullArguments pull_arguments_of(const CudaView& view, const Call& call);

/// Where the call's words go: `vectors` to each rank in each stage.
void use_slots(KernelCall& k, const SlotArea& area, const CudaView& view, uint64_t vectors);

inline bool whole_vectors(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0;
}

/// `cluster`: blocks of the grid that make a cluster, one after the other.
void launch(Kernel kernel, const Plan& plan, PdlLevel pdl, void** arguments, Stream stream,
            const char* what, uint32_t cluster = 1);

/// Those of the fallback, which wait for nobody.
void load_local_kernels();

}  // namespace collx::cuda
