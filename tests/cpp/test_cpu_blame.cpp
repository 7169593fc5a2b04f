// Tests which rank is named if a rank is missing that some ranks wait for directly, and others
// indirectly.
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "cpu/failure.h"
#include "cpu/session.h"
#include "cpu_ranks.h"
#include "machine.h"

namespace collx::cpu {
namespace {

constexpr uint64_t kPatient = kPatientNs;  // a timeout that never expires

/// Maps each rank to the rank that it waits for. Ranks without an entry never call.
using Waits = std::map<int, int>;

class Chain {
 public:
  Chain(int world, Waits waits) : ranks_(world), waits_(std::move(waits)) {}

  Ranks& ranks() { return ranks_; }
  bool failed(int rank) { return poisoned(ranks_.view(rank)); }

  /// Makes one call on every rank with an entry. `before(rank)` runs within the call, before its
  /// wait.
  template <typename TimeoutOf, typename Before>
  void run(TimeoutOf timeout_of, Before before) {
    ranks_.run([&](int rank) {
      if (waits_.count(rank) == 0) return;
      CpuView view = ranks_.view(rank);
      view.timeout_ns = timeout_of(rank);
      Call call{};
      Session session(view, call);
      ASSERT_TRUE(session.enter());
      ++within_;
      before(rank);
      const Use use = session.next_use(Area::end_barrier);
      EXPECT_FALSE(session.await_from(waits_.at(rank), use, Word::arrived, Phase::arrival));
    });
  }

  /// Waits until all calling ranks are within their calls.
  void meet() const {
    while (within_ < int(waits_.size())) std::this_thread::yield();
  }
  void until_failed(int rank) {
    while (!failed(rank)) std::this_thread::yield();
  }

  void expect_named(int end) {
    for (const auto& [rank, peer] : waits_) expect_named_at(rank, end);
  }
  void expect_named_at(int rank, int end) {
    const HostStatus& status = ranks_.status(rank);
    ASSERT_TRUE(is_recorded(status)) << rank;
    EXPECT_EQ(status.by_host.record.failure, Failure::timeout) << rank;
    EXPECT_EQ(status.by_host.record.peer, end) << "named by rank " << rank;
    EXPECT_EQ(waits_.at(status.by_host.record.rank), end) << "named by rank " << rank;
  }

