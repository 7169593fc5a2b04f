// Tests that a call that cannot succeed ends on every rank in time, with a report of the cause.
#include <gtest/gtest.h>
#include <pthread.h>

#include <csignal>

#include "cpu/failure.h"
#include "exchange_forms.h"
#include "machine.h"

namespace collx::cpu {
namespace {

using namespace std::chrono_literals;

constexpr int kWorld = 3;
constexpr uint64_t kNumel = 24 << 10;  // large enough to use symmetric tensors without staging

struct Tensors {
  explicit Tensors(int world = kWorld, uint64_t numel = kNumel)
      : inputs(size_t(world), std::vector<float>(numel, 1.0f)),
        outputs(size_t(world), std::vector<float>(numel, -1.0f)) {}

  bool call(const CpuView& view, const Case& c, const std::function<void(Call&)>& adjust = {}) {
    const Places places{[&](int rank) { return inputs[size_t(rank)].data(); },
                        [&](int rank) { return outputs[size_t(rank)].data(); }};
    return carry_out(view, c, places, adjust);
  }

  bool untouched(int rank) const {
    const std::vector<float>& output = outputs[size_t(rank)];
    return std::all_of(output.begin(), output.end(), [](float value) { return value == -1.0f; });
  }

  std::vector<std::vector<float>> inputs;
  std::vector<std::vector<float>> outputs;
};

Case case_with(const Form& form, int root = 0, uint64_t numel = kNumel) {
  Case c = case_of(form, kWorld, {1, numel, 4}, DType::float32, 0);
  if (has_root(c.collective)) c.root = root;
  if (c.collective == Collective::alltoallv) {
    c.rows.assign(kWorld * kWorld, 100);
    c.row_bytes = 4;
  }
  return c;
}

Case allreduce_with(Algorithm algorithm, bool symmetric = false, uint64_t numel = kNumel) {
  return case_with({Collective::allreduce, algorithm, symmetric}, -1, numel);
}

std::string name_of_form(const testing::TestParamInfo<Form>& info) {
  return std::string(name_of(info.param.collective)) + '_' +
         std::string(name_of(info.param.algorithm)) + (info.param.symmetric ? "_symmetric" : "") +
         (info.param.device_splits ? "_device_splits" : "");
}

class AbsentFrom : public testing::TestWithParam<Form> {};
INSTANTIATE_TEST_SUITE_P(Forms, AbsentFrom, testing::ValuesIn(tensor_forms()), name_of_form);

/// Repeats a call until it fails. In one-way collectives, a rank may not notice a missing rank
/// immediately, but it cannot get far ahead of it.
void call_until_failure(Ranks& ranks, Tensors& tensors, const Case& c, int absent) {
  ranks.run([&](int rank) {
    if (rank == absent) return;
    std::vector<int64_t> sent(kWorld, 100), received(kWorld);
    const auto split = [&](Call& call) {
      if (!c.device_splits) return;
      static_cast<ExchangeCall&>(call).splits = {sent.data(), received.data(), 4, 300, 300};
    };
    int made = 0;
    while (made < 5 && tensors.call(ranks.view(rank), c, split)) ++made;
    EXPECT_LT(made, 4) << "rank " << rank;
  });
}

/// Checks the reports of all ranks that rank 2 is missing.
void expect_2_is_named(const Ranks& ranks, const Case& c,
                       const std::function<void(const StatusRecord&)>& more) {
  for (int rank = 0; rank < kWorld; ++rank) {
    const StatusRecord& record = ranks.record(rank);
    ASSERT_TRUE(is_recorded(ranks.status(rank))) << rank;
    EXPECT_EQ(record.failure, Failure::timeout);
    EXPECT_EQ(record.peer, 2);
    EXPECT_NE(record.rank, 2);
    EXPECT_EQ(record.own.collective, c.collective);
    EXPECT_EQ(record.own.algorithm, c.algorithm);
    more(record);
  }
}

TEST_P(AbsentFrom, a_rank_that_never_comes_is_named_within_the_timeout_and_a_second) {
  for (const bool check : {false, true}) {
    for (const int root : {0, 2}) {
      const Case c = case_with(GetParam(), root);
      if (root != 0 && c.root < 0) continue;  // the same call again
      const uint64_t timeout = short_timeout_ns();
      Ranks ranks(kWorld, kDefaultPayloadBytes, timeout, check);
      Tensors tensors;
      const Stopwatch watch;
      call_until_failure(ranks, tensors, c, 2);
      EXPECT_TRUE(watch.within(std::chrono::nanoseconds(timeout) + 1s));
      EXPECT_FALSE(tensors.call(ranks.view(2), c)) << "a late rank is refused";
      EXPECT_TRUE(tensors.untouched(2));
      expect_2_is_named(ranks, c, [&](const StatusRecord& record) {
        EXPECT_EQ(record.phase == Phase::check, check);
      });
    }
  }
}

struct Absence {
  Algorithm algorithm;
  bool symmetric;
  bool check;
  Phase phase;
};

class AbsentRank : public testing::TestWithParam<Absence> {};
INSTANTIATE_TEST_SUITE_P(
    Phases, AbsentRank,
    testing::Values(Absence{Algorithm::oneshot_push, false, false, Phase::arrival},
                    Absence{Algorithm::twoshot_push, false, false, Phase::arrival},
                    Absence{Algorithm::oneshot_pull, false, false, Phase::stage_barrier},
                    Absence{Algorithm::twoshot_pull, false, false, Phase::stage_barrier},
                    Absence{Algorithm::pull_push, true, false, Phase::start_barrier},
                    Absence{Algorithm::oneshot_pull, true, false, Phase::start_barrier},
                    Absence{Algorithm::twoshot_pull, true, false, Phase::start_barrier},
                    Absence{Algorithm::twoshot_pull, false, true, Phase::check}));

TEST_P(AbsentRank, is_named_everywhere_within_the_timeout_and_a_second) {
  const Absence& p = GetParam();
  const std::chrono::nanoseconds timeout(short_timeout_ns());
  Ranks ranks(kWorld, kDefaultPayloadBytes, uint64_t(timeout.count()), p.check);
  Tensors tensors;
  const Case c = allreduce_with(p.algorithm, p.symmetric);
  ranks.run([&](int rank) { EXPECT_TRUE(tensors.call(ranks.view(rank), c)); });
  const Stopwatch watch;
  ranks.run([&](int rank) {
    if (rank == 2) return;
    EXPECT_FALSE(tensors.call(ranks.view(rank), c));
  });
  EXPECT_GE(watch.elapsed(), timeout);
  EXPECT_TRUE(watch.within(timeout + 1s));
  EXPECT_FALSE(tensors.call(ranks.view(2), c)) << "a late rank is refused";

  expect_2_is_named(ranks, c, [&](const StatusRecord& record) {
    EXPECT_EQ(record.phase, p.phase);
    EXPECT_EQ(record.sequence, 1u);
    EXPECT_EQ(record.own.numel, kNumel);
    // Descriptors alternate between two mailboxes: the awaited one was last written two calls ago.
    const bool mailbox = p.phase == Phase::check || p.phase == Phase::start_barrier;
    EXPECT_EQ(uint32_t(record.expected - record.seen), mailbox ? 2u : 1u);
  });
}

#if !defined(__SANITIZE_THREAD__)  // which delays signals
std::atomic<bool> was_paused, may_continue;

/// One rank is paused in the middle of a call, longer than the timeout. Meanwhile the other rank
/// raises its error and changes its tensors.
class PausedRank : public testing::TestWithParam<Algorithm> {};
INSTANTIATE_TEST_SUITE_P(Algorithms, PausedRank,
                         testing::Values(Algorithm::pull_push, Algorithm::oneshot_pull,
                                         Algorithm::twoshot_pull));

TEST_P(PausedRank, does_not_return_sums_of_changed_tensors) {
  constexpr size_t kLarge = 8 << 20;
  std::signal(SIGUSR1, [](int) {
    was_paused = true;
    while (!may_continue) std::this_thread::sleep_for(1ms);
  });
  const Case c = allreduce_with(GetParam(), true, kLarge);
  bool results[2] = {true, true};
  // The call may end before the signal arrives, on a busy machine also by the timeout.
  for (int attempt = 0; attempt < 20 && !(was_paused && !results[0]); ++attempt) {
    Ranks ranks(2, kDefaultPayloadBytes, short_timeout_ns());
    Tensors tensors(2, kLarge);
    was_paused = may_continue = false;
    std::atomic<bool> ended{false};
    std::thread paused([&] {
      results[1] = tensors.call(ranks.view(1), c);
      ended = true;
    });
    std::thread other([&] {
      results[0] = tensors.call(ranks.view(0), c);
      std::fill(tensors.inputs[0].begin(), tensors.inputs[0].end(), 1000.0f);
      may_continue = true;
    });
    const volatile float& middle = tensors.outputs[1][kLarge / 2];
    while (middle == -1.0f && !ended) std::this_thread::yield();
    pthread_kill(paused.native_handle(), SIGUSR1);
    other.join();
    paused.join();
  }
  EXPECT_TRUE(was_paused);
  EXPECT_FALSE(results[0]);
  EXPECT_FALSE(results[1]);
}
#endif

TEST(CpuFailure, ranks_that_sleep_are_woken_by_the_first_that_gives_up) {
  Ranks ranks(4);
  Tensors tensors(4);
  const uint64_t timeout = short_timeout_ns();
  const Stopwatch watch;
  ranks.run([&](int rank) {
    if (rank == 3) return;
    CpuView view = ranks.view(rank);
    if (rank == 0) view.timeout_ns = timeout;
    EXPECT_FALSE(tensors.call(view, allreduce_with(Algorithm::twoshot_pull)));
    EXPECT_EQ(view.status->by_host.record.rank, 0);
    EXPECT_EQ(view.status->by_host.record.peer, 3);
  });
  EXPECT_TRUE(watch.within(std::chrono::nanoseconds(timeout) + 1s));
}

TEST(CpuFailure, a_poisoned_communicator_refuses_at_once_and_keeps_the_first_report) {
  const std::chrono::nanoseconds timeout(short_timeout_ns());
  Ranks ranks(2, kDefaultPayloadBytes, uint64_t(timeout.count()));
  Tensors tensors(2);
  EXPECT_FALSE(tensors.call(ranks.view(0), allreduce_with(Algorithm::oneshot_push)));
  const Stopwatch watch;
  for (int i = 0; i < 100; ++i) {
    EXPECT_FALSE(tensors.call(ranks.view(0), allreduce_with(Algorithm::pull_push, true)));
  }
  EXPECT_TRUE(watch.within(timeout));
  EXPECT_EQ(ranks.record(0).own.algorithm, Algorithm::oneshot_push);
}

// Rank 0 broadcasts, rank 2 never calls, and the timeout of rank 1 expires first.
TEST(CpuFailure, who_waits_for_a_waiting_rank_names_the_one_that_is_missing) {
  Ranks ranks(kWorld);
  Tensors tensors;
  const Case c = case_with({Collective::broadcast, Algorithm::onestage, false}, 0);
  const uint64_t timeout = short_timeout_ns();
  ranks.run([&](int rank) {
    if (rank == 2) return;
    CpuView view = ranks.view(rank);
    if (rank == 1) view.timeout_ns = timeout;
    while (tensors.call(view, c)) {
    }
    EXPECT_EQ(ranks.record(rank).rank, 0);
    EXPECT_EQ(ranks.record(rank).peer, 2);
    EXPECT_EQ(ranks.record(rank).phase, Phase::release);
  });
}

TEST(CpuFailure, a_rank_that_died_while_it_waited_is_named_itself) {
  Ranks ranks(kWorld, kDefaultPayloadBytes, short_timeout_ns());
  control_of(ranks.region(1), ranks.layout()).busy = 1;  // within its call forever
  Tensors tensors;
  const Case c = case_with({Collective::broadcast, Algorithm::onestage, false}, 1);
  EXPECT_FALSE(tensors.call(ranks.view(0), c));
  EXPECT_EQ(ranks.record(0).peer, 1);
}

TEST(CpuFailure, a_rank_that_misses_a_barrier_is_named) {
  for (const bool check : {false, true}) {
    Ranks ranks(kWorld, kDefaultPayloadBytes, short_timeout_ns(), check);
    CallDescriptor descriptor;
    descriptor.collective = Collective::barrier;
    ranks.run([&](int rank) { EXPECT_TRUE(barrier(ranks.view(rank), descriptor)); });
    ranks.run([&](int rank) {
      if (rank == 1) return;
      EXPECT_FALSE(barrier(ranks.view(rank), descriptor));
    });
    for (int rank = 0; rank < kWorld; rank += 2) {
      EXPECT_EQ(ranks.record(rank).peer, 1);
      EXPECT_EQ(ranks.record(rank).sequence, 1u);
      EXPECT_EQ(ranks.record(rank).own.collective, Collective::barrier);
      EXPECT_EQ(ranks.record(rank).phase, check ? Phase::check : Phase::start_barrier);
    }
  }
}

TEST(CpuFailure, checked_mode_names_both_sides_on_every_rank_and_touches_nothing) {
  const Form broadcast{Collective::broadcast, Algorithm::onestage, false};
  const Form reduce{Collective::reduce, Algorithm::staged, false};
  const std::vector<std::pair<Case, Case>> pairs = {
      {case_with(broadcast, 0), case_with(broadcast, 1)},
      {case_with(broadcast, 1), case_with(reduce, 1)},
      {allreduce_with(Algorithm::oneshot_pull), allreduce_with(Algorithm::oneshot_pull, false, 7)},
  };
  for (const auto& [most, odd] : pairs) {
    Ranks ranks(4, kDefaultPayloadBytes, kPatientNs, true);
    Tensors tensors(4);
    const auto call = [&, &usual = most](int rank) {
      return tensors.call(ranks.view(rank), usual);
    };
    for (int i = 0; i < 3; ++i) ranks.run([&](int rank) { EXPECT_TRUE(call(rank)); });
    for (auto& output : tensors.outputs) std::fill(output.begin(), output.end(), -1.0f);
    ranks.run(
        [&](int rank) { EXPECT_FALSE(tensors.call(ranks.view(rank), rank == 2 ? odd : most)); });
    for (int rank = 0; rank < 4; ++rank) {
      const StatusRecord& record = ranks.record(rank);
      EXPECT_EQ(record.failure, Failure::mismatch);
      EXPECT_EQ(record.phase, Phase::check);
      EXPECT_EQ(record.sequence, 3u);
      EXPECT_TRUE(record.rank == 2 || record.peer == 2);
      for (const bool own : {true, false}) {
        const Case& c = (own ? record.rank : record.peer) == 2 ? odd : most;
        const CallDescriptor& descriptor = own ? record.own : record.other;
        EXPECT_EQ(descriptor.collective, c.collective);
        EXPECT_EQ(descriptor.root, c.root);
        EXPECT_EQ(descriptor.numel, c.shape.units);
      }
      EXPECT_TRUE(tensors.untouched(rank));
    }
  }
}

TEST(CpuFailure, checked_mode_looks_at_empty_calls_too) {
  Ranks ranks(2, kDefaultPayloadBytes, kPatientNs, true);
  Tensors tensors(2);
  ranks.run([&](int rank) {
    const Case c = allreduce_with(Algorithm::oneshot_pull, false, rank == 0 ? 0 : kNumel);
    EXPECT_FALSE(tensors.call(ranks.view(rank), c));
    EXPECT_EQ(ranks.record(rank).failure, Failure::mismatch);
  });
}

TEST(CpuFailure, symmetric_offsets_that_differ_are_named_without_checked_mode) {
  for (const auto offset : {&CallDescriptor::input_offset, &CallDescriptor::output_offset}) {
    for (const Form& form : tensor_forms()) {
      if (!form.symmetric) continue;
      Ranks ranks(kWorld);
      Tensors tensors;
      const Case c = case_with(form);
      ranks.run([&](int rank) {
        const auto move = [&](Call& call) { call.descriptor.*offset = rank == 1 ? 64 : 0; };
        EXPECT_FALSE(tensors.call(ranks.view(rank), c, move)) << describe(c);
        EXPECT_EQ(ranks.record(rank).failure, Failure::mismatch);
        EXPECT_EQ(ranks.record(rank).phase, Phase::start_barrier);
      });
    }
  }
}

// Hazard 1: two threads in one communicator at once.
TEST(CpuFailure, overlapping_calls_of_one_rank_are_refused_by_name) {
  Ranks ranks(2);
  Tensors tensors(2);
  std::thread first(
      [&] { EXPECT_FALSE(tensors.call(ranks.view(0), allreduce_with(Algorithm::twoshot_push))); });
  while (control_of(ranks.region(0), ranks.layout()).busy.load() == 0) std::this_thread::yield();
  EXPECT_FALSE(tensors.call(ranks.view(0), allreduce_with(Algorithm::oneshot_push)));
  first.join();
  EXPECT_FALSE(tensors.call(ranks.view(1), allreduce_with(Algorithm::oneshot_push)));
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(ranks.record(rank).failure, Failure::overlap);
    EXPECT_EQ(ranks.record(rank).rank, 0);
  }
}

TEST(CpuFailure, a_thread_may_follow_another_on_one_communicator) {
  Ranks ranks(2);
  Tensors tensors(2);
  for (int i = 0; i < 20; ++i) {
    ranks.run([&](int rank) {  // new threads each time
      EXPECT_TRUE(tensors.call(ranks.view(rank), allreduce_with(Algorithm::twoshot_push)));
    });
  }
}

TEST(CpuFailure, a_refused_argument_leaves_the_communicator_usable) {
  Ranks ranks(kWorld);
  Tensors tensors;
  std::vector<Case> bad;
  bad.push_back(case_with({Collective::broadcast, Algorithm::channels, false}));
  bad.push_back(case_with({Collective::allgather, Algorithm::onestage, false}));
  bad.push_back(case_with({Collective::alltoallv, Algorithm::pipelined, false}));
  bad.push_back(case_with({Collective::scatter, Algorithm::fallback, false}));
  bad.push_back(allreduce_with(Algorithm::fallback));
  for (const Case& c : {case_with({Collective::reduce, Algorithm::staged, false}),
                        allreduce_with(Algorithm::oneshot_push)}) {
    bad.push_back(c);
    bad.back().dtype = DType::int32;
    bad.back().op = ReduceOp::avg;
  }
  const Case wrong = case_with({Collective::allreduce, Algorithm::staged, false});
  ranks.run([&](int rank) {
    const CpuView view = ranks.view(rank);
    for (const Case& c : bad) EXPECT_THROW(tensors.call(view, c), std::invalid_argument);
    EXPECT_THROW(exchange(view, make_exchange(wrong, kWorld, rank, nullptr, nullptr)),
                 std::invalid_argument);
    EXPECT_TRUE(tensors.call(view, case_with({Collective::allgather, Algorithm::staged, false})));
    EXPECT_TRUE(tensors.call(view, allreduce_with(Algorithm::oneshot_push)));
  });
  EXPECT_EQ(tensors.outputs[1][0], float(kWorld));
}

StatusRecord fallback_record(int rank, int peer) {
  StatusRecord record;
  record.failure = Failure::timeout;
  record.phase = Phase::fallback;
  record.rank = rank;
  record.peer = peer;
  return record;
}

TEST(CpuFailure, a_failure_noticed_outside_reaches_the_peers_and_the_first_stays) {
  Ranks ranks(3);
  Tensors tensors(3);
  report(ranks.view(1), fallback_record(1, 2));
  report(ranks.view(1), fallback_record(1, 0));
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_FALSE(tensors.call(ranks.view(rank), allreduce_with(Algorithm::oneshot_push)));
    EXPECT_EQ(ranks.record(rank).phase, Phase::fallback);
    EXPECT_EQ(ranks.record(rank).peer, 2);
  }
}

TEST(CpuFailure, a_communicator_without_regions_keeps_its_own_report) {
  HostStatus status{};
  CpuView view{};
  view.world = 2;
  view.status = &status;
  report(view, fallback_record(0, 1));
  report(view, fallback_record(0, 2));
  EXPECT_TRUE(is_recorded(status));
  EXPECT_EQ(status.by_host.record.peer, 1);
}

}  // namespace
}  // namespace collx::cpu
