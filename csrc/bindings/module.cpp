// The extension module collx._C, which links to the library of operators. python/collx/_C.pyi
// documents its interface.
//
// It uses the pybind11 in torch/include, which shares types and exceptions with PyTorch's own
// modules.
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#if COLLX_CUDA
#include <cuda.h>
#endif
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "../memory/boot_id.h"
#include "../memory/cpu_allocator.h"
#include "../memory/interpreter_lock.h"
#include "../ops/communicator.h"
#include "../ops/epilogue.h"
#include "../ops/errors.h"
#include "../ops/explain.h"
#include "../ops/kernel_cache.h"
#include "../ops/region.h"
#include "../ops/registry.h"
#include "../ops/run_time_compiler.h"
#include "../ops/tuning.h"
#include "../protocol/names.h"
#include "../protocol/partition.h"
#include "bindings.h"

namespace py = pybind11;

namespace {

using collx::Communicator;
using collx::CommunicatorOptions;
using NoGil = py::call_guard<py::gil_scoped_release>;

constexpr std::array<std::string_view, 3> kPdlNames = {"off", "end", "early"};

collx::PdlLevel parse_pdl(std::string_view name) {
  const auto level = collx::find_name<collx::PdlLevel>(kPdlNames, name);
  TORCH_CHECK_VALUE(level.has_value(), "collx: pdl: got \"", name, "\"; accepted: off, end, early");
  return *level;
}

std::string_view pdl_name(collx::PdlLevel level) { return kPdlNames[static_cast<size_t>(level)]; }

std::shared_ptr<Communicator> make_communicator(
    std::string name, std::string group_name, c10::Device device, int rank, int world_size,
    std::vector<uint64_t> regions, uint64_t payload_bytes, int64_t timeout_ms,
    const std::string& pdl, bool check, const collx::Offer& agreed, int spare_blocks,
    uint64_t multicast, std::string multicast_unavailable_reason, bool simulated,
    bool deterministic, c10::intrusive_ptr<c10d::ProcessGroup> fallback_group, bool watchdog,
    bool overlap, const std::vector<collx::NamedTuningEntry>& tuning,
    std::vector<int64_t> global_ranks) {
  return Communicator::create(CommunicatorOptions{std::move(name),
                                                  std::move(group_name),
                                                  device,
                                                  rank,
                                                  world_size,
                                                  std::move(regions),
                                                  payload_bytes,
                                                  timeout_ms,
                                                  parse_pdl(pdl),
                                                  check,
                                                  agreed.at("blocks"),
                                                  spare_blocks,
                                                  collx::capabilities_of(agreed),
                                                  multicast,
                                                  std::move(multicast_unavailable_reason),
                                                  simulated,
                                                  deterministic,
                                                  overlap,
                                                  watchdog,
                                                  collx::make_tuning_table(tuning),
                                                  std::move(global_ranks),
                                                  std::move(fallback_group)});
}

/// Poisons the communicator here and at the peers: `rank` timed out waiting for `peer` to vote (-1:
/// unknown).
void report_absent(Communicator& self, int rank, int peer) {
  collx::StatusRecord record = self.begin_record(collx::Failure::timeout, collx::Phase::none);
  record.rank = rank;
  record.peer = peer;
  self.report(record);
}

void register_tensor(Communicator& self, const at::Tensor& tensor,
                     const std::vector<uint64_t>& pointers, uint64_t nbytes, uint64_t key,
                     uint64_t multicast) {
  TORCH_CHECK_VALUE(pointers.size() == static_cast<size_t>(self.options().world_size),
                    "collx.register: pointers: got ", pointers.size(), " for ",
                    self.options().world_size, " ranks");
  const auto held = self.lock();
  self.symmetric().add(tensor, pointers, multicast, nbytes, key, self.options().rank);
}

py::dict explain(const Communicator& self, std::string_view op, uint64_t numel, uint64_t cols,
                 at::ScalarType dtype, bool input_symmetric, bool output_symmetric,
                 std::string_view algorithm, int64_t max_blocks, std::string_view rounding,
                 std::string_view scale_mode, int64_t quant_group_size, bool keep_norm) {
  const collx::Explanation e =
      collx::explain(self, op, numel, cols, dtype, input_symmetric, output_symmetric, algorithm,
                     max_blocks, {rounding, scale_mode, quant_group_size, keep_norm});
  py::dict d;
  d["algorithm"] = collx::name_of(e.plan.named);
  d["executed_by"] = collx::name_of(e.plan.algorithm);
  d["blocks"] = e.plan.blocks;
  d["threads"] = e.plan.threads;
  d["chunks"] = e.chunks;
  d["bytes"] = e.bytes;
  d["workspace_bytes"] = e.workspace_bytes;
  d["tuned"] =
      e.entry == nullptr ? py::none() : py::object(py::make_tuple(e.entry->from, e.entry->to));
  return d;
}

/// The algorithm names that an operator accepts, except "auto". `multicast`: include those that
/// require multicast.
std::vector<std::string_view> algorithms(std::string_view op, bool multicast) {
  const auto collective = collx::find_name<collx::Collective>(collx::kCollectiveNames, op);
  TORCH_CHECK_VALUE(collective.has_value(), "collx.algorithms: op: got \"", op, "\"");
  return collx::names_where(collx::kAlgorithms, [&](const collx::AlgorithmRow& row) {
    return row.algorithm != collx::Algorithm::automatic && (multicast || !row.multicast) &&
           collx::has_algorithm(*collective, row.algorithm);
  });
}

py::tuple part_of(uint64_t numel, int world_size, int rank) {
  TORCH_CHECK_VALUE(world_size >= 1 && rank >= 0 && rank < world_size,
                    "collx.part_of: got world_size ", world_size, " and rank ", rank,
                    "; accepted: 1 or more, and a rank below it");
  const collx::Part part = collx::partition(numel, world_size, rank);
  return py::make_tuple(part.start, part.count);
}

py::dict region_layout(const std::string& device_type, int world_size, uint64_t payload_bytes) {
  py::dict d;
  for (const auto& [name, bytes] : collx::region_parts(device_type, world_size, payload_bytes)) {
    d[py::str(name)] = bytes;
  }
  return d;
}

#define COLLX_WORDS(...) #__VA_ARGS__
#define COLLX_TEXT(...) COLLX_WORDS(__VA_ARGS__)

/// (PyTorch, CUDA, architectures); the last two are None in a build without CUDA.
py::tuple built_for() {
#if COLLX_CUDA
  const std::string cuda =
      std::to_string(CUDA_VERSION / 1000) + "." + std::to_string(CUDA_VERSION % 1000 / 10);
  return py::make_tuple(TORCH_VERSION, cuda, COLLX_TEXT(COLLX_ARCHITECTURES));
#else
  return py::make_tuple(TORCH_VERSION, py::none(), py::none());
#endif
}

/// The Python functions that create and look up communicators. Never destroyed: C++ may call them
/// until the process ends.
struct InPython {
  py::object make, look_up;
};
InPython& in_python() {
  static auto* const functions = new InPython;
  return *functions;
}

template <py::object InPython::*kFunction, typename... Arguments>
std::shared_ptr<Communicator> call_python(const std::string& group_name, Arguments... arguments) {
  TORCH_CHECK(Py_IsInitialized() != 0, "collx: a communicator for process group \"", group_name,
              "\" cannot be created, since the Python interpreter has ended");
  const py::gil_scoped_acquire held;
  return (in_python().*kFunction)(group_name, arguments...)
      .template cast<std::shared_ptr<Communicator>>();
}

/// Functions with which symmetric memory releases Python's lock while it waits for a peer.
constexpr collx::memory::InterpreterLock kPythonLock = {
    []() -> void* {
      return Py_IsInitialized() != 0 && PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr;
    },
    [](void* state) noexcept {
      try {
        PyEval_RestoreThread(static_cast<PyThreadState*>(state));
      } catch (...) {
        // The interpreter is exiting. Before Python 3.14, it unwinds threads that then try to take
        // the lock, which destructors do not survive. Sleep until the process ends, as Python 3.14
        // does.
        for (;;) ::pause();
      }
    }};

/// collx::GettingReady for a `with` statement.
struct ReadyContext {
  std::optional<collx::GettingReady> entered;
};

void bind_epilogues(py::module_& m) {
  py::class_<ReadyContext>(m, "GettingReady")
      .def(py::init<>())
      .def("__enter__", [](ReadyContext& c) { c.entered.emplace(); })
      .def(
          "__exit__",
          [](ReadyContext& c, const py::object&, const py::object&, const py::object&) {
            c.entered.reset();
          },
          py::arg("kind"), py::arg("value"), py::arg("traceback"));
  m.def("made_kernels", [] {
    const collx::MadeKernels made = collx::made_kernels();
    return py::make_tuple(made.compiled, made.found);
  });
  m.def(
      "read_kernel",
      [](const std::string& folder, const std::string& name) {
        std::string code;
        {
          const py::gil_scoped_release others_run;
          code = collx::kernel_cache::read(folder, name);
        }
        return py::bytes(code);
      },
      py::arg("folder"), py::arg("name"));
  m.def("keep_kernel", &collx::kernel_cache::keep, py::arg("folder"), py::arg("name"),
        py::arg("code"), py::arg("most_bytes") = collx::kernel_cache::kMostBytes,
        py::call_guard<py::gil_scoped_release>());
  m.def(
      "epilogue_program",
      [](std::string_view expression, at::ScalarType dtype, std::string_view kernel,
         bool has_simple, int world, bool simple, bool has_worlds, bool rows, bool multicast,
         bool simulated, bool layer, bool groups, bool steps,
         const std::optional<std::vector<int32_t>>& whole, bool keeps) {
        const collx::KernelTemplate of{kernel, has_simple, has_worlds, rows, multicast};
        collx::EpilogueForm form{whole.has_value(), keeps};
        for (size_t x = 0; whole && x < std::min(whole->size(), std::size(form.extra)); ++x) {
          const int32_t dims = whole->at(x);
          form.extra[x] =
              collx::known_form(dims > 0 ? collx::Lies::vectors : collx::Lies::same, dims);
        }
        return collx::program_of(expression, dtype,
                                 {of, world, simple, simulated, {layer, groups, steps}, form});
      },
      py::arg("expression"), py::arg("dtype"), py::arg("kernel"), py::arg("has_simple"),
      py::arg("world"), py::arg("simple"), py::arg("has_worlds") = true, py::arg("rows") = false,
      py::arg("multicast") = false, py::arg("simulated") = false, py::arg("layer") = false,
      py::arg("groups") = false, py::arg("steps") = false, py::arg("whole") = std::nullopt,
      py::arg("keeps") = false);
}

void bind_communicator(py::module_& m) {
  py::class_<Communicator, std::shared_ptr<Communicator>> communicator(m, "Communicator");
  collx::bind_statistics(communicator);
  communicator
      .def(py::init(&make_communicator), py::kw_only(), py::arg("name"), py::arg("group_name"),
           py::arg("device"), py::arg("rank"), py::arg("world_size"), py::arg("regions"),
           py::arg("payload_bytes"), py::arg("timeout_ms"), py::arg("pdl"), py::arg("check"),
           py::arg("agreed"), py::arg("spare_blocks") = 0, py::arg("multicast") = 0,
           py::arg("multicast_unavailable_reason") = "it was not requested",
           py::arg("simulated") = false, py::arg("deterministic") = true,
           py::arg("fallback_group") = py::none(), py::arg("watchdog") = false,
           py::arg("overlap") = false, py::arg("tuning") = std::vector<collx::NamedTuningEntry>(),
           py::arg("global_ranks") = std::vector<int64_t>())
      .def_property_readonly("name", [](const Communicator& c) { return c.options().name; })
      .def_property_readonly("group_name",
                             [](const Communicator& c) { return c.options().group_name; })
      .def_property_readonly("global_ranks",
                             [](const Communicator& c) { return c.options().global_ranks; })
      .def_property_readonly("rank", [](const Communicator& c) { return c.options().rank; })
      .def_property_readonly("world_size",
                             [](const Communicator& c) { return c.options().world_size; })
      .def_property_readonly("blocks", [](const Communicator& c) { return c.options().blocks; })
      .def_property(
          "pdl", [](const Communicator& c) { return pdl_name(c.pdl()); },
          [](Communicator& c, const std::string& level) { c.set_pdl(parse_pdl(level)); })
      .def("set_timeout", &Communicator::set_timeout, py::arg("milliseconds"), NoGil())
      .def_property("deterministic", &Communicator::deterministic, &Communicator::set_deterministic)
      .def_property_readonly("poisoned",
                             [](const Communicator& c) { return c.failure().has_value(); })
      .def_property_readonly("destroyed", &Communicator::destroyed)
      .def(
          "refuse_if_forked",
          [](const Communicator& c, const std::string& op) { c.refuse_if_forked(op.c_str()); },
          py::arg("op"))
      .def(
          "check", [](Communicator& c, bool wait) { c.check("raise_if_failed", {}, wait); },
          py::arg("wait") = true, NoGil())
      .def("status",
           [](const Communicator& c) -> std::optional<py::dict> {
             const auto record = c.failure();
             return record ? std::optional(collx::record_dict(*record)) : std::nullopt;
           })
      // Runs without the GIL, since a call of another thread may hold the communicator's lock while
      // it waits.
      .def("register", &register_tensor, py::arg("tensor"), py::arg("pointers"), py::arg("nbytes"),
           py::arg("key"), py::arg("multicast") = 0, NoGil())
      .def("explain", &explain, py::arg("op"), py::arg("numel"), py::arg("cols"), py::arg("dtype"),
           py::arg("input_symmetric"), py::arg("output_symmetric"), py::arg("algorithm"),
           py::arg("max_blocks"), py::arg("rounding"), py::arg("scale_mode"),
           py::arg("quant_group_size"), py::arg("keep_norm"))
      .def_property_readonly("multicast_unavailable_reason",
                             &Communicator::multicast_unavailable_reason)
      .def("report_absent", &report_absent, py::arg("rank"), py::arg("peer"), NoGil())
      .def("abort_posted", &Communicator::abort_posted, NoGil())
      .def("tune", &Communicator::tune, py::arg("blocks"), py::arg("threads"), NoGil())
      .def("destroy", &Communicator::destroy, NoGil());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "collx: operators (torch.ops.collx) and communicators.";
  m.attr("built_for") = built_for();
  m.attr("version") = COLLX_TEXT(COLLX_VERSION);
  collx::bind_errors(m);
  bind_communicator(m);
  bind_epilogues(m);
  m.def("register_cpu_allocator", [] { collx::memory::register_cpu_allocator(kPythonLock); });
  m.def("boot_id", &collx::memory::boot_id);
  m.def("region_layout", &region_layout, py::arg("device_type"), py::arg("world_size"),
        py::arg("payload_bytes"));
  m.def("initialize_region", &collx::initialize_region, py::arg("ptr"), py::arg("device"),
        py::arg("world_size"), py::arg("payload_bytes"), NoGil());
  m.def("load_kernels", &collx::load_kernels, py::arg("device"), py::arg("world_size"),
        py::arg("clusters") = true, py::arg("simulated") = false, NoGil());
  m.def("held_at_once", &collx::held_at_once, py::arg("wanted"), py::arg("regions"),
        py::arg("device"), py::arg("rank"), py::arg("number"), py::arg("limit_ms"),
        py::arg("timeout_ms"), NoGil());
  m.def(
      "workspace_bytes",
      [](std::string_view op, uint64_t numel, uint64_t cols, at::ScalarType dtype, int world_size,
         std::string_view algorithm, bool symmetric) {
        return collx::workspace_bytes(op, numel, cols, dtype, world_size, algorithm, symmetric);
      },
      py::arg("op"), py::arg("numel"), py::arg("cols"), py::arg("dtype"), py::arg("world_size"),
      py::arg("algorithm"), py::arg("symmetric"));
  m.def("algorithms", &algorithms, py::arg("op"), py::arg("multicast") = false);
  m.def("tunable_operators", &collx::tunable_operators);
  m.def("tunable_algorithms", &collx::tunable_algorithms, py::arg("op"), py::arg("device_type"),
        py::arg("symmetric"), py::arg("deterministic"));
  m.def(
      "make_by",
      [](py::function function) {
        in_python().make = std::move(function);
        collx::registry::make_by(call_python<&InPython::make>);
      },
      py::arg("function"));
  m.def(
      "look_up_by",
      [](py::function function) {
        in_python().look_up = std::move(function);
        collx::registry::look_up_by(call_python<&InPython::look_up, std::optional<c10::Device>>);
      },
      py::arg("function"));
  m.def("lookup", &collx::registry::find, py::arg("name"));
  collx::bind_functions(m);
  collx::bind_handle(m);
  collx::bind_backend(m);
  m.def("part_of", &part_of, py::arg("numel"), py::arg("world_size"), py::arg("rank"));
}
