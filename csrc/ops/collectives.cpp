#include "collectives.h"

#include "allreduce.h"
#include "call.h"
#include "checks.h"
#include "epilogue_kernels.h"
#include "registry.h"

namespace collx {

namespace {

/// Parts of an unsplit tensor, which is the one of the two that is divided.
void use_parts(const Given& given, Prepared& p) {
  const char* const op = given.op();
  const CommunicatorOptions& o = p.communicator->options();
  check_group(op, given.group_size, *p.communicator);
  p.sizes = result_sizes(given);
  const bool equal = has_equal_parts(given.collective);
  const int64_t axis = equal ? 0 : check_axis(op, given.input, given.axis);
  const bool grows = row_of(given.collective).input == Extent::part;
  Exchange& e = p.exchange;
  e.axis = static_cast<int>(axis);
  e.geometry =
      geometry_of(grows ? p.output_sizes() : given.input.sizes(), axis, given.input.element_size());
  if (given.total) {
    const uint64_t own = partition(e.geometry.units, o.world_size, o.rank).count;
    TORCH_CHECK_VALUE(own == static_cast<uint64_t>(given.input.size(axis)), "collx.", op,
                      ": total: got ", *given.total, " with an input of ", given.input.size(axis),
                      " along axis ", axis, "; accepted on rank ", o.rank, " of ", o.world_size,
                      " with that total: ", own);
  }
  if (!equal && e.geometry.outer == 1) {
    p.own_part = static_cast<int64_t>(part_span(e.geometry, o.world_size, o.rank).offset);
  }
}

void use_splits(const Given& given, Prepared& p) {
  const char* const op = given.op();
  const CommunicatorOptions& o = p.communicator->options();
  p.sizes = result_sizes(given);
  Exchange& e = p.exchange;
  e.sent_rows = C10_AS_INTARRAYREF_SLOW(given.input_splits);
  e.received_rows = C10_AS_INTARRAYREF_SLOW(given.output_splits);
  TORCH_CHECK_VALUE(e.sent_rows.size() == static_cast<size_t>(o.world_size), "collx.", op,
                    ": input_splits: got ", e.sent_rows.size(),
                    " numbers; accepted: one for each rank of \"", o.name, "\", ", o.world_size);
  const auto rank = static_cast<size_t>(o.rank);
  TORCH_CHECK_VALUE(e.sent_rows[rank] == e.received_rows[rank], "collx.", op,
                    ": output_splits: got ", e.received_rows[rank], " rows from rank ", rank,
                    " itself; accepted: what input_splits says for it, ", e.sent_rows[rank]);
  e.axis = 0;
  e.geometry = rows_of(given.input);
}

Prepared prepare_with_shapes(const Given& given) {
  Prepared p = prepare(given);
  if (row_of(given.collective).counted) {
    use_splits(given, p);
  } else if (has_parts(given.collective)) {
    use_parts(given, p);
  } else if (given.collective != Collective::allreduce) {  // which counts elements alone
    p.exchange.geometry = undivided(given.input);
  }
  return p;
}

/// Both are contiguous.
void carry_out_all(const Prepared& p, const at::Tensor& input, const at::Tensor& output) {
  const Exchange& e = p.exchange;
  if (e.collective != Collective::allreduce) return run(e, *p.communicator, input, output);
  run_allreduce(*p.communicator, {e.dtype, e.reduce_op, e.algorithm, e.max_blocks, e.epilogue},
                input, output);
}

/// With the epilogue: in the kernels, or behind them.
void carry_out(const Prepared& p, const at::Tensor& input, const at::Tensor& output) {
  const Epilogue* const epilogue = p.exchange.epilogue;
  if (epilogue == nullptr || in_kernels(*p.communicator, p.exchange.algorithm)) {
    return carry_out_all(p, input, output);
  }
  if (getting_ready()) return;
  const bool here = output.scalar_type() == input.scalar_type() && epilogue->apart;
  const at::Tensor value = epilogue->value != nullptr ? *epilogue->value
                           : here                     ? output
                                                      : make_output(output.sizes(), input);
  carry_out_all(p, input, value);
  apply(epilogue->expression(), value, epilogue->extras, epilogue->origin, output);
}

/// Of the epilogue, where there is one.
std::optional<at::ScalarType> result_dtype(const Given& given) {
  return given.epilogue ? std::optional(given.epilogue->result()) : std::nullopt;
}

/// Through a temporary where `out` has another order, or holes.
void into_dense(const Prepared& p, at::Tensor& out) {
  const OnDevice guard(p.input.device());
  const auto input = p.input.expect_contiguous();
  if (out.is_contiguous()) return carry_out(p, *input, out);
  const at::Tensor dense = make_output(p.output_sizes(), p.input, out.scalar_type());
  carry_out(p, *input, dense);
  out.copy_(dense);
}

}  // namespace

at::IntArrayRef Prepared::output_sizes() const {
  return keeps_shape(exchange.collective) ? input.sizes()
                                          : C10_AS_INTARRAYREF_SLOW(c10::SymIntArrayRef(sizes));
}

Prepared prepare(const Given& given) {
  const char* const op = given.op();
  const at::Tensor& input = given.input;
  Prepared p{input, {}, nullptr, {}, std::nullopt};
  Exchange& e = p.exchange;
  e.collective = given.collective;
  if (is_reduction(given.collective)) {
    const ReductionOptions o = check_reduction(given.collective, input, given.reduce_op,
                                               given.algorithm, given.max_blocks);
    e.dtype = o.dtype;
    e.reduce_op = o.reduce_op;
    e.algorithm = o.algorithm;
    e.max_blocks = o.max_blocks;
    e.epilogue = given.epilogue;
  } else {
    check_copyable(op, "input", input);
    e.algorithm = check_algorithm(op, given.collective, given.algorithm);
    e.max_blocks = check_max_blocks(op, given.max_blocks);
  }
  p.communicator = registry::require(op, given.group_name);
  check_device(op, "input", input, *p.communicator);
  p.communicator->require_usable(op);
  if (has_root(given.collective)) {
    check_root(op, given.root, p.communicator->options().world_size);
    e.root = static_cast<int>(given.root);
  }
  return p;
}

at::Tensor into_new(const Given& given) {
  const Prepared p = prepare_with_shapes(given);
  const OnDevice guard(given.input.device());
  at::Tensor output = make_output(p.output_sizes(), given.input,
                                  result_dtype(given).value_or(given.input.scalar_type()));
  carry_out(p, *given.input.expect_contiguous(), output);
  return output;
}

void into_like(const Given& given, at::Tensor& out) {
  const Prepared p = prepare_with_shapes(given);
  check_out(given.op(), given.input, given.input.sym_sizes(), out, "out", result_dtype(given));
  if (out.scalar_type() == given.input.scalar_type()) {
    check_overlap(given.op(), given.input, out);
  } else {
    check_disjoint(given.op(), given.input, out, std::nullopt);
  }
  into_dense(p, out);
}

void into_apart(const Given& given, at::Tensor& out) {
  const Prepared p = prepare_with_shapes(given);
  check_out(given.op(), given.input, p.sizes, out, "out", result_dtype(given));
  const bool same = out.scalar_type() == given.input.scalar_type();
  check_disjoint(given.op(), given.input, out, same ? p.own_part : std::nullopt);
  into_dense(p, out);
}

void in_place(const Given& given) {
  const Prepared p = prepare_with_shapes(given);
  const at::Tensor& input = given.input;
  check_writable(given.op(), "input", input);
  const OnDevice guard(input.device());
  if (input.is_contiguous()) return carry_out(p, input, input);
  const at::Tensor dense = input.contiguous();
  carry_out(p, dense, dense);
  input.copy_(dense);
}

}  // namespace collx
