#include "functions.h"

#include <array>
#include <memory>
#include <string>
#include <utility>

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

template <size_t I>
PyObject* enter(PyObject*, PyObject* const* values, Py_ssize_t count, PyObject* names) {
  try {
    return built_ins()[I].function->call({values, count, names});
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (...) {
    py::detail::try_translate_exceptions();
  }
  return nullptr;
}

using Entry = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);
constexpr auto kEntries = []<size_t... I>(std::index_sequence<I...>) {
  return std::array<Entry, kMostFunctions>{enter<I>...};
}
(std::make_index_sequence<kMostFunctions>());

py::object built_in(const std::string& name, const std::string& module, const std::string& doc,
                    const py::tuple& names, const py::tuple& defaults, size_t positional,
                    const py::object& declaration, const py::object& twin,
                    const py::object& conversions) {
  static size_t made = 0;  // guarded by the interpreter's lock
  TORCH_INTERNAL_ASSERT(made < kMostFunctions);
  BuiltIn& one = built_ins()[made];
  one.function =
      std::make_unique<Function>(name, names, defaults, positional, declaration, twin, conversions);
  one.name = name;
  one.doc = doc;
  // Functions with keyword arguments have a type that differs from that of the member.
  one.method = {one.name.c_str(),
                reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(kEntries[made])),
                METH_FASTCALL | METH_KEYWORDS, one.doc.c_str()};
  ++made;
  return py::reinterpret_steal<py::object>(
      PyCFunction_NewEx(&one.method, nullptr, py::str(module).ptr()));
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
  m.def("variants", &variants, py::arg("function"));
}

}  // namespace collx
