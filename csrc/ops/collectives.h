// The operators of one collective on one tensor, also with an epilogue, the epilogue alone, and the
// barrier: kernels below autograd, and Meta kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "epilogue.h"
#include "exchange.h"
#include "operator_table.h"
#include "shapes.h"

namespace collx {

/// A call whose arguments have been checked.
struct Prepared {
  const at::Tensor& input;  // as given
  Exchange exchange;
  std::shared_ptr<Communicator> communicator;
  Sizes sizes;  // of the output, if they differ from the input's
  // If one tensor may be a part of the other: bytes between their beginnings.
  std::optional<int64_t> own_part;

  at::IntArrayRef output_sizes() const {
    return keeps_shape(exchange.collective) ? input.sizes()
                                            : C10_AS_INTARRAYREF_SLOW(symbolic_output_sizes());
  }
  c10::SymIntArrayRef symbolic_output_sizes() const {
    return keeps_shape(exchange.collective) ? input.sym_sizes() : c10::SymIntArrayRef(sizes);
  }
};

/// Checks the arguments that all calls share. Shapes are not checked.
Prepared prepare(const Arguments& arguments);
/// Checks shapes as well.
Prepared prepare_with_shapes(const Arguments& arguments);

/// Execute the call into a new tensor, or into `out`, which is checked. `epilogue` may be null.
at::Tensor into_new(const Prepared& prepared, const std::shared_ptr<const Epilogue>& epilogue);
void into(const Prepared& prepared, const std::shared_ptr<const Epilogue>& epilogue,
          const at::Tensor& out);

/// The shape of the result, for Meta kernels. It is exact on every rank. Only uneven parts need the
/// registry, to look up this rank.
Sizes check_meta(const Arguments& arguments);

Results exchange(const Operator& op, const Arguments& arguments);
Results exchange_meta(const Operator& op, const Arguments& arguments);
Results exchange_device_splits(const Operator& op, const Arguments& arguments);
Results exchange_device_splits_meta(const Operator& op, const Arguments& arguments);

/// The position of the result in the reduced tensor, of which it may be this rank's part.
Origin origin_of(const Arguments& arguments);

Results reduce_and_map(const Operator& op, const Arguments& arguments);
Results reduce_and_map_meta(const Operator& op, const Arguments& arguments);

/// Applies the epilogue to a tensor that begins at `start` along `axis` in the tensor to which
/// coordinates refer.
Results apply_epilogue(const Operator& op, const Arguments& arguments);
Results apply_epilogue_meta(const Operator& op, const Arguments& arguments);

/// Returns after all ranks have called it.
Results barrier(const Operator& op, const Arguments& arguments);

}  // namespace collx
