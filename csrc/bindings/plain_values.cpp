#include "plain_values.h"

#include <torch/csrc/Export.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <string>
#include <utility>

// Declared in torch/csrc/jit/python/pybind_utils.h. Including that header increases the compilation
// time of this file from 10 to 16 seconds.
namespace torch::jit {
TORCH_PYTHON_API c10::IValue toIValue(pybind11::handle value, const c10::TypePtr& type,
                                      std::optional<int32_t> count);
}  // namespace torch::jit

namespace collx {

namespace {

/// Tensor subclasses do not count.
bool is_tensor(PyObject* value) { return THPVariable_CheckExact(value); }

bool is_plain(PyObject* value) {
  return is_tensor(value) || value == Py_None || PyUnicode_CheckExact(value) ||
         PyLong_CheckExact(value) || PyFloat_CheckExact(value) || PyBool_Check(value);
}

bool is_sequence(PyObject* value) { return PyList_CheckExact(value) || PyTuple_CheckExact(value); }

bool all_of_sequence(PyObject* sequence, bool (*holds)(PyObject*)) {
  PyObject** const items = PySequence_Fast_ITEMS(sequence);
  return std::all_of(items, items + PySequence_Fast_GET_SIZE(sequence), holds);
}

/// The kind of the elements if this is a list type.
c10::TypeKind element_kind(const c10::Type& type) {
  return type.kind() == c10::TypeKind::ListType ? type.containedType(0)->kind()
                                                : c10::TypeKind::NoneType;
}

bool is_small_int(PyObject* value) {
  int overflow = 0;
  return PyLong_CheckExact(value) &&
         (PyLong_AsLongLongAndOverflow(value, &overflow), overflow == 0);
}

/// Faster than PyTorch's conversion, which checks each element for a symbol.
c10::List<int64_t> ints_of(PyObject* sequence) {
  c10::List<int64_t> ints;
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence);
  ints.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    ints.push_back(PyLong_AsLongLong(PySequence_Fast_GET_ITEM(sequence, i)));
  }
  return ints;
}

/// Faster than PyTorch's conversion, which creates two intermediate lists.
c10::List<at::Tensor> tensors_of(PyObject* sequence) {
  c10::List<at::Tensor> tensors;
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence);
  tensors.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    tensors.push_back(THPVariable_Unpack(PySequence_Fast_GET_ITEM(sequence, i)));
  }
  return tensors;
}

}  // namespace

std::optional<c10::IValue> converted(PyObject* value, const c10::Argument& argument) {
  const c10::TypePtr& type = argument.real_type();
  const bool optional = type->kind() == c10::TypeKind::OptionalType;
  const c10::Type& given = optional ? *type->containedType(0) : *type;
  if (is_tensor(value)) {
    if (given.kind() != c10::TypeKind::TensorType) return std::nullopt;
    return THPVariable_Unpack(value);
  }
  if (is_sequence(value)) {
    const c10::TypeKind kind = element_kind(given);
    if (kind == c10::TypeKind::TensorType && all_of_sequence(value, is_tensor)) {
      return tensors_of(value);
    }
    if (kind == c10::TypeKind::SymIntType && all_of_sequence(value, is_small_int)) {
      return ints_of(value);
    }
    if (!all_of_sequence(value, is_plain)) return std::nullopt;
  } else if (!is_plain(value)) {
    return std::nullopt;
  }
  try {
    return torch::jit::toIValue(value, type, argument.N());
  } catch (const pybind11::cast_error&) {
  } catch (const pybind11::error_already_set&) {
  }
  return std::nullopt;
}

std::optional<c10::IValue> converted_text(PyObject* value) {
  if (!PyUnicode_CheckExact(value)) return std::nullopt;
  Py_ssize_t bytes = 0;
  const char* const begin = PyUnicode_AsUTF8AndSize(value, &bytes);
  if (begin == nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  return c10::IValue(std::string(begin, static_cast<size_t>(bytes)));
}

}  // namespace collx
