// Tests that every collective, algorithm, root, axis and dtype has the bits of its definition, and
// that calls only write their outputs.
#include <gtest/gtest.h>

#include <set>

#include "exchange_forms.h"
#include "exchange_runner.h"

namespace collx::cpu {
namespace {

class CpuExchange : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, CpuExchange, testing::ValuesIn(worlds()));

TEST_P(CpuExchange, every_form_and_dtype_is_right_in_the_smallest_region) {
  Ranks ranks(GetParam(), smallest_cpu_region(GetParam()));
  std::vector<Case> cases;
  uint64_t i = 0;
  for (const Form& form : exchange_forms()) {
    for (const DTypeRow& row : kDTypes) {
      const DType dtype = row.dtype;
      const auto element = static_cast<uint64_t>(dtype_size(dtype));
      cases.push_back(case_of(form, GetParam(), {1, 301, element}, dtype, i++));
      cases.push_back(case_of(form, GetParam(), {1, 37, 5 * element}, dtype, i++));
    }
  }
  CaseRunner(ranks, cases).run();
}

TEST_P(CpuExchange, every_root_and_reduce_op_is_right_in_place_and_out_of_place) {
  Ranks ranks(GetParam(), smallest_cpu_region(GetParam()));
  std::vector<Case> cases;
  for (const Form& form : exchange_forms()) {
    for (int root = 0; root < GetParam(); ++root) {
      for (const ReduceOp op : kOps) {
        for (const bool in_place : {false, true}) {
          Case c = case_of(form, GetParam(), {1, 67, 4}, DType::float32, uint64_t(root));
          c.op = op;
          c.in_place = in_place && allows_in_place(c);
          cases.push_back(c);
          if (!is_reduction(form.collective)) break;
        }
        if (!is_reduction(form.collective)) break;
      }
    }
  }
  CaseRunner(ranks, cases).run();
}

/// Returns numbers of units near the borders of parts, slots and chunks. `inner`: bytes of a unit.
std::set<uint64_t> telling_units(const CpuLayout& layout, int world, uint64_t inner) {
  const auto w = static_cast<uint64_t>(world);
  std::set<uint64_t> units = {0, 1, w - 1, w, w + 1};
  for (const Collective c : {Collective::allgather, Collective::alltoall, Collective::reducescatter,
                             Collective::broadcast}) {
    const uint64_t chunk = cpu_slots(layout, c, kAnyMessage, world).chunk / inner;
    for (const uint64_t of_message : {chunk - 1, chunk, chunk + 1, 3 * chunk + 2}) {
      units.insert(of_message);
      units.insert(of_message * w + 1);
    }
  }
  return units;
}

TEST_P(CpuExchange, sizes_around_the_borders_of_chunks_and_parts_lose_nothing) {
  Ranks ranks(GetParam(), smallest_cpu_region(GetParam()));
  std::vector<Case> cases;
  uint64_t i = 0;
  for (const Form& form : exchange_forms()) {
    for (const uint64_t units : telling_units(ranks.layout(), GetParam(), 4)) {
      cases.push_back(case_of(form, GetParam(), {1, units, 4}, DType::int32, i++));
    }
  }
  CaseRunner(ranks, cases).run();
}

TEST_P(CpuExchange, parts_along_any_axis_are_found) {
  Ranks ranks(GetParam(), smallest_cpu_region(GetParam()) + (64 << 10));
  std::vector<Case> cases;
  uint64_t i = 0;
  for (const Form& form : exchange_forms()) {
    if (!has_axis(form.collective)) continue;
    for (const DTypeRow& row : kDTypes) {
      const DType dtype = row.dtype;
      for (const uint64_t outer : {2, 3, 65}) {
        for (const uint64_t units : {1, 5, 33}) {
          for (const uint64_t inner : {1, 2, 7}) {
            const auto element = static_cast<uint64_t>(dtype_size(dtype));
            cases.push_back(case_of(form, GetParam(), {outer, units, inner * element}, dtype, i++));
          }
        }
      }
    }
  }
  CaseRunner(ranks, cases).run();
}

TEST_P(CpuExchange, the_default_region_carries_several_chunks_too) {
  if (large_calls_are_slow(GetParam())) GTEST_SKIP() << "takes minutes here";
  Ranks ranks(GetParam());
  std::vector<Case> cases;
  const uint64_t staging = ranks.layout().staging_bytes;
  uint64_t i = 0;
  for (const Form& form : exchange_forms()) {
    const Geometry large{1, 5 * staging / 8 + 5, 4};
    cases.push_back(case_of(form, GetParam(), large, DType::float32, ++i));
    cases.push_back(case_of(form, GetParam(), large, DType::float32, ++i));  // one in place
    cases.push_back(case_of(form, GetParam(), {3, staging / 512, 200}, DType::float16, ++i));
  }
  CaseRunner(ranks, cases).run();
}

TEST_P(CpuExchange, calls_are_counted_and_empty_ones_need_neither_peer_nor_address) {
  Ranks ranks(GetParam());
  const CpuView view = ranks.view(0);
  uint64_t calls = 0;
  for (const Form& form : exchange_forms()) {
    if (form.collective == Collective::alltoallv) continue;
    const Case c = case_of(form, GetParam(), {1, 0, 4}, DType::float32, 0);
    EXPECT_TRUE(exchange(view, make_exchange(c, GetParam(), 0, nullptr, nullptr)));
    EXPECT_EQ(view.header(0)->sequence, ++calls);
  }
}

TEST_P(CpuExchange, a_barrier_holds_everybody_until_the_last_has_come) {
  Ranks ranks(GetParam());
  std::atomic<int> come = 0;
  ranks.run([&](int rank) {
    for (int round = 1; round <= 50; ++round) {
      if (rank == round % GetParam()) std::this_thread::yield();
      ++come;
      CallDescriptor descriptor;
      descriptor.collective = Collective::barrier;
      EXPECT_TRUE(barrier(ranks.view(rank), descriptor));
      EXPECT_GE(come.load(), round * GetParam());
    }
  });
}

// Negative controls of the comparison: a wrong byte and an extra byte are noticed.
TEST(CpuExchangeOracle, tells_who_gets_what) {
  Case c;
  c.shape = {2, 3, 1};
  const std::vector<const char*> parts = {"ACBD", "xy"};
  const auto text = [](const Bytes& b) { return std::string(b.begin(), b.end()); };
  c.collective = Collective::allgather;
  EXPECT_EQ(text(expected_output(c, 2, 1, parts)), "ACxBDy");
  c.collective = Collective::gather;
  c.root = 1;
  EXPECT_EQ(text(expected_output(c, 2, 1, parts)), "ACxBDy");
  EXPECT_EQ(expected_output(c, 2, 0, parts), Bytes(6, 0));
  c.shape = {1, 4, 1};
  const std::vector<const char*> whole = {"abcd", "wxyz"};
  c.collective = Collective::alltoall;
  EXPECT_EQ(text(expected_output(c, 2, 1, whole)), "cdyz");
  c.collective = Collective::scatter;
  EXPECT_EQ(text(expected_output(c, 2, 0, whole)), "wx");
  c.collective = Collective::reduce;
  c.op = ReduceOp::max;
  EXPECT_EQ(text(expected_output(c, 2, 1, whole)), "wxyz");
  EXPECT_EQ(text(expected_output(c, 2, 0, whole)), "abcd");
  c.collective = Collective::alltoallv;
  c.rows = {1, 3, 2, 1};
  EXPECT_EQ(text(expected_output(c, 2, 1, {"abcd", "wxy"})), "bcdy");
}

}  // namespace
}  // namespace collx::cpu
