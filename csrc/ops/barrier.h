// The barrier operator, which returns after all ranks have called it.
#pragma once

#include "operator_table.h"

namespace collx {

Results barrier(const Operator& op, const Arguments& arguments);

}  // namespace collx
