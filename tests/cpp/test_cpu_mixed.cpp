// Tests all collectives on one set of regions, in any order and with late ranks: no slot is
// overwritten before it is read, and all ranks count the uses correctly.
#include <gtest/gtest.h>

#include <chrono>

#include "exchange_forms.h"
#include "exchange_runner.h"

namespace collx::cpu {
namespace {

using namespace std::chrono_literals;

std::vector<Form> all_forms() {
  std::vector<Form> forms = tensor_forms();
  forms.push_back({Collective::barrier, Algorithm::automatic, false});
  return forms;
}

std::vector<Case> random_cases(uint64_t seed, int world, int count, uint64_t most_bytes) {
  std::mt19937_64 random(seed);
  const std::vector<Form> forms = all_forms();
  std::vector<Case> cases;
  for (int i = 0; i < count; ++i) {
    cases.push_back(random_case(random, forms[random() % forms.size()], world, most_bytes));
  }
  return cases;
}

/// Sometimes delays a random rank.
CaseRunner::Delay random_delay(uint64_t seed, int world) {
  return [=](int rank, size_t index) {
    std::mt19937_64 random(seed * 1000003 + index);
    if (random() % 4 != 0 || int(random() % uint64_t(world)) != rank) return;
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
  };
}

class CpuMixed : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, CpuMixed, testing::ValuesIn(worlds()));

TEST_P(CpuMixed, random_calls_of_all_collectives_share_one_communicator) {
  const uint64_t seed = 4000 + uint64_t(GetParam());
  SCOPED_TRACE("seed " + std::to_string(seed));
  Ranks ranks(GetParam(), smallest_cpu_region(GetParam()));
  const std::vector<Case> cases = random_cases(seed, GetParam(), 1500, 3 << 10);
  CaseRunner(ranks, cases).run(random_delay(seed, GetParam()));
}

TEST_P(CpuMixed, random_calls_in_larger_regions) {
  if (large_calls_are_slow(GetParam())) GTEST_SKIP() << "takes minutes here";
  const uint64_t seed = 5000 + uint64_t(GetParam());
  SCOPED_TRACE("seed " + std::to_string(seed));
  Ranks ranks(GetParam(), smallest_cpu_region(GetParam()) + (256 << 10));
  const std::vector<Case> cases = random_cases(seed, GetParam(), 300, 200 << 10);
  CaseRunner(ranks, cases).run(random_delay(seed, GetParam()));
}

TEST_P(CpuMixed, random_calls_in_checked_mode) {
  const uint64_t seed = 6000 + uint64_t(GetParam());
  SCOPED_TRACE("seed " + std::to_string(seed));
  Ranks ranks(GetParam(), smallest_cpu_region(GetParam()), kPatientNs, true);
  const std::vector<Case> cases = random_cases(seed, GetParam(), 500, 2 << 10);
  CaseRunner(ranks, cases).run(random_delay(seed, GetParam()));
}

Case bytes_of(const Form& form, int world, uint64_t bytes, int root) {
  return case_of(form, world, {1, bytes / 4, 4}, DType::float32, uint64_t(root));
}

TEST_P(CpuMixed, one_way_calls_in_a_row_and_between_two_way_ones) {
  const Form broadcast{Collective::broadcast, Algorithm::onestage, false};
  const Form gather{Collective::gather, Algorithm::staged, false};
  const Form allreduce{Collective::allreduce, Algorithm::oneshot_pull, false};
  const Form twoshot{Collective::allreduce, Algorithm::twoshot_pull, false};
  const Form twostage{Collective::broadcast, Algorithm::twostage, false};
  const std::vector<std::vector<Form>> sequences = {
      {broadcast, broadcast, broadcast}, {allreduce, broadcast, allreduce},
      {twoshot, broadcast, twoshot},     {twoshot, twostage, broadcast, twoshot},
      {gather, gather, broadcast},       {gather, allreduce, twostage},
  };
  Ranks ranks(GetParam(), smallest_cpu_region(GetParam()));
  std::vector<Case> cases;
  for (int round = 0; round < 12; ++round) {
    for (const auto& sequence : sequences) {
      for (const Form& form : sequence) {
        cases.push_back(bytes_of(form, GetParam(), 200, round % GetParam()));
      }
    }
  }
  // One rank is always the last.
  for (int slow = 0; slow < GetParam(); ++slow) {
    CaseRunner(ranks, cases).run([&](int rank, size_t) {
      if (rank == slow) std::this_thread::sleep_for(20us);
    });
  }
}

TEST_P(CpuMixed, epochs_wrap_around_unnoticed) {
  const uint64_t seed = 7000 + uint64_t(GetParam());
  SCOPED_TRACE("seed " + std::to_string(seed));
  Ranks ranks(GetParam(), smallest_cpu_region(GetParam()));
  ranks.start_epochs_at(0xFFFFFF00);
  std::vector<Case> cases;
  for (int i = 0; i < 300; ++i) {  // enough calls of each form to exceed the wrap-around
    for (const Form& form : all_forms()) {
      const DType dtype = kDTypes[size_t(i) % std::size(kDTypes)].dtype;
      const Geometry shape{1, 1 + uint64_t(i) % 40, uint64_t(dtype_size(dtype))};
      cases.push_back(case_of(form, GetParam(), shape, dtype, uint64_t(i)));
    }
  }
  CaseRunner(ranks, cases).run();
  if (GetParam() == 1) return;  // no peers, no epochs
  for (size_t c = 0; c < kAreas; ++c) {
    EXPECT_LT(control_of(ranks.region(0), ranks.layout()).epochs[c], 0x80000000u) << c;
  }
  EXPECT_LT(ranks.view(0).header(0)->check_epoch, 0x80000000u);
}

}  // namespace
}  // namespace collx::cpu
