// Functions with which Python sets up a communicator's region on a device.
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

/// Initializes this rank's region. On CUDA this runs on the current stream, which is synchronized.
C10_EXPORT void initialize_region(uint64_t address, c10::Device device, int world_size,
                                  uint64_t payload_bytes);

/// The capabilities of a rank's device, by name. Ranks agree on the minimum of each.
using Offer = std::map<std::string, int>;

/// Loads every CUDA kernel for this world size. The offer has "blocks", the number of blocks of
/// kFullBlock threads that are resident on the device at once, and the Capabilities of the device.
/// If `clusters` is false, the device is treated as one without clusters. On the CPU nothing is
/// loaded, and a rank is one thread. `simulated`: see CudaView.
C10_EXPORT Offer load_kernels(c10::Device device, int world_size, bool clusters, bool simulated);

/// Measures whether the clusters of an offer are resident at once on the devices of all ranks.
/// Returns those that were, with 0 for the others; see cuda::held_at_once. `regions` are the
/// addresses of all ranks' regions on this rank.
C10_EXPORT Offer held_at_once(const Offer& wanted, const std::vector<uint64_t>& regions,
                              c10::Device device, int rank, uint32_t number, int64_t limit_ms,
                              int64_t timeout_ms);

C10_EXPORT Capabilities capabilities_of(const Offer& agreed);

}  // namespace collx
