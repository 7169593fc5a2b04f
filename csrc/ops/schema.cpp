// The library of operators: their schemas, and their kernels below autograd.
#include <torch/library.h>

#include "barrier.h"
#include "device_splits.h"
#include "epilogue_operator.h"
#include "generated.h"
#include "map_operators.h"
#include "norm.h"
#include "shared_kernels.h"

namespace collx {

TORCH_LIBRARY(collx, library) {
  operators::for_each([&]<typename Op>(Op) { Generated<Op>::define(library); });
  define_device_splits(library);
  define_norms(library);
  define_maps(library);
  define_epilogue(library);
  library.def("barrier(str group_name) -> ()", {at::Tag::pt2_compliant_tag});
  // The layouts that are refused get the same kernels, whose checks say what is accepted; without
  // one, the dispatcher's own message would name neither argument nor cure.
  for (const c10::DispatchKey key :
       {c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::SparseCPU,
        c10::DispatchKey::SparseCUDA, c10::DispatchKey::SparseCsrCPU,
        c10::DispatchKey::SparseCsrCUDA, c10::DispatchKey::QuantizedCPU,
        c10::DispatchKey::QuantizedCUDA, c10::DispatchKey::MkldnnCPU}) {
    operators::for_each([&]<typename Op>(Op) { Generated<Op>::add_kernels(library, key); });
    add_device_splits_kernels(library, key);
    add_norm_kernels(library, key);
    add_map_kernels(library, key);
    add_epilogue_kernel(library, key);
  }
  // No tensor says on which device: the communicator does.
  library.impl("barrier",
               torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(barrier)));
  add_shared_kernels(library);
}

}  // namespace collx
