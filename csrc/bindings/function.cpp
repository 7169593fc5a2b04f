#include "function.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <c10/util/SmallVector.h>
#include <pybind11/gil_simple.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <utility>

#include "../ops/posting.h"
#include "bindings.h"
#include "plain_values.h"

namespace collx {

namespace py = pybind11;

namespace {

py::object interned(const std::string& text) {
  return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(text.c_str()));
}

py::object borrowed(PyObject* object) { return py::reinterpret_borrow<py::object>(object); }

/// Most names in a program are interned, so that equal names are the same object.
bool is_name(PyObject* given, PyObject* name) {
  return given == name || (PyUnicode_GET_LENGTH(given) == PyUnicode_GET_LENGTH(name) &&
                           PyUnicode_Compare(given, name) == 0);
}

/// Whether `function` still has the code and reads the modules that it had when it was traced.
/// `traced`: collx.epilogues.Traced.
bool is_unchanged(PyObject* function, PyObject* traced) {
  if (!PyFunction_Check(function)) return false;
  if (PyFunction_GET_CODE(function) != PyTuple_GET_ITEM(traced, 1)) return false;
  PyObject *name = nullptr, *module = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(PyTuple_GET_ITEM(traced, 2), &position, &name, &module)) {
    PyObject* const found = PyDict_GetItem(PyFunction_GET_GLOBALS(function), name);
    if (found != (module == Py_None ? nullptr : module)) return false;
  }
  return true;
}

std::vector<at::Tensor> tensors_in(const torch::jit::Stack& stack) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : stack) {
    if (value.isTensor()) tensors.push_back(value.toTensor());
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(tensor);
    }
  }
  return tensors;
}

template <typename Values>
PyObject* value_of(int parameter, const Values& values) {
  return parameter < 0 ? Py_None : values[static_cast<size_t>(parameter)];
}

}  // namespace

Function::Function(const std::string& name, const py::tuple& names, const py::tuple& defaults,
                   size_t positional, py::object declaration, py::object twin,
                   const py::object& conversions)
    : name_(interned(name)),
      positional_(positional),
      declaration_(std::move(declaration)),
      twin_(std::move(twin)),
      known_(conversions.attr("known")),
      distributed_(conversions.attr("distributed_c10d")),
      group_arguments_(conversions.attr("group_arguments")),
      reduce_op_argument_(conversions.attr("reduce_op_argument")),
      epilogue_arguments_(conversions.attr("epilogue_arguments")),
      traced_texts_(conversions.attr("traced_texts")),
      quantization_of_(conversions.attr("quantization_of")),
      world_(interned("_world")),
      default_group_(interned("default_pg")) {
  TORCH_INTERNAL_ASSERT(names.size() <= kMostParameters);
  for (size_t i = 0; i < names.size(); ++i) {
    const auto parameter = py::cast<std::string>(names[i]);
    parameters_.push_back({interned(parameter), defaults[i], {}, {}});
    for (const auto& [own_name, place] : places()) {
      if (parameter == own_name) *place = static_cast<int>(i);
    }
  }
  for (const Variant& variant : variants_of(name)) add(variant);
}

std::array<std::pair<const char*, int*>, 11> Function::places() {
  return {{{"input", &input_},
           {"epilogue", &epilogue_},
           {"extras", &extras_},
           {"index", &index_},
           {"device_splits", &device_splits_},
           {"output_splits", &output_splits_},
           {"residual", &residual_},
           {"quantization", &quantization_},
           {"keep_norm", &keep_norm_},
           {"out", &out_},
           {"async_op", &async_op_}}};
}

void Function::add(const Variant& variant) {
  const Operator& op = *variant.op;
  Choice choice{&op, &op.handle(), {}};
  const auto use = [&](int parameter) {
    if (parameter != kNone) choice.used |= 1u << parameter;
  };
  const std::vector<c10::Argument>& schema = op.handle().schema().arguments();
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    const std::string name = parameter_of(op, i);
    const auto found = std::find_if(
        parameters_.begin(), parameters_.end(),
        [&](const Parameter& parameter) { return py::cast<std::string>(parameter.name) == name; });
    TORCH_CHECK_VALUE(found != parameters_.end(), "collx: ", op.full_name(), " needs a parameter ",
                      name);
    choice.sources.push_back(
        {op.arguments[i], static_cast<int>(found - parameters_.begin()), &schema[i]});
    use(choice.sources.back().parameter);
  }
  // fill() and choose() always read these.
  for (const int parameter : {epilogue_, extras_, index_, quantization_, keep_norm_, async_op_}) {
    use(parameter);
  }
  if (op.takes_outputs()) {
    use(out_);
    if (op.family == Family::device_splits) use(output_splits_);
  }
  // The epilogue of a normalization is an argument of the same operator.
  const bool norm = op.family == Family::norm;
  selects_ |= norm ? bit(Feature::residual) : bit(Feature::epilogue) | bit(Feature::device_splits);
  choices_[variant.features] = std::make_unique<Choice>(std::move(choice));
}

