// Tests that every algorithm computes the bits of the scalar reference on every rank and only
// writes its output.
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "cpu_ranks.h"
#include "scalar_reference.h"

namespace collx::cpu {
namespace {

using Bytes = std::vector<char>;

constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::max, ReduceOp::min,
                             ReduceOp::prod};
constexpr char kCanary = 0x5a;
constexpr uint64_t kGuardBytes = 128;  // before and after every tensor
constexpr uint64_t kMostShift = 8;     // limit of the tensors' offsets in elements

struct Case {
  DType dtype;
  ReduceOp op;
  Algorithm algorithm;
  bool symmetric;
  bool in_place;
  uint64_t numel;
  uint64_t shift;  // offset of the input in elements; the output has another one
};

std::string describe(const Case& c) {
  return std::string(name_of(c.algorithm)) + ' ' + std::string(name_of(c.dtype)) + ' ' +
         std::string(name_of(c.op)) + " of " + std::to_string(c.numel) + " shifted by " +
         std::to_string(c.shift) + (c.symmetric ? ", symmetric" : "") +
         (c.in_place ? ", in place" : "");
}

const std::vector<Form>& forms() {
  static const std::vector<Form> forms = forms_of(only(Collective::allreduce));
  return forms;
}

/// The inputs of all ranks, and the expected output for each op, as far as the cases need it. The
/// reduction is elementwise, so the output of a short call is the beginning of that of a long one.
class Oracle {
 public:
  Oracle(int world, const std::vector<Case>& cases) {
    std::mt19937_64 random(20240607u + unsigned(world));
    uint64_t most[size_t(DType::count)] = {};
    for (const Case& c : cases) most[size_t(c.dtype)] = std::max(most[size_t(c.dtype)], c.numel);
    for (const DTypeRow& row : kDTypes) {
      const DType dtype = row.dtype;
      const uint64_t bytes = most[size_t(dtype)] * uint64_t(dtype_size(dtype));
      for (int r = 0; r < world; ++r) {
        inputs_[size_t(dtype)].push_back(Bytes(bytes));
        for (char& byte : inputs_[size_t(dtype)].back()) byte = char(random());
      }
    }
    for (const Case& c : cases) expect(c.dtype, c.op, most[size_t(c.dtype)]);
  }
  const char* input(DType dtype, int rank) const {
    return inputs_[size_t(dtype)][size_t(rank)].data();
  }
  const char* expected(DType dtype, ReduceOp op) const {
    return expected_[size_t(dtype)][size_t(op)].data();
  }

 private:
  void expect(DType dtype, ReduceOp op, uint64_t numel) {
    Bytes& expected = expected_[size_t(dtype)][size_t(op)];
    if (!expected.empty()) return;
    std::vector<const void*> sources;
    for (const Bytes& input : inputs_[size_t(dtype)]) sources.push_back(input.data());
    expected.resize(numel * uint64_t(dtype_size(dtype)));
    reference_reduce(sources, expected.data(), numel, dtype, op);
  }

  std::vector<Bytes> inputs_[size_t(DType::count)];
  Bytes expected_[size_t(DType::count)][size_t(ReduceOp::count)];
};

uint64_t most_bytes(const std::vector<Case>& cases) {
  uint64_t most = 0;
  for (const Case& c : cases) most = std::max(most, c.numel * uint64_t(dtype_size(c.dtype)));
  return most;
}

/// Runs cases in order on one communicator. Each rank refills its tensors as soon as its own call
/// returns, so that the test notices a peer that still reads or writes them.
class CaseRunner {
 public:
  CaseRunner(Ranks& ranks, const std::vector<Case>& cases)
      : ranks_(ranks), cases_(cases), oracle_(ranks.world(), cases) {
    const uint64_t bytes = most_bytes(cases) + 2 * kGuardBytes + 8 * kMostShift;
    inputs_.assign(size_t(ranks.world()), Bytes(bytes));
    outputs_ = inputs_;
  }

  void run() {
    ranks_.run([&](int rank) {
      const CpuView view = ranks_.view(rank);
      for (const Case& c : cases_) {
        if (!run_case(view, c)) return;
      }
    });
  }

 private:
  static uint64_t offset(const Case& c, uint64_t shift) {
    return kGuardBytes + shift * uint64_t(dtype_size(c.dtype));
  }

