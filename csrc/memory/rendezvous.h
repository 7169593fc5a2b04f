// Maps one allocation of every rank of a group on all other ranks.
#pragma once

#include <memory>

#include "symmetric_memory.h"

namespace collx::memory {

/// Collective. Every rank passes its own segment of `bytes` bytes and the same `offset`. Either all
/// ranks return mappings, or all throw c10::Error, within the timeout of the group's store (at most
/// 300 s). Causes of errors are sizes, offsets or signal pads that differ between ranks (hazard
/// 16), ranks on different machines, and a rank that does not arrive or ends during the call.
std::shared_ptr<RankMappings> rendezvous(const std::string& group_name,
                                         std::shared_ptr<const Segment> segment, size_t bytes,
                                         size_t offset);

}  // namespace collx::memory
