// The reductions with an epilogue, allreduce_map and reducescatter_map, and the operator that
// applies one to a tensor that is there already.
#pragma once

#include <torch/library.h>

namespace collx {

void define_maps(torch::Library& library);
void add_map_kernels(torch::Library& library, c10::DispatchKey key);

}  // namespace collx
