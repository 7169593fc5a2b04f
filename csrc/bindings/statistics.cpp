#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "bindings.h"

namespace collx {

namespace py = pybind11;

namespace {

/// The calls that are still in the log, oldest first.
py::list recent_calls(Communicator& self) {
  const uint64_t counted = self.calls();  // does not count a call in progress
  py::list calls;
  for (uint64_t number = counted - std::min(counted, CallLog::kKept); number <= counted; ++number) {
    const std::optional<LoggedCall> logged = self.log().find(number);
    if (!logged) continue;
    py::dict call = call_dict(logged->call);
    call["number"] = number;
    call["function"] = logged->op;
    call["input_bytes"] = logged->input_bytes;
    call["created_ns"] = logged->created_ns;
    calls.append(call);
  }
  return calls;
}

py::dict tallies(Communicator& self) {
  py::dict by_op;
  for (const CallLog::Tally& tally : self.log().tallies()) {
    by_op[tally.op] = py::make_tuple(tally.calls, tally.bytes);
  }
  return by_op;
}

/// For each rank: {completed calls, whether the next call is in progress}.
std::vector<std::pair<uint64_t, bool>> progress(Communicator& self) {
  std::vector<std::pair<uint64_t, bool>> of;
  for (const Progress& found : self.progress()) of.emplace_back(found.completed, found.in_call);
  return of;
}

}  // namespace

void bind_statistics(py::class_<Communicator, std::shared_ptr<Communicator>>& communicator) {
  // progress() queries the device, and both wait for destroy(), which may need the GIL.
  communicator.def("recent_calls", &recent_calls)
      .def("tallies", &tallies)
      .def("progress", &progress, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("calls", &Communicator::calls)
      .def("waited", &Communicator::waited, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("has_captured", &Communicator::has_captured);
}

}  // namespace collx
