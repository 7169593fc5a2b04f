#include "../distributed/backend.h"

#include <c10/util/Exception.h>
#include <pybind11/stl/filesystem.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "../ops/communicator.h"
#include "bindings.h"

namespace collx {

namespace py = pybind11;

namespace {

using distributed::Backend;
using distributed::BackendOptions;
using Words = SymmetricPool::Source::Words;

/// Checks that an option is absent or at least `least`.
std::optional<int64_t> checked(const char* argument, std::optional<int64_t> value,
                               int64_t least = 1) {
  TORCH_CHECK_VALUE(!value || *value >= least, "collx.backend.Options: ", argument, ": got ",
                    *value, "; accepted: ", least, " or more, or None");
  return value;
}

/// A Python object with the methods of Maker.
class PythonMaker final : public distributed::Maker {
 public:
  explicit PythonMaker(py::object maker) : maker_(std::move(maker)) {}
  ~PythonMaker() override {
    if (Py_IsInitialized() == 0) {
      (void)maker_.release();  // the interpreter has ended
      return;
    }
    const py::gil_scoped_acquire held;
    maker_ = py::object();
  }

  std::shared_ptr<Communicator> make(c10::Device device) override {
    const py::gil_scoped_acquire held;
    const py::object made = maker_.attr("make")(py::cast(device));
    return made.is_none() ? nullptr : made.cast<std::shared_ptr<Communicator>>();
  }
  void set_timeout(std::chrono::milliseconds timeout) override {
    const py::gil_scoped_acquire held;
    maker_.attr("set_timeout")(std::chrono::duration<double>(timeout).count());
  }
  std::optional<Words> words(c10::Device device, uint64_t bytes) override {
    const py::gil_scoped_acquire held;
    const py::object made = maker_.attr("words")(py::cast(device), bytes);
    if (made.is_none()) return std::nullopt;
    auto [own, mapped, most] = made.cast<std::tuple<at::Tensor, std::vector<uint64_t>, uint64_t>>();
    return Words{std::move(own), std::move(mapped), most};
  }
  at::Tensor segment(c10::Device device, uint64_t bytes) override {
    const py::gil_scoped_acquire held;
    const py::object made = maker_.attr("segment")(py::cast(device), bytes);
    return made.is_none() ? at::Tensor() : made.cast<at::Tensor>();
  }
  void leave() override {
    const py::gil_scoped_acquire held;
    maker_.attr("leave")();
  }
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<BackendOptions>& options) override {
    const py::gil_scoped_acquire held;
    const py::object made = maker_.attr("split")(store, ranks, options);
    return made.is_none() ? nullptr : made.cast<c10::intrusive_ptr<c10d::Backend>>();
  }

 private:
  py::object maker_;
};

}  // namespace

void bind_backend(py::module_& module) {
  // This module registers the base classes.
  py::module_::import("torch._C._distributed_c10d");
  py::class_<BackendOptions, c10d::Backend::Options, c10::intrusive_ptr<BackendOptions>>(
      module, "BackendOptions")
      .def(py::init([](std::optional<int64_t> max_blocks, std::optional<int64_t> payload_bytes,
                       bool deterministic, std::optional<bool> check, bool watchdog,
                       std::optional<int64_t> symmetric_bytes,
                       const std::optional<std::filesystem::path>& tuning, bool overlap) {
             auto options = c10::make_intrusive<BackendOptions>();
             options->max_blocks = checked("max_blocks", max_blocks);
             options->payload_bytes = checked("payload_bytes", payload_bytes);
             options->deterministic = deterministic;
             options->check = check;
             options->watchdog = watchdog;
             options->symmetric_bytes = checked("symmetric_bytes", symmetric_bytes, 0);
             if (tuning) options->tuning = tuning->string();
             options->overlap = overlap;
             return options;
           }),
           py::kw_only(), py::arg("max_blocks") = std::nullopt,
           py::arg("payload_bytes") = std::nullopt, py::arg("deterministic") = true,
           py::arg("check") = std::nullopt, py::arg("watchdog") = false,
           py::arg("symmetric_bytes") = std::nullopt, py::arg("tuning") = std::nullopt,
           py::arg("overlap") = false)
      .def_property(
          "max_blocks", [](const BackendOptions& self) { return self.max_blocks; },
          [](BackendOptions& self, std::optional<int64_t> value) {
            self.max_blocks = checked("max_blocks", value);
          })
      .def_property(
          "payload_bytes", [](const BackendOptions& self) { return self.payload_bytes; },
          [](BackendOptions& self, std::optional<int64_t> value) {
            self.payload_bytes = checked("payload_bytes", value);
          })
      .def_readwrite("deterministic", &BackendOptions::deterministic)
      .def_readwrite("check", &BackendOptions::check)
      .def_readwrite("watchdog", &BackendOptions::watchdog)
      .def_readwrite("tuning", &BackendOptions::tuning)
      .def_readwrite("overlap", &BackendOptions::overlap)
      .def_property(
          "symmetric_bytes", [](const BackendOptions& self) { return self.symmetric_bytes; },
          [](BackendOptions& self, std::optional<int64_t> value) {
            self.symmetric_bytes = checked("symmetric_bytes", value, 0);
          })
      .def("__copy__",
           [](const BackendOptions& self) { return c10::make_intrusive<BackendOptions>(self); })
      .def(
          "__deepcopy__",
          [](const BackendOptions& self, const py::dict&) {
            return c10::make_intrusive<BackendOptions>(self);
          },
          py::arg("memo"));
  py::class_<Backend, c10d::Backend, c10::intrusive_ptr<Backend>>(module, "Backend")
      .def(py::init([](int rank, int size, c10::intrusive_ptr<BackendOptions> options,
                       c10::intrusive_ptr<c10d::ProcessGroup> inner, py::object maker) {
             return c10::make_intrusive<Backend>(rank, size, std::move(options), std::move(inner),
                                                 std::make_unique<PythonMaker>(std::move(maker)));
           }),
           py::arg("rank"), py::arg("size"), py::arg("options"), py::arg("inner"), py::arg("maker"))
      .def("get_error", &Backend::getError)
      // PyTorch calls it on the ranks that are not members of a new group, if the default group has
      // a `device_id`. Nothing is split off a communicator.
      .def(
          "perform_nocolor_split", [](Backend&, const py::object& /*device*/) {}, py::arg("device"))
      .def_property_readonly("options", &Backend::getBackendOptions);
}

}  // namespace collx
