// The operator that returns when all ranks have called it.
#pragma once

#include <string_view>

namespace collx {

void barrier(std::string_view group_name);

}  // namespace collx
