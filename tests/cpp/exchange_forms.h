// Every form that a collective can take on CPU, and cases of each.
#pragma once

#include <random>

#include "exchange_case.h"

namespace collx::cpu {

struct Form {
  Collective collective;
  Algorithm algorithm;
  bool symmetric;
  bool device_splits = false;
};

inline constexpr Form kExchangeForms[] = {
    {Collective::reducescatter, Algorithm::staged, false},
    {Collective::reducescatter, Algorithm::direct, true},
    {Collective::allgather, Algorithm::staged, false},
    {Collective::allgather, Algorithm::direct, true},
    {Collective::broadcast, Algorithm::onestage, false},
    {Collective::broadcast, Algorithm::onestage, true},
    {Collective::broadcast, Algorithm::twostage, false},
    {Collective::broadcast, Algorithm::twostage, true},
    {Collective::broadcast, Algorithm::pipelined, false},
    {Collective::broadcast, Algorithm::pipelined, true},
    {Collective::reduce, Algorithm::staged, false},
    {Collective::reduce, Algorithm::direct, true},
    {Collective::gather, Algorithm::staged, false},
    {Collective::gather, Algorithm::direct, true},
    {Collective::scatter, Algorithm::staged, false},
    {Collective::scatter, Algorithm::direct, true},
    {Collective::alltoall, Algorithm::staged, false},
    {Collective::alltoall, Algorithm::direct, true},
    {Collective::alltoallv, Algorithm::staged, false},
    {Collective::alltoallv, Algorithm::staged, false, true},
};

inline constexpr Form kOtherForms[] = {
    {Collective::allreduce, Algorithm::oneshot_push, false},
    {Collective::allreduce, Algorithm::twoshot_push, false},
    {Collective::allreduce, Algorithm::oneshot_pull, false},
    {Collective::allreduce, Algorithm::twoshot_pull, false},
    {Collective::allreduce, Algorithm::oneshot_pull, true},
    {Collective::allreduce, Algorithm::twoshot_pull, true},
    {Collective::allreduce, Algorithm::pull_push, true},
    {Collective::barrier, Algorithm::automatic, false},
};

inline constexpr DType kDTypes[] = {DType::float32, DType::float16, DType::bfloat16, DType::float64,
                                    DType::int32,   DType::int64,   DType::int8,     DType::uint8};
inline constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::avg, ReduceOp::max, ReduceOp::min,
                                    ReduceOp::prod};

inline ReduceOp op_of(DType dtype, uint64_t i) {
  const ReduceOp op = kOps[i % std::size(kOps)];
  return op == ReduceOp::avg && !has_sentinel(dtype) ? ReduceOp::sum : op;
}

/// Equal parts along the first dimension only.
inline bool is_equal_parts(Collective c) {
  return c == Collective::gather || c == Collective::scatter || c == Collective::alltoall;
}
inline bool has_axis(Collective c) {
  return c == Collective::reducescatter || c == Collective::allgather;
}
inline bool allows_in_place(const Case& c) {
  if (has_axis(c.collective)) return c.shape.outer == 1;
  if (c.collective == Collective::alltoall) return c.algorithm != Algorithm::direct;
  return c.collective == Collective::broadcast || c.collective == Collective::reduce ||
         c.collective == Collective::allreduce;
}

/// A call of that form. The rest of the case is the same in all forms.
inline Case case_of(const Form& form, int world, const Geometry& shape, DType dtype,
                    uint64_t salt) {
  Case c;
  c.collective = form.collective;
  c.algorithm = form.algorithm;
  c.symmetric = form.symmetric;
  c.device_splits = form.device_splits;
  c.dtype = dtype;
  c.op = op_of(dtype, salt);
  c.shift = salt;
  c.shape = shape;
  if (!has_axis(c.collective)) c.shape = {1, shape.outer * shape.units, shape.inner};
  if (is_equal_parts(c.collective)) {
    c.shape.units = round_up(c.shape.units, static_cast<uint64_t>(world));
  }
  if (has_root(c.collective)) c.root = static_cast<int>(salt % static_cast<uint64_t>(world));
  c.in_place = salt % 2 != 0 && allows_in_place(c);
  if (c.collective != Collective::alltoallv) return c;
  std::mt19937_64 random(salt);
  c.row_bytes = shape.inner;
  c.spare_rows = form.device_splits ? random() % 4 : 0;
  const uint64_t most = ceil_div(shape.outer * shape.units, static_cast<uint64_t>(world)) + 1;
  for (int pair = 0; pair < world * world; ++pair) {
    c.rows.push_back(random() % 3 == 0 ? 0 : random() % most);
  }
  return c;
}

inline Case random_case(std::mt19937_64& random, const Form& form, int world, uint64_t most_bytes) {
  const DType dtype = kDTypes[random() % std::size(kDTypes)];
  const uint64_t element = static_cast<uint64_t>(dtype_size(dtype));
  Geometry shape;
  shape.outer = random() % 3 == 0 ? 1 + random() % 5 : 1;
  shape.inner = element * (random() % 2 != 0 ? 1 : 1 + random() % 40);
  // Small sizes as often as large ones.
  const uint64_t most = std::max<uint64_t>(1, most_bytes / shape.outer / shape.inner);
  shape.units = random() % 2 != 0 ? random() % most : random() % 12;
  return case_of(form, world, shape, dtype, random());
}

}  // namespace collx::cpu
