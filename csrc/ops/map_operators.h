// The operators that reduce with an epilogue: allreduce_map and reducescatter_map.
#pragma once

#include <torch/library.h>

namespace collx {

void define_maps(torch::Library& library);
void add_map_kernels(torch::Library& library, c10::DispatchKey key);

}  // namespace collx
