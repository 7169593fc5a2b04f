// Tests that equal calls have equal fingerprints, and that different calls do not.
#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "protocol/status.h"

namespace collx {
namespace {

CallDescriptor example() {
  CallDescriptor call;
  call.collective = Collective::allreduce;
  call.dtype = DType::bfloat16;
  call.reduce_op = ReduceOp::sum;
  call.algorithm = Algorithm::oneshot_push;
  call.root = 1;
  call.axis = 2;
  call.max_blocks = 8;
  call.dims = 3;
  call.numel = 2 * 3 * 5;
  call.symmetric = 1;
  call.input_offset = 256;
  call.output_offset = 512;
  call.sizes[0] = 2;
  call.sizes[1] = 3;
  call.sizes[2] = 5;
  return call;
}

struct Change {
  std::string name;
  std::function<void(CallDescriptor&)> apply;
};

std::vector<Change> changes() {
  std::vector<Change> all = {
      {"collective", [](CallDescriptor& c) { c.collective = Collective::none; }},
      {"dtype", [](CallDescriptor& c) { c.dtype = DType::float16; }},
      {"reduce op", [](CallDescriptor& c) { c.reduce_op = ReduceOp::avg; }},
      {"algorithm", [](CallDescriptor& c) { c.algorithm = Algorithm::twoshot_push; }},
      {"what runs", [](CallDescriptor& c) { c.runs = Algorithm::channels; }},
      {"a result more", [](CallDescriptor& c) { c.keeps_norm = true; }},
      {"root", [](CallDescriptor& c) { c.root = 0; }},
      {"root, negative", [](CallDescriptor& c) { c.root = -1; }},
      {"axis", [](CallDescriptor& c) { c.axis = 0; }},
      {"axis, negative", [](CallDescriptor& c) { c.axis = -2; }},
      {"max_blocks", [](CallDescriptor& c) { c.max_blocks = 9; }},
      {"dims", [](CallDescriptor& c) { c.dims = 4; }},
      {"numel", [](CallDescriptor& c) { c.numel += 1; }},
      {"numel, high half", [](CallDescriptor& c) { c.numel += 1ull << 32; }},
      {"symmetric input", [](CallDescriptor& c) { c.symmetric = 0; }},
      {"symmetric output", [](CallDescriptor& c) { c.symmetric = 3; }},
      {"input offset", [](CallDescriptor& c) { c.input_offset += 16; }},
      {"output offset", [](CallDescriptor& c) { c.output_offset += 16; }},
      {"epilogue", [](CallDescriptor& c) { c.epilogue += 1; }},
      {"scalar type", [](CallDescriptor& c) { c.scalar_type = 24; }},
      {"another scalar type", [](CallDescriptor& c) { c.scalar_type = 25; }},
      {"sizes in another order", [](CallDescriptor& c) { std::swap(c.sizes[0], c.sizes[1]); }},
  };
  for (int i = 0; i < 8; ++i) {
    all.push_back({"size " + std::to_string(i), [i](CallDescriptor& c) { c.sizes[i] += 1; }});
  }
  return all;
}

TEST(Fingerprint, any_change_of_a_field_changes_it) {
  const uint32_t original = fingerprint(example());
  std::set<uint32_t> seen = {original};
  for (const Change& change : changes()) {
    CallDescriptor call = example();
    change.apply(call);
    EXPECT_TRUE(seen.insert(fingerprint(call)).second) << change.name;
  }
}

TEST(Fingerprint, any_option_of_a_fused_norm_changes_it) {
  CallDescriptor norm = example();
  norm.collective = Collective::allreduce_rmsnorm_fp8;
  const std::vector<std::function<void(NormOptions&)>> options = {
      [](NormOptions&) {},
      [](NormOptions& o) { o.norm = Norm::layer; },
      [](NormOptions& o) { o.rounding = Rounding::parity; },
      [](NormOptions& o) { o.quantization = Quantization::e5m2; },
      [](NormOptions& o) { o.scale_mode = ScaleMode::group; },
      [](NormOptions& o) { o.scale_type = ScaleType::float16; },
      [](NormOptions& o) { o.ue8m0 = true; },
      [](NormOptions& o) { o.column_major = true; },
      [](NormOptions& o) { o.weight_float32 = true; },
      [](NormOptions& o) { o.quant_group_size = 128; },
      [](NormOptions& o) { o.eps = 1e-6f; },
      [](NormOptions& o) { o.weight_offset = 1; },
      [](NormOptions& o) { o.scale_ub = 1; },
  };
  std::set<uint32_t> seen;
  for (const auto& change : options) {
    CallDescriptor call = norm;
    change(call.norm);
    EXPECT_TRUE(seen.insert(fingerprint(call)).second) << "change " << seen.size();
  }
}

TEST(Fingerprint, equal_calls_agree) {
  EXPECT_EQ(fingerprint(example()), fingerprint(example()));
  CallDescriptor call = example();
  call.sends = 7;  // these differ between ranks
  call.expects = 8;
  EXPECT_EQ(fingerprint(call), fingerprint(example()));
}

TEST(Fingerprint, of_a_pair_is_the_same_at_both_ends_when_what_one_sends_the_other_expects) {
  const uint32_t call = fingerprint(example());
  EXPECT_EQ(pair_fingerprint(call, 0, 3, 100, 200), pair_fingerprint(call, 3, 0, 200, 100));
  EXPECT_NE(pair_fingerprint(call, 0, 3, 100, 200), pair_fingerprint(call, 3, 0, 200, 101));
  EXPECT_NE(pair_fingerprint(call, 0, 3, 100, 200), pair_fingerprint(call, 3, 0, 201, 100));
  EXPECT_NE(pair_fingerprint(call, 0, 3, 100, 200), pair_fingerprint(call, 3, 0, 100, 200));
  EXPECT_NE(pair_fingerprint(call, 0, 3, 1, 2), pair_fingerprint(call + 1, 0, 3, 1, 2));
}

TEST(Fingerprint, single_bits_of_sizes_do_not_collide) {
  std::set<uint32_t> seen;
  for (int i = 0; i < 8; ++i) {
    for (int bit = 0; bit < 63; ++bit) {
      CallDescriptor call = example();
      call.sizes[i] ^= int64_t{1} << bit;
      EXPECT_TRUE(seen.insert(fingerprint(call)).second) << "size " << i << ", bit " << bit;
    }
  }
}

// Negative control: a hash that ignores the positions of values would not pass the tests above.
TEST(Fingerprint, a_sum_of_the_fields_would_not_notice_swapped_sizes) {
  const auto sum = [](const CallDescriptor& c) {
    uint64_t total = c.numel;
    for (const int64_t size : c.sizes) total += static_cast<uint64_t>(size);
    return fold(total);
  };
  CallDescriptor swapped = example();
  std::swap(swapped.sizes[0], swapped.sizes[1]);
  EXPECT_EQ(sum(swapped), sum(example()));
  EXPECT_NE(fingerprint(swapped), fingerprint(example()));
}

TEST(Fingerprint, is_the_same_on_host_and_at_compile_time) {
  constexpr uint32_t compiled = fingerprint(CallDescriptor{});
  const CallDescriptor call;
  EXPECT_EQ(fingerprint(call), compiled);
}

}  // namespace
}  // namespace collx
