#include <set>
#include <stdexcept>
#include <string>

#include "../protocol/names.h"
#include "../protocol/selection.h"
#include "collectives/kernel_table.cuh"
#include "kernels.h"

namespace collx::cuda {
namespace {

/// Of which dtypes a kernel has instances: copies know none.
enum class DTypes : uint8_t { any, all, normalized };

struct KernelRow {
  Algorithm algorithm;
  Collectives serves;
  DTypes dtypes;
  Kernel (*find)(const Instance&);
};

constexpr Collectives kAllreduce = only(Collective::allreduce);
constexpr Collectives kReduce = only(Collective::reduce);
constexpr Collectives kReductions =
    kPairs & collectives_where([](const CollectiveRow& row) { return row.reduces; });
constexpr Collectives kCopies = kPairs & ~kReductions;

constexpr KernelRow kKernels[] = {
    {Algorithm::oneshot_push, kAllreduce, DTypes::all, allreduce_oneshot_push},
    {Algorithm::twoshot_push, kAllreduce, DTypes::all, allreduce_twoshot_push},
    {Algorithm::pull_push, kAllreduce, DTypes::all, allreduce_pull_push},
    {Algorithm::oneshot_pull, kAllreduce, DTypes::all, allreduce_oneshot_pull},
    {Algorithm::twoshot_pull, kAllreduce, DTypes::all, allreduce_twoshot_pull},
    {Algorithm::staged, kReductions, DTypes::all, gather_scatter_staged_reduce},
    {Algorithm::staged, kCopies, DTypes::any, gather_scatter_staged_copy},
    {Algorithm::channels, kReduce, DTypes::all, gather_scatter_channels_reduce},
    {Algorithm::channels, kCopies | kBroadcast, DTypes::any, gather_scatter_channels_copy},
    {Algorithm::direct, kReductions, DTypes::all, reducescatter_direct},
    {Algorithm::direct, kCopies | kBroadcast, DTypes::any, gather_scatter_direct},
    {Algorithm::reduce_twostage, kReduce, DTypes::all, reduce_twostage},
    {Algorithm::pipelined, kBroadcast, DTypes::any, broadcast_pipelined},
    {Algorithm::twostage, kBroadcast, DTypes::any, broadcast_twostage},
    {Algorithm::oneshot_push, kNorms | kScatteringNorms, DTypes::normalized, norm_oneshot_push},
    {Algorithm::twoshot_push, kNorms, DTypes::normalized, norm_twoshot_push},
    {Algorithm::twoshot_push_sums, kNorms, DTypes::normalized, norm_twoshot_push_sums},
    {Algorithm::oneshot_pull, kNorms, DTypes::normalized, norm_oneshot_pull},
    {Algorithm::twoshot_pull, kNorms, DTypes::normalized, norm_twoshot_pull},
};

constexpr const KernelRow* find_row(Collective c, Algorithm a) {
  for (const KernelRow& row : kKernels) {
    if (row.algorithm == a && (row.serves & only(c)) != 0) return &row;
  }
  return nullptr;
}

static_assert(is_complete(DeviceKind::cuda, kWithTensors & ~kScatteringNorms,
                          [](Collective c, Algorithm a) { return find_row(c, a) != nullptr; }));
// plan_norm() pushes to every rank what these collectives ask for.
static_assert(is_complete(DeviceKind::cuda, kScatteringNorms, [](Collective c, Algorithm) {
  return find_row(c, Algorithm::oneshot_push) != nullptr;
}));

bool is_normalized(DType dtype) {
  return dtype == DType::float32 || dtype == DType::float16 || dtype == DType::bfloat16;
}

using Visit = std::function<void(Kernel)>;

/// Visits each kernel once: many are the instances of several dtypes or worlds.
class Once {
 public:
  explicit Once(const Visit& visit) : visit_(visit) {}
  void operator()(Kernel kernel) {
    if (seen_.insert(kernel).second) visit_(kernel);
  }

 private:
  const Visit& visit_;
  std::set<Kernel> seen_;
};

void visit_instances(const KernelRow& row, Once& visit) {
  for (int i = 0; i < static_cast<int>(DType::count); ++i) {
    const auto dtype = static_cast<DType>(i);
    if (row.dtypes == DTypes::any && i > 0) break;
    if (row.dtypes == DTypes::normalized && !is_normalized(dtype)) continue;
    for (const int world : kCompiledWorlds) {
      for (const bool simple : {false, true}) visit(row.find({dtype, world, simple}));
    }
  }
}

constexpr KernelRow kLocal = {Algorithm::fallback, kNorms, DTypes::normalized, norm_local};
constexpr KernelRow kOthers[] = {
    {Algorithm::channels, kCopies, DTypes::any, alltoallv_device_splits},
    {Algorithm::direct, kCopies, DTypes::any, rank_barrier},
};

}  // namespace

Kernel require_kernel(Collective c, Algorithm a, DType dtype, int world, bool simple) {
  const KernelRow* row = find_row(c, a);
  const Kernel kernel = row == nullptr ? nullptr : row->find({dtype, world, simple});
  if (kernel != nullptr) return kernel;
  throw std::runtime_error("collx: " + std::string(name_of(c)) + " of " +
                           std::string(name_of(dtype)) + " has no kernel for algorithm " +
                           std::string(name_of(a)));
}

void for_each_norm_kernel(const Visit& visit) {
  Once once(visit);
  for (const KernelRow& row : kKernels) {
    if (row.dtypes == DTypes::normalized) visit_instances(row, once);
  }
  visit_instances(kLocal, once);
}

void for_each_kernel(const Visit& visit) {
  Once once(visit);
  for (const KernelRow& row : kKernels) visit_instances(row, once);
  for (const KernelRow& row : kOthers) visit_instances(row, once);
  visit_instances(kLocal, once);
}

}  // namespace collx::cuda