PyObject* Function::call(const Given& given) {
  Values values;
  if (!parse(given, values)) {
    PyObject* const accepted = given.pass_to(declaration_);  // Python raises the error
    if (accepted == nullptr) return nullptr;
    Py_DECREF(accepted);
    return given.pass_to(twin_);
  }
  const bool posts = value_of(async_op_, values) == Py_True;
  // Torch function modes do not see a posted call, because it is not a call of an overload.
  const bool by_twin =
      !posts && (at::impl::torch_function_mode_enabled() || !is_default(async_op_, values));
  torch::jit::Stack stack;
  const Choice* const choice = by_twin ? nullptr : fill(stack, values);
  if (choice == nullptr) return given.pass_to(twin_);
  if (posts) return post(*choice, stack, values);
  // Holds a reference to each tensor until the interpreter's lock is taken again. Otherwise the
  // operator would take the lock for each tensor when it releases its arguments.
  c10::SmallVector<c10::IValue, 8> held;
  for (const c10::IValue& value : stack) {
    if (value.isTensor() || value.isList()) held.push_back(value);
  }
  {
    const py::gil_scoped_release_simple others_run;
    choice->handle->callBoxed(stack);
  }
  return returned(*choice->op, stack, values);
}

PyObject* Function::post(const Given& given) {
  Values values;
  if (!parse(given, values) || !is_default(async_op_, values)) return nullptr;
  torch::jit::Stack stack;
  const Choice* const choice = fill(stack, values);
  return choice == nullptr ? nullptr : post(*choice, stack, values);
}

PyObject* Function::post(const Choice& choice, torch::jit::Stack& stack,
                         const Values& values) const {
  std::vector<at::Tensor> tensors = tensors_in(stack);
  // vmap may call the operator several times, and it stacks the results immediately.
  TORCH_CHECK_NOT_IMPLEMENTED(
      std::none_of(tensors.begin(), tensors.end(), at::functorch::isBatchedTensor), "collx.",
      choice.op->name,
      ": an asynchronous call cannot take a batch of torch.func.vmap; accepted: a synchronous "
      "call");
  std::shared_ptr<PostedCall> posted;
  {
    const py::gil_scoped_release_simple others_run;
    Posting posting;
    choice.handle->callBoxed(stack);
    posted = posting.posted();
  }
  const Operator& op = *choice.op;
  std::vector<at::Tensor> results;
  if (op.form == Form::functional) {
    results = tensors_in(stack);
    tensors.insert(tensors.end(), results.begin(), results.end());
  } else if (op.form == Form::in_place) {
    results = {tensors.front()};
  } else {
    results.assign(tensors.end() - static_cast<ptrdiff_t>(op.outputs.size()), tensors.end());
  }
  py::object result = py::reinterpret_steal<py::object>(returned(op, stack, values));
  return make_handle(PyUnicode_AsUTF8(name_.ptr()), std::move(posted), std::move(result),
                     std::move(tensors), std::move(results))
      .release()
      .ptr();
}

bool Function::parse(const Given& given, Values& values) const {
  const auto count = static_cast<size_t>(given.count);
  if (count > positional_) return false;
  std::copy_n(given.values, count, values.begin());
  for (size_t i = count; i < parameters_.size(); ++i) values[i] = parameters_[i].fallback.ptr();
  const Py_ssize_t named = given.names == nullptr ? 0 : PyTuple_GET_SIZE(given.names);
  for (Py_ssize_t n = 0; n < named; ++n) {
    size_t i = count;
    while (i < parameters_.size() &&
           !is_name(PyTuple_GET_ITEM(given.names, n), parameters_[i].name.ptr())) {
      ++i;
    }
    if (i == parameters_.size()) return false;
    values[i] = given.values[given.count + n];
  }
  const auto end = values.begin() + static_cast<ptrdiff_t>(parameters_.size());
  return std::find(values.begin(), end, Py_Ellipsis) == end;
}

bool Function::is_default(int parameter, const Values& values) const {
  const auto i = static_cast<size_t>(parameter);
  return parameter == kNone || values[i] == parameters_[i].fallback.ptr();
}

