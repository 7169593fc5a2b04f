#include "quick_call.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Export.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

// torch/csrc/jit/python/pybind_utils.h declares these two. Including it takes this file from 10 to
// 16 seconds of compilation.
namespace torch::jit {
TORCH_PYTHON_API c10::IValue toIValue(pybind11::handle value, const c10::TypePtr& type,
                                      std::optional<int32_t> count);
TORCH_PYTHON_API pybind11::object toPyObject(c10::IValue value);
}  // namespace torch::jit

namespace collx {

namespace py = pybind11;

namespace {

/// What nobody but the operator has a say in: no tensor of a subclass, nothing that stands for
/// another thing while it is traced.
bool is_plain(PyObject* value) {
  return THPVariable_CheckExact(value) || value == Py_None || PyUnicode_CheckExact(value) ||
         PyLong_CheckExact(value) || PyFloat_CheckExact(value) || PyBool_Check(value);
}

/// Of a list of tensors, which PyTorch makes by way of two others.
std::optional<c10::List<at::Tensor>> tensors_of(PyObject* value) {
  if (!PyList_CheckExact(value) && !PyTuple_CheckExact(value)) return std::nullopt;
  PyObject** const items = PySequence_Fast_ITEMS(value);
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(value);
  if (!std::all_of(items, items + count, THPVariable_CheckExact)) return std::nullopt;
  c10::List<at::Tensor> tensors;
  tensors.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) tensors.push_back(THPVariable_Unpack(items[i]));
  return tensors;
}

bool is_plain_or_list(PyObject* value) {
  if (!PyList_CheckExact(value) && !PyTuple_CheckExact(value)) return is_plain(value);
  PyObject** const items = PySequence_Fast_ITEMS(value);
  return std::all_of(items, items + PySequence_Fast_GET_SIZE(value), is_plain);
}

/// PyTorch looks up each argument that is not given, by a string that it makes of the name: with
/// many options that is a good part of a small call. Here the strings are made once, and a text is
/// copied when it is another one than before. What is not plain, or does not fit the schema, is
/// left to PyTorch, with its words for what is wrong.
class QuickCall {
 public:
  QuickCall(const std::string& name, const std::string& overload, py::object usual)
      : op_(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str())),
        usual_(std::move(usual)) {
    for (const c10::Argument& argument : op_.schema().arguments()) {
      names_.push_back(
          py::reinterpret_steal<py::object>(PyUnicode_InternFromString(argument.name().c_str())));
      takes_tensors_.push_back(*argument.real_type() == *c10::ListType::ofTensors());
    }
    texts_.resize(names_.size());
  }

  py::object operator()(const py::tuple& given, const std::optional<py::dict>& options,
                        const py::tuple& outs) const {
    torch::jit::Stack stack;
    if (at::impl::torch_function_mode_enabled() || !fill(stack, given, options, outs)) {
      return call_usual(given, options, outs);
    }
    // The last reference to a tensor besides Python's own is given up with the interpreter's lock,
    // which would be taken anew for each of them when the operator is done with its arguments.
    torch::jit::Stack held;
    held.reserve(stack.size());
    std::copy_if(stack.begin(), stack.end(), std::back_inserter(held),
                 [](const c10::IValue& value) { return value.isTensor() || value.isTensorList(); });
    {
      const py::gil_scoped_release others_run;
      op_.callBoxed(stack);
    }
    if (stack.empty()) return py::none();
    if (stack.size() == 1) return torch::jit::toPyObject(std::move(stack[0]));
    py::tuple results(stack.size());
    for (size_t i = 0; i < stack.size(); ++i) {
      results[i] = torch::jit::toPyObject(std::move(stack[i]));
    }
    return results;
  }

 private:
  /// A text does not change: the object that came last needs no other copy.
  struct Text {
    py::object given;
    c10::IValue value;
  };

  bool fill(torch::jit::Stack& stack, const py::tuple& given,
            const std::optional<py::dict>& options, const py::tuple& outs) const {
    const std::vector<c10::Argument>& arguments = op_.schema().arguments();
    if (given.size() + outs.size() > arguments.size()) return false;
    const size_t first_out = arguments.size() - outs.size();
    size_t unused = options ? options->size() : 0;
    stack.reserve(arguments.size());
    for (size_t i = 0; i < arguments.size(); ++i) {
      const c10::Argument& argument = arguments[i];
      PyObject* value = nullptr;
      if (i < given.size()) {
        value = PyTuple_GET_ITEM(given.ptr(), i);
      } else if (i >= first_out) {
        value = PyTuple_GET_ITEM(outs.ptr(), i - first_out);
      } else if (unused > 0) {
        value = PyDict_GetItem(options->ptr(), names_[i].ptr());
        if (value != nullptr) --unused;
      }
      if (value == nullptr) {
        if (!argument.default_value()) return false;
        stack.push_back(*argument.default_value());
        continue;
      }
      Text& last = texts_[i];
      if (value == last.given.ptr()) {
        stack.push_back(last.value);
        continue;
      }
      if (takes_tensors_[i]) {
        if (auto tensors = tensors_of(value)) {
          stack.emplace_back(*std::move(tensors));
          continue;
        }
      }
      if (!is_plain_or_list(value)) return false;
      try {
        stack.push_back(torch::jit::toIValue(value, argument.real_type(), argument.N()));
        if (PyUnicode_CheckExact(value)) {
          last = {py::reinterpret_borrow<py::object>(value), stack.back()};
        }
      } catch (const py::cast_error&) {
        return false;
      } catch (const py::error_already_set&) {
        return false;
      }
    }
    return unused == 0;
  }

  py::object call_usual(const py::tuple& given, const std::optional<py::dict>& options,
                        const py::tuple& outs) const {
    py::dict named;
    if (options) named.attr("update")(*options);
    const size_t first_out = names_.size() - outs.size();
    for (size_t i = 0; i < outs.size(); ++i) named[names_[first_out + i]] = outs[i];
    return usual_(*given, **named);
  }

  c10::OperatorHandle op_;
  py::object usual_;
  std::vector<py::object> names_;    // of the arguments, interned
  std::vector<bool> takes_tensors_;  // a list of them, each argument
  mutable std::vector<Text> texts_;  // likewise; with the interpreter's lock
};

}  // namespace

py::cpp_function quick_call(const std::string& name, const std::string& overload,
                            py::object usual) {
  return QuickCall(name, overload, std::move(usual));
}

}  // namespace collx
