// collx's own exception classes, and the words that a status record becomes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "../protocol/status.h"

namespace collx {

enum class ErrorKind : uint8_t { timeout, mismatch, overlap, poisoned, init, count };

/// What the words say besides the record: whose record it is, and who reads it.
struct FailureContext {
  std::string_view communicator;
  int rank;
  double timeout_seconds;
};

/// The record in words, without the name of the operator that noticed it.
std::string describe(const StatusRecord& record, const FailureContext& context);

/// One call in words: what it was, on which tensors, by which algorithm.
std::string describe(const CallDescriptor& call);

/// Name of the tensors' dtype.
std::string dtype_of(const CallDescriptor& call);

std::string_view name_of(Failure failure);
std::string_view name_of(Phase phase);

ErrorKind kind_of(Failure failure);

/// Raises the class of `kind`: a subclass of RuntimeError in Python, whichever way the call came
/// (torch.ops, a method of the communicator, a backward pass).
[[noreturn]] void raise_error(ErrorKind kind, std::string message);

}  // namespace collx
