// What the Python side needs to set up a communicator's region on a device.
#pragma once

#include <c10/core/Device.h>
#include <c10/macros/Export.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "../protocol/selection.h"

namespace collx {

/// Name and bytes of every part of a rank's region, and "total".
C10_EXPORT std::vector<std::pair<std::string, uint64_t>> region_parts(
    const std::string& device_type, int world_size, uint64_t payload_bytes);

/// Makes this rank's region ready for use; on CUDA on the current stream, which is synchronized.
C10_EXPORT void initialize_region(uint64_t address, c10::Device device, int world_size,
                                  uint64_t payload_bytes);

/// What a rank's device offers, by name. Ranks agree on the smallest of each.
using Offer = std::map<std::string, int>;

/// Loads every CUDA kernel of a world of that size. "blocks" of kFullBlock threads that the device
/// holds resident, and its Capabilities; `clusters`: false: as if it had no hardware for them. On
/// CPU nothing is loaded, and a rank is one thread. `simulated`: see CudaView.
C10_EXPORT Offer load_kernels(c10::Device device, int world_size, bool clusters, bool simulated);

/// Whether the devices of all ranks hold the clusters of an offer at the same time: those that they
/// held, with 0 for the others; see cuda::held_at_once. `regions`: of every rank, as mapped here.
C10_EXPORT Offer held_at_once(const Offer& wanted, const std::vector<uint64_t>& regions,
                              c10::Device device, int rank, uint32_t number, int64_t limit_ms,
                              int64_t timeout_ms);

C10_EXPORT Capabilities capabilities_of(const Offer& agreed);

}  // namespace collx
