// Communicators by name: how an operator, which gets nothing but tensors and strings, finds its
// communicator.
#pragma once

#include <c10/macros/Export.h>

#include <memory>
#include <string>
#include <string_view>

namespace collx {

class Communicator;

namespace registry {

/// ValueError when the name is taken.
void enter(const std::shared_ptr<Communicator>& communicator);

/// Takes the entry out, if it is still this communicator's. Never waits for a peer.
void leave(const Communicator& communicator);

/// Null when there is none.
C10_EXPORT std::shared_ptr<Communicator> find(std::string_view name);

/// ValueError that lists the known names when there is none.
std::shared_ptr<Communicator> require(const char* op, std::string_view name);

/// Makes the communicator of a process group, by the group's name.
using Factory = std::shared_ptr<Communicator> (*)(const std::string& group_name);

/// Sets how make() creates communicators. This library does not depend on Python, in which init is
/// written: the Python module says it.
C10_EXPORT void make_by(Factory factory);

/// A new communicator for the process group of that name, as collx.init makes it with its defaults.
/// Collective over the group: all ranks return one, or all raise what init raises. The caller may
/// hold Python's lock or not. RuntimeError in a process that has not imported collx in Python.
C10_EXPORT std::shared_ptr<Communicator> make(const std::string& group_name);

/// Communicators that live on a CUDA device.
int live_on_device(int device_index);

/// How many forks lie between this process and the one that loaded the library.
int fork_generation();

}  // namespace registry
}  // namespace collx
