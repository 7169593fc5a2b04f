// Tests which entry of a tuning table a call uses, and how the entry changes the plan.
#include <gtest/gtest.h>

#include "protocol/tuning.h"

namespace collx {
namespace {

constexpr TuningEntry kEntry{Collective::allreduce,  DType::float32, false, 1024, 8192,
                             Algorithm::twoshot_push};

Request request(uint64_t bytes = 4096, DeviceKind device = DeviceKind::cuda) {
  Request r;
  r.device = device;
  r.bytes = bytes;
  r.world = 4;
  r.room = 66;
  return r;
}

TuningEntry with(Algorithm algorithm, int blocks = 0, int threads = 0, bool symmetric = false) {
  TuningEntry entry = kEntry;
  entry.algorithm = algorithm;
  entry.max_blocks = blocks;
  entry.threads = threads;
  entry.symmetric = symmetric;
  return entry;
}

const TuningEntry* find(const TuningEntry& entry, const Request& r) {
  static TuningTable table;
  table = TuningTable({entry});
  return table.find(r);
}

TEST(Tuning, finds_the_entry_whose_range_holds_the_size) {
  TuningEntry above = kEntry;
  above.from = 8193;
  above.to = 10000;
  const TuningTable table({above, kEntry});
  EXPECT_TRUE(table.is_disjoint());
  EXPECT_EQ(table.find(request(1023)), nullptr);
  EXPECT_EQ(table.find(request(1024))->to, 8192u);
  EXPECT_EQ(table.find(request(8192))->to, 8192u);
  EXPECT_EQ(table.find(request(8193))->to, 10000u);
  EXPECT_EQ(table.find(request(10001)), nullptr);
  EXPECT_EQ(TuningTable().find(request()), nullptr);
}

TEST(Tuning, notices_ranges_that_overlap) {
  TuningEntry same = kEntry;
  same.from = 8192;
  same.to = 9000;
  EXPECT_FALSE(TuningTable({kEntry, same}).is_disjoint());
  same.dtype = DType::bfloat16;
  EXPECT_TRUE(TuningTable({kEntry, same}).is_disjoint());
}

TEST(Tuning, leaves_calls_alone_that_differ_from_the_entry) {
  EXPECT_NE(find(kEntry, request()), nullptr);
  Request r = request();
  r.algorithm = Algorithm::oneshot_push;
  EXPECT_EQ(find(kEntry, r), nullptr);
  r = request();
  r.dtype = DType::float16;
  EXPECT_EQ(find(kEntry, r), nullptr);
  r = request();
  r.input_symmetric = r.output_symmetric = true;
  EXPECT_EQ(find(kEntry, r), nullptr);
  EXPECT_NE(find(with(Algorithm::pull_push, 0, 0, true), r), nullptr);
  r = request();
  r.epilogue = true;
  EXPECT_EQ(find(kEntry, r), nullptr);
  r = request();
  r.capabilities.peer_access = false;
  EXPECT_EQ(find(kEntry, r), nullptr);
}

TEST(Tuning, of_copies_the_dtype_does_not_matter) {
  TuningEntry entry = with(Algorithm::direct, 0, 0, true);
  entry.collective = Collective::allgather;
  entry.dtype = DType::uint8;
  Request r = request();
  r.collective = Collective::allgather;
  r.output_symmetric = true;
  for (const DType dtype : {DType::uint8, DType::float32}) {
    r.dtype = dtype;
    EXPECT_NE(find(entry, r), nullptr);
  }
}

TEST(Tuning, exceeds_no_bound_of_the_call) {
  Request r = request();
  r.max_blocks = 8;
  EXPECT_EQ(find(kEntry, r), nullptr);
  EXPECT_EQ(find(with(Algorithm::twoshot_push, 16), r), nullptr);
  EXPECT_NE(find(with(Algorithm::twoshot_push, 8), r), nullptr);
  r.device = DeviceKind::cpu;  // has no blocks
  EXPECT_NE(find(kEntry, r), nullptr);
}

TEST(Tuning, takes_the_order_of_a_switch_only_where_that_is_allowed) {
  const TuningEntry entry = with(Algorithm::multimem_twoshot, 0, 0, true);
  Request r = request();
  r.input_symmetric = r.output_symmetric = r.input_multicast = r.output_multicast = true;
  EXPECT_EQ(find(entry, r), nullptr);
  r.capabilities.multicast = true;
  EXPECT_EQ(find(entry, r), nullptr);
  r.deterministic = false;
  EXPECT_NE(find(entry, r), nullptr);
  r.reduce_op = ReduceOp::max;
  EXPECT_EQ(find(entry, r), nullptr);
  EXPECT_NE(find(with(Algorithm::multimem_gather, 0, 0, true), r), nullptr);  // keeps the order
}

TEST(Tuning, an_entry_never_names_what_changes_bits_or_leaves_the_device) {
  for (const CollectiveRow& row : kCollectives) {
    for (const AlgorithmRow& named : kAlgorithms) {
      for (const bool symmetric : {false, true}) {
        if (!may_be_named(row.collective, named.algorithm, DeviceKind::cpu, symmetric, false)) {
          continue;
        }
        EXPECT_TRUE(is_tunable(row.collective));
        EXPECT_NE(named.algorithm, Algorithm::fallback);
        EXPECT_FALSE(named.multicast);
        EXPECT_TRUE(symmetric || !named.in_place);
      }
    }
  }
  EXPECT_FALSE(is_tunable(Collective::alltoallv));
  EXPECT_FALSE(is_tunable(Collective::barrier));
  EXPECT_FALSE(is_tunable(Collective::allreduce_rmsnorm));
}

TEST(Tuning, its_plan_is_that_of_a_call_that_names_the_choice) {
  for (const AlgorithmRow& row : kAlgorithms) {
    if (!may_be_named(Collective::allreduce, row.algorithm, DeviceKind::cuda, true, false))
      continue;
    for (const int blocks : {0, 4, 64, 1024}) {
      const TuningEntry entry = with(row.algorithm, blocks);
      Request named = request(8 << 20);
      named.algorithm = row.algorithm;
      named.max_blocks = blocks;
      const Plan expected = select(named);
      const Plan plan = select(with_choice(request(8 << 20), &entry));
      EXPECT_EQ(plan.algorithm, expected.algorithm);
      EXPECT_EQ(plan.blocks, expected.blocks);
      EXPECT_EQ(plan.threads, expected.threads);
      EXPECT_EQ(plan.width, expected.width);
    }
  }
}

TEST(Tuning, blocks_of_fewer_threads_stay_within_what_can_be_resident) {
  for (const Algorithm algorithm :
       {Algorithm::oneshot_push, Algorithm::twoshot_push, Algorithm::twoshot_pull}) {
    for (int threads = 64; threads <= kFullBlock; threads += 64) {
      const TuningEntry entry = with(algorithm, 0, threads);
      const Plan plan = select(with_choice(request(64 << 20), &entry));
      EXPECT_EQ(plan.threads, threads);
      EXPECT_LE(plan.blocks * plan.threads, 66 * kFullBlock);
      if (algorithm == Algorithm::twoshot_pull) {
        EXPECT_LE(plan.blocks, 66);
      }
    }
  }
}

}  // namespace
}  // namespace collx
