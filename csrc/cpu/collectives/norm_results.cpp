#include "norm_results.h"

#include <algorithm>
#include <cstring>

#include "norm_rows.h"

namespace collx::cpu {
namespace {

struct Section {
  char* first;
  uint64_t bytes;  // of a row
};
struct Sections {
  Section dense[3];
};

Sections sections_of(const NormCall& call) {
  const uint64_t values = call.cols * static_cast<uint64_t>(dtype_size(call.dtype));
  const auto section = [](void* tensor, uint64_t bytes) {
    return Section{static_cast<char*>(tensor), tensor == nullptr ? 0 : bytes};
  };
  return {section(call.residual_out, values), section(call.normalized, values),
          section(call.quantized, call.cols)};
}

}  // namespace

NormResults::NormResults(const NormCall& call, CopyKernel copy) : call_(call), copy_(copy) {
  const RowScales scales = scales_of(call, call.rows, 0);
  row_bytes_ = scales.count * scales.bytes;
  for (const Section& section : sections_of(call).dense) row_bytes_ += section.bytes;
}

/// Calls move(address, bytes) for each run of the message, in order. Scales are moved one by one.
template <typename Move>
void NormResults::visit(uint64_t first_row, uint64_t from, uint64_t bytes, Move move) const {
  const Sections sections = sections_of(call_);
  uint64_t row = first_row + from / std::max<uint64_t>(row_bytes_, 1);
  uint64_t at = row_bytes_ == 0 ? 0 : from % row_bytes_;  // offset within the row
  for (; bytes > 0; ++row, at = 0) {
    const RowScales scales = scales_of(call_, call_.rows, row);
    uint64_t start = scales.count * scales.bytes;  // of the section within the row
    for (; at < start && bytes > 0; at += scales.bytes, bytes -= scales.bytes) {
      move(scales.first + at / scales.bytes * scales.stride, scales.bytes);
    }
    for (const Section& section : sections.dense) {
      const uint64_t end = start + section.bytes;
      if (at < end && bytes > 0) {
        const uint64_t run = std::min(bytes, end - at);
        move(section.first + row * section.bytes + (at - start), run);
        at += run;
        bytes -= run;
      }
      start = end;
    }
  }
}

void NormResults::pack(char* to, uint64_t first_row, uint64_t from, uint64_t bytes) const {
  visit(first_row, from, bytes, [&](const char* run, uint64_t length) {
    copy_(to, run, length);
    to += length;
  });
}

void NormResults::unpack(const char* from, uint64_t first_row, uint64_t at, uint64_t bytes) const {
  visit(first_row, at, bytes, [&](char* run, uint64_t length) {
    copy_(run, from, length);
    from += length;
  });
}

}  // namespace collx::cpu
