#include "mapped.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>

#include <utility>

#include "checks.h"
#include "registry.h"

namespace collx {

using at::Tensor;

Epilogue Mapped::check() {
  known = check_expression(op(), text, given.input.scalar_type());
  sizes = check_meta(given);
  check_extras(op(), known->expression, extras, given.input, sizes);
  return {*known, extras, with_numbers(op(), known->expression, numbers)};
}

Origin origin_of(const Given& given) {
  if (given.collective == Collective::allreduce) return {};
  const int64_t axis = check_axis(given.op(), given.input, given.axis);
  const CommunicatorOptions& o = registry::require(given.op(), given.group_name)->options();
  const auto units = static_cast<uint64_t>(given.input.size(axis));
  return {axis, static_cast<int64_t>(partition(units, o.world_size, o.rank).start)};
}

namespace {

/// To be carried out.
Epilogue epilogue_of(Mapped& mapped) {
  Epilogue epilogue = mapped.check();
  if (mapped.known->expression.indices > 0) epilogue.origin = origin_of(mapped.given);
  return epilogue;
}

}  // namespace

Tensor mapped_new(Mapped mapped) {
  const Epilogue epilogue = epilogue_of(mapped);
  mapped.given.epilogue = &epilogue;
  return into_new(mapped.given);
}

void mapped_into(Mapped mapped, Tensor& out, const Tensor* value) {
  Epilogue epilogue = epilogue_of(mapped);
  epilogue.value = value;
  for (size_t i = 0; i < mapped.extras.size(); ++i) {
    const at::MemOverlapStatus overlap = at::get_overlap_status(mapped.extras[i], out);
    epilogue.apart = epilogue.apart && overlap == at::MemOverlapStatus::No;
    TORCH_CHECK_VALUE(
        overlap != at::MemOverlapStatus::Partial, "collx.", mapped.op(), ": extras[", i,
        "]: overlaps out partly, or in another order; accepted: out itself, or a tensor that "
        "shares nothing with it");
  }
  mapped.given.epilogue = &epilogue;
  if (mapped.given.collective == Collective::allreduce) {
    into_like(mapped.given, out);
  } else {
    into_apart(mapped.given, out);
  }
}

std::tuple<Tensor, Tensor> mapped_with_value(Mapped mapped) {
  Epilogue epilogue = epilogue_of(mapped);
  const Tensor value = at::empty(C10_AS_INTARRAYREF_SLOW(c10::SymIntArrayRef(mapped.sizes)),
                                 mapped.given.input.options().requires_grad(false));
  epilogue.value = &value;
  mapped.given.epilogue = &epilogue;
  return {into_new(mapped.given), value};
}

void check_value(Mapped& mapped, const Tensor& value) {
  mapped.check();
  check_out(mapped.op(), mapped.given.input, mapped.sizes, value, "value");
}

void mapped_into_with_value(Mapped mapped, Tensor& out, const Tensor& value) {
  check_value(mapped, value);
  TORCH_CHECK_VALUE(value.is_contiguous(), "collx.", mapped.op(), ": value: got strides ",
                    value.strides(), "; accepted: a contiguous tensor");
  check_disjoint(mapped.op(), mapped.given.input, value, std::nullopt, "value");
  mapped_into(std::move(mapped), out, &value);
}

Tensor mapped_meta(Mapped mapped) {
  const at::ScalarType result = mapped.check().result();
  return at::empty_symint(mapped.sizes, mapped.given.input.options().dtype(result));
}

std::tuple<Tensor, Tensor> mapped_with_value_meta(Mapped mapped) {
  Tensor out = mapped_meta(mapped);
  return {std::move(out), at::empty_symint(check_meta(mapped.given), mapped.given.input.options())};
}

void check_result_meta(Mapped mapped, const Tensor& out) {
  const at::ScalarType result = mapped.check().result();
  check_out(mapped.op(), mapped.given.input, mapped.sizes, out, "out", result);
}

}  // namespace collx
