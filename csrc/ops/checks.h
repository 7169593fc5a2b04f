// Argument checks: each refusal names the operator, the argument, what was given and what is
// accepted, before anything is launched.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "../protocol/algorithms.h"
#include "communicator.h"
#include "operator_table.h"

namespace collx {

/// TypeError unless the tensor is strided and of a dtype that can be reduced.
DType check_dtype(const char* op, const char* argument, const at::Tensor& tensor);
DType check_dtype(const char* op, at::ScalarType dtype);

ReduceOp check_reduce_op(const char* op, std::string_view name, DType dtype);
/// ValueError unless the collective has an algorithm of that name.
Algorithm check_algorithm(const char* op, Collective collective, std::string_view name);
int check_max_blocks(const char* op, int64_t max_blocks);

/// What the strings and numbers of a call mean. The root is not checked.
CallCore check_core(const Arguments& arguments);

/// TypeError unless the tensor is strided, with elements of whole bytes: what can be copied.
void check_copyable(const char* op, const char* argument, const at::Tensor& tensor);

/// A rank of the communicator.
void check_root(const char* op, int64_t root, int world_size);

/// What the schema says of the group must be so.
void check_group(const char* op, int64_t group_size, const Communicator& communicator);

void check_device(const char* op, const char* argument, const at::Tensor& tensor,
                  const Communicator& communicator);

/// dtype, device and shape of `out`: what Meta can check as well. `epilogue`: its dtype, where one
/// makes the result.
void check_out(const char* op, const at::Tensor& input, c10::SymIntArrayRef sizes,
               const at::Tensor& out, const char* argument = "out",
               std::optional<at::ScalarType> epilogue = {});

/// `out` has one element per memory location, and is the input or shares nothing with it.
void check_overlap(const char* op, const at::Tensor& input, const at::Tensor& out);

/// `out` shares nothing with the input, unless the one begins `offset` bytes behind the other and
/// is contiguous: its own part of it.
void check_disjoint(const char* op, const at::Tensor& input, const at::Tensor& out,
                    std::optional<int64_t> offset, const char* argument = "out");

/// Every element of a tensor that is written has a location of its own.
void check_writable(const char* op, const char* argument, const at::Tensor& tensor);

[[noreturn, gnu::cold]] void refuse_unsymmetric(const char* op, Algorithm algorithm,
                                                bool input_symmetric, bool output_symmetric);

/// An algorithm that works on the ranks' own tensors needs them registered.
inline void check_symmetric(const char* op, Algorithm algorithm, bool input_symmetric,
                            bool output_symmetric) {
  if (!needs_symmetric(algorithm) || (input_symmetric && output_symmetric)) return;
  refuse_unsymmetric(op, algorithm, input_symmetric, output_symmetric);
}

/// "direct": between the tensors themselves, so those that peers touch have to be registered.
void check_direct(const char* op, Collective collective, Algorithm algorithm, bool input_symmetric,
                  bool output_symmetric, bool in_place);

[[noreturn, gnu::cold]] void refuse_multicast(const char* op, const Request& request,
                                              const Communicator& communicator);

/// torch.use_deterministic_algorithms: RuntimeError, or a warning, for a sum whose order the NVLink
/// switch chooses. Integer sums are the same in any order.
void alert_order_of_switch(const char* op, const Request& request);

/// NotImplementedError where the call asks for NVLink multicast, and that is not there or does not
/// reduce so.
inline void check_multicast(const char* op, const Request& request,
                            const Communicator& communicator) {
  if (!needs_multicast(request.algorithm)) return;
  const bool adds = adds_by_multicast(request.collective, request.algorithm);
  if (adds ? can_be_switched(request) : request.capabilities.multicast) {
    return adds ? alert_order_of_switch(op, request) : void();
  }
  refuse_multicast(op, request, communicator);
}

[[noreturn, gnu::cold]] void refuse_without_regions(const char* op, Algorithm algorithm,
                                                    const Communicator& communicator);

/// Without access to each other's memory ranks have the fallback alone.
inline void check_peer_access(const char* op, Algorithm algorithm,
                              const Communicator& communicator) {
  if (algorithm == Algorithm::automatic || !row_of(algorithm).kernels) return;
  if (!communicator.has_regions()) refuse_without_regions(op, algorithm, communicator);
}

}  // namespace collx
