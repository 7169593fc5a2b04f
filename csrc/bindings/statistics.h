// Statistics of a communicator: its last calls, the number of calls, and the progress of the ranks.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "../ops/communicator.h"

namespace collx {

void bind_statistics(pybind11::class_<Communicator, std::shared_ptr<Communicator>>& communicator);

}  // namespace collx
