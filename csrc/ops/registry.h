// Maps names to communicators. An operator, which only receives tensors and strings, uses it to
// find its communicator.
#pragma once

#include <c10/core/Device.h>
#include <c10/macros/Export.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace collx {

class Communicator;

namespace registry {

/// Raises ValueError if the name is taken.
void enter(const std::shared_ptr<Communicator>& communicator);

/// Removes the entry if it still belongs to this communicator. Never waits for a peer.
void leave(const Communicator& communicator);

/// Returns null if there is none.
C10_EXPORT std::shared_ptr<Communicator> find(std::string_view name);

/// Also finds the communicator of a process group with the backend "collx" by the name of the
/// group. If there is none, the backend creates one on `device`, which is collective over the
/// group. Without a device, returns null.
std::shared_ptr<Communicator> look_up(std::string_view name,
                                      std::optional<c10::Device> device = {});

/// Like look_up(), but raises ValueError, which lists the known names, instead of returning null.
std::shared_ptr<Communicator> require(const char* op, std::string_view name,
                                      std::optional<c10::Device> device = {});

/// Creates the communicator of a process group, given the group's name.
using Factory = std::shared_ptr<Communicator> (*)(const std::string& group_name);

/// Sets how make() creates communicators. collx.init is written in Python, on which this library
/// does not depend, so the Python module sets the factory.
C10_EXPORT void make_by(Factory factory);

/// Sets how look_up() finds or creates the communicator of a process group with the backend
/// "collx". The function returns null for other names.
using Lookup = std::shared_ptr<Communicator> (*)(const std::string& group_name,
                                                 std::optional<c10::Device> device);
C10_EXPORT void look_up_by(Lookup lookup);

/// Creates a communicator for the process group of that name, as collx.init does with its defaults.
/// Collective over the group: either all ranks return one, or all raise the exception of init. The
/// caller may or may not hold Python's lock. Raises RuntimeError in a process that has not imported
/// collx in Python.
C10_EXPORT std::shared_ptr<Communicator> make(const std::string& group_name);

/// The number of live communicators on a CUDA device.
int live_on_device(int device_index);

/// The number of forks between the process that loaded the library and this process.
int fork_generation();

}  // namespace registry
}  // namespace collx
