// Tests alltoallv with all kinds of splits, with splits on which two ranks disagree, and with
// splits that do not fit.
#include <gtest/gtest.h>

#include "exchange_forms.h"
#include "exchange_runner.h"

namespace collx::cpu {
namespace {

constexpr Form kHost{Collective::alltoallv, Algorithm::staged, false};
constexpr Form kHostDirect{Collective::alltoallv, Algorithm::direct, true};
constexpr Form kDevice{Collective::alltoallv, Algorithm::staged, false, true};
constexpr Form kDeviceDirect{Collective::alltoallv, Algorithm::direct, true, true};
constexpr Form kForms[] = {kHost, kHostDirect, kDevice, kDeviceDirect};

Case with_rows(const Form& form, int world, uint64_t row_bytes, std::vector<uint64_t> rows) {
  Case c = case_of(form, world, {1, 1, row_bytes}, DType::uint8, 0);
  c.rows = std::move(rows);
  return c;
}

/// rows[from * world + to] of every rank.
using Rows = std::vector<uint64_t>;
Rows filled(int world, uint64_t n) { return Rows(size_t(world * world), n); }

class CpuAlltoallv : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, CpuAlltoallv, testing::Values(1, 2, 3, 4, 8));

TEST_P(CpuAlltoallv, counts_around_the_borders_of_chunks_arrive) {
  const int world = GetParam();
  const auto w = size_t(world);
  Ranks ranks(world, smallest_cpu_region(world));
  const uint64_t chunk = cpu_slots(ranks.layout(), Collective::alltoallv, kAnyMessage, world).chunk;
  std::vector<Case> cases;
  for (const Form& form : kForms) {
    for (const uint64_t n : {uint64_t{0}, uint64_t{1}, chunk - 1, chunk, chunk + 1, 5 * chunk}) {
      cases.push_back(with_rows(form, world, 1, filled(world, n)));
      Rows one_pair = filled(world, 0), one_sender = one_pair, one_receiver = one_pair;
      Rows to_itself = one_pair;
      one_pair[w - 1] = n;
      for (size_t r = 0; r < w; ++r) {
        one_sender[(w - 1) * w + r] = n;
        one_receiver[r * w] = n + r;
        to_itself[r * w + r] = n;
      }
      for (const Rows& rows : {one_pair, one_sender, one_receiver, to_itself}) {
        cases.push_back(with_rows(form, world, 1, rows));
        cases.push_back(with_rows(form, world, 3, rows));
      }
    }
  }
  for (size_t i = 0; i < cases.size(); ++i) {
    if (cases[i].device_splits) cases[i].spare_rows = i % 3;
  }
  CaseRunner(ranks, cases).run();
}

TEST_P(CpuAlltoallv, random_splits_arrive) {
  const int world = GetParam();
  std::mt19937_64 random(8000 + uint64_t(world));
  Ranks ranks(world, smallest_cpu_region(world) + (32 << 10));
  std::vector<Case> cases;
  for (int i = 0; i < 400; ++i) {
    cases.push_back(random_case(random, kForms[i % 4], world, 40 << 10));
  }
  CaseRunner(ranks, cases).run();
}

TEST_P(CpuAlltoallv, rows_without_bytes_are_counted_all_the_same) {
  Ranks ranks(GetParam());
  std::vector<Case> cases;
  for (const Form& form : {kDevice, kDeviceDirect}) {
    cases.push_back(with_rows(form, GetParam(), 0, filled(GetParam(), 7)));
  }
  CaseRunner(ranks, cases).run();
}

TEST_P(CpuAlltoallv, a_call_without_rows_still_meets) {
  if (GetParam() == 1) return;
  Ranks ranks(GetParam(), kDefaultPayloadBytes, 50'000'000);
  const Case c = with_rows(kHost, GetParam(), 4, filled(GetParam(), 0));
  EXPECT_FALSE(exchange(ranks.view(0), make_exchange(c, GetParam(), 0, nullptr, nullptr)));
  EXPECT_EQ(ranks.record(0).phase, Phase::counts);
}

/// Two ranks disagree: rank 0 sends five rows to rank 1, which expects three.
void disagree(const Form& form, bool check) {
  Ranks ranks(3, kDefaultPayloadBytes, 200'000'000, check);
  std::vector<Bytes> outputs(3, Bytes(4 * 9, -1));
  ranks.run([&](int rank) {
    Rows rows = filled(3, 3);
    if (rank == 0) rows[1] = 5;
    const Case c = with_rows(form, 3, 4, rows);
    const Bytes input(4 * 11, 1);
    ExchangeCall call = make_exchange(c, 3, rank, input.data(), outputs[rank].data());
    for (int r = 0; r < 3; ++r) call.peer_output[r] = outputs[r].data();
    // Ranks 0 and 2 may complete calls before rank 1 reports the failure.
    while (exchange(ranks.view(rank), call)) EXPECT_NE(rank, 1);
  });
  for (int rank = 0; rank < 3; ++rank) {
    const StatusRecord& record = ranks.record(rank);
    EXPECT_EQ(record.failure, Failure::mismatch);
    const bool by_1 = record.rank == 1;
    EXPECT_EQ(record.rank + record.peer, 1) << "between ranks 0 and 1";
    const CallDescriptor& of_0 = by_1 ? record.other : record.own;
    const CallDescriptor& of_1 = by_1 ? record.own : record.other;
    EXPECT_EQ(of_0.sends, 20u);
    EXPECT_EQ(of_0.expects, 12u);
    EXPECT_EQ(of_1.sends, 12u);
    EXPECT_EQ(of_1.expects, 12u);
    EXPECT_EQ(record.own.collective, Collective::alltoallv);
    EXPECT_EQ(record.phase, check ? Phase::check : Phase::counts);
  }
  EXPECT_TRUE(std::all_of(outputs[1].begin(), outputs[1].end(), [](char c) { return c == -1; }));
}

TEST(CpuAlltoallvMismatch, is_named_with_both_counts) {
  for (const Form& form : {kHost, kHostDirect}) disagree(form, false);
}
TEST(CpuAlltoallvMismatch, is_named_with_both_counts_in_checked_mode) {
  for (const Form& form : {kHost, kHostDirect}) disagree(form, true);
}

struct Refused {
  std::vector<int64_t> splits;  // the splits of rank 1, whose input has 8 rows
  uint64_t capacity;            // the capacity of every rank
  Phase phase;
  uint64_t expected;
  uint64_t seen;
};

class CpuDeviceSplits : public testing::TestWithParam<Refused> {};
INSTANTIATE_TEST_SUITE_P(
    Splits, CpuDeviceSplits,
    testing::Values(Refused{{-1, 4, 4}, 100, Phase::counts, 8, 7},
                    Refused{{4, 4, 1}, 100, Phase::counts, 8, 9},
                    Refused{{INT64_MIN, INT64_MIN, 8}, 100, Phase::counts, 8, 8},
                    Refused{{INT64_MAX, INT64_MAX, 4}, 100, Phase::counts, 8, 2},
                    Refused{{2, 2, 4}, 7, Phase::arrival, 7, 8}));

void refuse(const Form& form, const Refused& p) {
  constexpr uint64_t kGuard = 64;
  Ranks ranks(3);
  std::vector<Bytes> outputs(3, Bytes(p.capacity * 4 + 2 * kGuard, -1));
  ranks.run([&](int rank) {
    std::vector<int64_t> sent(3, 2), received(3, -7);
    if (rank == 1) sent = p.splits;
    const Bytes input(8 * 4, 1);
    const Bytes& output = outputs[rank];
    ExchangeCall call{};
    call.collective = call.descriptor.collective = Collective::alltoallv;
    call.plan.algorithm = form.algorithm;
    call.input = input.data();
    call.output = outputs[rank].data() + kGuard;
    for (int r = 0; r < 3; ++r) call.peer_output[r] = outputs[r].data() + kGuard;
    call.element_bytes = 1;
    call.root = -1;
    call.splits = {sent.data(), received.data(), 4, 8, p.capacity};
    while (exchange(ranks.view(rank), call)) {
    }
    const StatusRecord& record = ranks.record(rank);
    EXPECT_EQ(record.failure, Failure::splits);
    EXPECT_EQ(record.phase, p.phase);
    EXPECT_EQ(record.rank, p.phase == Phase::counts ? 1 : 2);
    EXPECT_EQ(record.peer, record.rank);
    EXPECT_EQ(record.expected, p.expected);
    EXPECT_EQ(record.seen, p.seen);
    for (uint64_t i = 0; i < kGuard; ++i) {
      EXPECT_EQ(output[i], -1);
      EXPECT_EQ(output[output.size() - 1 - i], -1);
    }
    if (rank == record.rank) {
      EXPECT_EQ(received, std::vector<int64_t>(3, -7));
      EXPECT_TRUE(std::all_of(output.begin(), output.end(), [](char c) { return c == -1; }));
    }
  });
}

TEST_P(CpuDeviceSplits, that_do_not_fit_fail_on_all_ranks_and_write_nothing_outside) {
  for (const Form& form : {kDevice, kDeviceDirect}) refuse(form, GetParam());
}

}  // namespace
}  // namespace collx::cpu
