// Tests that a call that cannot succeed ends on every rank in time, with a report of the cause.
#include <gtest/gtest.h>
#include <pthread.h>

#include <csignal>
#include <numeric>

#include "cpu/failure.h"
#include "cpu_ranks.h"
#include "machine.h"

namespace collx::cpu {
namespace {

using namespace std::chrono_literals;

constexpr uint64_t kNumel = 5000;  // large enough to be read in place when symmetric

struct Tensors {
  explicit Tensors(int world, uint64_t numel = kNumel)
      : inputs(size_t(world), std::vector<float>(numel, 1.0f)),
        outputs(size_t(world), std::vector<float>(numel, -1.0f)) {}

  AllreduceCall call(int rank, Algorithm algorithm, bool symmetric = false) {
    const size_t r = size_t(rank);
    AllreduceCall call = make_call(inputs[r].data(), outputs[r].data(), inputs[r].size(),
                                   DType::float32, ReduceOp::sum, algorithm, symmetric);
    for (size_t p = 0; symmetric && p < inputs.size(); ++p) {
      call.peer_input[p] = inputs[p].data();
      call.peer_output[p] = outputs[p].data();
    }
    return call;
  }

  std::vector<std::vector<float>> inputs;
  std::vector<std::vector<float>> outputs;
};

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
  Ranks ranks(3, kDefaultPayloadBytes, uint64_t(timeout.count()), p.check);
  Tensors tensors(3);
  const auto call = [&](int rank) {
    return allreduce(ranks.view(rank), tensors.call(rank, p.algorithm, p.symmetric));
  };
  ranks.run([&](int rank) { EXPECT_TRUE(call(rank)); });
  const Stopwatch watch;
  ranks.run([&](int rank) {
    if (rank == 2) return;
    EXPECT_FALSE(call(rank));
  });
  EXPECT_GE(watch.elapsed(), timeout);
  EXPECT_TRUE(watch.within(timeout + 1s));
  EXPECT_FALSE(call(2)) << "a late rank is refused";

