// Tests that fused normalizations have the bits of the contract in every mode, at every vector
// level, with every algorithm and in every region, and that they only write their results.
#include <gtest/gtest.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "norm_case.h"
#include "simd_levels.h"

namespace collx::cpu {
namespace {

/// Runs only the local computation, without communication, and compares its results.
std::string normalized_difference(const NormCase& c, const NormData& data, NormResult expected) {
  NormCall call = make_norm(c, Algorithm::fallback);
  NormOutputs outputs(c, c.rows);
  outputs.put_into(call);
  call.residual = c.residual ? data.residuals[0].data() : nullptr;
  call.weight = data.weight.data();
  call.bias = c.options.norm == Norm::layer ? data.bias.data() : nullptr;
  call.given_scale = c.options.scale_mode == ScaleMode::tensor ? &data.given_scale : nullptr;
  std::vector<const void*> inputs;
  for (const Bytes& input : data.inputs) inputs.push_back(input.data());
  normalize(inputs.data(), int(inputs.size()), call);
  return outputs.compare(std::move(expected));
}

void expect_normalized(const NormCase& c, int world) {
  const NormData data = make_data(c, world);
  const NormResult expected = expected_norm(c, data, world, 0);
  at_every_level([&] {
    EXPECT_EQ(normalized_difference(c, data, expected), "") << describe(c) << " of " << world;
  });
}

TEST(CpuNormalize, every_form_dtype_and_shape_keeps_the_contract) {
  uint64_t i = 0;
  for (NormCase c : norm_forms()) {
    for (const DType dtype : kNormDTypes) {
      for (const uint64_t cols : {1, 8, 16, 100, 384, 512, 1000}) {
        for (const uint64_t rows : {1, 2, 7}) {
          c.dtype = dtype;
          c.rows = rows;
          c.cols = cols;
          c.seed = i++;
          if (!fits(c)) continue;
          expect_normalized(c, 1 + int(i % 4));
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

TEST(CpuNormalize, every_length_of_a_row_has_its_tree) {
  for (const size_t form : {0, 1, 24, 36}) {
    for (uint64_t cols = 1; cols < 300; ++cols) {
      NormCase c = norm_forms()[form];
      c.dtype = kNormDTypes[cols % 3];
      c.cols = cols;
      c.rows = 1;
      c.seed = cols % 3;
      expect_normalized(c, 2);
      if (testing::Test::HasFailure()) return;
    }
  }
  for (const uint64_t cols : {2047, 2048, 2049, 4096, 5000, 12288}) {
    NormCase c = norm_forms()[24];
    c.cols = cols;
    expect_normalized(c, 3);
  }
}

TEST(CpuNormalize, special_rows_are_what_the_operations_make_of_them) {
  uint64_t i = 0;
  for (NormCase c : norm_forms()) {
    c.dtype = kNormDTypes[i % 3];
    c.rows = 24;
    c.cols = 384;
    c.seed = 12 * (++i);
    expect_normalized(c, 2);
    c.options.eps = 0;
    c.seed += 1;
    expect_normalized(c, 1);
    if (testing::Test::HasFailure()) return;
  }
}

#if defined(__x86_64__)
TEST(CpuNormalize, a_caller_that_flushes_subnormals_changes_nothing) {
  for (NormCase c : norm_forms()) {
    c.dtype = DType::float32;
    c.rows = 3;
    c.cols = 128;
    c.options.eps = 0;
    c.seed = 12 * 7 + 5;  // subnormal, huge, tiny
    const NormData data = make_data(c, 2);
    const NormResult expected = expected_norm(c, data, 2, 0);
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040u | 0x6000u);  // flush inputs and results, round toward zero
    const std::string difference = normalized_difference(c, data, expected);
    EXPECT_EQ(_mm_getcsr() & 0xffc0u, (before | 0xe040u) & 0xffc0u);
    _mm_setcsr(before);
    EXPECT_EQ(difference, "") << describe(c);
  }
}
#endif

/// Returns the codes of `values` with a given scale. The input is a row of ones, whose norm is 1,
/// and its weight is the values.
Bytes codes_of(const std::vector<float>& values, Quantization to, float given = 1) {
  NormCase c;
  c.dtype = DType::float32;
  c.rows = 1;
  c.cols = values.size();
  c.options.quantization = to;
  c.options.scale_mode = ScaleMode::tensor;
  c.options.weight_float32 = true;
  c.options.weight_offset = -0.0f;
  NormCall call = make_norm(c, Algorithm::fallback);
  const std::vector<float> ones(values.size(), 1.0f);
  float scale = 0;
  Bytes codes(values.size());
  call.weight = values.data();
  call.given_scale = &given;
  call.quantized = codes.data();
  call.scale = &scale;
  const void* const input = ones.data();
  normalize(&input, 1, call);
  EXPECT_EQ(scale, given);
  return codes;
}

TEST(CpuNormalize, conversions_round_to_the_nearest_code_and_to_even) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  constexpr uint32_t kStep = 37;
#else
  constexpr uint32_t kStep = 1;
#endif
  // All signs, exponents and relevant mantissa bits, with edge cases of the sticky bits.
  const uint32_t endings[] = {0, 1, 0x7ff, 0x800, 0x801, 0xfff};
  std::vector<float> values;
  for (uint32_t high = 0; high < (1u << 20); high += kStep) {
    for (const uint32_t low : endings) values.push_back(std::bit_cast<float>(high << 12 | low));
    if (values.size() < (1 << 18) && high + kStep < (1u << 20)) continue;
    for (const Quantization to : {Quantization::e4m3fn, Quantization::e5m2, Quantization::int8}) {
      Bytes expected;
      for (const float value : values) expected.push_back(char(nearest_code(value, to)));
      at_every_level([&] {
        const Bytes codes = codes_of(values, to);
        for (size_t i = 0; i < values.size(); ++i) {
          ASSERT_EQ(codes[i], expected[i])
              << std::hexfloat << values[i] << " to format " << int(to);
        }
      });
      if (testing::Test::HasFailure()) return;
    }
    values.clear();
  }
}

TEST(CpuNormalize, a_given_scale_divides) {
  for (const Quantization to : {Quantization::e4m3fn, Quantization::e5m2, Quantization::int8}) {
    const std::vector<double> codes = code_values(to);
    for (float scale = 3; scale < 128; scale += 2) {
      // Ties. For some scales, a multiplication by the inverse rounds them differently.
      std::vector<float> values;
      Bytes expected;
      for (size_t i = 1; i < codes.size(); ++i) {
        values.push_back(float((codes[i - 1] + codes[i]) / 2) * scale);
        expected.push_back(char(nearest_code(values.back() / scale, to)));
      }
      at_every_level([&] { EXPECT_EQ(codes_of(values, to, scale), expected) << scale; });
    }
  }
}

TEST(CpuNormReference, knows_the_formats) {
  EXPECT_EQ(code_values(Quantization::e4m3fn).back(), 448);
  EXPECT_EQ(code_values(Quantization::e4m3fn)[1], 0x1p-9);
  EXPECT_EQ(code_values(Quantization::e5m2).back(), 57344);
  EXPECT_EQ(code_values(Quantization::e5m2)[1], 0x1p-16);
  EXPECT_EQ(nearest_code(-1.0f, Quantization::e4m3fn), 0xb8);
  EXPECT_EQ(nearest_code(1.0625f, Quantization::e4m3fn), 0x38);  // a tie
  EXPECT_EQ(nearest_code(1.1875f, Quantization::e4m3fn), 0x3a);
  EXPECT_EQ(nearest_code(-2.5f, Quantization::int8), 0xfe);
  EXPECT_EQ(tree_sum({0x1p24f, 1, 1, 0}), 0x1p24f);
  EXPECT_EQ(tree_sum({1, 1, 0x1p24f}), 0x1p24f + 2);
}

struct Prepared {
  NormCase c;
  NormData data;
  std::vector<NormResult> expected;  // by rank, or one if all ranks have the same
};

/// Runs cases on all ranks. Inputs are overwritten as soon as a call returns, while peers may still
/// be in the call.
class NormRunner {
 public:
  NormRunner(Ranks& ranks, const std::vector<NormCase>& cases) : ranks_(ranks) {
    uint64_t most = 0;
    for (const NormCase& c : cases) {
      Prepared p{c, make_data(c, ranks.world()), {}};
      const int results = scatters_rows(c.collective) ? ranks.world() : 1;
      for (int r = 0; r < results; ++r) {
        p.expected.push_back(expected_norm(c, p.data, ranks.world(), r));
      }
      prepared_.push_back(std::move(p));
      most = std::max(most, c.numel() * c.element());
    }
    inputs_.assign(size_t(ranks.world()), Bytes(most + 64));
  }

  void run() {
    ranks_.run([&](int rank) {
      for (const Prepared& p : prepared_) {
        for (const Form& way : forms_of(only(p.c.collective))) {
          if (!run_case(rank, p, way)) return;
        }
      }
    });
  }

 private:
  bool run_case(int rank, const Prepared& p, const Form& way) {
    const NormCase& c = p.c;
    const uint64_t shift = c.seed % 3 * c.element();
    const auto input_of = [&](int r) { return inputs_[size_t(r)].data() + shift; };
    char* const input = input_of(rank);
    const Bytes& values = p.data.inputs[size_t(rank)];
    std::copy(values.begin(), values.end(), input);
    NormCall call = make_norm(c, way.algorithm, way.symmetric);
    const Part part =
        scatters_rows(c.collective) ? partition(c.rows, ranks_.world(), rank) : Part{0, c.rows};
    NormOutputs outputs(c, part.count);
    outputs.put_into(call);
    call.input = input;
    for (int r = 0; way.symmetric && r < ranks_.world(); ++r) call.peer_input[r] = input_of(r);
    const Bytes& residual = p.data.residuals[size_t(rank)];
    call.residual = c.residual ? residual.data() + part.start * c.cols * c.element() : nullptr;
    call.weight = p.data.weight.data();
    call.bias = c.options.norm == Norm::layer ? p.data.bias.data() : nullptr;
    call.given_scale = c.options.scale_mode == ScaleMode::tensor ? &p.data.given_scale : nullptr;
    const CpuView view = ranks_.view(rank);
    const bool done = norm(view, call);
    std::fill_n(input, values.size(), char(0xff));
    EXPECT_TRUE(done) << describe(c) << " in phase " << int(view.status->by_host.record.phase);
    if (!done) return false;
    EXPECT_EQ(outputs.compare(p.expected[p.expected.size() > 1 ? size_t(rank) : 0]), "")
        << describe(c) << " " << name_of(way.algorithm) << (way.symmetric ? " symmetric" : "")
        << " on rank " << rank << " of " << ranks_.world();
    return true;  // the others wait for this rank
  }

  Ranks& ranks_;
  std::vector<Prepared> prepared_;
  std::vector<Bytes> inputs_;
};

/// Returns the forms that also exist with scattered rows.
std::vector<NormCase> scattering_forms() {
  std::vector<NormCase> forms;
  for (NormCase c : norm_forms()) {
    if (c.options.norm != Norm::rms || c.options.quantization == Quantization::int8) continue;
    c.collective = c.quantizes() ? Collective::reducescatter_residual_rmsnorm_fp8
                                 : Collective::reducescatter_residual_rmsnorm;
    forms.push_back(c);
  }
  return forms;
}

class CpuNorm : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, CpuNorm, testing::Values(1, 2, 3, 4, 8));

constexpr uint64_t kRows[] = {0, 1, 2, 7};
constexpr uint64_t kCols[] = {1, 8, 100, 384, 1000};

/// Returns each form and dtype once, with alternating shapes. More ranks than two only run some of
/// the forms, because more threads than cores are slow.
std::vector<NormCase> forms_in_turn(const std::vector<NormCase>& forms, int world, uint64_t first,
                                    uint64_t most_rows = 7) {
  const uint64_t stride = world > 4 ? 5 : world > 2 ? 2 : 1;
  std::vector<NormCase> cases;
  uint64_t i = first;
  for (NormCase c : forms) {
    for (const DType dtype : kNormDTypes) {
      c.dtype = dtype;
      c.seed = i;
      c.rows = std::min(i % 3 + (i % 11 == 0 ? 5 : 1), most_rows);
      c.cols = kCols[i % 5];
      if (!fits(c)) c.cols = 384;
      if (i++ % stride == 0) cases.push_back(c);
    }
  }
  return cases;
}

TEST_P(CpuNorm, every_form_and_dtype_in_the_smallest_region) {
  Ranks ranks(GetParam(), smallest_cpu_region(GetParam()));
  std::vector<NormCase> cases = forms_in_turn(norm_forms(), GetParam(), 1, 3);
  // A use has 64 bytes in this region, so long rows need many uses.
  for (NormCase& c : cases) {
    if (GetParam() > 4 && c.cols > 100) {
      c.cols = c.options.scale_mode == ScaleMode::group ? 128 : 44;
    }
  }
  NormRunner(ranks, cases).run();
}

TEST_P(CpuNorm, every_form_and_dtype_in_a_larger_region) {
  Ranks ranks(GetParam(), smallest_cpu_region(GetParam()) + (300 << 10));
  NormRunner(ranks, forms_in_turn(norm_forms(), GetParam(), 2)).run();
}

TEST_P(CpuNorm, every_form_with_scattered_rows) {
  Ranks small(GetParam(), smallest_cpu_region(GetParam()));
  NormRunner(small, forms_in_turn(scattering_forms(), GetParam(), 4, 3)).run();
  Ranks large(GetParam());
  NormRunner(large, forms_in_turn(scattering_forms(), GetParam(), 3)).run();
}

TEST_P(CpuNorm, every_shape) {
  Ranks ranks(GetParam(), smallest_cpu_region(GetParam()));
  std::vector<NormCase> cases;
  const std::vector<NormCase> forms = norm_forms(), scattering = scattering_forms();
  uint64_t i = 0;
  for (const uint64_t rows : kRows) {
    for (const uint64_t cols : kCols) {
      if (GetParam() > 4 && rows * cols > 200) continue;
      for (NormCase c : {forms[3], forms[5], forms[24], forms[29], scattering[2], scattering[12]}) {
        c.rows = rows;
        c.cols = cols;
        c.seed = i++;
        cases.push_back(c);
      }
    }
  }
  NormRunner(ranks, cases).run();
}

TEST_P(CpuNorm, many_rows_take_several_batches_and_rows_longer_than_slots_several_pieces) {
  if (large_calls_are_slow(GetParam())) GTEST_SKIP() << "takes minutes here";
  Ranks ranks(GetParam(), smallest_cpu_region(GetParam()) + (100 << 10));
  std::vector<size_t> forms = {2, 30, 31, 34, 35, 60};
  if (large_calls_are_slow(3)) forms = {2, 31};  // under ThreadSanitizer
  std::vector<NormCase> cases;
  uint64_t i = 0;
  for (const auto& [rows, cols] :
       {std::pair<uint64_t, uint64_t>{61, 640}, {200, 128}, {3, 40960}}) {
    for (const size_t form : forms) {
      NormCase c = norm_forms()[form];
      c.rows = rows;
      c.cols = cols;
      c.dtype = kNormDTypes[i % 3];
      c.seed = i++;
      cases.push_back(c);
      if (form % 2 != 0 || c.options.norm != Norm::rms) continue;
      c.collective = Collective::reducescatter_residual_rmsnorm;
      c.options.quantization = Quantization::none;
      cases.push_back(c);
    }
  }
  NormRunner(ranks, cases).run();
}

TEST_P(CpuNorm, checked_calls_and_epochs_that_wrap_around) {
  if (GetParam() > 4) GTEST_SKIP() << "threads that outnumber cores take minutes";
  Ranks ranks(GetParam(), smallest_cpu_region(GetParam()) + (8 << 10), kPatientNs, true);
  ranks.start_epochs_at(0xFFFFFFE0);
  std::vector<NormCase> cases;
  for (NormCase c : forms_in_turn(norm_forms(), GetParam(), 5)) {
    if (c.cols <= 100) cases.push_back(c);
  }
  NormRunner(ranks, cases).run();
}

TEST_P(CpuNorm, calls_without_rows_need_neither_peer_nor_address) {
  Ranks ranks(GetParam());
  const CpuView view = ranks.view(0);
  NormCase c;
  c.rows = 0;
  uint64_t calls = 0;
  for (const Form& way : forms_of(only(c.collective))) {
    EXPECT_TRUE(norm(view, make_norm(c, way.algorithm, way.symmetric)));
    EXPECT_EQ(view.header(0)->sequence, ++calls);
  }
}

TEST(CpuNormPlan, refuses_what_has_no_kernel) {
  Ranks ranks(2);
  NormCase c;
  EXPECT_THROW(norm(ranks.view(0), make_norm(c, Algorithm::staged)), std::invalid_argument);
  c.collective = Collective::reducescatter_residual_rmsnorm;
  EXPECT_THROW(norm(ranks.view(0), make_norm(c, Algorithm::oneshot_pull)), std::invalid_argument);
  c.dtype = DType::float64;
  EXPECT_THROW(norm(ranks.view(0), make_norm(c, Algorithm::staged)), std::invalid_argument);
}

}  // namespace
}  // namespace collx::cpu
