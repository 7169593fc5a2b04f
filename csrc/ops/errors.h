// collx's own exception classes, and the error messages for status records.
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

/// Context of a message besides the record: the communicator, and the rank that reports the
/// failure.
struct FailureContext {
  std::string_view communicator;
  int rank;
  double timeout_seconds;
};

/// A description of the record, without the name of the operator that detected the failure.
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
  std::optional<StatusRecord> record;  // of a failure; nullopt if a communicator is refused
};

/// Raises the exception class of its kind. In Python this is one of collx's classes, no matter
/// whether the call was made through torch.ops, a method of the communicator, or a backward pass.
/// Without Python it is a c10::Error.
[[noreturn]] void raise_error(const RaisedError& error);

/// Throws the exception that corresponds to the error in the caller's language.
using Raise = void (*)(const RaisedError& error);

/// During its lifetime, raise_error() on this thread throws CarriedError, which raise_carried()
/// converts on the thread that waits for the error. Throwing it does not take Python's lock.
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
[[noreturn]] C10_EXPORT void raise_carried(const std::exception_ptr& error);

/// Sets how raise_error() raises. This library does not depend on Python; the Python module sets
/// it.
C10_EXPORT void raise_by(Raise raise);

}  // namespace collx