const Function::Choice* Function::choose(const Values& values,
                                         std::shared_ptr<Quantized>& quantized) {
  Features features = 0;
  const auto add = [&](int parameter, Feature feature) {
    if (value_of(parameter, values) != Py_None) features |= bit(feature);
  };
  add(epilogue_, Feature::epilogue);
  add(device_splits_, Feature::device_splits);
  add(residual_, Feature::residual);
  features &= selects_;
  add(out_, Feature::out);
  if (PyObject* const quantization = value_of(quantization_, values); quantization != Py_None) {
    quantized = interpreted(quantization);
    features |= bit(quantized->kind);
  }
  if (!is_default(keep_norm_, values)) {
    if (value_of(keep_norm_, values) != Py_True) return nullptr;
    features |= bit(Feature::keep_norm);
  }
  return choices_[features].get();
}

std::shared_ptr<Function::Quantized> Function::interpreted(PyObject* quantization) {
  if (quantized_ != nullptr && quantization == quantized_->given.ptr()) return quantized_;
  py::object meant = quantization_of_(borrowed(quantization));
  const bool fp8 = py::cast<std::string>(meant.attr("kind")) == "fp8";
  auto made = std::make_shared<Quantized>(
      Quantized{borrowed(quantization), std::move(meant), fp8 ? Feature::fp8 : Feature::int8, {}});
  quantized_ = made;
  return made;
}

const Function::Choice* Function::fill(torch::jit::Stack& stack, const Values& values) {
  std::shared_ptr<Quantized> quantized;
  const Choice* const choice = choose(values, quantized);
  if (choice == nullptr) return nullptr;
  for (int i = 0; i < static_cast<int>(parameters_.size()); ++i) {
    if ((choice->used & (1u << i)) == 0 && !is_default(i, values)) return nullptr;
  }
  Mapped mapped;
  if (value_of(epilogue_, values) != Py_None) {
    mapped = map(values);
  } else if (!is_default(extras_, values) || !is_default(index_, values)) {
    return nullptr;
  }
  mapped.quantized = std::move(quantized);
  stack.reserve(choice->op->stack_size());
  for (const Source& source : choice->sources) {
    if (!push(stack, source, value_of(source.parameter, values), mapped)) return nullptr;
  }
  return push_outputs(stack, *choice->op, values) ? choice : nullptr;
}

/// The text of an epilogue that Python has already traced, that depends only on its code, and whose
/// extras are all tensors. Null for any other epilogue. This avoids Python's own lookup, which
/// takes a third of the time of a small call.
py::object Function::traced_text(const Values& values) const {
  PyObject* const input = value_of(input_, values);
  PyObject* const extras = value_of(extras_, values);
  if (!THPVariable_CheckExact(input) || !is_default(index_, values)) return {};
  if (!PyTuple_CheckExact(extras) && !PyList_CheckExact(extras)) return {};
  PyObject* const* const items = PySequence_Fast_ITEMS(extras);
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(extras);
  if (!std::all_of(items, items + count, [](PyObject* x) { return THPVariable_CheckExact(x); })) {
    return {};
  }
  const auto dtype_of = [](at::ScalarType type) {
    return borrowed(reinterpret_cast<PyObject*>(torch::getTHPDtype(type)));
  };
  const py::tuple key = py::make_tuple(
      borrowed(value_of(epilogue_, values)),
      py::make_tuple(dtype_of(THPVariable_Unpack(input).scalar_type()), static_cast<int64_t>(count),
                     py::none(), dtype_of(c10::get_default_dtype_as_scalartype())));
  PyObject* const traced = PyDict_GetItem(traced_texts_.ptr(), key.ptr());
  if (traced == nullptr || !is_unchanged(value_of(epilogue_, values), traced)) return {};
  return borrowed(PyTuple_GET_ITEM(traced, 0));
}

Function::Mapped Function::map(const Values& values) const {
  Mapped mapped;
  mapped.owned = traced_text(values);
  if (mapped.owned) {
    mapped.expression = mapped.owned.ptr();
    mapped.extras = value_of(extras_, values);
    return mapped;
  }
  PyObject* const given[] = {name_.ptr(), value_of(epilogue_, values), value_of(input_, values),
                             value_of(extras_, values), value_of(index_, values)};
  mapped.owned = py::reinterpret_steal<py::object>(
      PyObject_Vectorcall(epilogue_arguments_.ptr(), given, std::size(given), nullptr));
  if (!mapped.owned) throw py::error_already_set();
  mapped.expression = PyTuple_GET_ITEM(mapped.owned.ptr(), 0);
  mapped.extras = PyTuple_GET_ITEM(mapped.owned.ptr(), 1);
  PyObject* const numbers = PyTuple_GET_ITEM(mapped.owned.ptr(), 2);
  if (PyList_GET_SIZE(numbers) > 0) mapped.numbers = numbers;
  return mapped;
}

