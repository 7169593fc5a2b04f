#include "quick_call.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>
#include <pybind11/gil_simple.h>
#include <torch/csrc/Export.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

// torch/csrc/jit/python/pybind_utils.h declares it. Including it takes this file from 10 to
// 16 seconds of compilation.
namespace torch::jit {
TORCH_PYTHON_API c10::IValue toIValue(pybind11::handle value, const c10::TypePtr& type,
                                      std::optional<int32_t> count);
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

/// Most names in a program are interned, and so one object.
bool is_name(PyObject* given, PyObject* name) {
  return given == name || (PyUnicode_GET_LENGTH(given) == PyUnicode_GET_LENGTH(name) &&
                           PyUnicode_Compare(given, name) == 0);
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
      outs_ += argument.is_out() ? 1 : 0;
      is_tensor_.push_back(argument.real_type()->kind() == c10::TypeKind::TensorType);
      takes_tensors_.push_back(*argument.real_type() == *c10::ListType::ofTensors());
    }
    texts_.resize(names_.size());
    out_names_ = py::tuple(py::cast(std::vector<py::object>(names_.end() - outs_, names_.end())));
  }

  /// `given`: `count` arguments by position, of which the last ones are the tensors for the results
  /// of a form with out=; then those that `names` has, a tuple or null.
  PyObject* call(PyObject* const* given, Py_ssize_t count, PyObject* names) {
    torch::jit::Stack stack;
    if (count < outs_) throw py::type_error("quick_call: the tensors for the results are missing");
    if (at::impl::torch_function_mode_enabled() ||
        !fill(stack, given, static_cast<size_t>(count - outs_), names)) {
      py::tuple all = out_names_;
      if (names != nullptr) all = all + py::reinterpret_borrow<py::tuple>(names);
      return PyObject_Vectorcall(usual_.ptr(), given, static_cast<size_t>(count - outs_),
                                 all.empty() ? nullptr : all.ptr());
    }
    // The last reference to a tensor besides Python's own is given up with the interpreter's lock,
    // which would be taken anew for each of them when the operator is done with its arguments.
    c10::SmallVector<c10::IValue, 8> held;
    for (const c10::IValue& value : stack) {
      if (value.isTensor() || value.isTensorList()) held.push_back(value);
    }
    {
      const py::gil_scoped_release_simple others_run;
      op_.callBoxed(stack);
    }
    if (stack.empty()) return py::none().release().ptr();
    if (stack.size() == 1) return THPVariable_Wrap(std::move(stack[0]).toTensor());
    py::tuple results(stack.size());
    for (size_t i = 0; i < stack.size(); ++i) {
      results[i] =
          py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(stack[i]).toTensor()));
    }
    return results.release().ptr();
  }

 private:
  /// A text does not change: the object that came last needs no other copy.
  struct Text {
    py::object given;
    c10::IValue value;
  };

  bool fill(torch::jit::Stack& stack, PyObject* const* given, size_t count, PyObject* names) {
    const std::vector<c10::Argument>& arguments = op_.schema().arguments();
    const size_t first_out = arguments.size() - static_cast<size_t>(outs_);
    if (count > first_out) return false;
    size_t unused = names == nullptr ? 0 : static_cast<size_t>(PyTuple_GET_SIZE(names));
    PyObject* const* const outs = given + count;
    PyObject* const* const named = outs + outs_;
    const size_t all = unused;
    stack.reserve(arguments.size());
    for (size_t i = 0; i < arguments.size(); ++i) {
      PyObject* value = i < count ? given[i] : i >= first_out ? outs[i - first_out] : nullptr;
      const bool by_name = value == nullptr;
      for (size_t n = 0; value == nullptr && unused > 0 && n < all; ++n) {
        if (is_name(PyTuple_GET_ITEM(names, n), names_[i].ptr())) value = named[n];
      }
      if (value == nullptr) {
        if (!arguments[i].default_value()) return false;
        stack.push_back(*arguments[i].default_value());
        continue;
      }
      if (by_name) --unused;
      if (!push(stack, i, value)) return false;
    }
    return unused == 0;
  }

  bool push(torch::jit::Stack& stack, size_t i, PyObject* value) {
    Text& last = texts_[i];
    if (value == last.given.ptr()) {
      stack.push_back(last.value);
      return true;
    }
    if (is_tensor_[i] && THPVariable_CheckExact(value)) {
      stack.emplace_back(THPVariable_Unpack(value));
      return true;
    }
    if (takes_tensors_[i]) {
      if (auto tensors = tensors_of(value)) {
        stack.emplace_back(*std::move(tensors));
        return true;
      }
    }
    if (!is_plain_or_list(value)) return false;
    const c10::Argument& argument = op_.schema().arguments()[i];
    try {
      stack.push_back(torch::jit::toIValue(value, argument.real_type(), argument.N()));
    } catch (const py::cast_error&) {
      return false;
    } catch (const py::error_already_set&) {
      return false;
    }
    if (PyUnicode_CheckExact(value)) {
      last = {py::reinterpret_borrow<py::object>(value), stack.back()};
    }
    return true;
  }

  c10::OperatorHandle op_;
  py::object usual_;
  // Of each argument:
  std::vector<py::object> names_;  // interned
  std::vector<bool> is_tensor_;
  std::vector<bool> takes_tensors_;  // a list of them
  std::vector<Text> texts_;          // with the interpreter's lock
  // The last arguments of a form with out=:
  py::tuple out_names_;
  Py_ssize_t outs_ = 0;
};

PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t count, PyObject* names) {
  try {
    auto* const quick = static_cast<QuickCall*>(PyCapsule_GetPointer(self, nullptr));
    return quick->call(given, count, names);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (...) {
    py::detail::try_translate_exceptions();
  }
  return nullptr;
}

// The type of functions with keywords is another one than that of the member.
PyMethodDef method = {"quick_call",
                      reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)),
                      METH_FASTCALL | METH_KEYWORDS, nullptr};

}  // namespace

py::object quick_call(const std::string& name, const std::string& overload, py::object usual) {
  const py::capsule self(new QuickCall(name, overload, std::move(usual)),
                         [](void* quick) { delete static_cast<QuickCall*>(quick); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, self.ptr()));
}

}  // namespace collx
