// collx's own exception classes, and the words that a status record becomes.
#pragma once

#include <c10/macros/Export.h>

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
C10_EXPORT std::string dtype_of(const CallDescriptor& call);

C10_EXPORT std::string_view name_of(Failure failure);
C10_EXPORT std::string_view name_of(Phase phase);

ErrorKind kind_of(Failure failure);

/// Raises the class of `kind`: a subclass of RuntimeError in Python, whichever way the call came
/// (torch.ops, a method of the communicator, a backward pass). Without Python, a c10::Error.
[[noreturn]] void raise_error(ErrorKind kind, std::string message);

/// Throws the exception that stands for `kind` in the language of the caller.
using Raise = void (*)(ErrorKind kind, std::string message);

/// How raise_error() raises from now on. This library knows no Python: the Python module says it.
C10_EXPORT void raise_by(Raise raise);

}  // namespace collx
