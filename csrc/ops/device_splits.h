// The overload of alltoallv whose splits lie in device memory.
#pragma once

#include <torch/library.h>

namespace collx {

void define_device_splits(torch::Library& library);
void add_device_splits_kernels(torch::Library& library, c10::DispatchKey key);

}  // namespace collx