bool Function::push(torch::jit::Stack& stack, const Source& source, PyObject* value,
                    const Mapped& mapped) {
  switch (source.argument) {
    case Argument::group_name:
    case Argument::group_size: return push_group(stack, source, value);
    case Argument::expression:
    case Argument::optional_expression: value = mapped.expression; break;
    case Argument::extras:
    case Argument::optional_extras: value = mapped.extras; break;
    case Argument::numbers: value = mapped.numbers; break;
    case Argument::reduce_op:
      if (PyUnicode_CheckExact(value)) break;
      return push_text(stack, source, reduce_op_argument_(name_, borrowed(value)).ptr());
    default: break;
  }
  if (source.parameter == quantization_) {
    return push_quantization(stack, source, *mapped.quantized);
  }
  const std::optional<c10::IValue>& fallback = source.schema->default_value();
  if (fallback && (value == nullptr ||
                   value == parameters_[static_cast<size_t>(source.parameter)].fallback.ptr())) {
    stack.push_back(*fallback);
    return true;
  }
  if (PyUnicode_CheckExact(value)) return push_text(stack, source, value);
  std::optional<c10::IValue> found = converted(value, *source.schema);
  if (found) stack.push_back(*std::move(found));
  return found.has_value();
}

bool Function::push_text(torch::jit::Stack& stack, const Source& source, PyObject* text) {
  Parameter& parameter = parameters_[static_cast<size_t>(source.parameter)];
  if (text != parameter.text.ptr()) {
    const bool fits = source.schema->real_type()->kind() == c10::TypeKind::StringType;
    std::optional<c10::IValue> found = fits ? converted_text(text) : std::nullopt;
    if (!found) return false;
    parameter.text = borrowed(text);
    parameter.value = *std::move(found);
  }
  stack.push_back(parameter.value);
  return true;
}

/// Pushes the communicator's name or size. If the size is not needed, any name is accepted here:
/// the operator rejects an unknown one.
bool Function::push_group(torch::jit::Stack& stack, const Source& source, PyObject* group) {
  const bool size = source.argument == Argument::group_size;
  if (!size && PyUnicode_CheckExact(group)) return push_text(stack, source, group);
  const py::object chosen =
      group == Py_None ? distributed_.attr(world_).attr(default_group_) : borrowed(group);
  py::object found = borrowed(PyDict_GetItem(known_.ptr(), chosen.ptr()));
  if (!found) found = group_arguments_(name_, borrowed(group), size);
  if (!size) return push_text(stack, source, PyTuple_GET_ITEM(found.ptr(), 0));
  stack.emplace_back(static_cast<int64_t>(PyLong_AsLongLong(PyTuple_GET_ITEM(found.ptr(), 1))));
  return true;
}

/// A quantization is immutable, so each attribute is converted only once.
bool Function::push_quantization(torch::jit::Stack& stack, const Source& source,
                                 Quantized& quantized) {
  std::optional<c10::IValue>& kept = quantized.converted[static_cast<size_t>(source.argument)];
  if (!kept) {
    const py::object value = quantized.meant.attr(source.schema->name().c_str());
    kept = converted(value.ptr(), *source.schema);
  }
  if (kept) stack.push_back(*kept);
  return kept.has_value();
}

bool Function::push_outputs(torch::jit::Stack& stack, const Operator& op,
                            const Values& values) const {
  if (!op.takes_outputs()) return true;
  PyObject* const out = value_of(out_, values);
  const std::array both = {out, value_of(output_splits_, values)};
  PyObject* const* outs = both.data();
  size_t count = op.family == Family::device_splits ? 2 : 1;
  if (op.family == Family::norm && (PyTuple_CheckExact(out) || PyList_CheckExact(out))) {
    outs = PySequence_Fast_ITEMS(out);
    count = static_cast<size_t>(PySequence_Fast_GET_SIZE(out));
  }
  if (count != op.outputs.size()) return false;
  for (size_t i = 0; i < count; ++i) {
    if (!THPVariable_CheckExact(outs[i])) return false;
    stack.emplace_back(THPVariable_Unpack(outs[i]));
  }
  return true;
}

PyObject* Function::returned(const Operator& op, torch::jit::Stack& results,
                             const Values& values) const {
  if (op.form == Form::in_place) return Py_NewRef(value_of(input_, values));
  if (op.takes_outputs()) {
    PyObject* const out = value_of(out_, values);
    if (op.family != Family::device_splits) return Py_NewRef(out);
    return PyTuple_Pack(2, out, value_of(output_splits_, values));
  }
  if (results.empty()) return Py_NewRef(Py_None);
  if (results.size() == 1) return THPVariable_Wrap(std::move(results[0]).toTensor());
  py::tuple tensors(results.size());
  for (size_t i = 0; i < results.size(); ++i) {
    tensors[i] =
        py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(results[i]).toTensor()));
  }
  return tensors.release().ptr();
}

}  // namespace collx