  for (int rank = 0; rank < 3; ++rank) {
    const HostStatus& status = ranks.status(rank);
    ASSERT_TRUE(is_recorded(status)) << rank;
    EXPECT_EQ(status.by_host.record.failure, Failure::timeout);
    EXPECT_EQ(status.by_host.record.phase, p.phase);
    EXPECT_NE(status.by_host.record.rank, 2);
    EXPECT_EQ(status.by_host.record.peer, 2);
    EXPECT_EQ(status.by_host.record.sequence, 1u);
    EXPECT_EQ(status.by_host.record.own.algorithm, p.algorithm);
    EXPECT_EQ(status.by_host.record.own.numel, kNumel);
    // Descriptors alternate between two mailboxes: the awaited one was last written two calls ago.
    const bool mailbox = p.phase == Phase::check || p.phase == Phase::start_barrier;
    EXPECT_EQ(uint32_t(status.by_host.record.expected - status.by_host.record.seen),
              mailbox ? 2u : 1u);
  }
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
  bool results[2] = {true, true};
  // The call may end before the signal arrives, on a busy machine also by the timeout.
  for (int attempt = 0; attempt < 20 && !(was_paused && !results[0]); ++attempt) {
    Ranks ranks(2, kDefaultPayloadBytes, short_timeout_ns());
    Tensors tensors(2, kLarge);
    was_paused = may_continue = false;
    std::atomic<bool> ended{false};
    std::thread paused([&] {
      results[1] = allreduce(ranks.view(1), tensors.call(1, GetParam(), true));
      ended = true;
    });
    std::thread other([&] {
      results[0] = allreduce(ranks.view(0), tensors.call(0, GetParam(), true));
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
    EXPECT_FALSE(allreduce(view, tensors.call(rank, Algorithm::twoshot_pull)));
    EXPECT_EQ(view.status->by_host.record.rank, 0);
    EXPECT_EQ(view.status->by_host.record.peer, 3);
  });
  EXPECT_TRUE(watch.within(std::chrono::nanoseconds(timeout) + 1s));
}

TEST(CpuFailure, a_poisoned_communicator_refuses_at_once_and_keeps_the_first_report) {
  const std::chrono::nanoseconds timeout(short_timeout_ns());
  Ranks ranks(2, kDefaultPayloadBytes, uint64_t(timeout.count()));
  Tensors tensors(2);
  EXPECT_FALSE(allreduce(ranks.view(0), tensors.call(0, Algorithm::oneshot_push)));
  const Stopwatch watch;
  for (int i = 0; i < 100; ++i) {
    EXPECT_FALSE(allreduce(ranks.view(0), tensors.call(0, Algorithm::pull_push, true)));
  }
  EXPECT_TRUE(watch.within(timeout));
  EXPECT_EQ(ranks.record(0).own.algorithm, Algorithm::oneshot_push);
}

TEST(CpuFailure, checked_mode_names_both_sides_on_every_rank_and_touches_nothing) {
  Ranks ranks(4, kDefaultPayloadBytes, kPatientNs, true);
  Tensors tensors(4);
  for (int i = 0; i < 3; ++i) {
    ranks.run([&](int rank) {
      EXPECT_TRUE(allreduce(ranks.view(rank), tensors.call(rank, Algorithm::oneshot_pull)));
    });
  }
  for (auto& output : tensors.outputs) std::fill(output.begin(), output.end(), -1.0f);
  ranks.run([&](int rank) {
    AllreduceCall call = tensors.call(rank, Algorithm::oneshot_pull);
    if (rank == 2) call.numel = call.descriptor.numel = 7;
    EXPECT_FALSE(allreduce(ranks.view(rank), call));
  });
  for (int rank = 0; rank < 4; ++rank) {
    const StatusRecord& record = ranks.record(rank);
    EXPECT_EQ(record.failure, Failure::mismatch);
    EXPECT_EQ(record.phase, Phase::check);
    EXPECT_TRUE(record.rank == 2 || record.peer == 2);
    EXPECT_EQ(record.own.numel, record.rank == 2 ? 7u : kNumel);
    EXPECT_EQ(record.other.numel, record.peer == 2 ? 7u : kNumel);
    EXPECT_EQ(record.sequence, 3u);
    for (const float value : tensors.outputs[size_t(rank)]) ASSERT_EQ(value, -1.0f);
  }
}

TEST(CpuFailure, checked_mode_looks_at_empty_calls_too) {
  Ranks ranks(2, kDefaultPayloadBytes, kPatientNs, true);
  Tensors tensors(2);
  ranks.run([&](int rank) {
    AllreduceCall call = tensors.call(rank, Algorithm::oneshot_pull);
    if (rank == 0) call.numel = call.descriptor.numel = 0;
    EXPECT_FALSE(allreduce(ranks.view(rank), call));
    EXPECT_EQ(ranks.record(rank).failure, Failure::mismatch);
  });
}

TEST(CpuFailure, symmetric_offsets_that_differ_are_named_without_checked_mode) {
  Ranks ranks(2);
  Tensors tensors(2);
  ranks.run([&](int rank) {
    AllreduceCall call = tensors.call(rank, Algorithm::pull_push, true);
    call.descriptor.input_offset = rank == 0 ? 0 : 64;
    EXPECT_FALSE(allreduce(ranks.view(rank), call));
    EXPECT_EQ(ranks.record(rank).failure, Failure::mismatch);
    EXPECT_EQ(ranks.record(rank).phase, Phase::start_barrier);
  });
}

// Hazard 1: two threads in one communicator at once.
TEST(CpuFailure, overlapping_calls_of_one_rank_are_refused_by_name) {
  Ranks ranks(2);
  Tensors tensors(2);
  std::thread first(
      [&] { EXPECT_FALSE(allreduce(ranks.view(0), tensors.call(0, Algorithm::twoshot_push))); });
  while (control_of(ranks.region(0), ranks.layout()).busy.load() == 0) std::this_thread::yield();
  EXPECT_FALSE(allreduce(ranks.view(0), tensors.call(0, Algorithm::oneshot_push)));
  first.join();
  EXPECT_FALSE(allreduce(ranks.view(1), tensors.call(1, Algorithm::oneshot_push)));
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
      EXPECT_TRUE(allreduce(ranks.view(rank), tensors.call(rank, Algorithm::twoshot_push)));
    });
  }
}

TEST(CpuFailure, a_refused_argument_leaves_the_communicator_usable) {
  Ranks ranks(2);
  Tensors tensors(2);
  ranks.run([&](int rank) {
    AllreduceCall call = tensors.call(rank, Algorithm::oneshot_push);
    call.dtype = DType::int32;
    call.reduce_op = ReduceOp::avg;
    EXPECT_THROW(allreduce(ranks.view(rank), call), std::invalid_argument);
    call = tensors.call(rank, Algorithm::fallback);
    EXPECT_THROW(allreduce(ranks.view(rank), call), std::invalid_argument);
    EXPECT_TRUE(allreduce(ranks.view(rank), tensors.call(rank, Algorithm::oneshot_push)));
  });
  EXPECT_EQ(tensors.outputs[1][0], 2.0f);
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
    EXPECT_FALSE(allreduce(ranks.view(rank), tensors.call(rank, Algorithm::oneshot_push)));
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
