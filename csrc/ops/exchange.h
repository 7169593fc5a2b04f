// Passes a collective with its tensors to the backend that executes it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "../protocol/geometry.h"
#include "communicator.h"

namespace collx {

struct Epilogue;

/// A call in terms of its unsplit tensor; csrc/protocol/geometry.h defines the messages.
struct Exchange : CallCore {
  Geometry geometry;  // all-reduce only counts elements
  int axis = -1;
  // alltoallv: rows to and from each rank, or their location in device memory.
  at::IntArrayRef sent_rows;
  at::IntArrayRef received_rows;
  DeviceSplits splits;

  const char* op() const;
};

/// Additional tensors of some calls, besides input and output.
struct MoreOperands {
  std::shared_ptr<const Epilogue> epilogue = {};  // of reductions; null: none
  /// Receives the results of an epilogue that the kernels do not apply; otherwise undefined.
  at::Tensor mapped = {};
  std::vector<std::pair<at::Tensor, at::Tensor>> copies = {};  // {from, to}; they run last
  std::vector<at::Tensor> kept = {};  // keeps alive the memory to which Exchange::splits points
};

/// Executes the call on the current stream. `input` and `output` are contiguous. They do not
/// overlap unless the in-place form of the op allows it. `more` may be null.
void run(const Exchange& exchange, Communicator& communicator, const at::Tensor& input,
         const at::Tensor& output, std::shared_ptr<const MoreOperands> more = {});

}  // namespace collx
