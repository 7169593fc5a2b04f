// The operators with an epilogue: a reduction with one, and an epilogue by itself.
#pragma once

#include "collectives.h"

namespace collx {

/// The first coordinate of this rank's part along the axis that is scattered.
Origin origin_of(const Arguments& arguments);

Results reduce_and_map(const Operator& op, const Arguments& arguments);
Results reduce_and_map_meta(const Operator& op, const Arguments& arguments);

/// Of a tensor that begins at `start` along `axis` in the tensor whose coordinates are meant.
Results apply_epilogue(const Operator& op, const Arguments& arguments);
Results apply_epilogue_meta(const Operator& op, const Arguments& arguments);

}  // namespace collx
