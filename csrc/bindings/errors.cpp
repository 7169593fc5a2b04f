#include "../ops/errors.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>

#include "../protocol/names.h"
#include "bindings.h"

namespace collx {

namespace py = pybind11;

namespace {

// Strong references that are never released, since errors may outlive the interpreter.
std::array<PyObject*, static_cast<size_t>(ErrorKind::count)> classes{};
PyObject* after_failure = nullptr;

/// Throws PyTorch's wrapper of a Python exception. Autograd's engine passes it between threads, so
/// that a backward pass raises the object created here, including the record.
[[noreturn]] void raise(const RaisedError& error) {
  const py::gil_scoped_acquire gil;
  PyObject* const type = classes[static_cast<size_t>(error.kind)];
  py::object record = py::none();
  if (error.record) record = record_dict(*error.record);
  const py::object made =
      py::reinterpret_borrow<py::object>(type)(error.message, error.communicator, record);
  if (after_failure != nullptr && error.record) {
    py::reinterpret_borrow<py::object>(after_failure)(error.communicator);
  }
  PyErr_SetObject(type, made.ptr());
  python_error carrier;
  carrier.persist();
  throw carrier;
}

}  // namespace

py::dict call_dict(const CallDescriptor& call) {
  constexpr int kKept = sizeof(call.sizes) / sizeof(call.sizes[0]);
  py::list shape;
  for (int i = 0; i < std::min<int>(call.dims, kKept); ++i) shape.append(call.sizes[i]);
  py::dict d;
  d["op"] = name_of(call.collective);
  d["dtype"] = dtype_of(call);
  d["reduce_op"] = name_of(call.reduce_op);
  d["root"] = static_cast<int>(call.root);
  d["axis"] = call.axis;
  d["algorithm"] = name_of(call.algorithm);
  d["executed_by"] = name_of(call.runs);
  d["max_blocks"] = call.max_blocks;
  d["shape"] = py::tuple(shape);
  d["numel"] = call.numel;
  return d;
}

namespace {

/// Returns None if the call is not known.
py::object call_or_none(const CallDescriptor& call, bool known) {
  if (!known || call.collective == Collective::none) return py::none();
  return call_dict(call);
}

}  // namespace

py::dict record_dict(const StatusRecord& record) {
  py::dict d;
  d["failure"] = name_of(record.failure);
  d["phase"] = name_of(record.phase);
  d["rank"] = record.rank;
  d["peer"] = record.peer;
  d["sequence"] = record.sequence;
  d["expected"] = record.expected;
  d["seen"] = record.seen;
  d["call"] = call_or_none(record.own, true);
  d["peer_call"] = call_or_none(record.other, record.failure == Failure::mismatch);
  return d;
}

void bind_errors(py::module_& module) {
  module.def(
      "after_failure", [](const py::object& function) { after_failure = function.inc_ref().ptr(); },
      py::arg("function"));
  module.def(
      "raise_as",
      [](const py::object& timeout, const py::object& mismatch, const py::object& overlap,
         const py::object& poisoned) {
        classes = {timeout.inc_ref().ptr(), mismatch.inc_ref().ptr(), overlap.inc_ref().ptr(),
                   poisoned.inc_ref().ptr()};
        raise_by(raise);
      },
      py::arg("timeout"), py::arg("mismatch"), py::arg("overlap"), py::arg("poisoned"));
  // PyTorch shares its pybind11 with this module, so this also translates errors of calls through
  // torch.ops, and of posted calls through futures.
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) raise_carried(thrown);
    } catch (python_error& error) {
      error.restore();
    }
  });
}

}  // namespace collx
