// From the tensors of any collective but all-reduce to the backend that carries it out.
#pragma once

#include <ATen/core/Tensor.h>

#include "../protocol/geometry.h"
#include "communicator.h"

namespace collx {

/// A call in terms of its unsplit tensor; csrc/protocol/geometry.h says who sends what.
struct Exchange {
  Collective collective;
  Geometry geometry;
  int root = -1;
  int axis = -1;
  Algorithm algorithm = Algorithm::automatic;
  int max_blocks = 0;
  // Reductions.
  DType dtype = DType::uint8;
  ReduceOp reduce_op = ReduceOp::sum;
  const struct Epilogue* epilogue = nullptr;
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
