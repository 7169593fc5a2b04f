#include "collectives.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "call.h"
#include "checks.h"
#include "epilogue_kernels.h"
#include "registry.h"

namespace collx {

namespace {

/// Prepares a call in which one of the two tensors is unsplit and divided into parts.
void use_parts(const Arguments& a, Prepared& p) {
  const char* const op = a.op();
  const CommunicatorOptions& o = p.communicator->options();
  check_group(op, a.group_size, *p.communicator);
  p.sizes = result_sizes(a);
  const bool equal = has_equal_parts(a.collective);
  const int64_t axis = equal ? 0 : check_axis(op, a.input, a.axis);
  const bool grows = row_of(a.collective).input == Extent::part;
  Exchange& e = p.exchange;
  e.axis = static_cast<int>(axis);
  e.geometry =
      geometry_of(grows ? p.output_sizes() : a.input.sizes(), axis, a.input.element_size());
  if (a.total) {
    const uint64_t own = partition(e.geometry.units, o.world_size, o.rank).count;
    TORCH_CHECK_VALUE(own == static_cast<uint64_t>(a.input.size(axis)), "collx.", op,
                      ": total: got ", *a.total, " with an input of ", a.input.size(axis),
                      " along axis ", axis, "; accepted on rank ", o.rank, " of ", o.world_size,
                      " with that total: ", own);
  }
  if (!equal && e.geometry.outer == 1) {
    p.own_part = static_cast<int64_t>(part_span(e.geometry, o.world_size, o.rank).offset);
  }
}

void use_splits(const Arguments& a, Prepared& p) {
  const char* const op = a.op();
  const CommunicatorOptions& o = p.communicator->options();
  p.sizes = result_sizes(a);
  Exchange& e = p.exchange;
  e.sent_rows = C10_AS_INTARRAYREF_SLOW(c10::SymIntArrayRef(a.input_splits));
  e.received_rows = C10_AS_INTARRAYREF_SLOW(c10::SymIntArrayRef(a.output_splits));
  TORCH_CHECK_VALUE(e.sent_rows.size() == static_cast<size_t>(o.world_size), "collx.", op,
                    ": input_splits: got ", e.sent_rows.size(),
                    " numbers; accepted: one for each rank of \"", o.name, "\", ", o.world_size);
  const auto rank = static_cast<size_t>(o.rank);
  TORCH_CHECK_VALUE(e.sent_rows[rank] == e.received_rows[rank], "collx.", op,
                    ": output_splits: got ", e.received_rows[rank], " rows from rank ", rank,
                    " itself; accepted: the number in input_splits, ", e.sent_rows[rank]);
  e.axis = 0;
  e.geometry = rows_of(a.input);
}

using More = std::shared_ptr<MoreOperands>;

/// Executes the call and the epilogue, if it is not null: in the kernels, or after them.
void carry_out(const Prepared& p, const std::shared_ptr<const Epilogue>& epilogue,
               const at::Tensor& input, const at::Tensor& output, More more = {}) {
  if (epilogue == nullptr) return run(p.exchange, *p.communicator, input, output, std::move(more));
  if (more == nullptr) more = std::make_shared<MoreOperands>();
  more->epilogue = epilogue;
  if (in_kernels(*p.communicator, p.exchange.algorithm)) {
    return run(p.exchange, *p.communicator, input, output, std::move(more));
  }
  if (getting_ready()) return;
  const bool here = output.scalar_type() == input.scalar_type() && epilogue->apart;
  const at::Tensor value = epilogue->value.defined() ? epilogue->value
                           : here                    ? output
                                                     : make_output(output.sizes(), input);
  more->mapped = output;
  run(p.exchange, *p.communicator, input, value, std::move(more));
}

/// The result dtype of the epilogue, if there is one.
std::optional<at::ScalarType> dtype_of(const std::shared_ptr<const Epilogue>& epilogue) {
  return epilogue != nullptr ? std::optional(epilogue->result()) : std::nullopt;
}

More copy_at_last(const at::Tensor& from, const at::Tensor& to) {
  More more = std::make_shared<MoreOperands>();
  more->copies = {{from, to}};
  return more;
}

/// Uses a temporary if `out` is not contiguous.
void into_dense(const Prepared& p, const std::shared_ptr<const Epilogue>& epilogue,
                const at::Tensor& out) {
  const auto input = p.input.expect_contiguous();
  if (out.is_contiguous()) return carry_out(p, epilogue, *input, out);
  const at::Tensor dense = make_output(p.output_sizes(), p.input, out.scalar_type());
  carry_out(p, epilogue, *input, dense, copy_at_last(dense, out));
}

}  // namespace

Prepared prepare(const Arguments& a) {
  const char* const op = a.op();
  const at::Tensor& input = a.input;
  Prepared p{input, {}, nullptr, {}, std::nullopt};
  Exchange& e = p.exchange;
  static_cast<CallCore&>(e) = check_core(a);
  p.communicator = registry::require(op, a.group_name, input.device());
  check_device(op, "input", input, *p.communicator);
  p.communicator->require_usable(op);
  if (has_root(a.collective)) {
    check_root(op, a.root, p.communicator->options().world_size);
    e.root = static_cast<int>(a.root);
  }
  return p;
}

Prepared prepare_with_shapes(const Arguments& a) {
  Prepared p = prepare(a);
  if (row_of(a.collective).counted) {
    use_splits(a, p);
  } else if (has_parts(a.collective)) {
    use_parts(a, p);
  } else if (a.collective != Collective::allreduce) {  // all-reduce only counts elements
    p.exchange.geometry = undivided(a.input);
  }
  return p;
}

at::Tensor into_new(const Prepared& p, const std::shared_ptr<const Epilogue>& epilogue) {
  at::Tensor output =
      make_output(p.output_sizes(), p.input, dtype_of(epilogue).value_or(p.input.scalar_type()));
  carry_out(p, epilogue, *p.input.expect_contiguous(), output);
  return output;
}

void into(const Prepared& p, const std::shared_ptr<const Epilogue>& epilogue,
          const at::Tensor& out) {
  const char* const op = p.exchange.op();
  const bool same = out.scalar_type() == p.input.scalar_type();
  check_out(op, p.input, p.symbolic_output_sizes(), out, "out", dtype_of(epilogue));
  if (keeps_shape(p.exchange.collective) && same) {
    check_overlap(op, p.input, out);
  } else {
    check_disjoint(op, p.input, out, same ? p.own_part : std::nullopt);
  }
  into_dense(p, epilogue, out);
}

namespace {

void in_place(const Prepared& p) {
  check_writable(p.exchange.op(), "input", p.input);
  if (p.input.is_contiguous()) return carry_out(p, nullptr, p.input, p.input);
  const at::Tensor dense = p.input.contiguous();
  carry_out(p, nullptr, dense, dense, copy_at_last(dense, p.input));
}

}  // namespace

Results exchange(const Operator& op, const Arguments& a) {
  const Prepared p = prepare_with_shapes(a);
  switch (op.form) {
    case Form::functional: return {into_new(p, nullptr)};
    case Form::out: into(p, nullptr, a.results[0]); break;
    case Form::in_place: in_place(p);
  }
  return {};
}

Sizes check_meta(const Arguments& a) {
  const char* const op = a.op();
  check_core(a);
  Sizes sizes = result_sizes(a);
  if (has_root(a.collective)) {
    // Without group_size, the size of the group is not known here.
    check_root(op, a.root, has_parts(a.collective) ? static_cast<int>(a.group_size) : kMaxRanks);
  }
  return sizes;
}

Results exchange_meta(const Operator& op, const Arguments& a) {
  const Sizes sizes = check_meta(a);
  if (op.form == Form::functional) return {at::empty_symint(sizes, a.input.options())};
  if (op.form == Form::out) check_out(a.op(), a.input, sizes, a.results[0]);
  return {};
}

}  // namespace collx
