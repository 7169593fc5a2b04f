#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>

#include <utility>

#include "call.h"
#include "checks.h"
#include "collectives.h"
#include "registry.h"

namespace collx {

using at::Tensor;

namespace {

/// The epilogue of a call whose result has these sizes. Meta kernels use it as well.
std::shared_ptr<Epilogue> make_epilogue(const char* op, const Arguments& a,
                                        std::shared_ptr<const KnownExpression> known,
                                        c10::SymIntArrayRef sizes) {
  check_extras(op, known->expression, a.extras, a.input, sizes);
  auto bound = with_numbers(op, known->expression, a.numbers);
  return std::make_shared<Epilogue>(Epilogue{std::move(known), a.extras, std::move(bound)});
}

void check_value(const Arguments& a, c10::SymIntArrayRef sizes) {
  check_out(a.op(), a.input, sizes, a.results[1], "value");
}

/// An extra is copied if its overlap with a result is unknown.
void check_extras_apart(const Arguments& a, Epilogue& epilogue) {
  constexpr auto kUnknown = at::MemOverlapStatus::TooHard, kNone = at::MemOverlapStatus::No;
  for (size_t i = 0; i < epilogue.extras.size(); ++i) {
    const at::MemOverlapStatus overlap = overlap_of(epilogue.extras[i], a.results[0]);
    const at::MemOverlapStatus with_value =
        epilogue.value.defined() ? overlap_of(epilogue.extras[i], epilogue.value) : kNone;
    TORCH_CHECK_VALUE(with_value == kNone || with_value == kUnknown, "collx.", a.op(), ": extras[",
                      i, "]: overlaps value; accepted: a tensor that shares no memory with it");
    if (overlap == kUnknown || with_value == kUnknown) {
      epilogue.extras[i] = epilogue.extras[i].clone();
      continue;
    }
    epilogue.apart = epilogue.apart && overlap == kNone;
    TORCH_CHECK_VALUE(
        overlap != at::MemOverlapStatus::Partial, "collx.", a.op(), ": extras[", i,
        "]: overlaps out partly, or in another order; accepted: out itself, or a tensor that "
        "shares no memory with it");
  }
}

}  // namespace

Origin origin_of(const Arguments& a) {
  if (keeps_shape(a.collective)) return {};
  const int64_t axis = check_axis(a.op(), a.input, a.axis);
  const CommunicatorOptions& o = registry::require(a.op(), a.group_name)->options();
  const auto units = static_cast<uint64_t>(a.input.size(axis));
  return {axis, static_cast<int64_t>(partition(units, o.world_size, o.rank).start)};
}

Results reduce_and_map(const Operator& op, const Arguments& a) {
  auto known = check_expression(a.op(), a.expression, a.input.scalar_type());
  const Prepared p = prepare_with_shapes(a);
  const auto epilogue = make_epilogue(a.op(), a, std::move(known), p.symbolic_output_sizes());
  const bool with_value = op.outputs.size() == 2;
  if (with_value && op.takes_outputs()) {
    check_value(a, p.symbolic_output_sizes());
    TORCH_CHECK_VALUE(a.results[1].is_contiguous(), "collx.", a.op(), ": value: got strides ",
                      a.results[1].strides(), "; accepted: a contiguous tensor");
    check_disjoint(a.op(), a.input, a.results[1], std::nullopt, "value");
    check_disjoint(a.op(), a.results[0], a.results[1], std::nullopt, "value", "out");
  }
  if (epilogue->known->expression.indices > 0) epilogue->origin = origin_of(a);
  if (op.takes_outputs()) {
    if (with_value) epilogue->value = a.results[1];
    check_extras_apart(a, *epilogue);
    into(p, epilogue, a.results[0]);
    return {};
  }
  if (!with_value) return {into_new(p, epilogue)};
  epilogue->value = make_output(p.output_sizes(), a.input);
  return {into_new(p, epilogue), epilogue->value};
}

Results reduce_and_map_meta(const Operator& op, const Arguments& a) {
  auto known = check_expression(a.op(), a.expression, a.input.scalar_type());
  const Sizes sizes = check_meta(a);
  const at::ScalarType result = make_epilogue(a.op(), a, std::move(known), sizes)->result();
  const bool with_value = op.outputs.size() == 2;
  if (op.takes_outputs()) {
    if (with_value) check_value(a, sizes);
    check_out(a.op(), a.input, sizes, a.results[0], "out", result);
    return {};
  }
  Results results{at::empty_symint(sizes, a.input.options().dtype(result))};
  if (with_value) results.push_back(at::empty_symint(sizes, a.input.options()));
  return results;
}

namespace {

std::shared_ptr<Epilogue> epilogue_alone(const Operator& op, const Arguments& a) {
  auto known = check_expression(op.name.c_str(), a.expression, a.input.scalar_type());
  return make_epilogue(op.name.c_str(), a, std::move(known), a.input.sym_sizes());
}

}  // namespace

Results apply_epilogue(const Operator& op, const Arguments& a) {
  const auto epilogue = epilogue_alone(op, a);
  Tensor out = at::empty(a.input.sizes(), a.input.options().dtype(epilogue->result()));
  apply(epilogue->expression(), a.input, a.extras, {a.axis, a.start}, out);
  return {std::move(out)};
}

Results apply_epilogue_meta(const Operator& op, const Arguments& a) {
  const auto epilogue = epilogue_alone(op, a);
  return {at::empty_symint(a.input.sym_sizes(), a.input.options().dtype(epilogue->result()))};
}

}  // namespace collx
