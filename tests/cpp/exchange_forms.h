// Cases of every form of a collective.
#pragma once

#include <random>

#include "exchange_case.h"
#include "forms.h"

namespace collx::cpu {

/// Every form of a collective with tensors, except the fused norms.
inline const std::vector<Form>& tensor_forms() {
  static const std::vector<Form> forms = forms_of(kExchanges | only(Collective::allreduce));
  return forms;
}

inline ReduceOp op_of(DType dtype, uint64_t i) {
  const ReduceOp op = kOps[i % std::size(kOps)];
  return op == ReduceOp::avg && !has_sentinel(dtype) ? ReduceOp::sum : op;
}

/// Whether the parts are equal and along the first dimension.
inline bool is_equal_parts(Collective c) {
  return c == Collective::gather || c == Collective::scatter || c == Collective::alltoall;
}
inline bool has_axis(Collective c) {
  return c == Collective::reducescatter || c == Collective::allgather;
}
inline bool allows_in_place(const Case& c) {
  if (has_axis(c.collective)) return c.shape.outer == 1;
  return keeps_shape(c.collective) &&
         !(needs_symmetric(c.algorithm) && overwrites_in_place(c.collective));
}

/// Returns a call of a form. The rest of the case is the same for all forms.
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
  const DType dtype = kDTypes[random() % std::size(kDTypes)].dtype;
  const uint64_t element = static_cast<uint64_t>(dtype_size(dtype));
  Geometry shape;
  shape.outer = random() % 3 == 0 ? 1 + random() % 5 : 1;
  shape.inner = element * (random() % 2 != 0 ? 1 : 1 + random() % 40);
  // Small sizes are as frequent as large ones.
  const uint64_t most = std::max<uint64_t>(1, most_bytes / shape.outer / shape.inner);
  shape.units = random() % 2 != 0 ? random() % most : random() % 12;
  return case_of(form, world, shape, dtype, random());
}

}  // namespace collx::cpu
