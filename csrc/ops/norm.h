// The fused normalisations below autograd.
#pragma once

#include <torch/library.h>

namespace collx {

/// Schemas of all of them.
void define_norms(torch::Library& library);
/// Their kernels for tensors on a device.
void add_norm_kernels(torch::Library& library, c10::DispatchKey key);

}  // namespace collx
