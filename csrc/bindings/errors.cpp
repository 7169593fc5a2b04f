#include "errors.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <string>

#include "../ops/errors.h"

namespace collx {

namespace {

struct PythonClass {
  const char* name;
  const char* doc;
  PyObject* type;  // strong reference, never given back: exceptions outlive the interpreter's end
};

std::array<PythonClass, static_cast<size_t>(ErrorKind::count)> python_classes = {{
    {"CollectiveTimeout", "A peer did not come in time; says which one, and in which phase.",
     nullptr},
    {"CollectiveMismatch", "Ranks made different calls; names both sides.", nullptr},
    {"CollectiveOverlap", "Two calls used one communicator at once, in no order.", nullptr},
    {"CommunicatorPoisoned", "The communicator failed before; it refuses work until destroyed.",
     nullptr},
    {"InitError", "collx.init failed; names the rank, the step and the cause.", nullptr},
}};

/// Derives from PyTorch's base, so that autograd's engine keeps the class as well.
class CollxError final : public torch::PyTorchError {
 public:
  CollxError(ErrorKind kind, std::string message)
      : torch::PyTorchError(std::move(message)), kind_(kind) {}
  PyObject* python_type() override { return python_classes[static_cast<size_t>(kind_)].type; }

 private:
  ErrorKind kind_;
};

}  // namespace

void bind_errors(pybind11::module_& module) {
  namespace py = pybind11;
  for (PythonClass& entry : python_classes) {
    const std::string qualified = std::string("collx.") + entry.name;
    entry.type =
        PyErr_NewExceptionWithDoc(qualified.c_str(), entry.doc, PyExc_RuntimeError, nullptr);
    if (entry.type == nullptr) throw py::error_already_set();
    module.attr(entry.name) = py::reinterpret_borrow<py::object>(entry.type);
  }
  // PyTorch's pybind11 is shared with this module, so calls through torch.ops pass here too.
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (CollxError& error) {
      PyErr_SetString(error.python_type(), error.what());
    }
  });
  raise_by([](ErrorKind kind, std::string message) { throw CollxError(kind, std::move(message)); });
}

}  // namespace collx
