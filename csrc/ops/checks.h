// Argument checks. Each error names the operator, the argument, the given value and the accepted
// values. All checks run before the launch.
#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "../protocol/algorithms.h"
#include "communicator.h"
#include "operator_table.h"

namespace collx {

/// Raises TypeError unless the tensor is strided and its dtype can be reduced.
DType check_dtype(const char* op, const char* argument, const at::Tensor& tensor);
DType check_dtype(const char* op, at::ScalarType dtype);

/// Raises ValueError unless the collective has an algorithm of that name.
Algorithm check_algorithm(const char* op, Collective collective, std::string_view name);
int check_max_blocks(const char* op, int64_t max_blocks);

/// Checks and converts the strings and numbers of a call. The root is not checked.
CallCore check_core(const Arguments& arguments);

/// Raises unless the root is a rank of the communicator.
void check_root(const char* op, int64_t root, int world_size);

/// Raises unless the group size argument equals the world size of the communicator.
void check_group(const char* op, int64_t group_size, const Communicator& communicator);

void check_device(const char* op, const char* argument, const at::Tensor& tensor,
                  const Communicator& communicator);

/// Checks dtype, device and shape of `out`, which Meta kernels can check as well. `other`: the
/// dtype of the result if it is not the input's. `whose` describes it in the message.
void check_out(const char* op, const at::Tensor& input, c10::SymIntArrayRef sizes,
               const at::Tensor& out, const char* argument = "out",
               std::optional<at::ScalarType> other = {}, const char* whose = "the epilogue's, ");

/// Raises unless `out` has one element per memory location, and either is the input or shares no
/// memory with it.
void check_overlap(const char* op, const at::Tensor& input, const at::Tensor& out);

/// Raises if `out` shares memory with the input, unless one tensor is this rank's part of the
/// other: it then begins `offset` bytes after the other and is contiguous. `argument` and `other`
/// name the tensors in the message.
void check_disjoint(const char* op, const at::Tensor& input, const at::Tensor& out,
                    std::optional<int64_t> offset, const char* argument = "out",
                    const char* other = "the input");

/// Like at::get_overlap_status, but also returns No if a tensor has holes and the address ranges of
/// both are disjoint.
at::MemOverlapStatus overlap_of(const at::Tensor& a, const at::Tensor& b);

/// Raises unless every element of a tensor that is written has its own memory location.
void check_writable(const char* op, const char* argument, const at::Tensor& tensor);

/// Checks the requirements of the algorithm that a call names. Raises NotImplementedError if the
/// ranks cannot access each other's memory, or if NVLink multicast is required but unavailable or
/// cannot perform the reduction. Raises ValueError if peers would access a tensor that is not
/// symmetric. Raises RuntimeError, or warns, if torch.use_deterministic_algorithms is set and the
/// NVLink switch determines the order of a sum.
void check_requirements(const char* op, const Request& request, const Communicator& communicator);

}  // namespace collx
