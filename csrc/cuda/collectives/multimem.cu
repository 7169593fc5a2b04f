// Kernels that use NVLink multicast.
#include "allgather_multimem.cuh"
#include "allreduce_multimem_gather.cuh"
#include "allreduce_multimem_oneshot.cuh"
#include "allreduce_multimem_twoshot.cuh"
#include "kernel_table.h"
#include "norm_multimem_twoshot.cuh"
#include "reducescatter_multimem.cuh"

namespace collx::cuda {

Kernel allreduce_multimem_oneshot(const Instance& i) {
  return for_dtype<is_summed>(i.dtype, [&]<DType D>() {
    return for_multicast(i, [&]<typename M>() {
      return as_kernel(allreduce_multimem_oneshot_kernel<Reduce<D>, M>);
    });
  });
}

Kernel allreduce_multimem_twoshot(const Instance& i) {
  return for_dtype<is_summed>(i.dtype, [&]<DType D>() {
    return for_multicast(i, [&]<typename M>() {
      return as_kernel(allreduce_multimem_twoshot_kernel<Reduce<D>, M>);
    });
  });
}

Kernel allreduce_multimem_gather(const Instance& i) {
  return for_dtype_and_world(i, [&]<DType D, int W>() {
    return for_multicast(i, [&]<typename M>() {
      return as_kernel(allreduce_multimem_gather_kernel<Reduce<D>, W, M>);
    });
  });
}

Kernel reducescatter_multimem(const Instance& i) {
  return for_dtype<is_summed>(i.dtype, [&]<DType D>() {
    return for_multicast(
        i, [&]<typename M>() { return as_kernel(reducescatter_multimem_kernel<Reduce<D>, M>); });
  });
}

Kernel allgather_multimem(const Instance& i) {
  return for_multicast(i, [&]<typename M>() { return as_kernel(allgather_multimem_kernel<M>); });
}

Kernel norm_multimem_twoshot(const Instance& i) {
  return for_dtype<can_normalize>(i.dtype, [&]<DType D>() {
    return for_multicast(
        i, [&]<typename M>() { return as_kernel(norm_multimem_twoshot_kernel<Normalized<D>, M>); });
  });
}

}  // namespace collx::cuda