 private:
  Ranks ranks_;
  Waits waits_;
  std::atomic<int> within_ = 0;
};

const std::pair<int, Waits> kChains[] = {
    {3, {{0, 1}, {1, 2}}},                          // two hops
    {4, {{2, 0}, {0, 3}, {3, 1}}},                  // three
    {5, {{0, 4}, {1, 0}, {2, 0}, {3, 2}}},          // a tree
    {6, {{0, 1}, {1, 2}, {2, 3}, {3, 4}, {4, 5}}},  // five hops
};

/// Returns the rank at the end of all chains of waits.
int end_of(const Waits& waits) {
  int rank = waits.begin()->first;
  while (waits.count(rank) != 0) rank = waits.at(rank);
  return rank;
}

// This holds whichever timeout expires first, even if the others started to wait long before.
TEST(CpuBlame, ends_at_the_missing_rank_whoever_is_the_first_to_lose_patience) {
  for (const auto& [world, waits] : kChains) {
    for (const auto& [impatient, peer] : waits) {
      Chain chain(world, waits);
      const uint64_t timeout = short_timeout_ns();
      chain.run([&](int rank) { return rank == impatient ? timeout : kPatient; },
                [&](int) { chain.meet(); });
      chain.expect_named(end_of(waits));
    }
  }
}

// The others are within their calls, but have not started to wait when the first timeout expires,
// so that the ranks that they will wait for are still unknown.
TEST(CpuBlame, ends_at_the_missing_rank_although_others_only_then_begin_to_wait) {
  for (const auto& [world, waits] : kChains) {
    for (const auto& [impatient, peer] : waits) {
      Chain chain(world, waits);
      const uint64_t timeout = 2 * short_timeout_ns();  // includes the grace of all of them
      chain.run([&](int) { return timeout; },
                [&](int rank) {
                  chain.meet();
                  if (rank != impatient) chain.until_failed(rank);
                });
      chain.expect_named(end_of(waits));
    }
  }
}

// All timeouts expire at about the same time, in any order, and threads arrive at any moment.
TEST(CpuBlame, ends_at_the_missing_rank_when_all_lose_patience_at_once) {
  std::mt19937_64 random(42);
  for (int round = 0; round < 4; ++round) {
    for (const auto& [world, waits] : kChains) {
      Chain chain(world, waits);
      const uint64_t timeout = short_timeout_ns();
      std::vector<std::chrono::nanoseconds> delays;
      for (int r = 0; r < world; ++r) delays.emplace_back(random() % (timeout / 8));
      chain.run([&](int) { return timeout; },
                [&](int rank) {
                  chain.meet();
                  std::this_thread::sleep_for(delays[size_t(rank)] / (round % 2 == 0 ? 1 : 100));
                });
      chain.expect_named(end_of(waits));
    }
  }
}

TEST(CpuBlame, falls_on_a_rank_that_stands_still_within_its_call) {
  Chain chain(4, {{0, 1}, {1, 2}, {2, 0}});
  const uint64_t timeout = short_timeout_ns();
  std::atomic<int> recorded = 0;
  std::thread released([&] {
    for (const int rank : {0, 1}) {
      while (!is_recorded(chain.ranks().status(rank))) std::this_thread::yield();
      ++recorded;
    }
  });
  chain.run([&](int) { return timeout; },
            [&](int rank) {
              chain.meet();
              while (rank == 2 && recorded < 2) std::this_thread::yield();
            });
  released.join();
  chain.expect_named_at(0, 2);
  chain.expect_named_at(1, 2);
}

TEST(CpuBlame, of_ranks_that_wait_for_each_other_falls_on_one_of_them_alike) {
  Chain chain(3, {{0, 1}, {1, 2}, {2, 1}});
  const uint64_t timeout = short_timeout_ns();
  chain.run([&](int rank) { return rank == 0 ? timeout : kPatient; }, [&](int) { chain.meet(); });
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(chain.ranks().record(rank).rank, 0);
    EXPECT_EQ(chain.ranks().record(rank).peer, 1);
  }
}

// Rank 0 waits for rank 1, which has failed for another reason.
TEST(CpuBlame, falls_on_what_else_has_failed) {
  Chain chain(3, {{0, 1}});
  const uint64_t timeout = 2 * short_timeout_ns();
  control_of(chain.ranks().region(1), chain.ranks().layout()).busy = 1;
  std::thread other([&] {
    chain.until_failed(1);
    StatusRecord mismatch;
    mismatch.failure = Failure::mismatch;
    mismatch.rank = 1;
    mismatch.peer = 2;
    report(chain.ranks().view(1), mismatch);
  });
  chain.run([&](int) { return timeout; }, [](int) {});
  other.join();
  for (const int rank : {0, 1}) {
    EXPECT_EQ(chain.ranks().record(rank).failure, Failure::mismatch);
    EXPECT_EQ(chain.ranks().record(rank).rank, 1);
  }
}

TEST(CpuBlame, is_learnt_by_who_comes_late) {
  Chain chain(3, {{0, 1}, {1, 2}});
  const uint64_t timeout = short_timeout_ns();
  chain.run([&](int) { return timeout; }, [&](int) { chain.meet(); });
  Call call{};
  EXPECT_FALSE(Session(chain.ranks().view(2), call).enter());
  EXPECT_EQ(chain.ranks().record(2).rank, 1);
  EXPECT_EQ(chain.ranks().record(2).peer, 2);
  chain.expect_named(2);
}

// Of two threads of one rank, the second one must not return without a recorded cause.
TEST(CpuBlame, is_there_when_a_second_thread_returns) {
  Chain chain(2, {{0, 1}});
  std::thread second([&] {
    chain.until_failed(0);
    adopt(chain.ranks().view(0));
    EXPECT_TRUE(is_recorded(chain.ranks().status(0)));
  });
  const uint64_t timeout = short_timeout_ns();
  chain.run([&](int) { return timeout; }, [](int) {});
  second.join();
  chain.expect_named(1);
}

}  // namespace
}  // namespace collx::cpu
