// The kernels that all operators share: for conjugate and negative views, and for vmap.
#pragma once

#include <torch/library.h>

namespace collx {

/// Registers these kernels for all operators that the library defines at that time.
void add_shared_kernels(torch::Library& library);

}  // namespace collx
