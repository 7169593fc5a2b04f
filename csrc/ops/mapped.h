// The operators with an epilogue: reductions with an epilogue, and the epilogue alone.
#pragma once

#include "collectives.h"

namespace collx {

/// The position of the result in the reduced tensor, of which it may be this rank's part.
Origin origin_of(const Arguments& arguments);

Results reduce_and_map(const Operator& op, const Arguments& arguments);
Results reduce_and_map_meta(const Operator& op, const Arguments& arguments);

/// Applies the epilogue to a tensor that begins at `start` along `axis` in the tensor to which
/// coordinates refer.
Results apply_epilogue(const Operator& op, const Arguments& arguments);
Results apply_epilogue_meta(const Operator& op, const Arguments& arguments);

}  // namespace collx
