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

/// `out` shares no memory with the input, unless one begins `offset` bytes after the other and
/// is contiguous: this rank's part of it.
void check_disjoint(const char* op, const at::Tensor& input, const at::Tensor& out,
                    std::optional<int64_t> offset, const char* argument = "out");

/// Every element of a tensor that is written has a location of its own.
void check_writable(const char* op, const char* argument, const at::Tensor& tensor);

/// What an algorithm that a call names requires. NotImplementedError where the ranks have no access
/// to each other's memory or no NVLink multicast, or where that does not reduce the dtype;
/// ValueError where peers access a tensor that is not symmetric; RuntimeError, or a warning, if
/// torch.use_deterministic_algorithms is set and the NVLink switch chooses the order of a sum.
void check_requirements(const char* op, const Request& request, const Communicator& communicator);

}  // namespace collx
