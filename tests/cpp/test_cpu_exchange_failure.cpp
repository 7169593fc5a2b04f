// Tests that a collective that cannot succeed ends on every rank in time, with a report of the
// cause.
#include <gtest/gtest.h>

#include "exchange_forms.h"
#include "machine.h"

namespace collx::cpu {
namespace {

using namespace std::chrono_literals;

constexpr int kWorld = 3;
constexpr uint64_t kBytes = 96 << 10;  // large enough to use symmetric tensors without staging

struct Tensors {
  explicit Tensors(uint64_t bytes = kBytes)
      : inputs(kWorld, Bytes(bytes, 1)), outputs(kWorld, Bytes(bytes, -1)) {}

  ExchangeCall call(const Case& c, int rank) {
    ExchangeCall call =
        make_exchange(c, kWorld, rank, inputs[size_t(rank)].data(), outputs[size_t(rank)].data());
    for (int r = 0; c.symmetric && r < kWorld; ++r) {
      call.peer_input[r] = inputs[size_t(r)].data();
      call.peer_output[r] = outputs[size_t(r)].data();
    }
    return call;
  }

  bool untouched(int rank) const {
    const Bytes& output = outputs[size_t(rank)];
    return std::all_of(output.begin(), output.end(), [](char byte) { return byte == -1; });
  }

