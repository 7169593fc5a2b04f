// From the tensors of a collective to the backend that carries it out.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "../protocol/geometry.h"
#include "communicator.h"

namespace collx {

struct Epilogue;

/// A call in terms of its unsplit tensor; csrc/protocol/geometry.h says who sends what.
struct Exchange : CallCore {
  Geometry geometry;  // all-reduce only counts elements
  int axis = -1;
  // alltoallv: rows for and from each rank, or where the device has them.
  at::IntArrayRef sent_rows;
  at::IntArrayRef received_rows;
  DeviceSplits splits;

  const char* op() const;
};

/// Additional tensors of some calls, besides input and output.
struct MoreOperands {
  std::shared_ptr<const Epilogue> epilogue = {};  // of reductions; null: none
  /// Where the epilogue's results go that no kernel has in it; otherwise undefined.
  at::Tensor mapped = {};
  std::vector<std::pair<at::Tensor, at::Tensor>> copies = {};  // after all else, {from, to}
  std::vector<at::Tensor> kept = {};                           // what Exchange::splits points to
};

/// Carries the call out on the current stream. `input` and `output` are contiguous. They share
/// nothing, or the op's own in-place forms allow it. `more`: null: none.
void run(const Exchange& exchange, Communicator& communicator, const at::Tensor& input,
         const at::Tensor& output, std::shared_ptr<const MoreOperands> more = {});

}  // namespace collx
