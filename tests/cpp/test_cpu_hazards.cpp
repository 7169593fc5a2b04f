// Tests hazards 3, 4, 11, 14 and 20 at their worst moment: rank 1 is late, and rank 0 goes as far
// ahead as the protocol allows. In the plain build, the same checks must notice each of the mutants
// of cpu/mutants.h, which the builds with a sanitizer do not contain.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <csignal>
#include <ctime>

#include "cpu/mutants.h"
#include "exchange_forms.h"

namespace collx::cpu {
namespace {

struct Scenario {
  const char* name;
  Mutant mutant;
  std::vector<Case> calls;  // on two ranks
  enum { before_call, in_call } late;
  size_t late_at;                      // the call before or in which rank 1 is delayed
  Failure noticed_as = Failure::none;  // none: wrong bits; otherwise, the failure of the calls

  friend std::ostream& operator<<(std::ostream& out, const Scenario& s) { return out << s.name; }
};

// Long enough that a call that is delayed at its first store has not read most of its source.
constexpr uint64_t kBytes = 80 << 10;

Case call_of(const Form& form, uint64_t bytes = kBytes) {
  return case_of(form, 2, {1, bytes / 4, 4}, DType::float32, 0);  // root 0, sum, not in place
}

constexpr Form kPush{Collective::allreduce, Algorithm::oneshot_push, false};
constexpr Form kTwoshot{Collective::allreduce, Algorithm::twoshot_push, false};
constexpr Form kPull{Collective::allreduce, Algorithm::oneshot_pull, false};
constexpr Form kPullInPlace{Collective::allreduce, Algorithm::oneshot_pull, true};
constexpr Form kGather{Collective::allgather, Algorithm::staged, false};
constexpr Form kBroadcast{Collective::broadcast, Algorithm::onestage, false};
constexpr Form kBroadcastFromOutput{Collective::broadcast, Algorithm::onestage, true};
constexpr Form kScatterDirect{Collective::reducescatter, Algorithm::direct, true};

std::vector<Case> times(int count, const Form& form) {
  return std::vector<Case>(size_t(count), call_of(form));
}

std::vector<Scenario> scenarios() {
  using S = Scenario;
  return {
      {"pushes_again", Mutant::epoch_stands_still, times(2, kPush), S::before_call, 1},
      {"pulls_again", Mutant::epoch_stands_still, times(2, kPull), S::before_call, 1},
      {"another_size",
       Mutant::epoch_by_shape,
       {call_of(kPull), call_of(kPull, kBytes + 4)},
       S::before_call,
       1},
      {"a_larger_one",
       Mutant::slots_by_shape,
       {call_of(kBroadcast, kBytes / 4), call_of(kBroadcast)},
       S::in_call,
       0},
      {"input_of_allreduce", Mutant::no_closing_barrier, times(1, kPullInPlace), S::in_call, 0},
      {"input_of_reducescatter", Mutant::no_closing_barrier, times(1, kScatterDirect), S::in_call,
       0},
      {"output_of_broadcast", Mutant::no_closing_barrier, times(1, kBroadcastFromOutput),
       S::in_call, 0},
      {"slot_of_allgather", Mutant::one_slot, times(2, kGather), S::in_call, 0},
      {"slot_of_broadcast", Mutant::one_slot, times(2, kBroadcast), S::in_call, 0},
      {"broadcasts_in_a_row", Mutant::no_claim, times(3, kBroadcast), S::before_call, 0},
      {"one_way_in_a_row", Mutant::only_root_publishes, times(3, kBroadcast), S::before_call, 0,
       Failure::timeout},
      {"pushed", Mutant::arrival_not_awaited, times(1, kPush), S::before_call, 0},
      {"scattered", Mutant::arrival_not_awaited, times(1, kTwoshot), S::before_call, 0},
      {"staged", Mutant::arrival_not_awaited, times(1, kPull), S::before_call, 0},
      {"where_it_lies", Mutant::no_opening_barrier, times(1, kPullInPlace), S::before_call, 0},
  };
}

// The state of the signal handler that delays rank 1 within a call: at its first store to an output
// whose pages are protected.
struct {
  char* page;
  size_t bytes;
  Doorbell* bell;
  std::atomic<bool> ended;  // rank 0 has completed all its calls
  std::atomic<bool> held;
} late;

/// Returns when rank 0 waits for rank 1: it sleeps on rank 1's bell, and continues to sleep
/// although it is woken several times to check.
void until_the_other_waits() {
  constexpr int kLooksInVain = 10;
  for (int looks = 0; looks < kLooksInVain && !late.ended; ++looks) {
    if (late.bell->sleepers.load() == 0) looks = 0;
    ring(*late.bell);
    const timespec pause{0, 2'000'000};
    nanosleep(&pause, nullptr);
  }
}

void hold(int, siginfo_t* info, void*) {
  const char* const at = static_cast<const char*>(info->si_addr);
  if (at < late.page || at >= late.page + late.bytes) {
    std::signal(SIGSEGV, SIG_DFL);  // an error in the test itself
    return;
  }
  late.held = true;
  until_the_other_waits();
  mprotect(late.page, late.bytes, PROT_READ | PROT_WRITE);
}

struct Outcome {
  std::string wrong;  // the places of the first wrong bits
  Failure failure = Failure::none;
};

class LateRun {
 public:
  LateRun(const Scenario& scenario, uint64_t timeout_ns)
      : scenario_(scenario), calls_(scenario.calls), ranks_(2, kDefaultPayloadBytes, timeout_ns) {
    calls_.push_back(call_of({Collective::barrier, Algorithm::automatic, false}));
    for (int r = 0; r < 2; ++r) {
      inputs_[r].assign(kMost, 'i');
      outputs_[r] = static_cast<char*>(
          mmap(nullptr, kMost, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    }
    late.page = outputs_[1];
    late.bytes = kMost;
    late.bell = &control_of(ranks_.region(1), ranks_.layout()).bell;
    late.ended = late.held = false;
  }
  ~LateRun() {
    for (char* const output : outputs_) munmap(output, kMost);
  }
  LateRun(const LateRun&) = delete;
  LateRun& operator=(const LateRun&) = delete;

  Outcome operator()() {
    struct sigaction before, action = {};
    action.sa_sigaction = hold;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, &before);
    ranks_.run([&](int rank) {
      for (size_t i = 0; i < calls_.size() && make(rank, i); ++i) continue;
      if (rank == 0) late.ended = true;
    });
    sigaction(SIGSEGV, &before, nullptr);
    EXPECT_TRUE(late.held) << "rank 1 was never late";
    return {wrong_[0] + wrong_[1], Failure(ranks_.record(0).failure)};
  }

 private:
  static constexpr uint64_t kMost = 256 << 10;

  static Bytes value(int rank, size_t index, uint64_t bytes) {
    Bytes value(bytes);
    std::mt19937 random(unsigned(2 * index) + unsigned(rank));
    for (char& byte : value) byte = char(random());
    return value;
  }

  /// Makes the call, checks its result, and immediately overwrites the tensors.
  bool make(int rank, size_t index) {
    const Case& c = calls_[index];
    const bool is_late = rank == 1 && index == scenario_.late_at;
    if (is_late && scenario_.late == Scenario::before_call) {
      until_the_other_waits();
      late.held = true;
    }
    const Bytes input = value(rank, index, input_bytes(c, 2, rank));
    std::copy(input.begin(), input.end(), inputs_[rank].begin());
    std::memset(outputs_[rank], 'p', kMost);
    if (is_late && scenario_.late == Scenario::in_call) mprotect(late.page, late.bytes, PROT_NONE);
    const Places places{[&](int r) { return inputs_[r].data(); },
                        [&](int r) { return outputs_[r]; }};
    if (!carry_out(ranks_.view(rank), c, places)) return false;
    check(c, rank, index);
    std::fill(inputs_[rank].begin(), inputs_[rank].end(), 'x');
    std::memset(outputs_[rank], 'x', kMost);
    return true;
  }

  void check(const Case& c, int rank, size_t index) {
    Bytes values[2];
    for (int r = 0; r < 2; ++r) values[r] = value(r, index, input_bytes(c, 2, r));
    const Bytes expected = expected_output(c, 2, rank, {values[0].data(), values[1].data()});
    const std::string difference =
        first_difference(outputs_[rank], expected.data(), expected.size() / c.element(), c.dtype);
    if (difference.empty()) return;
    wrong_[rank] += "rank " + std::to_string(rank) + ", call " + std::to_string(index) + ": " +
                    difference + "\n";
  }

  const Scenario& scenario_;
  std::vector<Case> calls_;
  Ranks ranks_;
  Bytes inputs_[2];
  char* outputs_[2];
  std::string wrong_[2];
};

class CpuHazard : public testing::TestWithParam<Scenario> {};
INSTANTIATE_TEST_SUITE_P(Late, CpuHazard, testing::ValuesIn(scenarios()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(CpuHazard, a_late_rank_spoils_nothing) {
  const Outcome outcome = LateRun(GetParam(), kPatientNs)();
  EXPECT_EQ(outcome.wrong, "");
  EXPECT_EQ(outcome.failure, Failure::none);
}

#if defined(COLLX_MUTANTS)

TEST_P(CpuHazard, each_mutant_is_noticed) {
  const Scenario& scenario = GetParam();
  const bool by_bits = scenario.noticed_as == Failure::none;
  active_mutant = scenario.mutant;
  const Outcome outcome = LateRun(scenario, by_bits ? kPatientNs : kPatientNs / 100)();
  active_mutant = Mutant::none;
  EXPECT_EQ(outcome.wrong.empty(), !by_bits) << outcome.wrong;
  EXPECT_EQ(outcome.failure, scenario.noticed_as);
}

TEST(CpuMutants, every_one_has_its_scenario) {
  std::vector<bool> covered(size_t(Mutant::count));
  covered[size_t(Mutant::none)] = true;
  for (const Scenario& scenario : scenarios()) covered[size_t(scenario.mutant)] = true;
  EXPECT_EQ(std::count(covered.begin(), covered.end(), true), int(Mutant::count));
}

#endif

}  // namespace
}  // namespace collx::cpu