  bool run_case(const CpuView& view, const Case& c) {
    Bytes& in = inputs_[size_t(view.rank)];
    Bytes& out = c.in_place ? in : outputs_[size_t(view.rank)];
    const uint64_t in_offset = offset(c, c.shift);
    const uint64_t out_offset = c.in_place ? in_offset : offset(c, (c.shift + 3) % kMostShift);
    const uint64_t bytes = c.numel * uint64_t(dtype_size(c.dtype));
    std::fill(in.begin(), in.end(), kCanary);
    if (!c.in_place) std::fill(out.begin(), out.end(), kCanary);
    if (bytes != 0) std::memcpy(in.data() + in_offset, oracle_.input(c.dtype, view.rank), bytes);

    AllreduceCall call = make_call(in.data() + in_offset, out.data() + out_offset, c.numel, c.dtype,
                                   c.op, c.algorithm, c.symmetric);
    for (int r = 0; c.symmetric && r < view.world; ++r) {
      call.peer_input[r] = inputs_[size_t(r)].data() + in_offset;
      call.peer_output[r] = (c.in_place ? inputs_ : outputs_)[size_t(r)].data() + out_offset;
    }
    if (!allreduce(view, call)) {
      ADD_FAILURE() << describe(c) << " failed on rank " << view.rank << " in phase "
                    << int(view.status->by_host.record.phase);
      return false;
    }
    check(view, c, out, out_offset, bytes);
    if (!c.in_place && bytes != 0) {
      EXPECT_EQ(std::memcmp(in.data() + in_offset, oracle_.input(c.dtype, view.rank), bytes), 0)
          << describe(c) << ": input changed on rank " << view.rank;
    }
    return true;
  }

  void check(const CpuView& view, const Case& c, const Bytes& out, uint64_t offset,
             uint64_t bytes) const {
    EXPECT_EQ(
        first_difference(out.data() + offset, oracle_.expected(c.dtype, c.op), c.numel, c.dtype),
        "")
        << describe(c) << " on rank " << view.rank;
    const auto untouched = [&](uint64_t from, uint64_t to) {
      return std::all_of(out.begin() + int64_t(from), out.begin() + int64_t(to),
                         [](char byte) { return byte == kCanary; });
    };
    EXPECT_TRUE(untouched(0, offset)) << describe(c) << ": bytes before the output";
    EXPECT_TRUE(untouched(offset + bytes, out.size())) << describe(c) << ": bytes behind it";
  }

  Ranks& ranks_;
  const std::vector<Case>& cases_;
  Oracle oracle_;
  std::vector<Bytes> inputs_;
  std::vector<Bytes> outputs_;
};

/// Returns sizes near the borders of parts and chunks.
std::set<uint64_t> telling_sizes(const CpuLayout& layout, const Form& form, DType dtype,
                                 int world) {
  const uint64_t w = uint64_t(world);
  uint64_t bytes = cpu_chunk_bytes(layout, form.algorithm, world);
  if (bytes == 0) bytes = layout.staging_bytes;
  const uint64_t chunk = bytes / uint64_t(dtype_size(dtype));
  return {0, 1, w - 1, w, w + 1, chunk - 1, chunk, chunk + 1, 2 * chunk + 1, 4 * chunk + w + 3};
}

ReduceOp op_of(DType dtype, uint64_t i) {
  const ReduceOp op = kOps[i % std::size(kOps)];
  return op == ReduceOp::avg && !has_sentinel(dtype) ? ReduceOp::sum : op;
}

Case random_case(std::mt19937_64& random, uint64_t most_bytes) {
  const Form& form = forms()[random() % forms().size()];
  const DType dtype = kDTypes[random() % std::size(kDTypes)].dtype;
  const uint64_t most = most_bytes / uint64_t(dtype_size(dtype));
  // Small sizes are as frequent as large ones.
  const uint64_t numel = random() % (random() % 2 != 0 ? most : 40);
  return {dtype, op_of(dtype, random()), form.algorithm, form.symmetric, random() % 3 == 0,
          numel, random() % kMostShift};
}

std::vector<Case> random_cases(uint64_t seed, int count, uint64_t most_bytes) {
  std::mt19937_64 random(seed);
  std::vector<Case> cases;
  for (int i = 0; i < count; ++i) cases.push_back(random_case(random, most_bytes));
  return cases;
}

class CpuAllreduce : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, CpuAllreduce, testing::ValuesIn(worlds()));

TEST_P(CpuAllreduce, every_algorithm_dtype_and_op_gives_the_reference_bits_in_the_smallest_region) {
  Ranks ranks(GetParam(), smallest_cpu_region(GetParam()));
  std::vector<Case> cases;
  uint64_t i = 0;
  for (const Form& form : forms()) {
    for (const DTypeRow& row : kDTypes) {
      const DType dtype = row.dtype;
      for (const ReduceOp op : kOps) {
        if (op != op_of(dtype, size_t(op))) continue;
        cases.push_back(
            {dtype, op, form.algorithm, form.symmetric, ++i % 2 == 0, 301, i % kMostShift});
      }
    }
  }
  CaseRunner(ranks, cases).run();
}

TEST_P(CpuAllreduce, sizes_around_the_borders_of_chunks_and_parts_lose_nothing) {
  Ranks ranks(GetParam(), smallest_cpu_region(GetParam()));
  std::vector<Case> cases;
  uint64_t i = 0;
  for (const Form& form : forms()) {
    for (const DTypeRow& row : kDTypes) {
      const DType dtype = row.dtype;
      for (const uint64_t numel : telling_sizes(ranks.layout(), form, dtype, GetParam())) {
        for (const bool in_place : {false, true}) {
          cases.push_back({dtype, op_of(dtype, i), form.algorithm, form.symmetric, in_place, numel,
                           i % kMostShift});
          ++i;
        }
      }
    }
  }
  CaseRunner(ranks, cases).run();
}

