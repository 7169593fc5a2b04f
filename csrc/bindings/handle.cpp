#include <pybind11/chrono.h>
#include <pybind11/gil_simple.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <chrono>
#include <optional>
#include <utility>
#include <variant>

#include "../distributed/work.h"
#include "bindings.h"

namespace collx {

namespace py = pybind11;

namespace {

using Seconds = std::chrono::duration<double>;
// The number of seconds comes first, because the caster of durations accepts floats but not
// integers.
using Limit = std::variant<double, Seconds>;

/// Returns the work of a call that writes `output`. `call` is null if no work is left.
c10::intrusive_ptr<c10d::Work> make_work(const std::shared_ptr<PostedCall>& call,
                                         const at::Tensor& output,
                                         std::vector<at::Tensor> tensors) {
  distributed::Work::Made parts{{}, {}, {output}, std::move(tensors), {}, nullptr};
  if (call != nullptr) parts.calls.push_back(call);
  auto made = c10::make_intrusive<distributed::Work>(-1, c10d::OpType::UNKNOWN, 0);
  made->set(std::move(parts));
  return made;
}

class Handle {
 public:
  Handle(const char* function, std::shared_ptr<PostedCall> call, py::object result,
         std::vector<at::Tensor> tensors, std::vector<at::Tensor> results)
      : function_(function),
        call_(std::move(call)),
        result_(std::move(result)),
        tensors_(std::move(tensors)),
        results_(std::move(results)) {}
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  ~Handle() {
    if (waited_ || call_ == nullptr || Py_IsInitialized() == 0) return;
    const py::error_scope kept;
    const std::string words = std::string("collx.") + function_ +
                              ": the handle of a posted call was dropped without wait()";
    if (PyErr_WarnEx(PyExc_ResourceWarning, words.c_str(), 1) != 0) PyErr_WriteUnraisable(nullptr);
  }

  bool is_completed() const { return call_ == nullptr || call_->is_completed(); }

  py::object wait(const std::optional<Limit>& given) {
    std::optional<double> timeout;
    if (given) {
      timeout = std::visit([](auto limit) { return Seconds(limit).count(); }, *given);
    }
    TORCH_CHECK_VALUE(!timeout || *timeout >= 0, "collx.", function_, ": wait: timeout: got ",
                      *timeout, " s; accepted: 0 or more, or None");
    waited_ = true;
    if (call_ != nullptr) {
      const py::gil_scoped_release_simple others_run;
      PostedCall::Timeout limit;
      if (timeout) {
        limit = std::chrono::duration_cast<std::chrono::nanoseconds>(
            Seconds(std::min(*timeout, kLongest)));
      }
      call_->wait(limit, tensors_);
    }
    return result_;
  }

  std::shared_ptr<torch::jit::PythonFutureWrapper> get_future() {
    waited_ = true;  // the owner of the future may wait for it
    c10::intrusive_ptr<c10::ivalue::Future> future;
    {
      const py::gil_scoped_release_simple others_run;
      future = future_of(call_.get(), results_, tensors_);
    }
    return std::make_shared<torch::jit::PythonFutureWrapper>(std::move(future));
  }

  c10::intrusive_ptr<c10d::Work> work(const at::Tensor& output) {
    waited_ = true;  // programs may drop a work without wait(), as DDP.join does
    return make_work(call_, output, tensors_);
  }

  const char* function() const { return function_; }

 private:
  static constexpr double kLongest = 1e9;  // seconds

  const char* const function_;
  const std::shared_ptr<PostedCall> call_;
  const py::object result_;
  const std::vector<at::Tensor> tensors_, results_;
  bool waited_ = false;
};

}  // namespace

py::object make_handle(const char* function, std::shared_ptr<PostedCall> call, py::object result,
                       std::vector<at::Tensor> tensors, std::vector<at::Tensor> results) {
  return py::cast(std::make_unique<Handle>(function, std::move(call), std::move(result),
                                           std::move(tensors), std::move(results)));
}

void bind_handle(py::module_& m) {
  py::class_<Handle> handle(
      m, "Handle",
      "A posted call. Any thread may wait for it, more than once. As a context "
      "manager, it waits at the end of the block, unless the block raises.");
  handle.attr("__module__") = "collx";
  handle
      .def("wait", &Handle::wait, py::arg("timeout") = std::nullopt, R"(
Returns what the synchronous call returns.

On the CPU, `wait` blocks until the call has completed. On a GPU, it orders the current stream after
the call and does not block the host. With `timeout`, in seconds or as a datetime.timedelta, the
host waits in both cases.

Raises:
    CollectiveTimeout, CollectiveMismatch, CollectiveOverlap: the call failed. On a GPU, `wait`
        raises a failure that is already known; the next call, `Communicator.raise_if_failed` or
        `Communicator.synchronize` raises a later one. CollectiveTimeout also means that the call
        has not completed within `timeout`; the call then continues.
    CommunicatorPoisoned: the communicator has been destroyed, or an earlier call failed.
)")
      .def("is_completed", &Handle::is_completed,
           "Whether the call has completed, successfully or not. Does not block.")
      .def("get_future", &Handle::get_future, "A future of the call's results, a list of tensors.")
      .def("__enter__", [](const py::object& self) { return self; })
      .def(
          "__exit__",
          [](Handle& self, const py::object& kind, const py::object&, const py::object&) {
            if (kind.is_none()) self.wait(std::nullopt);
          },
          py::arg("kind"), py::arg("error"), py::arg("traceback"))
      .def("__repr__", [](const Handle& self) {
        return std::string("<collx.Handle of ") + self.function() +
               (self.is_completed() ? ", completed>" : ">");
      });
  // Not a class in Python: c10d only keeps the part of a work that is in C++.
  m.def(
      "work_of",
      [](Handle* given, const at::Tensor& output) {
        return given == nullptr ? make_work(nullptr, output, {}) : given->work(output);
      },
      py::arg("handle").none(true), py::arg("output"));
}

}  // namespace collx