  std::vector<Bytes> inputs;
  std::vector<Bytes> outputs;
};

Case case_with(const Form& form, int root) {
  Case c = case_of(form, kWorld, {1, kBytes / 4, 4}, DType::float32, 0);
  if (has_root(c.collective)) c.root = root;
  if (c.collective == Collective::alltoallv) {
    c.rows.assign(kWorld * kWorld, 100);
    c.row_bytes = 4;
  }
  return c;
}

std::string name_of_form(const testing::TestParamInfo<Form>& info) {
  return std::string(name_of(info.param.collective)) + '_' +
         std::string(name_of(info.param.algorithm)) + (info.param.symmetric ? "_symmetric" : "") +
         (info.param.device_splits ? "_device_splits" : "");
}

class AbsentFrom : public testing::TestWithParam<Form> {};
INSTANTIATE_TEST_SUITE_P(Forms, AbsentFrom, testing::ValuesIn(forms_of(kExchanges)), name_of_form);

/// Repeats a call until it fails. In one-way collectives, a rank may not notice a missing rank
/// immediately, but it cannot get far ahead of it.
void call_until_failure(Ranks& ranks, Tensors& tensors, const Case& c, int absent) {
  ranks.run([&](int rank) {
    if (rank == absent) return;
    ExchangeCall call = tensors.call(c, rank);
    std::vector<int64_t> sent(kWorld, 100), received(kWorld);
    if (c.device_splits) call.splits = {sent.data(), received.data(), 4, 300, 300};
    int made = 0;
    while (made < 5 && exchange(ranks.view(rank), call)) ++made;
    EXPECT_LT(made, 4) << "rank " << rank;
  });
}

TEST_P(AbsentFrom, a_rank_that_never_comes_is_named_within_the_timeout_and_a_second) {
  for (const bool check : {false, true}) {
    for (const int root : {0, 2}) {
      const Case c = case_with(GetParam(), root);
      const uint64_t timeout = short_timeout_ns();
      Ranks ranks(kWorld, kDefaultPayloadBytes, timeout, check);
      Tensors tensors;
      const Stopwatch watch;
      call_until_failure(ranks, tensors, c, 2);
      EXPECT_TRUE(watch.within(std::chrono::nanoseconds(timeout) + 1s));
      EXPECT_FALSE(exchange(ranks.view(2), tensors.call(c, 2))) << "a late rank is refused";
      EXPECT_TRUE(tensors.untouched(2));
      for (int rank = 0; rank < kWorld; ++rank) {
        const StatusRecord& record = ranks.record(rank);
        ASSERT_TRUE(is_recorded(ranks.status(rank))) << rank;
        EXPECT_EQ(record.failure, Failure::timeout);
        EXPECT_EQ(record.peer, 2);
        EXPECT_NE(record.rank, 2);
        EXPECT_EQ(record.own.collective, c.collective);
        EXPECT_EQ(record.own.algorithm, c.algorithm);
        EXPECT_EQ(record.phase == Phase::check, check);
      }
    }
  }
}

// Rank 0 broadcasts, rank 2 never calls, and the timeout of rank 1 expires first.
TEST(CpuExchangeFailure, who_waits_for_a_waiting_rank_names_the_one_that_is_missing) {
  Ranks ranks(kWorld);
  Tensors tensors;
  const Case c = case_with({Collective::broadcast, Algorithm::onestage, false}, 0);
  const uint64_t timeout = short_timeout_ns();
  ranks.run([&](int rank) {
    if (rank == 2) return;
    CpuView view = ranks.view(rank);
    if (rank == 1) view.timeout_ns = timeout;
    while (exchange(view, tensors.call(c, rank))) {
    }
    EXPECT_EQ(ranks.record(rank).rank, 0);
    EXPECT_EQ(ranks.record(rank).peer, 2);
    EXPECT_EQ(ranks.record(rank).phase, Phase::release);
  });
}

TEST(CpuExchangeFailure, a_rank_that_died_while_it_waited_is_named_itself) {
  Ranks ranks(kWorld, kDefaultPayloadBytes, short_timeout_ns());
  control_of(ranks.region(1), ranks.layout()).busy = 1;  // within its call forever
  Tensors tensors;
  const Case c = case_with({Collective::broadcast, Algorithm::onestage, false}, 1);
  EXPECT_FALSE(exchange(ranks.view(0), tensors.call(c, 0)));
  EXPECT_EQ(ranks.record(0).peer, 1);
}

TEST(CpuExchangeFailure, a_rank_that_misses_a_barrier_is_named) {
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

TEST(CpuExchangeFailure, checked_mode_names_different_collectives_and_roots) {
  const Form broadcast{Collective::broadcast, Algorithm::onestage, false};
  const Form reduce{Collective::reduce, Algorithm::staged, false};
  const std::vector<std::pair<Case, Case>> pairs = {
      {case_with(broadcast, 0), case_with(broadcast, 1)},
      {case_with(broadcast, 1), case_with(reduce, 1)},
  };
  for (const auto& [most, odd] : pairs) {
    Ranks ranks(kWorld, kDefaultPayloadBytes, kPatientNs, true);
    Tensors tensors;
    ranks.run([&](int rank) {
      EXPECT_FALSE(exchange(ranks.view(rank), tensors.call(rank == 2 ? odd : most, rank)));
    });
    for (int rank = 0; rank < kWorld; ++rank) {
      const StatusRecord& record = ranks.record(rank);
      EXPECT_EQ(record.failure, Failure::mismatch);
      EXPECT_EQ(record.phase, Phase::check);
      EXPECT_TRUE(record.rank == 2 || record.peer == 2);
      const CallDescriptor& of_2 = record.rank == 2 ? record.own : record.other;
      EXPECT_EQ(of_2.collective, odd.collective);
      EXPECT_EQ(of_2.root, odd.root);
      EXPECT_TRUE(tensors.untouched(rank));
    }
  }
}

TEST(CpuExchangeFailure, symmetric_offsets_that_differ_are_named_without_checked_mode) {
  for (const Form& form : forms_of(kExchanges)) {
    if (!form.symmetric) continue;
    Ranks ranks(kWorld);
    Tensors tensors;
    const Case c = case_with(form, 0);
    ranks.run([&](int rank) {
      ExchangeCall call = tensors.call(c, rank);
      call.descriptor.output_offset = rank == 1 ? 64 : 0;
      EXPECT_FALSE(exchange(ranks.view(rank), call));
      EXPECT_EQ(ranks.record(rank).failure, Failure::mismatch);
      EXPECT_EQ(ranks.record(rank).phase, Phase::start_barrier);
    });
  }
}

TEST(CpuExchangeFailure, a_refused_argument_leaves_the_communicator_usable) {
  Ranks ranks(kWorld);
  Tensors tensors;
  Case good = case_with({Collective::allgather, Algorithm::staged, false}, 0);
  std::vector<Case> bad;
  bad.push_back(case_with({Collective::broadcast, Algorithm::channels, false}, 0));
  bad.push_back(case_with({Collective::allgather, Algorithm::onestage, false}, 0));
  bad.push_back(case_with({Collective::alltoallv, Algorithm::pipelined, false}, 0));
  bad.push_back(case_with({Collective::scatter, Algorithm::fallback, false}, 0));
  bad.push_back(case_with({Collective::allreduce, Algorithm::staged, false}, 0));
  bad.push_back(case_with({Collective::reduce, Algorithm::staged, false}, 0));
  bad.back().dtype = DType::int32;
  bad.back().op = ReduceOp::avg;
  ranks.run([&](int rank) {
    for (const Case& c : bad) {
      EXPECT_THROW(exchange(ranks.view(rank), tensors.call(c, rank)), std::invalid_argument);
    }
    EXPECT_TRUE(exchange(ranks.view(rank), tensors.call(good, rank)));
  });
}

}  // namespace
}  // namespace collx::cpu
