#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>

#include "bindings.h"
#include "function.h"

namespace collx {

namespace py = pybind11;

namespace {

/// A built-in function without a self object, so that it pickles by name. Each has its own C
/// function, through which it finds its state. Like all definitions of a Python module, they are
/// never freed.
struct BuiltIn {
  std::unique_ptr<Function> function;
  std::string name, doc;
  PyMethodDef method;
};
constexpr size_t kMostFunctions = 32;
std::array<BuiltIn, kMostFunctions>& built_ins() {
  static auto* const all = new std::array<BuiltIn, kMostFunctions>;
  return *all;
}

/// The result of `call`, or null after its exception has become one of Python.
template <typename Call>
PyObject* translated(Call call) {
  try {
    return call();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (...) {
    py::detail::try_translate_exceptions();
  }
  return nullptr;
}

template <size_t I>
PyObject* enter(PyObject*, PyObject* const* values, Py_ssize_t count, PyObject* names) {
  return translated([&] { return built_ins()[I].function->call({values, count, names}); });
}

using Entry = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);
constexpr auto kEntries = []<size_t... I>(std::index_sequence<I...>) {
  return std::array<Entry, kMostFunctions>{enter<I>...};
}
(std::make_index_sequence<kMostFunctions>());

py::object define(BuiltIn& one, Entry entry, const std::string& name, const std::string& module,
                  const std::string& doc) {
  one.name = name;
  one.doc = doc;
  // Functions with keyword arguments have a type that differs from that of the member.
  one.method = {one.name.c_str(),
                reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(entry)),
                METH_FASTCALL | METH_KEYWORDS, one.doc.c_str()};
  return py::reinterpret_steal<py::object>(
      PyCFunction_NewEx(&one.method, nullptr, py::str(module).ptr()));
}

py::object built_in(const std::string& name, const std::string& module, const std::string& doc,
                    const py::tuple& names, const py::tuple& defaults, size_t positional,
                    const py::object& declaration, const py::object& twin,
                    const py::object& conversions) {
  static size_t made = 0;  // guarded by the interpreter's lock
  TORCH_INTERNAL_ASSERT(made < kMostFunctions);
  BuiltIn& one = built_ins()[made];
  one.function =
      std::make_unique<Function>(name, names, defaults, positional, declaration, twin, conversions);
  return define(one, kEntries[made++], name, module, doc);
}

/// The function of a Python object. Null if the object is not a built-in function of this module.
Function* function_of(PyObject* object) {
  if (!PyCFunction_CheckExact(object)) return nullptr;
  const PyMethodDef* const method = reinterpret_cast<PyCFunctionObject*>(object)->m_ml;
  const auto found = std::ranges::find(built_ins(), method, [](auto& one) { return &one.method; });
  return found == built_ins().end() ? nullptr : found->function.get();
}

py::handle post_in_python;  // never freed

PyObject* post(PyObject*, PyObject* const* values, Py_ssize_t count, PyObject* names) {
  return translated([&]() -> PyObject* {
    Function* const function = count > 0 ? function_of(values[0]) : nullptr;
    if (function != nullptr) {
      if (PyObject* const handle = function->post({values + 1, count - 1, names})) return handle;
    }
    return Given{values, count, names}.pass_to(post_in_python);
  });
}

/// Creates `collx.post`. The twin makes the calls with arguments that are not plain or not valid.
py::object built_in_post(const std::string& module, const std::string& doc, py::object twin) {
  static auto* const made = new BuiltIn;
  post_in_python = twin.release();
  return define(*made, post, "post", module, doc);
}

/// A list of (features, operator, overload, whether it is a fused normalization).
py::list variants(const std::string& function) {
  py::list list;
  for (const Variant& variant : variants_of(function)) {
    py::list features;
    for (size_t i = 0; i < std::size(kFeatureNames); ++i) {
      if ((variant.features >> i & 1) != 0) features.append(kFeatureNames[i]);
    }
    const Operator& op = *variant.op;
    list.append(
        py::make_tuple(py::tuple(features), op.name + (op.form == Form::in_place ? "_" : ""),
                       op.overload.empty() ? "default" : op.overload, op.family == Family::norm));
  }
  return list;
}

}  // namespace

void bind_functions(py::module_& m) {
  m.def("built_in", &built_in, py::kw_only(), py::arg("name"), py::arg("module"), py::arg("doc"),
        py::arg("names"), py::arg("defaults"), py::arg("positional"), py::arg("declaration"),
        py::arg("twin"), py::arg("conversions"));
  m.def("built_in_post", &built_in_post, py::kw_only(), py::arg("module"), py::arg("doc"),
        py::arg("twin"));
  m.def("variants", &variants, py::arg("function"));
}

}  // namespace collx
