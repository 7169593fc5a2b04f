#include "tuning.h"

#include <c10/util/Exception.h>

#include <optional>

#include "../protocol/names.h"

namespace collx {

namespace {

Collective check_tunable(std::string_view op) {
  const auto found = find_name<Collective>(kCollectiveNames, op).value_or(Collective::none);
  TORCH_CHECK_VALUE(is_tunable(found), "collx: tuning: op: got \"", op, "\"");
  return found;
}

TuningEntry check_entry(const NamedTuningEntry& named) {
  const auto& [op, dtype, symmetric, from, to, algorithm, max_blocks, threads] = named;
  const Collective collective = check_tunable(op);
  const std::optional<DType> found =
      dtype.empty() ? DType::uint8 : find_name<DType>(kDTypeNames, dtype);
  TORCH_CHECK_VALUE(found && dtype.empty() != reduces(collective), "collx: tuning: dtype: got \"",
                    dtype, "\" for ", op);
  const std::optional<Algorithm> chosen = parse_algorithm(algorithm);
  TORCH_CHECK_VALUE(
      chosen && may_be_named(collective, *chosen, DeviceKind::cuda, /*symmetric=*/true,
                             /*deterministic=*/false),
      "collx: tuning: algorithm: got \"", algorithm, "\" for ", op);
  TORCH_CHECK_VALUE(from <= to, "collx: tuning: got ", from, " to ", to, " bytes");
  TORCH_CHECK_VALUE(
      max_blocks >= 0 && max_blocks <= kMaxBlocks && (threads == 0 || is_block_size(threads)),
      "collx: tuning: got ", max_blocks, " blocks of ", threads, " threads; accepted: 0 to ",
      kMaxBlocks, ", of 0 or a multiple of 64 up to ", kFullBlock);
  return {collective, *found, symmetric, from, to, *chosen, max_blocks, threads};
}

}  // namespace

TuningTable make_tuning_table(const std::vector<NamedTuningEntry>& entries) {
  std::vector<TuningEntry> checked;
  checked.reserve(entries.size());
  for (const NamedTuningEntry& entry : entries) checked.push_back(check_entry(entry));
  TuningTable table(std::move(checked));
  TORCH_CHECK_VALUE(table.is_disjoint(), "collx: tuning: two entries have overlapping ranges");
  return table;
}

std::vector<std::string_view> tunable_operators() {
  return names_where(kCollectives,
                     [](const CollectiveRow& row) { return is_tunable(row.collective); });
}

std::vector<std::string_view> tunable_algorithms(std::string_view op, std::string_view device_type,
                                                 bool symmetric, bool deterministic) {
  const Collective collective = check_tunable(op);
  const DeviceKind device = device_type == "cuda" ? DeviceKind::cuda : DeviceKind::cpu;
  return names_where(kAlgorithms, [&](const AlgorithmRow& row) {
    return may_be_named(collective, row.algorithm, device, symmetric, deterministic);
  });
}

}  // namespace collx
