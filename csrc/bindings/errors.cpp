#include "errors.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>

#include "../ops/errors.h"
#include "../protocol/names.h"

namespace collx {

namespace py = pybind11;

namespace {

// Strong references, never given back: errors outlive the interpreter's end.
std::array<PyObject*, static_cast<size_t>(ErrorKind::count)> classes{};

/// Throws PyTorch's carrier of a Python exception. Autograd's engine takes it from thread to
/// thread, so that a backward pass raises the object that was made here, record and all.
[[noreturn]] void raise(const RaisedError& error) {
  const py::gil_scoped_acquire gil;
  PyObject* const type = classes[static_cast<size_t>(error.kind)];
  py::object record = py::none();
  if (error.record) record = record_dict(*error.record);
  const py::object made =
      py::reinterpret_borrow<py::object>(type)(error.message, error.communicator, record);
  PyErr_SetObject(type, made.ptr());
  python_error carrier;
  carrier.persist();
  throw carrier;
}

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

/// None for a call of which nothing is known.
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
      "raise_as",
      [](const py::object& timeout, const py::object& mismatch, const py::object& overlap,
         const py::object& poisoned) {
        classes = {timeout.inc_ref().ptr(), mismatch.inc_ref().ptr(), overlap.inc_ref().ptr(),
                   poisoned.inc_ref().ptr()};
        raise_by(raise);
      },
      py::arg("timeout"), py::arg("mismatch"), py::arg("overlap"), py::arg("poisoned"));
  // PyTorch's pybind11 is shared with this module, so calls through torch.ops pass here too.
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (python_error& error) {
      error.restore();
    }
  });
}

}  // namespace collx
