// collx's own exception classes, and the words that a status record becomes.
#pragma once

#include <c10/macros/Export.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "../protocol/status.h"

namespace collx {

enum class ErrorKind : uint8_t { timeout, mismatch, overlap, poisoned, count };

/// What a message contains besides the record: the communicator, and the rank that reads it.
struct FailureContext {
  std::string_view communicator;
  int rank;
  double timeout_seconds;
};

/// The record in words, without the name of the operator that noticed it.
std::string describe(const StatusRecord& record, const FailureContext& context);

/// A description of a call: operator, tensors and algorithm.
std::string describe(const CallDescriptor& call);

/// Name of the tensors' dtype.
C10_EXPORT std::string dtype_of(const CallDescriptor& call);

C10_EXPORT std::string_view name_of(Failure failure);
C10_EXPORT std::string_view name_of(Phase phase);

ErrorKind kind_of(Failure failure);

/// The error to raise: the message, and the record that it describes.
struct RaisedError {
  ErrorKind kind;
  std::string message;
  std::string communicator;
  std::optional<StatusRecord> record;  // of a failure; none where a communicator is refused
};

/// Raises the class of its kind: in Python one of collx's, whichever way the call came (torch.ops,
/// a method of the communicator, a backward pass). Without Python, a c10::Error.
[[noreturn]] void raise_error(const RaisedError& error);

/// Throws the exception that corresponds to the error in the caller's language.
using Raise = void (*)(const RaisedError& error);

/// While one lives, raise_error() on this thread throws CarriedError, for raise_carried() on the
/// thread that the error is meant for. It takes no lock of an interpreter.
class CarryErrors {
 public:
  CarryErrors();
  ~CarryErrors();
  CarryErrors(const CarryErrors&) = delete;
  CarryErrors& operator=(const CarryErrors&) = delete;
};
struct CarriedError : std::runtime_error {
  explicit CarriedError(const RaisedError& raised)
      : std::runtime_error(raised.message), error(raised) {}

  RaisedError error;
};
[[noreturn]] void raise_carried(const std::exception_ptr& error);

/// Sets how raise_error() raises. This library does not depend on Python; the Python module sets
/// it.
C10_EXPORT void raise_by(Raise raise);

}  // namespace collx
