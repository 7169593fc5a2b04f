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

TEST_P(CpuExchange, every_form_dtype_and_reduce_op_is_right_in_the_smallest_region) {
  Ranks ranks(GetParam(), smallest_cpu_region(GetParam()));
  std::vector<Case> cases;
  uint64_t i = 0;
  for (const Form& form : tensor_forms()) {
    for (const DTypeRow& row : kDTypes) {
      const DType dtype = row.dtype;
      const auto element = static_cast<uint64_t>(dtype_size(dtype));
      cases.push_back(case_of(form, GetParam(), {1, 37, 5 * element}, dtype, i + 1));
      for (const ReduceOp op : kOps) {
        if (op != op_of(dtype, size_t(op))) continue;
        cases.push_back(case_of(form, GetParam(), {1, 301, element}, dtype, i++));
        cases.back().op = op;
        if (!is_reduction(form.collective)) break;
      }
    }
  }
  CaseRunner(ranks, cases).run();
}

TEST_P(CpuExchange, every_root_and_reduce_op_is_right_in_place_and_out_of_place) {
  Ranks ranks(GetParam(), smallest_cpu_region(GetParam()));
  std::vector<Case> cases;
  for (const Form& form : tensor_forms()) {
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
std::set<uint64_t> telling_units(const CpuLayout& layout, const Form& form, int world,
                                 uint64_t inner) {
  const auto w = static_cast<uint64_t>(world);
  std::set<uint64_t> units = {0, 1, w - 1, w, w + 1};
  if (form.collective == Collective::allreduce) {
    const uint64_t bytes = cpu_chunk_bytes(layout, form.algorithm, world);
    const uint64_t chunk = (bytes != 0 ? bytes : layout.staging_bytes) / inner;
    units.insert({chunk - 1, chunk, chunk + 1, 2 * chunk + 1, 4 * chunk + w + 3});
    return units;
  }
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
  for (const Form& form : tensor_forms()) {
    const bool of_all = form.collective == Collective::allreduce;
    for (const DTypeRow& row : kDTypes) {
      if (!of_all && row.dtype != DType::int32) continue;
      const auto element = static_cast<uint64_t>(dtype_size(row.dtype));
      for (const uint64_t units : telling_units(ranks.layout(), form, GetParam(), element)) {
        const Geometry shape{1, units, element};
        cases.push_back(case_of(form, GetParam(), shape, row.dtype, i++));
        if (of_all) cases.push_back(case_of(form, GetParam(), shape, row.dtype, i++));  // in place
      }
    }
  }
  CaseRunner(ranks, cases).run();
}

TEST_P(CpuExchange, parts_along_any_axis_are_found) {
  Ranks ranks(GetParam(), smallest_cpu_region(GetParam()) + (64 << 10));
  std::vector<Case> cases;
  uint64_t i = 0;
  for (const Form& form : tensor_forms()) {
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
  for (const Form& form : tensor_forms()) {
    if (form.collective == Collective::allreduce) {
      const uint64_t bytes =
          std::max<uint64_t>(cpu_chunk_bytes(ranks.layout(), form.algorithm, GetParam()),
                             ranks.layout().oneshot.slot_bytes);
      for (const uint64_t units : {bytes / 4 + 1, bytes / 2 + 5}) {
        cases.push_back(case_of(form, GetParam(), {1, units, 4}, DType::float32, 0));
        cases.back().shift = units;
      }
      continue;
    }
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
  for (const Form& form : tensor_forms()) {
    if (form.collective == Collective::alltoallv) continue;
    const Case c = case_of(form, GetParam(), {1, 0, 4}, DType::float32, 0);
    const auto none = [](int) { return nullptr; };
    EXPECT_TRUE(carry_out(view, c, {none, none}));
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

// Negative control of the comparison: one wrong bit is noticed.
TEST(CpuExchangeOracle, sees_one_wrong_bit_and_tells_zeros_apart) {
  const float a[2] = {1.0f, 0.0f};
  float b[2] = {1.0f, -0.0f};
  EXPECT_NE(first_difference(a, b, 2, DType::float32), "");
  b[1] = 0.0f;
  EXPECT_EQ(first_difference(a, b, 2, DType::float32), "");
  b[0] = std::nextafter(1.0f, 2.0f);
  EXPECT_NE(first_difference(a, b, 2, DType::float32), "");
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
