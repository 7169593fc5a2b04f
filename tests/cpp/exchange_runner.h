// Runs cases in order on one communicator and then checks every byte of the outputs, the inputs and
// the memory around them.
#pragma once

#include <gtest/gtest.h>

#include <random>

#include "exchange_case.h"

namespace collx::cpu {

/// Each rank refills its tensors as soon as its own call returns, so that the test notices a peer
/// that still reads or writes them.
class CaseRunner {
 public:
  using Delay = std::function<void(int rank, size_t index)>;

  CaseRunner(Ranks& ranks, const std::vector<Case>& cases) : ranks_(ranks), cases_(cases) {
    uint64_t most = 0;
    for (const Case& c : cases) most = std::max(most, used_bytes(c));
    std::mt19937_64 random(20240607u + unsigned(world()));
    // The inputs of successive cases start at different places.
    values_.assign(size_t(world()), Bytes(most + 8 * kPlaces));
    for (Bytes& values : values_) {
      for (char& byte : values) byte = char(random());
    }
    inputs_.assign(size_t(world()), Bytes(most));
    outputs_ = inputs_;
    // The reference is slow, so the ranks share a result that is the same on all of them.
    shared_.resize(cases.size());
    for (size_t i = 0; i < cases.size(); ++i) {
      if (!is_same_everywhere(cases[i])) continue;
      shared_[i] = expected_output(cases[i], world(), 0, values_of(i));
    }
  }

  void run(const Delay& delay = {}) {
    ranks_.run([&](int rank) {
      for (size_t i = 0; i < cases_.size(); ++i) {
        if (delay) delay(rank, i);
        if (!run_case(ranks_.view(rank), cases_[i], i)) return;
      }
    });
  }

 private:
  static constexpr char kCanary = 0x5a;
  static constexpr uint64_t kGuardBytes = 128;  // before and after every tensor
  static constexpr uint64_t kMostShift = 8;
  static constexpr uint64_t kPlaces = 61;

  struct Place {
    std::vector<Bytes>* tensors;
    uint64_t offset;
    char* of(int rank) const { return (*tensors)[size_t(rank)].data() + offset; }
  };

  int world() const { return ranks_.world(); }

  /// Returns the used bytes at the start of a buffer: the largest tensor of any rank and its
  /// guards.
  uint64_t used_bytes(const Case& c) const {
    uint64_t most = 0;
    for (int r = 0; r < world(); ++r) {
      most = std::max({most, input_bytes(c, world(), r), output_bytes(c, world(), r)});
    }
    return most + 2 * kGuardBytes + 8 * kMostShift;
  }
  const char* value(int rank, size_t index) const {
    return values_[size_t(rank)].data() + 8 * (index % kPlaces);
  }
  std::vector<const char*> values_of(size_t index) const {
    std::vector<const char*> values;
    for (int r = 0; r < world(); ++r) values.push_back(value(r, index));
    return values;
  }
  static bool is_same_everywhere(const Case& c) {
    return is_reduction(c.collective) && !has_root(c.collective) && keeps_shape(c.collective);
  }
  Place input_place(const Case& c) {
    return {&inputs_, kGuardBytes + c.shift % kMostShift * c.element()};
  }
  Place output_place(const Case& c) {
    if (c.in_place) return input_place(c);
    return {&outputs_, kGuardBytes + (c.shift + 3) % kMostShift * c.element()};
  }

  /// In place, the smaller tensor is a part of the larger one.
  char* input_of(const Case& c, int rank) {
    const bool inside = c.in_place && c.collective == Collective::allgather;
    return input_place(c).of(rank) + (inside ? own_offset(c, world(), rank) : 0);
  }
  char* output_of(const Case& c, int rank) {
    const bool inside = c.in_place && c.collective == Collective::reducescatter;
    return output_place(c).of(rank) + (inside ? own_offset(c, world(), rank) : 0);
  }

  bool run_case(const CpuView& view, const Case& c, size_t index) {
    const size_t me = size_t(view.rank);
    char* const input = input_of(c, view.rank);
    const uint64_t used = used_bytes(c);
    std::fill_n(inputs_[me].begin(), used, kCanary);
    std::fill_n(outputs_[me].begin(), used, kCanary);
    std::memcpy(input, value(view.rank, index), input_bytes(c, world(), view.rank));
    Bytes wanted_inputs(inputs_[me].begin(), inputs_[me].begin() + int64_t(used));
    Bytes wanted_outputs(used, kCanary);
    if (!carry_out(view, c)) {
      ADD_FAILURE() << describe(c) << " failed on rank " << view.rank << " in phase "
                    << int(view.status->by_host.record.phase) << " of failure "
                    << int(view.status->by_host.record.failure);
      return false;
    }
    Bytes& wanted = c.in_place ? wanted_inputs : wanted_outputs;
    const Bytes& got = c.in_place ? inputs_[me] : outputs_[me];
    expect(view, c, index, uint64_t(output_of(c, view.rank) - got.data()), got, wanted);
    EXPECT_TRUE(std::equal(wanted_inputs.begin(), wanted_inputs.end(), inputs_[me].begin()))
        << describe(c) << ": bytes of or around the input on rank " << view.rank << ", case "
        << index;
    EXPECT_TRUE(std::equal(wanted_outputs.begin(), wanted_outputs.end(), outputs_[me].begin()))
        << describe(c) << ": bytes of or around the output on rank " << view.rank << ", case "
        << index;
    return !testing::Test::HasFailure();
  }

  /// Stores the expected output in `wanted`.
  void expect(const CpuView& view, const Case& c, size_t index, uint64_t offset, const Bytes& got,
              Bytes& wanted) const {
    Bytes output = is_same_everywhere(c) ? shared_[index]
                                         : expected_output(c, world(), view.rank, values_of(index));
    if (is_reduced(c, view.rank)) {
      const uint64_t numel = output.size() / c.element();
      EXPECT_EQ(first_difference(got.data() + offset, output.data(), numel, c.dtype), "")
          << describe(c) << " on rank " << view.rank << ", case " << index;
      output.assign(got.begin() + int64_t(offset), got.begin() + int64_t(offset + output.size()));
    }
    std::copy(output.begin(), output.end(), wanted.begin() + int64_t(offset));
  }

  bool carry_out(const CpuView& view, const Case& c) {
    const Places places{[&](int rank) { return input_of(c, rank); },
                        [&](int rank) { return output_of(c, rank); }};
    if (!c.device_splits) return cpu::carry_out(view, c, places);
    std::vector<int64_t> sent, expected, received(size_t(world()), -7);
    for (int r = 0; r < world(); ++r) {
      sent.push_back(int64_t(c.rows_between(world(), view.rank, r)));
      expected.push_back(int64_t(c.rows_between(world(), r, view.rank)));
    }
    const bool done = cpu::carry_out(view, c, places, [&](Call& made) {
      auto& call = static_cast<ExchangeCall&>(made);
      // The caller does not know the sizes of the messages.
      std::fill_n(call.sends, world(), 0);
      std::fill_n(call.expects, world(), 0);
      call.longest = 0;
      call.splits = {sent.data(), received.data(), c.row_bytes, rows_sent(c, world(), view.rank),
                     rows_received(c, world(), view.rank) + c.spare_rows};
    });
    EXPECT_TRUE(!done || received == expected) << describe(c) << " on rank " << view.rank;
    return done;
  }

  Ranks& ranks_;
  const std::vector<Case>& cases_;
  std::vector<Bytes> values_;
  std::vector<Bytes> shared_;
  std::vector<Bytes> inputs_;
  std::vector<Bytes> outputs_;
};

}  // namespace collx::cpu
