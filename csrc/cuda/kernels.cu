#include <set>
#include <stdexcept>

#include "../protocol/algorithms.h"
#include "../protocol/norm.h"
#include "kernels.h"

namespace collx::cuda {
namespace {

using Visit = std::function<void(Kernel)>;

/// Visits each kernel once: several dtypes may share an instance.
class Once {
 public:
  Once(int world, bool simulated, const Visit& visit)
      : world_(world), simulated_(simulated), visit_(visit) {}

  void operator()(const KernelFamily& family) {
    for (int i = 0; i < static_cast<int>(DType::count); ++i) {
      const auto dtype = static_cast<DType>(i);
      if (family.dtypes == DTypes::any && i > 0) break;
      if (family.dtypes == DTypes::normalized && !can_normalize(dtype)) continue;
      if (family.dtypes == DTypes::summed && !is_summed(dtype)) continue;
      visit(family.find({dtype, world_, false, simulated_}));
      for (int common = 0; common < static_cast<int>(CommonNorm::count); ++common) {
        visit(family.find({dtype, world_, true, simulated_, static_cast<CommonNorm>(common)}));
      }
    }
  }

 private:
  void visit(Kernel kernel) {
    if (kernel == nullptr)
      throw std::runtime_error(
          "collx: this build does not contain the kernels that simulate multicast");
    if (seen_.insert(kernel).second) visit_(kernel);
  }

  const int world_;
  const bool simulated_;
  const Visit& visit_;
  std::set<Kernel> seen_;
};

}  // namespace

void for_each_norm_kernel(int world, bool simulated, const Visit& visit) {
  Once once(world, simulated, visit);
  for (const KernelFamily& family : kernels::kAll) {
    if (family.dtypes == DTypes::normalized) once(family);
  }
}

void for_each_kernel(int world, bool simulated, const Visit& visit) {
  Once once(world, simulated, visit);
  for (const KernelFamily& family : kernels::kAll) once(family);
}

}  // namespace collx::cuda
