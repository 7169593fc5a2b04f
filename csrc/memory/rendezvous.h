// Makes one allocation of every rank of a group known to all the others.
#pragma once

#include <memory>

#include "symmetric_memory.h"

namespace collx::memory {

/// Collective. Every rank gives its own segment of `bytes` bytes and the same `offset`. All ranks
/// return mappings, or all throw c10::Error, within the timeout of the group's store (at most
/// 300 s): other sizes, offsets or signal pads than the others' (hazard 16), another machine, or a
/// rank that did not come or ended on the way.
std::shared_ptr<RankMappings> rendezvous(const std::string& group_name,
                                         std::shared_ptr<const Segment> segment, size_t bytes,
                                         size_t offset);

}  // namespace collx::memory
