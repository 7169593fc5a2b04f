// The kernels that are the same for every operator: for conjugate and negative views, and for vmap.
#pragma once

#include <torch/library.h>

namespace collx {

/// Adds them for all operators that the library has at that time.
void add_shared_kernels(torch::Library& library);

}  // namespace collx