TEST_P(CpuAllreduce, the_default_region_carries_several_chunks_too) {
  if (large_calls_are_slow(GetParam())) GTEST_SKIP() << "takes minutes here";
  Ranks ranks(GetParam());
  std::vector<Case> cases;
  for (const Form& form : forms()) {
    const uint64_t chunk =
        std::max<uint64_t>(cpu_chunk_bytes(ranks.layout(), form.algorithm, GetParam()),
                           ranks.layout().oneshot.slot_bytes);
    const uint64_t numel = chunk / uint64_t(dtype_size(DType::float32));
    for (const uint64_t n : {numel + 1, 2 * numel + 5}) {
      cases.push_back(
          {DType::float32, ReduceOp::sum, form.algorithm, form.symmetric, false, n, n % 5});
    }
  }
  CaseRunner(ranks, cases).run();
}

TEST_P(CpuAllreduce, random_calls_share_one_communicator) {
  const uint64_t seed = 1000 + uint64_t(GetParam());
  SCOPED_TRACE("seed " + std::to_string(seed));
  Ranks ranks(GetParam(), smallest_cpu_region(GetParam()) + (16 << 10));
  const std::vector<Case> cases = random_cases(seed, 600, 12 << 10);
  CaseRunner(ranks, cases).run();
}

TEST_P(CpuAllreduce, random_calls_in_checked_mode) {
  const uint64_t seed = 2000 + uint64_t(GetParam());
  SCOPED_TRACE("seed " + std::to_string(seed));
  Ranks ranks(GetParam(), smallest_cpu_region(GetParam()), kPatientNs, true);
  const std::vector<Case> cases = random_cases(seed, 300, 4 << 10);
  CaseRunner(ranks, cases).run();
}

TEST_P(CpuAllreduce, epochs_wrap_around_unnoticed) {
  const uint64_t seed = 3000 + uint64_t(GetParam());
  SCOPED_TRACE("seed " + std::to_string(seed));
  Ranks ranks(GetParam(), smallest_cpu_region(GetParam()));
  ranks.start_epochs_at(0xFFFFFF00);
  std::vector<Case> cases;
  // 300 calls of each form exceed the wrap-around in every area, including that of the barriers.
  for (int i = 0; i < 300; ++i) {
    for (const Form& form : forms()) {
      const DType dtype = kDTypes[size_t(i) % std::size(kDTypes)].dtype;
      cases.push_back({dtype, op_of(dtype, uint64_t(i)), form.algorithm, form.symmetric, i % 2 == 0,
                       1 + uint64_t(i) % 40, uint64_t(i) % kMostShift});
    }
  }
  CaseRunner(ranks, cases).run();
  if (GetParam() == 1) return;  // no peers, no epochs
  for (size_t c = 0; c < kAreas; ++c) {
    EXPECT_LT(control_of(ranks.region(0), ranks.layout()).epochs[c], 0x80000000u) << c;
  }
  EXPECT_LT(ranks.view(0).header(0)->check_epoch, 0x80000000u);
}

TEST_P(CpuAllreduce, calls_are_counted_and_empty_ones_need_neither_peer_nor_address) {
  Ranks ranks(GetParam());
  const CpuView view = ranks.view(0);
  EXPECT_TRUE(allreduce(view, make_call(nullptr, nullptr, 0, DType::float32, ReduceOp::sum,
                                        Algorithm::twoshot_push)));
  EXPECT_EQ(view.header(0)->sequence, 1u);
}

// Negative control of the comparison: one wrong bit is noticed.
TEST(CpuAllreduceOracle, sees_one_wrong_bit_and_tells_zeros_apart) {
  const float a[2] = {1.0f, 0.0f};
  float b[2] = {1.0f, -0.0f};
  EXPECT_NE(first_difference(a, b, 2, DType::float32), "");
  b[1] = 0.0f;
  EXPECT_EQ(first_difference(a, b, 2, DType::float32), "");
  b[0] = std::nextafter(1.0f, 2.0f);
  EXPECT_NE(first_difference(a, b, 2, DType::float32), "");
}

TEST(CpuRegion, refuses_what_does_not_fit_with_the_numbers_in_words) {
  EXPECT_THROW(layout(0, kDefaultPayloadBytes), std::invalid_argument);
  EXPECT_THROW(layout(kMaxCpuRanks + 1, kDefaultPayloadBytes), std::invalid_argument);
  EXPECT_THROW(layout(4, smallest_cpu_region(4) - 1), std::invalid_argument);
  EXPECT_LE(layout(4, smallest_cpu_region(4)).total_bytes, smallest_cpu_region(4));
}

}  // namespace
}  // namespace collx::cpu
