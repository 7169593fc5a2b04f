// From the tensors of a collective to the backend that carries it out.
#pragma once

#include <ATen/core/Tensor.h>

#include "../protocol/geometry.h"
#include "communicator.h"

namespace collx {

/// A call in terms of its unsplit tensor; csrc/protocol/geometry.h says who sends what.
struct Exchange : CallCore {
  Geometry geometry;  // all-reduce counts elements alone
  int axis = -1;
  const struct Epilogue* epilogue = nullptr;  // of reductions
  // alltoallv: rows for and from each rank, or where the device has them.
  at::IntArrayRef sent_rows;
  at::IntArrayRef received_rows;
  DeviceSplits splits;

  const char* op() const;
};

/// Both tensors are contiguous. They share nothing, or the op's own in-place forms allow it.
void run(const Exchange& exchange, Communicator& communicator, const at::Tensor& input,
         const at::Tensor& output);

}  // namespace collx
