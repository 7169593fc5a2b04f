// A Python function of an operator, which converts the arguments of a vectorcall for the
// dispatcher.
#pragma once

#include <ATen/core/stack.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "function_table.h"

namespace collx {

/// The arguments of a vectorcall.
struct Given {
  PyObject* const* values;
  Py_ssize_t count;  // number of positional arguments
  PyObject* names;   // names of the keyword arguments; null if there are none

  PyObject* pass_to(pybind11::handle function) const {
    return PyObject_Vectorcall(function.ptr(), values, static_cast<size_t>(count), names);
  }
};

/// Selects the operator by the arguments, converts them, and calls the operator through the
/// dispatcher. A call with arguments that are not plain or not valid goes to the twin, a Python
/// function that does the same and supports tracing, overrides and error messages of PyTorch. The
/// caller must hold the interpreter's lock, which is released for the operator.
class Function {
 public:
  /// `positional`: the number of parameters that are also accepted by position. `defaults`:
  /// Ellipsis for a parameter without a default. `declaration` raises TypeError for arguments that
  /// the function does not take. `conversions`: collx.ops.arguments.
  Function(const std::string& name, const pybind11::tuple& names, const pybind11::tuple& defaults,
           size_t positional, pybind11::object declaration, pybind11::object twin,
           const pybind11::object& conversions);

  /// Returns a new reference, or null with an error set.
  PyObject* call(const Given& given);
  /// Posts the call and returns its handle. Returns null without an error if the arguments are not
  /// plain or not valid, or include async_op.
  PyObject* post(const Given& given);

 private:
  static constexpr size_t kMostParameters = 20;
  static constexpr int kNone = -1;
  /// The value of each parameter in a call: the argument, or the default.
  using Values = std::array<PyObject*, kMostParameters>;

  struct Parameter {
    pybind11::object name;
    pybind11::object fallback;  // its default
    // The last text, and its conversion.
    pybind11::object text;
    c10::IValue value;
  };

  /// A quantization, its interpretation, and those of its arguments that have been converted. A
  /// call holds a reference, since the conversions run Python code, in which another thread may
  /// call this function.
  struct Quantized {
    pybind11::object given, meant;
    Feature kind;
    std::array<std::optional<c10::IValue>, static_cast<size_t>(Argument::numbers) + 1> converted;
  };

  /// An argument of an operator, and the parameter from which it is converted.
  struct Source {
    Argument argument;
    int parameter;
    const c10::Argument* schema;
  };

  /// An operator that a call can select.
  struct Choice {
    const Operator* op;
    const c10::OperatorHandle* handle;
    std::vector<Source> sources;
    uint32_t used = 0;  // bit mask of parameters
  };

  /// The parameters that do not simply become an argument of the same name.
  std::array<std::pair<const char*, int*>, 11> places();
  void add(const Variant& variant);

  bool parse(const Given& given, Values& values) const;
  bool is_default(int parameter, const Values& values) const;
  /// Also interprets the quantization, if there is one.
  const Choice* choose(const Values& values, std::shared_ptr<Quantized>& quantized);
  /// Selects the operator and pushes its arguments on the stack. Returns null if the twin must make
  /// the call.
  const Choice* fill(torch::jit::Stack& stack, const Values& values);

  /// The epilogue and the quantization of a call, in the form that operators take. Null members: no
  /// epilogue, no numbers, or no quantization.
  struct Mapped {
    PyObject* expression = nullptr;
    PyObject* extras = nullptr;
    PyObject* numbers = nullptr;
    pybind11::object owned;  // keeps them alive, if the values of the call do not
    std::shared_ptr<Quantized> quantized;
  };
  Mapped map(const Values& values) const;
  pybind11::object traced_text(const Values& values) const;

  // Each pushes one argument, or returns false if the value is not plain.
  bool push(torch::jit::Stack& stack, const Source& source, PyObject* value, const Mapped& mapped);
  bool push_text(torch::jit::Stack& stack, const Source& source, PyObject* text);
  bool push_group(torch::jit::Stack& stack, const Source& source, PyObject* group);
  static bool push_quantization(torch::jit::Stack& stack, const Source& source,
                                Quantized& quantized);
  bool push_outputs(torch::jit::Stack& stack, const Operator& op, const Values& values) const;

  std::shared_ptr<Quantized> interpreted(PyObject* quantization);
  PyObject* post(const Choice& choice, torch::jit::Stack& stack, const Values& values) const;
  PyObject* returned(const Operator& op, torch::jit::Stack& results, const Values& values) const;

  const pybind11::object name_;
  const size_t positional_;
  const pybind11::object declaration_;
  const pybind11::object twin_;
  const pybind11::object known_, distributed_;
  const pybind11::object group_arguments_, reduce_op_argument_, epilogue_arguments_, traced_texts_,
      quantization_of_;
  const pybind11::object world_, default_group_;  // names of attributes
  std::vector<Parameter> parameters_;
  int input_ = kNone, epilogue_ = kNone, extras_ = kNone, index_ = kNone, device_splits_ = kNone,
      output_splits_ = kNone, residual_ = kNone, quantization_ = kNone, keep_norm_ = kNone,
      out_ = kNone, async_op_ = kNone;
  Features selects_ = 0;  // features that choose between operators, except out=
  std::array<std::unique_ptr<Choice>, kAllFeatures + 1> choices_;
  std::shared_ptr<Quantized> quantized_;  // of the last call that had one
};

}  // namespace collx
