// Creates tuning tables from the names in the Python API.
#pragma once

#include <c10/macros/Export.h>

#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "../protocol/tuning.h"

namespace collx {

/// Operator, dtype ("" for copies), symmetric, first and last number of bytes, algorithm,
/// max_blocks, threads: see TuningEntry.
using NamedTuningEntry =
    std::tuple<std::string, std::string, bool, uint64_t, uint64_t, std::string, int32_t, int32_t>;

/// Raises ValueError for unknown names, numbers out of range, or overlapping ranges. It does not
/// check what depends on the device; suits() does so for each call.
C10_EXPORT TuningTable make_tuning_table(const std::vector<NamedTuningEntry>& entries);

/// The operators for which a table can have entries.
C10_EXPORT std::vector<std::string_view> tunable_operators();

/// The algorithms that an entry of an operator may name. Raises ValueError for an unknown operator.
C10_EXPORT std::vector<std::string_view> tunable_algorithms(std::string_view op,
                                                            std::string_view device_type,
                                                            bool symmetric, bool deterministic);

}  // namespace collx
